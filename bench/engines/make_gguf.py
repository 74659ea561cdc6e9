"""Write a model of random weights as a GGUF file. Runs in llama.cpp's environment; needs numpy and gguf only.

    .venv-llamacpp/bin/python bench/engines/make_gguf.py --shape llama-3.2-1b --format q4_0 --out FILE

Speed does not depend on the values, as long as none is denormal or infinite, so blocks are filled with random codes
under one scale each: weights of standard deviation 0.02 at the speed of a random generator, where quantizing a random
model would take minutes. The formats are

    q4_0       Q4_0 linears; the tied embedding, which is also the head, in Q6_K as llama.cpp's own tool writes it,
               or in Q8_0 where a row is no multiple of Q6_K's 256 columns (the tool does the same)
    q4_0-q8_0  the same with a Q8_0 head whatever the row
    bf16       everything

The vocabulary is `no_vocab`: only its size is known, and text cannot be asked for.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import gguf
import numpy as np
from contract import SEED, SHAPES, Shape
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray

STD = 0.02
BLOCKS = {  # weights of a block, and its fields in the order of the file
    Kind.Q4_0: (32, np.dtype([("d", "<f2"), ("codes", "u1", 16)])),
    Kind.Q8_0: (32, np.dtype([("d", "<f2"), ("codes", "i1", 32)])),
    Kind.Q6_K: (256, np.dtype([("codes", "u1", 192), ("scales", "i1", 16), ("d", "<f2")])),
}
# The standard deviation of a uniform code, times the scale within the block that Q6_K has.
SPREAD = {Kind.Q4_0: 16 / 12**0.5, Kind.Q8_0: 256 / 12**0.5, Kind.Q6_K: 32 * 64 / 12**0.5}


def random_tensor(kind: Kind, rows: int, columns: int, rng: np.random.Generator) -> NDArray[np.uint8]:
    """[rows, bytes of a row]"""
    if kind == Kind.BF16:
        values = rng.standard_normal((rows, columns), dtype=np.float32) * np.float32(STD)
        return np.ascontiguousarray((values.view(np.uint32) >> 16).astype("<u2")).view(np.uint8)
    size, layout = BLOCKS[kind]
    assert columns % size == 0
    blocks = np.frombuffer(bytearray(rng.bytes(rows * columns // size * layout.itemsize)), layout)
    blocks["d"] = STD / SPREAD[kind]
    if kind == Kind.Q6_K:
        blocks["scales"] = 32
    return blocks.view(np.uint8).reshape(rows, -1)


def kinds(shape: Shape, name: str) -> tuple[Kind, Kind]:
    """Of the linears and of the tied embedding."""
    if name == "bf16":
        return Kind.BF16, Kind.BF16
    fits = shape.hidden % BLOCKS[Kind.Q6_K][0] == 0
    return Kind.Q4_0, Kind.Q6_K if fits and name == "q4_0" else Kind.Q8_0


def write(path: Path, shape: Shape, name: str) -> None:
    rng = np.random.default_rng(SEED)
    linear, embedding = kinds(shape, name)
    writer = gguf.GGUFWriter(path, shape.family)
    writer.add_context_length(131072)
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.ffn)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(shape.rope_theta)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(shape.vocab)
    writer.add_tokenizer_model("no_vocab")
    writer.add_tensor(
        "token_embd.weight", random_tensor(embedding, shape.vocab, shape.hidden, rng), raw_dtype=embedding
    )
    ones = np.ones(shape.hidden, np.float32)
    writer.add_tensor("output_norm.weight", ones)
    for i in range(shape.layers):
        writer.add_tensor(f"blk.{i}.attn_norm.weight", ones)
        writer.add_tensor(f"blk.{i}.ffn_norm.weight", ones)
        for part, (rows, columns) in shape.linears().items():
            writer.add_tensor(f"blk.{i}.{part}.weight", random_tensor(linear, rows, columns, rng), raw_dtype=linear)
            if shape.qkv_bias and part in ("attn_q", "attn_k", "attn_v"):
                writer.add_tensor(f"blk.{i}.{part}.bias", np.zeros(rows, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, required=True)
    parser.add_argument("--format", choices=("q4_0", "q4_0-q8_0", "bf16"), default="q4_0")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    partial = args.out.with_suffix(".partial")
    write(partial, SHAPES[args.shape], args.format)
    os.replace(partial, args.out)


if __name__ == "__main__":
    main()
