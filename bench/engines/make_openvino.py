"""Export a model of random weights to OpenVINO's format. Runs in OpenVINO's environment.

    .venv-openvino/bin/python bench/engines/make_openvino.py --shape llama-3.2-1b --out FOLDER

The way a user takes: a transformers model, exported by optimum-intel with weights compressed by NNCF: int4 symmetric
with groups of 128 in the blocks, int8 for the tied embedding, which is also the head. Nothing is calibrated: rounding
to nearest reads no data. The tokenizer is the smallest that OpenVINO GenAI opens, one token a byte; prompts go in as
token ids and it is never called.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import openvino
import torch
from contract import SEED, SHAPES, Shape
from openvino_tokenizers import convert_tokenizer
from optimum.intel import OVModelForCausalLM, OVWeightQuantizationConfig
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast


def save_random(folder: Path, shape: Shape) -> None:
    """The bf16 checkpoint of a model as transformers initialises it."""
    config = AutoConfig.for_model(
        shape.family,
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        intermediate_size=shape.ffn,
        vocab_size=shape.vocab,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        max_position_embeddings=131072,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
    )
    torch.manual_seed(SEED)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)


def save_tokenizer(folder: Path) -> None:
    vocabulary = {piece: i for i, piece in enumerate(["<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", bos_token="<eos>")
    pair = convert_tokenizer(fast, with_detokenizer=True)
    for model, name in zip(pair, ("openvino_tokenizer", "openvino_detokenizer"), strict=True):
        openvino.save_model(model, folder / f"{name}.xml")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    partial = args.out.with_name(args.out.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    with tempfile.TemporaryDirectory(dir=args.out.parent) as checkpoint:
        save_random(Path(checkpoint), SHAPES[args.shape])
        int4 = OVWeightQuantizationConfig(bits=4, sym=True, group_size=128, ratio=1.0)
        model = OVModelForCausalLM.from_pretrained(checkpoint, export=True, compile=False, quantization_config=int4)
        model.save_pretrained(partial)
    save_tokenizer(partial)
    os.replace(partial, args.out)


if __name__ == "__main__":
    main()
