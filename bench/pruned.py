"""What zeros gain on this machine: the same model dense, pruned in every way, and smaller, timed in turns.

    python bench/pruned.py [--rounds 5] [--prompt 256] [--gen 48]

The model is a Llama of random weights, whose speed is that of a trained one: large enough that its weights come from
memory, small enough to be pruned in seconds. Zeros that no kernel skips gain nothing, and the table is there to say so;
only what makes matrices smaller is faster, and what stores fewer bits. Ratios are to the dense model, medians of rounds
in which all take turns. Run it on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save_file

from attar.checkpoints.sources import hf
from attar.compression.runs.pipeline import compress
from attar.evaluation import decode_speed

HIDDEN, HEADS, KV_HEADS, WIDE, LAYERS, VOCAB = 768, 12, 4, 2048, 8, 4096
RECIPES = (
    "magnitude-s50",
    "magnitude-2:4",
    "structured-p25",
    "structured-p50",
    "rtn-w4g128",
    "magnitude-2:4-w4g128",
    "magnitude-2:4-sparse24",
)


def make(folder: Path) -> Path:
    """Write the model."""
    head, numbers = HIDDEN // HEADS, torch.Generator().manual_seed(0)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=numbers) / math.sqrt(columns)).bfloat16()

    tensors = {"model.embed_tokens.weight": matrix(VOCAB, HIDDEN), "model.norm.weight": torch.ones(HIDDEN).bfloat16()}
    for i in range(LAYERS):
        at = f"model.layers.{i}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{at}.{norm}.weight"] = torch.ones(HIDDEN).bfloat16()
        for name, rows, columns in (
            ("self_attn.q_proj", HIDDEN, HIDDEN),
            ("self_attn.k_proj", KV_HEADS * head, HIDDEN),
            ("self_attn.v_proj", KV_HEADS * head, HIDDEN),
            ("self_attn.o_proj", HIDDEN, HIDDEN),
            ("mlp.gate_proj", WIDE, HIDDEN),
            ("mlp.up_proj", WIDE, HIDDEN),
            ("mlp.down_proj", HIDDEN, WIDE),
        ):
            tensors[f"{at}.{name}.weight"] = matrix(rows, columns)
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16", "vocab_size": VOCAB,
        "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "head_dim": head,
        "num_key_value_heads": KV_HEADS, "intermediate_size": WIDE, "hidden_act": "silu", "rms_norm_eps": 1e-5,
        "max_position_embeddings": 2048, "tie_word_embeddings": True, "rope_theta": 10000.0,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def weights(folder: Path) -> int:
    """Of the linears of all blocks."""
    decoder = hf.load(folder, torch.float32)
    return sum(linear.shape[0] * linear.shape[1] for block in decoder.blocks for linear in block.linears())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--gen", type=int, default=48)
    options = parser.parse_args()
    load = decode_speed.Load(options.prompt, options.gen)
    with tempfile.TemporaryDirectory() as place:
        folders = {"dense": make(Path(place) / "dense")}
        ids = torch.randint(0, VOCAB, (8, 64), generator=torch.Generator().manual_seed(1)).tolist()
        for recipe in RECIPES:
            folders[recipe] = Path(place) / recipe.replace(":", "of")
            compress(folders["dense"], folders[recipe], recipe=recipe, calibration=ids)
        counts = {name: weights(folder) for name, folder in folders.items()}
        rounds = []
        for _ in range(options.rounds):
            taken = {}
            for name, folder in folders.items():
                taken[name] = decode_speed.run(partial(decode_speed.load, folder), load)
            rounds.append(taken)
    print(f"{'recipe':<24}{'weights':>14}{'bytes/token':>14}{'decode tok/s':>14}{'':>8}{'prefill tok/s':>15}{'':>8}")
    report = {}
    for name in folders:
        decode, prefill = (
            statistics.median(taken[name][key] for taken in rounds) for key in ("decode_tok_s", "prefill_tok_s")
        )
        gains = [
            statistics.median(taken[name][key] / taken["dense"][key] for taken in rounds)
            for key in ("decode_tok_s", "prefill_tok_s")
        ]
        size, refused = rounds[0][name]["bytes_per_token"], len(rounds[0][name]["reference_linears"])
        report[name] = {
            "weights": counts[name], "bytes_per_token": size, "decode_tok_s": decode, "prefill_tok_s": prefill,
            "decode_ratio": gains[0], "prefill_ratio": gains[1], "reference_linears": refused,
        }  # fmt: skip
        kernel = f"  {refused} linears without a kernel" if refused else ""
        print(
            f"{name:<24}{counts[name]:>14,}{size:>14,}{decode:>14.1f}{gains[0]:>7.2f}x{prefill:>15.1f}{gains[1]:>7.2f}x"
            f"{kernel}"
        )
    print(json.dumps({"bench": "pruned", "threads": torch.get_num_threads(), "recipes": report}))


if __name__ == "__main__":
    main()
