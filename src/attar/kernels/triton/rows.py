"""Norms, activations, rows rounded to int8 or float8, and the argmax of rows, in Triton. Shapes: N rows, I columns.

Each is bound by memory, so each reads its rows once and writes them once. All but `argmax` have a row in the registers
of one program: a row's bits depend on that row alone. The arithmetic is float32, with the intermediate roundings of
`ref` to the rows' own dtype: the sum with the residual, and an RMSNorm before its weight.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attar.errors import UserError
from attar.kernels.operands import Activation, Norm
from attar.kernels.triton.backend import same_device
from attar.kernels.triton.language import arrive_last, counters, kernel, next_power, nothing, tl

LONGEST = 1 << 16  # columns of a row that one program can hold
ROUND = tl.constexpr(12582912.0)  # 1.5 * 2^23: added and subtracted, it rounds a float32 below 2^22 half to even
KINDS = ("silu", "relu", "gelu", "gelu_tanh", "quick_gelu")
SHARE, STEP = 8192, 1024  # logits of one program, and of a step of it


@kernel
def _norm(
    stream: tl.tensor, delta: tl.tensor, weight: tl.tensor, bias: tl.tensor, total: tl.tensor, out: tl.tensor,
    columns: tl.tensor, eps: tl.tensor, offset: tl.tensor,
    ADD: tl.constexpr, LAYER: tl.constexpr, BIAS: tl.constexpr, OFFSET: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * columns
    at = tl.arange(0, BLOCK)
    held = at < columns
    x = tl.load(stream + row + at, mask=held, other=0.0)
    if ADD:
        x = (x.to(tl.float32) + tl.load(delta + row + at, mask=held, other=0.0).to(tl.float32)).to(x.dtype)
        tl.store(total + row + at, x, mask=held)
    w = tl.load(weight + at, mask=held, other=0.0).to(tl.float32)
    wide = x.to(tl.float32)
    if LAYER:
        wide = tl.where(held, wide - tl.sum(wide, 0) / columns, 0.0)
    wide = wide * tl.rsqrt(tl.sum(wide * wide, 0) / columns + eps)
    if LAYER:
        wide = wide * w
        if BIAS:
            wide += tl.load(bias + at, mask=held, other=0.0).to(tl.float32)
    elif OFFSET:
        wide = wide * (w + offset)
    else:
        wide = wide.to(x.dtype).to(tl.float32) * w
    tl.store(out + row + at, wide.to(x.dtype), mask=held)


def norm(stream: Tensor, delta: Tensor | None, spec: Norm) -> tuple[Tensor, Tensor]:
    """Run `ops.norm` on rows [..., I] of one dtype. Raises ValueError where shapes or devices do not fit."""
    columns = stream.shape[-1]
    if any(each is not None and each.shape != (columns,) for each in (spec.weight, spec.bias)):
        raise ValueError(f"{spec.name}: rows of {columns} columns do not fit a norm over {spec.weight.numel()}")
    if delta is not None and delta.shape != stream.shape:
        raise ValueError(f"{spec.name}: what is added to the stream has its shape")
    _check_columns(columns)
    same_device(stream, delta, spec.weight, spec.bias)
    stream = stream.contiguous()
    out, none = torch.empty_like(stream), nothing(stream.device)
    total = stream if delta is None else torch.empty_like(stream)
    if stream.numel():
        block = next_power(columns)
        _norm[(stream.numel() // columns,)](
            stream, none if delta is None else delta.contiguous(), spec.weight.contiguous(),
            none if spec.bias is None else spec.bias, total, out, columns, spec.eps, spec.offset,
            ADD=delta is not None, LAYER=spec.kind == "layer", BIAS=spec.bias is not None, OFFSET=spec.offset != 0,
            BLOCK=block, num_warps=_warps(block),
        )  # fmt: skip
    return total, out


@kernel
def _act(x: tl.tensor, KIND: tl.constexpr) -> tl.tensor:
    """Apply an activation to float32. (1 + tanh(y)) / 2 is 1 / (1 + exp(-2 y)), which is exact where the sum would
    cancel."""
    if KIND == "silu":
        return x / (1.0 + tl.exp(-x))
    elif KIND == "relu":
        return tl.where(x < 0, 0.0, x)
    elif KIND == "quick_gelu":
        return x / (1.0 + tl.exp(-1.702 * x))
    elif KIND == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    else:
        y = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        return x / (1.0 + tl.exp(-2.0 * y))


@kernel
def _activate(
    x: tl.tensor, out: tl.tensor, columns: tl.tensor, KIND: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    held = at < columns
    source = x + row * columns * (2 if GATED else 1) + at
    a = tl.load(source, mask=held, other=0.0)
    y = _act(a.to(tl.float32), KIND)
    if GATED:
        y = y.to(a.dtype).to(tl.float32) * tl.load(source + columns, mask=held, other=0.0).to(tl.float32)
    tl.store(out + row * columns + at, y.to(a.dtype), mask=held)


def activate(x: Tensor, kind: Activation, gated: bool) -> Tensor:
    """Run `ops.activate` on rows [N, I]. Raises ValueError for gated rows of odd length."""
    assert kind in KINDS
    if gated and x.shape[1] % 2:
        raise ValueError(f"gated rows have two halves: {x.shape[1]} columns are odd")
    x, columns = x.contiguous(), x.shape[1] // (2 if gated else 1)
    out = x.new_empty((len(x), columns))
    if out.numel():
        block = min(1024, next_power(columns))
        grid = (len(x), -(-columns // block))
        _activate[grid](x, out, columns, KIND=kind, GATED=gated, BLOCK=block, num_warps=4)
    return out


@kernel
def _round_rows(
    x: tl.tensor, codes: tl.tensor, scales: tl.tensor, fixed: tl.tensor, columns: tl.tensor, span: tl.tensor,
    least: tl.tensor, lowest: tl.tensor, highest: tl.tensor, FIXED: tl.constexpr, INTEGER: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    held = at < columns
    wide = tl.load(x + row * columns + at, mask=held, other=0.0).to(tl.float32)
    if FIXED:
        scale = tl.load(fixed)
    else:
        largest = tl.max(tl.abs(wide), 0)
        scale = tl.div_rn(largest, span)
        scale = tl.where(scale == 0, least, scale)
    finite = tl.sum(tl.where(tl.abs(wide) < float("inf"), 0, 1), 0) == 0  # a maximum may pass over a NaN
    value = tl.minimum(tl.maximum(tl.div_rn(wide, scale), lowest), highest)
    if INTEGER:
        value = (value + ROUND) - ROUND
    value = tl.where(finite, value, 0.0)
    if INTEGER:
        tl.store(codes + row * columns + at, value.to(tl.int8), mask=held)
    else:
        tl.store(codes + row * columns + at, value.to(tl.float8e4nv, fp_downcast_rounding="rtne"), mask=held)
    tl.store(scales + row, tl.where(finite, scale, float("nan")))


def round_rows(x: Tensor, dtype: torch.dtype, fixed: Tensor | None = None, group: int = 0) -> tuple[Tensor, Tensor]:
    """Round rows x [N, I] to codes [N, I], int8 or float8_e4m3fn, and scales float32 [N]: x = code * scale.

    Each row has one scale by the rule of `formats`, max|x| over half the span (127.5 or 448); or `fixed` [1] serves
    all. A row that holds a NaN or an infinity gets the scale NaN, which nothing later can lose. With a `group`, a
    divisor of I, each group of columns has its own scale: [N, I / group]. Raises ValueError for rows that are too long.
    """
    if group:
        codes, scales = round_rows(x.reshape(-1, group), dtype, fixed)
        return codes.view(x.shape), scales.view(len(x), -1)
    _check_columns(x.shape[1])
    same_device(x, fixed)
    x = x.contiguous()
    codes, scales = torch.empty_like(x, dtype=dtype), x.new_empty(len(x), dtype=torch.float32)
    integer = dtype == torch.int8
    span, lowest, highest = (127.5, -128.0, 127.0) if integer else (448.0, -448.0, 448.0)
    if len(x):
        block = next_power(x.shape[1])
        _round_rows[(len(x),)](
            x, codes, scales, nothing(x.device) if fixed is None else fixed, x.shape[1], span,
            torch.finfo(torch.float32).eps, lowest, highest, FIXED=fixed is not None, INTEGER=integer, BLOCK=block,
            num_warps=_warps(block),
        )  # fmt: skip
    return codes, scales


@kernel
def _argmax(
    rows: tl.tensor, parts: tl.tensor, out: tl.tensor, arrived: tl.tensor, columns: tl.tensor, stride: tl.tensor,
    SPLITS: tl.constexpr, BLOCK_P: tl.constexpr, SHARE: tl.constexpr, STEP: tl.constexpr,
) -> None:  # fmt: skip
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    least = -9223372036854775808
    best = tl.full([STEP], least, tl.int64)
    for start in range(split * SHARE, tl.minimum(split * SHARE + SHARE, columns), STEP):
        at = start + tl.arange(0, STEP)
        x = tl.load(rows + row * stride + at, mask=at < columns, other=0.0).to(tl.float32)
        x = tl.where(x == 0, 0.0, x)  # -0 equals 0
        bits = x.to(tl.int32, bitcast=True)
        order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
        order = tl.where(x != x, 2147483647, order)
        key = (order.to(tl.int64) << 32) | (2147483647 - at).to(tl.int64)
        best = tl.maximum(best, tl.where(at < columns, key, least))
    found = tl.max(best, 0)
    if SPLITS > 1:
        tl.store(parts + row * SPLITS + split, found)
        if not arrive_last(arrived, tl.program_id(0), SPLITS):
            return
        each = tl.arange(0, BLOCK_P)
        found = tl.max(tl.load(parts + row * SPLITS + each, mask=each < SPLITS, other=least, cache_modifier=".cg"), 0)
    tl.store(out + row, 2147483647 - (found & 0xFFFFFFFF))


def argmax(rows: Tensor) -> Tensor:
    """Run `ops.argmax` on rows [B, V] whose numbers lie side by side: int64 [B].

    It is the choice of a greedy request and the basis of every other. A row of 128,000 logits is shared out among
    programs. Each leaves the best of its share as one integer in the wanted order: the number's bits, made monotone,
    above the index counted down. So the first among equals wins, and a NaN is above everything.

    Random numbers for sampling come from the host: they follow from a request's seed and the token's index alone
    (`sampling/sampler.py`), so they are known before the logits are.
    """
    assert rows.ndim == 2
    assert rows.stride(1) == 1
    assert rows.shape[1] > 0
    out = torch.empty(len(rows), dtype=torch.int64, device=rows.device)
    splits = -(-rows.shape[1] // SHARE)
    parts = torch.empty((len(rows), splits), dtype=torch.int64, device=rows.device) if splits > 1 else out
    if len(rows):
        _argmax[(len(rows), splits)](
            rows, parts, out, counters(rows.device) if splits > 1 else nothing(rows.device), rows.shape[1],
            rows.stride(0), SPLITS=splits, BLOCK_P=next_power(splits), SHARE=SHARE, STEP=STEP, num_warps=4,
        )  # fmt: skip
    return out


@kernel
def _mask(
    rows: tl.tensor, places: tl.tensor, bits: tl.tensor, columns: tl.tensor, stride: tl.tensor, words: tl.tensor,
    STEP: tl.constexpr,
) -> None:  # fmt: skip
    each = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * STEP + tl.arange(0, STEP)
    within = at < columns
    word = tl.load(bits + each * words + at // 32, mask=within, other=-1)
    banned = ((word >> (at % 32)) & 1) == 0
    row = tl.load(places + each)
    tl.store(rows + row * stride + at, tl.full([STEP], float("-inf"), tl.float64), mask=within & banned)


def mask(rows: Tensor, places: Tensor, bits: Tensor) -> None:
    """Run `ops.mask` on float64 rows [B, V] whose numbers lie side by side. Allowed numbers are neither read nor
    written."""
    assert rows.stride(1) == 1
    assert bits.is_contiguous()
    if len(places):
        _mask[(len(places), -(-rows.shape[1] // STEP))](
            rows, places, bits, rows.shape[1], rows.stride(0), bits.shape[1], STEP=STEP, num_warps=4
        )


def _check_columns(columns: int) -> None:
    if columns > LONGEST:
        raise UserError(
            "architecture_unsupported", f"rows of {columns:,} columns are too long for one program: at most {LONGEST:,}"
        )


def _warps(block: int) -> int:
    return min(16, max(1, block // 512))
