"""Time of a decode step's attention, of all keys and of few: one sequence, native kernels, a model's shape.

    PYTHONPATH=src python bench/sparse_attention_speed.py [--length 16384] [--read 1/16] [--kv bfloat16] [--layers 8]
        [--heads 32,8,64] [--dense 0] [--json FILE]

The default is the shape of Llama-3.2-1B. Caches of all layers are filled with random keys and values, and a step is one
row in every layer, so that layers displace one another in the processor's caches as in a model. Times are the least of
several steps. `--dense` layers read all keys in both, as diffuse layers do.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path

import torch

from attar.kernels.native import attention
from attar.kernels.operands import AttentionForm
from attar.kv.pages import AttentionMetadata, PagedKV, Rotation
from attar.kv.schemes import scheme
from attar.kv.signs import Signs
from attar.kv.sparse import SparseAttention

BLOCK, PIECE, THETA = 64, 512, 500_000.0


def filled(args: argparse.Namespace, settings: SparseAttention) -> tuple[list[PagedKV], torch.Tensor]:
    """Return the pages of every layer, and the block table."""
    heads, kv_heads, size = map(int, args.heads.split(","))
    blocks = -(-args.length // BLOCK)
    table = torch.randperm(blocks).int()
    pair = torch.arange(size // 2).double()
    angle = (torch.arange(blocks * BLOCK)[:, None].double() * THETA ** -(2 * pair / size)).float()
    angles = angle.cos(), angle.sin()
    layers = []
    for _ in range(args.layers):
        pages = PagedKV.zeros(blocks, BLOCK, kv_heads, size, scheme(args.kv))
        pages.signs = Signs.zeros(
            blocks, BLOCK, torch.randn(kv_heads, size), torch.ones(kv_heads, size), settings, angles
        )
        for at in torch.arange(args.length).split(PIECE):
            slots = table[at // BLOCK].long() * BLOCK + at % BLOCK
            starts, lengths = torch.tensor([0, len(at)]).int(), torch.tensor([int(at[-1]) + 1]).int()
            place = AttentionMetadata(starts, lengths, table[None], at.int(), slots)
            q, k, v = (torch.randn(len(at), n, size) for n in (heads, kv_heads, kv_heads))
            attention.write_kv(q, k, v, pages, place, Rotation(*angles, at.int()))
        layers.append(pages)
    return layers, table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=16384)
    parser.add_argument("--read", default="1/16", help="tokens, or 1/N of them")
    parser.add_argument("--kv", default="bfloat16")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--heads", default="32,8,64", help="query heads, key-value heads, columns of a head")
    parser.add_argument("--dense", type=int, default=0)
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    heads, kv_heads, size = map(int, args.heads.split(","))
    layers, table = filled(args, SparseAttention.parse(f"topk:{args.read}"))
    form = AttentionForm(heads, kv_heads, size, size**-0.5)
    row = torch.tensor([0, 1]).int(), torch.tensor([args.length]).int(), table[None]
    slot = table[[-1]].long() * BLOCK + (args.length - 1) % BLOCK
    whole = AttentionMetadata(*row, torch.tensor([args.length - 1]).int(), slot)
    few, q = replace(whole, dense_until=torch.tensor([1]).int()), torch.randn(1, heads, size)
    times: dict[str, list[float]] = {"all": [], "few": []}
    for _ in range(args.steps):  # in turn: whatever else the machine does meets both
        for name, place in (("all", whole), ("few", few)):
            begun = time.perf_counter()
            for i, pages in enumerate(layers):
                attention.paged_attention(q, pages, whole if i < args.dense else place, form)
            times[name].append(time.perf_counter() - begun)
    found = {name: 1e3 * min(each) for name, each in times.items()}
    print(f"all keys {found['all']:.2f} ms, few {found['few']:.2f} ms: {found['all'] / found['few']:.2f} times as fast")
    told = {"length": args.length, "read": args.read, "kv": args.kv, "layers": args.layers, "dense": args.dense}
    line = json.dumps({**told, "heads": args.heads, "threads": torch.get_num_threads(), "ms": found})
    print(line)
    if args.json:
        Path(args.json).write_text(line)


if __name__ == "__main__":
    main()
