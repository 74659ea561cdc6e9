"""What reading few keys of a whole cache costs: lookups, and KL divergence at equal reads.

    PYTHONPATH=src:. python bench/longcontext.py [--read 1/16] [--length 2033] [--prompts 2] [--json FILE]
    PYTHONPATH=src:. python bench/longcontext.py --model FILE.gguf --text TEXT [--context 4096] [--rows 64]
    PYTHONPATH=src:. python bench/longcontext.py --model FILE.gguf --text TEXT --front 0,2,4,8 [--read 1/16,1/8]

Without a model, the constructed one of `tests/model/lookup_model.py` looks up needles, a key and three values each.
They are asked as the prompt's last token (its row reads everything), afterwards, and two in a row; figures are shares
of answers that are wholly right, and of those asked afterwards by depth. With a model, the figure is the KL divergence
of the next token from full attention, teacher-forced, over the last rows of one document.

Methods read equally many keys: `one-bit` is attar's; `constant means` is the same without spreads, with means that do
not turn with the position; `quest` ranks runs of 16 by the bounds of Quest (Tang et al. 2024); `exact` ranks them by
the weights themselves; `recent` takes the newest and the first run. All of them keep the same layers dense. Everything
but the first two is the reference in plain PyTorch: it says what a method loses, and nothing of speed.

`--front` measures attar's method alone, with so many of the most diffuse layers dense: the share of layers, the share
of all keys that is read in all layers together, and KL divergence.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from attar.checkpoints import vocabulary
from attar.checkpoints.sources import opening
from attar.execution import kv_cache
from attar.kernels import dispatch, ref_attention, ref_sparse
from attar.kernels.native import attention as native_attention
from attar.kernels.operands import AttentionForm
from attar.kv.pages import AttentionMetadata, PagedKV
from attar.kv.schemes import RUN, scheme
from attar.kv.signs import Signs
from attar.kv.sparse import SparseAttention
from attar.model import sparse_layers
from attar.model.cache import ForwardBatch, KVCache
from attar.model.decoder import Decoder
from attar.model.sparse_layers import SparseLayers
from tests.model.lookup_model import FILLER, VALUES, answer, haystack, lookup_model

METHODS = ("one-bit", "constant means", "quest", "exact", "recent")
PIECE = 512  # tokens of a prompt at once
Statistics = list[sparse_layers.KeyStatistics | None]
Rank = Callable[[Tensor, Signs, Tensor, int, AttentionForm], Tensor]


def _of_weights(weights: Tensor, form: AttentionForm) -> Tensor:
    """Weights [H, S] of the keys to ranks of runs [G, runs]."""
    by_run = F.pad(weights, (0, -weights.shape[1] % RUN)).unflatten(-1, (-1, RUN)).sum(-1)
    ranks: Tensor = by_run.unflatten(0, (form.kv_heads, -1)).sum(1)
    return ranks


def _ranks(method: str, keys: Tensor) -> Rank:
    """How a method ranks the runs of a sequence with keys [S, G, D]."""

    def exact(q: Tensor, signs: Signs, table: Tensor, length: int, form: AttentionForm) -> Tensor:
        each = keys[:length].repeat_interleave(form.heads // form.kv_heads, 1)
        return _of_weights((torch.einsum("hd,shd->hs", q, each) * form.scale).softmax(-1), form)

    def quest(q: Tensor, signs: Signs, table: Tensor, length: int, form: AttentionForm) -> Tensor:
        ends = -length % RUN
        low = F.pad(keys[:length], (0, 0, 0, 0, 0, ends), value=torch.inf).unflatten(0, (-1, RUN)).amin(1)
        high = F.pad(keys[:length], (0, 0, 0, 0, 0, ends), value=-torch.inf).unflatten(0, (-1, RUN)).amax(1)
        low, high = (each.repeat_interleave(form.heads // form.kv_heads, 1) for each in (low, high))
        bounds = torch.einsum("hd,rhd->hr", q.relu(), high) - torch.einsum("hd,rhd->hr", (-q).relu(), low)
        ranks: Tensor = (bounds * form.scale).softmax(-1).unflatten(0, (form.kv_heads, -1)).sum(1)
        return ranks

    def recent(q: Tensor, signs: Signs, table: Tensor, length: int, form: AttentionForm) -> Tensor:
        return torch.arange(-(-length // RUN)).float().expand(form.kv_heads, -1).clone()

    return {"exact": exact, "quest": quest, "recent": recent}[method]


@contextmanager
def reading(method: str) -> Iterator[None]:
    """Rows choose by another method for a while, in the reference."""
    native = native_attention.paged_attention

    def by_method(q: Tensor, pages: PagedKV, place: AttentionMetadata, form: AttentionForm, *more: Any) -> Any:
        if place.dense_until is None or pages.signs is None:
            return native(q, pages, place, form, *more)
        dense, _ = native(q, pages, replace(place, dense_until=None), form)
        keys, _ = ref_attention.read_sequence(pages, place.block_tables[0], int(place.lengths[0]), None, torch.float32)
        plain = ref_sparse.ranks
        ref_sparse.ranks = _ranks(method, keys)  # type: ignore[assignment]
        try:
            return ref_sparse.replace_rows(dense, q, pages, place, form), None
        finally:
            ref_sparse.ranks = plain

    if method not in ("one-bit", "constant means"):
        native_attention.paged_attention = by_method  # type: ignore[assignment]
    try:
        yield
    finally:
        native_attention.paged_attention = native


def run(decoder: Decoder, cache: KVCache, ids: Tensor) -> None:
    for piece in ids.split(PIECE):
        decoder.states(piece, ForwardBatch((len(piece),), cache.capacity, cache))


def rewrite(cache: KVCache, constant: bool, tables: list[Any], means: Statistics) -> None:
    """Signs of what the cache holds, anew: about means that turn with the position, or about their average there."""
    length = cache.filled[0]
    at = torch.arange(length)
    slots = cache.block_tables[0, at // cache.block].long() * cache.block + at % cache.block
    for pages, angles, own in zip(cache.layers, tables, means, strict=True):
        if pages.signs is None or own is None:
            continue
        pages.signs = replace(pages.signs, means=own.means, spreads=own.spreads, angles=angles)
        if constant:
            mean = pages.signs.means_at(at).mean(0)
            pages.signs = replace(pages.signs, means=mean, spreads=torch.ones_like(own.spreads), angles=None)
        keys, _ = ref_attention.read_sequence(pages, cache.block_tables[0], length, None, torch.float32)
        pages.signs.write(keys, slots, at)


def methods_on(cache: KVCache, means: Statistics) -> Iterator[str]:
    """Each method, the cache ready for it."""
    tables = [None if pages.signs is None else pages.signs.angles for pages in cache.layers]
    for method in METHODS:
        if method in ("constant means", "quest"):
            rewrite(cache, method == "constant means", tables, means)
        with reading(method):
            yield method


def lookups(settings: SparseAttention, length: int, prompts: int) -> dict[str, Any]:
    """Shares of right answers by method and form of question."""
    decoder = lookup_model()
    sample = torch.randint(0, FILLER, (2, 256), generator=torch.Generator().manual_seed(1))
    means = sparse_layers.calibrate(decoder, sample)
    found: dict[str, dict[str, list[float]]] = {}
    for seed in range(prompts):
        ids, needles = haystack(length, seed)
        cache = decoder.cache(length + 4 * (VALUES + 1))
        sparse_layers.attach(cache.layers, decoder, SparseLayers(settings, means), cache.capacity)
        run(decoder, cache, ids)
        for method in _with_full(cache, means):
            into = found.setdefault(method, {})
            for depth, (key, *values) in enumerate(needles):
                for form, until in (("in the prompt", length + 1), ("afterwards", length)):
                    cache.dense_until = None if method == "full" else [until]
                    right = float(answer(decoder, cache, [key]) == values)
                    into.setdefault(form, []).append(right)
                    if form == "afterwards":
                        third = ("early", "middle", "late")[depth * 3 // len(needles)]
                        into.setdefault(third, []).append(right)
                        other = needles[(depth + 3) % len(needles)]
                        into.setdefault("second question", []).append(
                            float(answer(decoder, cache, other[:1]) == other[1:])
                        )
                    cache.truncate(0, length)
    return {name: {form: sum(each) / len(each) for form, each in forms.items()} for name, forms in found.items()}


def _with_full(cache: KVCache, means: Statistics) -> Iterator[str]:
    yield "full"
    yield from methods_on(cache, means)


def divergence(args: argparse.Namespace, settings: SparseAttention) -> dict[str, Any]:
    """KL divergence by method over the last rows of a document."""
    path = Path(args.model)
    decoder = opening.load(path, torch.float32, None, dispatch.store(args.activations, "cpu", torch.float32))
    text = Path(args.text).read_text(errors="replace")[: 12 * args.context]
    ids = torch.tensor(vocabulary.tokenizer(path).encode(text)[: args.context])
    assert len(ids) == args.context, "the text is too short"
    begun = time.perf_counter()
    means = list(kv_cache.sparse_layers_of(decoder, settings).statistics)
    calibrated = time.perf_counter() - begun
    cache = decoder.cache(args.context, scheme=scheme(args.kv))
    sparse_layers.attach(cache.layers, decoder, SparseLayers(settings, means), cache.capacity)
    first = args.context - args.rows
    begun = time.perf_counter()
    run(decoder, cache, ids[:first])
    prefilled = time.perf_counter() - begun
    found: dict[str, Any] = {}
    reference: Tensor | None = None
    for method in _with_full(cache, means):
        cache.dense_until = None if method == "full" else [first]
        step = ForwardBatch((args.rows,), cache.capacity, cache)
        chances = decoder.forward(ids[first:], step).double().log_softmax(-1)
        cache.truncate(0, first)
        if reference is None:
            reference = chances
            continue
        each = (reference.exp() * (reference - chances)).sum(-1)
        agree = (reference.argmax(-1) == chances.argmax(-1)).double().mean()
        found[method] = {"kl": float(each.mean()), "worst": float(each.max()), "agree": float(agree)}
        print(
            f"{method:15} KL {found[method]['kl']:.5f}, worst {found[method]['worst']:.4f}, top-1 {agree:.3f}",
            flush=True,
        )
    read = [settings.tokens_read(at + 1) for at in range(first, args.context)]
    dense = [i for i, each in enumerate(means) if each is None]
    return {
        "methods": found, "dense_layers": dense, "tokens_read": sum(read) / len(read), "calibration_s": calibrated,
        "prefill_s": prefilled, "context": args.context, "rows": args.rows, "activations": args.activations,
    }  # fmt: skip


def front(args: argparse.Namespace, every: list[SparseAttention]) -> dict[str, Any]:
    """KL divergence over the last rows of a document, by the number of dense layers and of keys that others read."""
    path = Path(args.model)
    decoder = opening.load(path, torch.float32, None, dispatch.store(args.activations, "cpu", torch.float32))
    text = Path(args.text).read_text(errors="replace")[args.skip :][: 12 * args.context]
    ids = torch.tensor(vocabulary.tokenizer(path).encode(text)[: args.context])
    assert len(ids) == args.context, "the text is too short"
    shares, diffuse, share_of = list[float](), sparse_layers.DIFFUSE, sparse_layers._share

    def told(*of: Any) -> float:
        shares.append(share_of(*of))
        return shares[-1]

    sparse_layers._share, sparse_layers.DIFFUSE = told, 2.0  # type: ignore[assignment]  # every layer has statistics
    means = list(kv_cache.sparse_layers_of(decoder, every[0]).statistics)
    sparse_layers._share, sparse_layers.DIFFUSE = share_of, diffuse
    texts = len(shares) // len(means)
    each = [sum(shares[i * texts : (i + 1) * texts]) / texts for i in range(len(means))]
    order = sorted(range(len(means)), key=lambda layer: -each[layer])
    usual = sum(share > diffuse for share in each)
    print("shares of keys with 0.9 of weight:", " ".join(f"{i}: {each[i]:.2f}" for i in order), flush=True)
    cache, first = decoder.cache(args.context, scheme=scheme(args.kv)), args.context - args.rows
    sparse_layers.attach(cache.layers, decoder, SparseLayers(every[0], means), cache.capacity)
    run(decoder, cache, ids[:first])
    signs = [pages.signs for pages in cache.layers]
    step = ForwardBatch((args.rows,), cache.capacity, cache)
    full = decoder.forward(ids[first:], step).double().log_softmax(-1)
    found = list[dict[str, Any]]()
    for settings in every:
        for dense in sorted({usual, *map(int, args.front.split(","))}):
            for layer, (pages, own) in enumerate(zip(cache.layers, signs, strict=True)):
                whole = layer in order[:dense] or own is None
                pages.signs = None if whole else replace(own, settings=settings)  # type: ignore[type-var]
            cache.truncate(0, first)
            cache.dense_until = [first]
            step = ForwardBatch((args.rows,), cache.capacity, cache)
            chances = decoder.forward(ids[first:], step).double().log_softmax(-1)
            kl = (full.exp() * (full - chances)).sum(-1)
            read = settings.tokens_read(args.context) / args.context
            read = (dense + (len(means) - dense) * read) / len(means)
            row = {
                "read": str(settings), "dense": dense, "layers": len(means), "keys_read": read, "kl": float(kl.mean()),
                "worst": float(kl.max()),
            }  # fmt: skip
            found.append(row)
            mark = " (the usual)" if dense == usual else ""
            print(
                f"{settings}, {dense} of {len(means)} layers dense{mark}: {read:.3f} of all keys, KL {kl.mean():.5f}, "
                f"worst {kl.max():.4f}",
                flush=True,
            )
    return {"front": found, "context": args.context, "rows": args.rows, "activations": args.activations}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--read", default="1/16", help="tokens, or 1/N of them")
    parser.add_argument("--length", type=int, default=2033)
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("--model")
    parser.add_argument("--text")
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--kv", default="float32")
    parser.add_argument("--activations", default="exact")
    parser.add_argument("--front", help="numbers of dense layers, separated by commas")
    parser.add_argument("--skip", type=int, default=0, help="characters of the text before the document of --front")
    parser.add_argument("--json")
    args = parser.parse_args()
    parsed = [SparseAttention.parse(f"topk:{each}") for each in args.read.split(",")]
    every = [SparseAttention(each.topk, each.share, dense_below=0) for each in parsed]
    settings = every[0]
    with torch.inference_mode():
        if args.front is not None:
            found = front(args, every)
        elif args.model is None:
            found = lookups(settings, args.length, args.prompts)
            for method, forms in found.items():
                print(f"{method:15} " + "  ".join(f"{form} {share:.2f}" for form, share in forms.items()))
        else:
            found = divergence(args, settings)
    line = json.dumps({"read": args.read, **found})
    print(line)
    if args.json:
        Path(args.json).write_text(line)


if __name__ == "__main__":
    main()
