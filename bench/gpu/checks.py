"""Every kernel against the reference on the device, in bfloat16 too, which the interpreter gets wrong.

The oracle computes in float32 from the same stored numbers, so what is left is the kernel's own rounding. That of the
cache does so on the CPU: torch on a card multiplies by a scalar's reciprocal where it is to divide, and of millions of
numbers a few then have another code. An error is the largest difference, relative to the largest number expected.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from functools import partial
from typing import Any

import torch
from gpu import tune
from gpu.timing import DEVICE
from torch import Tensor

from attar.formats.packed import codec
from attar.formats.scheme import Scheme
from attar.kernels import dispatch, ops, ref, ref_attention
from attar.kernels.operands import AttentionForm, Linear, Norm
from attar.kernels.triton import attention, backend, kv_write, linear, rows, w8, weights
from attar.kernels.triton.pages import PlainPages
from attar.kv.pages import AttentionMetadata, PagedKV, Rotation
from attar.kv.schemes import SCHEMES

DTYPES = (torch.float32, torch.float16) if backend.interpreted() else (torch.bfloat16, torch.float16, torch.float32)
ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-23}
FEW = 2  # roundings of a result that is summed in float32
SOME = 8  # of one that is rounded on the way as well, such as the weights of a softmax
SUMMED = 2e-6  # of sums of 2,048 float32 products, in another order
FLOAT8 = 0.08  # of numbers that may fall to the neighbouring float8
EIGHT = 0.02  # of rows rounded to 8 bits by other arithmetic than the oracle's: codes may fall to the neighbour

WEIGHTS: tuple[str, ...] = (
    "w4g128-asym", "w4g128", "w4g64", "w4g32-asym", "w4a8g128", "qserve-g128", "w8", "w8a8", "w8a8-static", "fp8",
    "fp8-tensor", "fp8-block", "fp8-block-weight",
)  # fmt: skip
WHOLE_BLOCKS = (1152, 2048)  # a weight that torch's product of blocks takes
ROWS = (1, 40) if DEVICE == "cpu" else (1, 7, 16, 33, 64, 100, 300, 1100)
FORMS: tuple[dict[str, object], ...] = (
    {}, {"window": 100}, {"soft_cap": 20.0}, {"window": 100, "soft_cap": 20.0}, {"head_dim": 256},
    {"heads": 7, "kv_heads": 1},
)  # fmt: skip
BATCHES = (([1, 1, 1], [3000, 70, 1]), ([1, 300, 200, 0], [400, 300, 700, 9]))  # counts of rows, lengths
if DEVICE == "cpu":
    BATCHES = (([1, 1, 1], [300, 70, 1]), ([1, 30, 20, 0], [40, 30, 70, 9]))

SCALED = {torch.int8: "int8", torch.float8_e4m3fn: "fp8"}  # pages of 8 bits
if DEVICE == "cpu":  # the interpreter halves numbers that it rounds up to a power of two
    del SCALED[torch.float8_e4m3fn]
    WEIGHTS = tuple(each for each in WEIGHTS if not each.startswith("fp8") or each.endswith("-weight"))

Check = Callable[[], tuple[float, float]]
"""Gives the error and the most that it may be."""


def every() -> Iterator[tuple[str, Check]]:
    """Name and check: in bfloat16 everything, in the others one of each kind, for compiling takes a second."""
    for dtype in DTYPES:
        name, first = str(dtype).removeprefix("torch."), dtype == DTYPES[0]
        for kind in ("rms", "layer"):
            yield f"{kind} norm {name}", partial(_norm, kind, dtype)
        for act in rows.KINDS:
            yield f"{act} {name}", partial(_activate, act, dtype)
        for scheme in WEIGHTS if first else WEIGHTS[:1]:
            for n in ROWS:
                yield f"{scheme} {n} rows {name}", partial(_product, scheme, n, dtype)
        for kv in (dtype, *SCALED):
            stored = str(kv).removeprefix("torch.")
            yield f"write_kv {name} to {stored}", partial(_write, kv, dtype)
            for form in FORMS if first else FORMS[:1]:
                for counts, lengths in BATCHES:
                    label = f"attention {counts} of {lengths} {form} {name}, {stored} pages"
                    yield label, partial(_attend, counts, lengths, kv, dtype, form)
    for counts in ([8, 8, 8], [16, 3]):  # with four query heads to a key, tiles of 32 and of 64
        for kv in (DTYPES[0], *SCALED):
            stored = str(kv).removeprefix("torch.")
            yield f"trees of {counts}, {stored} pages", partial(_tree, counts, kv)
    if w8.scaled_mm_against_blocks(torch.device(DEVICE), DTYPES[0], WHOLE_BLOCKS) is None:
        for n in (4, 64, 1102):
            yield f"fp8-block {n} rows by torch", partial(_blocks_by_torch, n)
    for window, cap in ((None, None), (100, 20.0)):
        yield f"pages of int4, window {window}, soft cap {cap}", partial(_four_bits, window, cap)
    yield "argmax", _argmax
    yield "mask", _mask


def _randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def _error(ours: Tensor, expected: Tensor) -> float:
    """Infinity where a number is missing."""
    difference = (ours.double() - expected.double()).abs().max()
    error = float(difference / expected.double().abs().max().clamp(min=1e-30))
    return error if error == error else float("inf")


def _norm(kind: str, dtype: torch.dtype) -> tuple[float, float]:
    stream, delta, weight, bias = (_randn(9, 4096, seed=i).to(dtype) for i in range(4))
    spec = Norm("rms", weight[0]) if kind == "rms" else Norm("layer", weight[0], bias[0])
    ours, expected = rows.norm(stream, delta, spec), ref.norm(stream, delta, spec)
    return max(_error(a, b) for a, b in zip(ours, expected, strict=True)), FEW * ROUNDING[dtype]


def _activate(kind: str, dtype: torch.dtype) -> tuple[float, float]:
    x = _randn(9, 2 * 1408).to(dtype) * 3
    return _error(rows.activate(x, kind, True), ref.activate(x.clone(), kind, True)), SOME * ROUNDING[dtype]  # type: ignore[arg-type]


def _blocks_by_torch(n: int) -> tuple[float, float]:
    with tune.forced("rows_from", 0):
        return _product("fp8-block", n, DTYPES[0], WHOLE_BLOCKS)


def _product(
    scheme: str, n: int, dtype: torch.dtype, shape: tuple[int, int] = (1100, 2048) if DEVICE == "cuda" else (70, 256)
) -> tuple[float, float]:
    parsed = Scheme.parse(scheme)
    packed = codec(parsed.weight.kind).quantize(_randn(*shape), parsed)
    one = Linear("l", packed, _randn(shape[0], seed=1).to(dtype))
    if parsed.static:
        one.activation_scale = torch.tensor([0.03], device=DEVICE)
    x = _randn(n, shape[1], seed=2).to(dtype)
    expected = ref.linear(x.float(), (one,))
    weights.prepare(one, dtype)
    most = FEW * ROUNDING[dtype] + SUMMED
    return _error(linear.linear(x, (one,)), expected), most if parsed.activation is None else max(most, EIGHT)


def _write(kv: torch.dtype, dtype: torch.dtype) -> tuple[float, float]:
    matrix = _randn(5, 8, 128).to(dtype)
    q, k, v = matrix.split((4, 2, 2), 1)
    slots = torch.tensor([3, 40, 17, 0, 31], device=DEVICE)
    place = AttentionMetadata(slots, slots, slots, slots, slots)
    angles = _randn(9, 64, seed=1)
    turns = torch.tensor([0, 8, 3, 3, 1], dtype=torch.int32, device=DEVICE)
    rotation, norm = Rotation(angles.cos(), angles.sin(), turns), Norm("rms", _randn(128, seed=2).to(dtype))
    ours = PlainPages.make(3, 16, 2, 128, kv, DEVICE)
    theirs = PagedKV.zeros(3, 16, 2, 128, SCHEMES[SCALED.get(kv, "float32")], DEVICE)
    out = kv_write.write_kv(q, k, v, ours, place, rotation, norm, norm)
    exact = Norm("rms", norm.weight.float())
    normed_q, normed_k = (ref.norm(x.float(), None, exact)[1] for x in (q, k))
    expected = ref_attention.write_kv(normed_q, normed_k, v.float(), theirs, place, rotation)
    errors = [_error(out, expected)]
    stored = ref_attention.read_pages(theirs, torch.arange(3, device=DEVICE), torch.float32)
    for held, scales, wanted in zip(
        (ours.keys, ours.values), (ours.key_scales, ours.value_scales), stored, strict=True
    ):
        numbers = held.float() if scales is None else held.float() * scales[..., None]
        errors.append(_error(numbers.transpose(1, 2).flatten(0, 1), wanted))
    return max(errors), SOME * ROUNDING[dtype] + {torch.int8: EIGHT, torch.float8_e4m3fn: FLOAT8}.get(kv, 0)


def _attend(
    counts: list[int], lengths: list[int], kv: torch.dtype, dtype: torch.dtype, form: dict[str, object]
) -> tuple[float, float]:
    q, ours, theirs, place, wanted = _cached(counts, lengths, kv, dtype, form)
    return _attended(q, ours, theirs, place, wanted), SOME * ROUNDING[dtype] + 1e-6


def _tree(counts: list[int], kv: torch.dtype) -> tuple[float, float]:
    """Guesses that branch: each row sees itself and, of the others, whom a mask allows."""
    lengths = [3000, 700, 90][: len(counts)] if DEVICE == "cuda" else [300, 70, 40][: len(counts)]
    q, ours, theirs, place, wanted = _cached(counts, lengths, kv, DTYPES[0], {})
    numbers = torch.Generator().manual_seed(0)
    masks = [torch.rand(count, count, generator=numbers) < 0.5 for count in counts]
    place.tree = torch.cat([(mask | torch.eye(len(mask)).bool()).flatten() for mask in masks]).to(DEVICE)
    for first, end in itertools.pairwise(place.row_starts.tolist()):
        depths = torch.randint(0, 3, (end - first,), generator=numbers).sort().values
        place.positions[first:end] = place.positions[first] + depths.int().to(DEVICE)
    return _attended(q, ours, theirs, place, wanted), SOME * ROUNDING[DTYPES[0]] + 1e-6


def _cached(
    counts: list[int], lengths: list[int], kv: torch.dtype, dtype: torch.dtype, form: dict[str, object]
) -> tuple[Tensor, PlainPages, PagedKV, AttentionMetadata, AttentionForm]:
    """Queries of the last `counts` rows of sequences of `lengths`, whose keys and values were written by the kernels,
    and by the reference."""
    wanted = AttentionForm(**({"heads": 8, "kv_heads": 2, "head_dim": 128, "scale": 0.09} | form))  # type: ignore[arg-type]
    block, width = 64, -(-max(lengths) // 64)
    sizes = (len(counts) * width + 1, block, wanted.kv_heads, wanted.head_dim)
    ours = PlainPages.make(*sizes, kv, DEVICE)
    theirs = PagedKV.zeros(*sizes, SCHEMES[SCALED.get(kv, "float32")])
    tables = torch.randperm(sizes[0], generator=torch.Generator().manual_seed(0))[:-1].view(len(counts), width)
    for b, length in enumerate(lengths):
        at = torch.arange(length)
        slots = (tables[b, at // block] * block + at % block).to(DEVICE)
        k, v = (_randn(length, wanted.kv_heads, wanted.head_dim, seed=10 * b + i).to(dtype) for i in (1, 2))
        ref_attention.write_pages(k.float().cpu(), v.float().cpu(), theirs, slots.cpu())
        place = AttentionMetadata(slots, slots, slots, slots, slots)
        kv_write.write_kv(k.new_zeros(length, wanted.heads, wanted.head_dim), k, v, ours, place)
    q = _randn(sum(counts), wanted.heads, wanted.head_dim).to(dtype)
    return q, ours, theirs, _placed(counts, lengths, tables), wanted


def _placed(counts: list[int], lengths: list[int], tables: Tensor) -> AttentionMetadata:
    """The last `counts` rows of sequences of `lengths`, whose blocks `tables` [B, width] names; nothing is written."""
    positions = [torch.arange(length - count, length) for count, length in zip(counts, lengths, strict=True)]
    return AttentionMetadata(
        torch.tensor([0, *counts]).cumsum(0).int().to(DEVICE),
        torch.tensor(lengths).int().to(DEVICE),
        tables.int().contiguous().to(DEVICE),
        torch.cat(positions).int().to(DEVICE),
        torch.zeros(sum(counts), dtype=torch.int64, device=DEVICE),
    )


def _attended(q: Tensor, ours: PlainPages, theirs: PagedKV, place: AttentionMetadata, wanted: AttentionForm) -> float:
    expected, _ = ref_attention.paged_attention(q.float().cpu(), theirs, on_cpu(place), wanted)
    again = [attention.paged_attention(q, ours, place, wanted) for _ in range(3)]
    assert all(torch.equal(each, again[0]) for each in again), "the same call gave other bits"
    return _error(again[0].cpu(), expected)


def on_cpu(place: AttentionMetadata) -> AttentionMetadata:
    moved: dict[str, Any] = {
        field.name: value.cpu() for field in fields(place) if isinstance(value := getattr(place, field.name), Tensor)
    }
    return replace(place, **moved)


def _four_bits(window: int | None, cap: float | None) -> tuple[float, float]:
    """Written and read, with rows as wide as most models': codes fall to a neighbour here and there. A whole prompt,
    then decoding beside the rest of another."""
    form, int4 = AttentionForm(8, 2, 128, 0.09, window, cap), SCHEMES["int4"]
    lengths = [200, 150] if DEVICE == "cuda" else [70, 40]
    width = -(-max(lengths) // 64)
    ours, theirs = (
        dispatch.pages(2 * width, 64, 2, 128, int4, DEVICE),
        PagedKV.zeros(2 * width, 64, 2, 128, int4),
    )
    tables = torch.randperm(2 * width, generator=torch.Generator().manual_seed(0)).view(2, width)
    errors = []
    for b, length in enumerate(lengths):
        at = torch.arange(length)
        place = _placed([length], [length], tables[b : b + 1])
        place.slot_mapping = (tables[b, at // 64] * 64 + at % 64).to(DEVICE)
        q, k, v = (_randn(length, n, 128, seed=10 * b + n).to(DTYPES[0]) for n in (8, 2, 2))
        turned = ops.write_kv(q, k, v, ours, place)
        q, k, v = (each.float().cpu() for each in (q, k, v))
        ref_attention.write_kv(q, k, v, theirs, on_cpu(place), None)
        errors.append(_difference(turned, ours, theirs, place, form))
    for counts in ([1, 1], [1, 30]):
        q = ours.bases.keys.turn_queries(_randn(sum(counts), 8, 128).to(DTYPES[0]))  # type: ignore[union-attr]
        errors.append(_difference(q, ours, theirs, _placed(counts, lengths, tables), form))
    return max(errors), EIGHT + SOME * ROUNDING[DTYPES[0]]


def _difference(q: Tensor, ours: PagedKV, theirs: PagedKV, place: AttentionMetadata, form: AttentionForm) -> float:
    found, _ = ops.paged_attention(q, ours, place, form)
    expected, _ = ref_attention.paged_attention(q.float().cpu(), theirs, on_cpu(place), form)
    return _error(found.cpu(), expected)


def _mask() -> tuple[float, float]:
    x, places = _randn(9, 128256 if DEVICE == "cuda" else 9000).double(), torch.tensor([2, 7]).to(DEVICE)
    words = torch.Generator().manual_seed(1)
    bits = torch.randint(-(2**31), 2**31, (2, -(-x.shape[1] // 32)), generator=words).to(torch.int32).to(DEVICE)
    expected = x.clone()
    ref.mask(expected, places, bits)
    ops.mask(x, places, bits)
    return float((x != expected).sum()), 0.0


def _argmax() -> tuple[float, float]:
    x = torch.randint(-50, 50, (9, 128256 if DEVICE == "cuda" else 9000)).float()
    x[3, 700] = torch.nan
    return float((ops.argmax(x.to(DEVICE)).cpu() != ops.argmax(x) if DEVICE == "cuda" else torch.zeros(1)).sum()), 0.0
