"""What each way to choose a prompt's keys costs, by KL divergence from the full cache at equal bytes.

    PYTHONPATH=src:. python bench/kv_policies.py MODEL TEXT [--context 4096] [--kept 1024] [--at 0] [--json FILE]

One document is computed once. Each method then keeps as many of its keys in every layer and key-value head, and the
figure is that of 64 rows that follow, teacher-forced: the text simply goes on. Beside the policies of `--kv-eviction`
stand variants of SnapKV (`snapkv/WINDOW/POOL`), its ranking with the newest quarter of the budget kept
(`snapkv+recent`), with diffuse layers that keep the newest instead (`snapkv+diffuse`), with diffuse heads as eviction
has them, by other shares of weight (`SHARE held`), and the first 4 and newest keys in their own positions (`newest`). A
layer is diffuse where 0.9 of the weight of its last rows takes more than half of the keys. Caches are float32, so that
what the figures show is the choice alone. `--json` adds a line to a file.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from attar.evaluation.long_context.eviction import ROWS
from attar.evaluation.long_context.windows import Subject, log_chances
from attar.kernels import ref_attention
from attar.kv import moving, ranking
from attar.kv.eviction import ONCE
from attar.kv.schemes import scheme
from attar.model.cache import ForwardBatch, KVCache
from attar.model.rope import far_rotation

PIECE = 512
MASS, SHARE = 0.9, 0.5  # a layer is diffuse whose rows need more than this share of keys for this share of weight
LAST = ONCE["expected"]  # rows whose queries are kept


class Layer(NamedTuple):
    """What a layer's choice is made from: the last rows' queries [w, H, D], keys and values [N, G, D], H2O's sums."""

    queries: Tensor
    keys: Tensor
    values: Tensor
    sums: Tensor
    scale: float


def prefill(subject: Subject, cache: KVCache, ids: Tensor) -> list[Layer]:
    """Compute a prompt, and return what choices are made from."""
    decoder, count = subject.decoder, len(ids)
    sums = [torch.zeros(subject.decoder.config.kv_heads, count) for _ in decoder.blocks]
    kept = [list[Tensor]() for _ in decoder.blocks]
    for piece in ids.split(PIECE):
        end = cache.filled[0] + len(piece)
        step = ForwardBatch((len(piece),), cache.capacity, cache, watched=torch.arange(len(piece)))
        decoder.states(piece, step)
        for layer, pages in enumerate(cache.layers):
            form, q = decoder.blocks[layer].attention.form, step.queries[layer]
            keys = moving.read_keys(pages, cache.block_tables[0, : -(-end // cache.block)].tolist(), end)
            for first in range(0, len(piece), 128):  # tiles, for memory
                own, until = q[first : first + 128], end - len(piece) + min(first + 128, len(piece))
                sums[layer][:, :until] += ranking.weights(own, keys[:until], form.scale, form.soft_cap).sum((1, 2))
            kept[layer] = [torch.cat((*kept[layer], q))[-LAST:].clone()]
    table = cache.block_tables[0, : -(-count // cache.block)].tolist()
    return [
        Layer(q, *moving.read(pages, table, count), own, block.attention.form.scale)
        for (q,), pages, own, block in zip(kept, cache.layers, sums, decoder.blocks, strict=True)
    ]


def diffuse(layer: Layer) -> bool:
    """Whether the last rows spread their weight over most keys."""
    weights = ranking.weights(layer.queries[-32:], layer.keys, layer.scale).mean((0, 1, 2))
    needed = int((weights.sort(descending=True).values.cumsum(0) < MASS * weights.sum()).sum()) + 1
    return needed > SHARE * len(weights)


def held(layer: Layer, kept: Tensor) -> Tensor:
    """The share [G] of the last rows' weight that the kept keys [G, N] have."""
    weights = ranking.weights(layer.queries[-32:], layer.keys, layer.scale).mean((1, 2))
    return weights.gather(1, kept).sum(1)


def settled(layer: Layer, kept: Tensor, least: float) -> Tensor:
    """The kept keys, and in diffuse heads, whose kept ones hold less than `least` of weight, those of eviction."""
    usual, ranking.LEAST = ranking.LEAST, least
    try:
        return ranking._settled(kept, ranking.Seen.by(layer.queries[-ranking.ROWS :], layer.keys, layer.scale))
    finally:
        ranking.LEAST = usual


def newest(layer: Layer, kept: int) -> Tensor:
    """The first keys and the newest."""
    count = len(layer.keys)
    own = torch.cat((torch.arange(ranking.SINKS), torch.arange(count - kept + ranking.SINKS, count)))
    return own.expand(layer.keys.shape[1], -1)


def snapkv(layer: Layer, kept: int, rows: int, pool: str, last: int) -> Tensor:
    """SnapKV by the last `rows` rows, with the `last` keys kept, and pooled as `pool` says: `max7`, `avg5`, `max1`."""
    sums = ranking.weights(layer.queries[-rows:], layer.keys, layer.scale).sum((1, 2))[:, : len(layer.keys) - last]
    width = int(pool[3:])
    pooled = functional.max_pool1d if pool.startswith("max") else functional.avg_pool1d
    return ranking._with_last(pooled(sums, width, 1, width // 2), kept, last)


def expected(subject: Subject, number: int, layer: Layer, kept: int, recent: int = 0) -> Tensor:
    """Expected Attention as published, and with the newest kept."""
    rope = subject.decoder.blocks[number].attention.rope
    assert rope is not None
    count, rows = len(layer.keys), len(layer.queries)
    cos, sin = far_rotation(rope, torch.arange(count - rows, count + 512), subject.decoder.config.context)
    half = cos.shape[1]
    a, b = layer.queries[..., :half], layer.queries[..., half : 2 * half]
    c, s = cos[:rows, None], sin[:rows, None]
    before = torch.cat((a * c + b * s, b * c - a * s, layer.queries[..., 2 * half :]), -1)
    turn = cos[rows:].mean(0), sin[rows:].mean(0)
    scores = ranking.expected_scores(before, layer.keys, layer.values, turn, layer.scale)[:, : count - recent]
    scores[:, : ranking.SINKS] = torch.inf
    return ranking._with_last(scores, kept, recent)


def choices(subject: Subject, layers: list[Layer], kept: int) -> Iterator[tuple[str, list[Tensor]]]:
    """Each method, with what it keeps of each layer: int64 [G, kept]."""
    yield "newest", [newest(each, kept) for each in layers]
    for rows in (16, 32, 64):
        for pool in ("max7", "avg5", "max1") if rows == 32 else ("max7",):
            yield f"snapkv/{rows}/{pool}", [snapkv(each, kept, rows, pool, rows) for each in layers]
    yield "snapkv+recent", [snapkv(each, kept, 32, "max7", kept // 4) for each in layers]
    yield "snapkv+half", [snapkv(each, kept, 32, "max7", kept // 2) for each in layers]
    mixed = [newest(each, kept) if diffuse(each) else snapkv(each, kept, 32, "max7", 32) for each in layers]
    yield "snapkv+diffuse", mixed
    for least in (0.6, 0.75, 0.9, 0.95):
        own = [settled(each, snapkv(each, kept, 32, "max7", 32), least) for each in layers]
        yield f"snapkv, {least} held", own
    own = [settled(each, snapkv(each, kept, 32, "max7", kept // 4), 0.9) for each in layers]
    yield "snapkv+recent, 0.9 held", own
    own = [settled(each, snapkv(each, kept, 32, "max1", 32), 0.9) for each in layers]
    yield "snapkv/32/max1, 0.9 held", own
    yield "h2o", [ranking.h2o(each.sums, kept) for each in layers]
    yield "expected", [expected(subject, i, each, kept) for i, each in enumerate(layers)]
    recents = [expected(subject, i, each, kept, kept // 4) for i, each in enumerate(layers)]
    yield "expected+recent", recents
    yield "expected+half", [expected(subject, i, each, kept, kept // 2) for i, each in enumerate(layers)]
    for least in (0.75, 0.9):
        own = [settled(each, one, least) for each, one in zip(layers, recents, strict=True)]
        yield f"expected+recent, {least} held", own
    yield "h2o, 0.9 held", [settled(each, ranking.h2o(each.sums, kept), 0.9) for each in layers]


def compacted(subject: Subject, layers: list[Layer], kept: list[Tensor], room: int) -> KVCache:
    """A cache of the kept keys, with room for more."""
    count = kept[0].shape[1]
    cache = subject.decoder.cache(count + room, scheme=scheme("float32"))
    for pages, layer, own in zip(cache.layers, layers, kept, strict=True):
        index = own.T[..., None].expand(-1, -1, layer.keys.shape[2])
        ref_attention.write_pages(
            layer.keys.gather(0, index), layer.values.gather(0, index), pages, torch.arange(count)
        )
    cache.filled, cache.offsets = [count], [len(layers[0].keys) - count]
    return cache


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("text", type=Path)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--kept", type=int, default=1024)
    parser.add_argument("--at", type=int, default=0, help="which window of the text")
    parser.add_argument("--only", help="methods, separated by semicolons")
    parser.add_argument("--activations", default="exact")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    most = args.context * (args.at + 1)
    subject = Subject.load(args.model, args.text, args.context, max_tokens=most, activations=args.activations)
    ids = torch.tensor(subject.ids[most - args.context : most])
    first = args.context - ROWS
    found = dict[str, dict[str, float]]()
    with torch.inference_mode():
        cache = subject.decoder.cache(args.context, scheme=scheme("float32"))
        layers = prefill(subject, cache, ids[:first])
        full = log_chances(subject.decoder, cache, ids[first:])
        spread = [i for i, layer in enumerate(layers) if diffuse(layer)]
        print("diffuse layers", spread, flush=True)
        own = torch.stack([held(each, snapkv(each, args.kept, 32, "max7", 32)) for each in layers])
        print("weight held by layer, least head:", " ".join(f"{float(each.min()):.2f}" for each in own), flush=True)
        for name, kept in choices(subject, layers, args.kept):
            if args.only is not None and name not in args.only.split(";"):
                continue
            chances = log_chances(subject.decoder, compacted(subject, layers, kept, ROWS), ids[first:])
            each = (full.exp() * (full - chances)).sum(-1)
            agree = float((full.argmax(-1) == chances.argmax(-1)).double().mean())
            found[name] = {"kl": float(each.mean()), "worst": float(each.max()), "agree": agree}
            print(
                f"{name:24} KL {float(each.mean()):.5f}, worst {float(each.max()):.4f}, top-1 {agree:.3f}", flush=True
            )
    line = json.dumps({
        "model": Path(args.model).name, "text": args.text.name, "context": args.context, "kept": args.kept,
        "at": args.at, "activations": args.activations, "diffuse": spread, "methods": found,
    })  # fmt: skip
    print(line)
    if args.json:
        with args.json.open("a") as file:
            file.write(line + "\n")


if __name__ == "__main__":
    main()
