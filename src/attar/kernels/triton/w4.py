"""Products of rows with 4-bit weights in Triton: one kernel for few rows and many, and the dequantization.

The product is computed as W x^T, tiles [64 or 128 outputs, rows]. The weight is then the first factor, which tensor
cores take from registers, where its codes have just been widened, and the rows the second, from shared memory. A batch
of one costs a tile of 16 rows, which no memory-bound product notices.

Widening is free of conversions, which run at a quarter of the rate of other instructions: 128 + n is the bfloat16 with
bits 0x4300 | n, and 1024 + n the float16 with bits 0x6400 | n, for n < 16; one subtraction takes off the offset and the
zero point together, exactly.

Codes and rows feed the tensor cores, so Triton loads them steps ahead of their use. It does not do so for scales and
zero points, and each step would wait for them: they are carried through the loop, loaded one step ahead. Two would be
safer, but then Triton no longer loads anything ahead.

The number of rows decides what bounds the product. Few: the bytes of the weight, so every multiprocessor must have many
of them in flight; where outputs give fewer programs than there are, several share the columns (`language.py` on split
sums). Some: tiles of 64 rows and 128 outputs. Many (`tuning.rows_from`): widening the weight once, into bfloat16, and
leaving the product to torch costs less than widening it for each tile of rows: 2.5 bytes moved for each weight, against
2 N operations.

Rows that are int8 codes take the same path, through the integer tensor cores: a run's sum is exact, and gets the
weight's scale as a float; the rows' own scales come last. With progressive levels (QServe; Lin et al. 2024) a group's
codes become int8 before they are multiplied, code * factor - offset in 8 bits. One sum of whole numbers then goes
through all columns, shared out among programs or not. It is exact, so neither the cut nor the rows beside it change a
bit. Floats come in once, at the end. Each run adds two instructions a weight in place of a float for each number of the
tile. Not done: four weights in one 32-bit multiplication, as in QServe, which Triton can express in assembly alone, and
int8 weights widened once where rows are many; neither was measured.

Shapes: N rows, I input columns, O output columns; the layout of codes is drawn in `weights.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attar.kernels.triton import language, tuning
from attar.kernels.triton.backend import same_device
from attar.kernels.triton.language import COMPILED, arrive_last, counters, device_name, kernel, nothing, processors, tl
from attar.kernels.triton.weights import NIBBLES, TritonWeight

_WORDS = """{{
    .reg .b32 second, third, fourth;
    shr.u32 second, $4, 4;
    shr.u32 third, $4, 8;
    shr.u32 fourth, $4, 12;
    lop3.b32 $0, $4, 0x000f000f, {0}, 0xea;
    lop3.b32 $1, second, 0x000f000f, {0}, 0xea;
    lop3.b32 $2, third, 0x000f000f, {0}, 0xea;
    lop3.b32 $3, fourth, 0x000f000f, {0}, 0xea;
}}"""
FIVE = tl.constexpr("=r,=r,=r,=r,r")  # registers
BFLOAT16_WORDS, FLOAT16_WORDS = tl.constexpr(_WORDS.format("0x43004300")), tl.constexpr(_WORDS.format("0x64006400"))


@kernel
def _numbers(nibbles: tl.tensor, zero: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """Return nibble - zero in a dtype, where `zero` already counts the offset of `_offset`."""
    if dtype == tl.bfloat16:
        return (nibbles.to(tl.int16) | 0x4300).to(tl.bfloat16, bitcast=True) - zero
    elif dtype == tl.float16:
        return (nibbles.to(tl.int16) | 0x6400).to(tl.float16, bitcast=True) - zero
    else:
        return nibbles.to(dtype) - zero


@kernel
def _quarters(words: tl.tensor, zero: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """Return nibble - zero in a dtype for each nibble of int16 words, as `_numbers` makes them. Compiled, two words are
    widened at once: (word & 0x000f000f) | 0x43004300 are two bfloat16 numbers."""
    if COMPILED and dtype == tl.bfloat16:
        a, b, c, d = tl.inline_asm_elementwise(
            BFLOAT16_WORDS, FIVE, [words], (tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), True, 2
        )
        return a - zero, b - zero, c - zero, d - zero
    elif COMPILED and dtype == tl.float16:
        a, b, c, d = tl.inline_asm_elementwise(
            FLOAT16_WORDS, FIVE, [words], (tl.float16, tl.float16, tl.float16, tl.float16), True, 2
        )
        return a - zero, b - zero, c - zero, d - zero
    else:
        return (
            _numbers(words & 15, zero, dtype), _numbers((words >> 4) & 15, zero, dtype),
            _numbers((words >> 8) & 15, zero, dtype), _numbers((words >> 12) & 15, zero, dtype),
        )  # fmt: skip


@kernel
def _int8(nibbles: tl.tensor, levels: tl.tensor) -> tl.tensor:
    """Return nibble * factor - offset modulo 256; stored weights fit int8."""
    factor, offset = (levels & 255).to(tl.uint8), ((levels >> 8) & 255).to(tl.uint8)
    return (nibbles * factor - offset).to(tl.int8, bitcast=True)


@kernel
def _product(
    x: tl.tensor, x_scales: tl.tensor, codes: tl.tensor, scales: tl.tensor, zeros: tl.tensor, bias: tl.tensor,
    out: tl.tensor, partials: tl.tensor, arrived: tl.tensor, rows: tl.tensor, outputs: tl.tensor, runs: tl.tensor,
    stride: tl.tensor, SCALED: tl.constexpr, OFFSET: tl.constexpr, RUN: tl.constexpr, RUNS_A_GROUP: tl.constexpr,
    ASYMMETRIC: tl.constexpr, LEVELS: tl.constexpr, BIAS: tl.constexpr, SPLITS: tl.constexpr, BLOCK_O: tl.constexpr,
    BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    WORDS: tl.constexpr = codes.dtype.element_ty == tl.int16
    PART: tl.constexpr = RUN // 4 if WORDS else RUN // 2
    NONE: tl.constexpr = 0 if SCALED else 0.0
    SUM: tl.constexpr = tl.int32 if SCALED else tl.float32
    TOTAL: tl.constexpr = tl.int32 if LEVELS else tl.float32
    dtype: tl.constexpr = x.dtype.element_ty
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    o = tl.program_id(1) * BLOCK_O + tl.arange(0, BLOCK_O)
    split = tl.program_id(2)
    tile, inside = (o // 64).to(tl.int64), o % 64
    j = tl.arange(0, PART)
    there = o < tl.cdiv(outputs, 64) * 64  # whole tiles are stored
    some = (n < rows)[None, :]
    groups = runs // RUNS_A_GROUP
    share = tl.cdiv(runs, SPLITS)
    first = split * share
    at = codes + (tile * runs * 64 + inside)[:, None] * PART + j[None, :]
    scale_at = scales + tile * groups * 64 + inside
    zero_at = zeros + tile * groups * 64 + inside
    row_at = x + n.to(tl.int64)[None, :] * (runs * RUN) + j[:, None]
    zero = tl.full([BLOCK_O], OFFSET + 8, tl.float32).to(dtype)
    acc = tl.zeros([BLOCK_O, BLOCK_N], TOTAL)
    group = tl.minimum(first, runs - 1) // RUNS_A_GROUP  # the last splits may have nothing to do
    scale, code = zero, zero
    if not LEVELS:
        scale = tl.load(scale_at + group * 64, mask=there, other=0.0)
    if ASYMMETRIC or LEVELS:
        code = tl.load(zero_at + group * 64, mask=there, other=0)
    for run in range(first, tl.minimum(first + share, runs)):
        packed = tl.load(at + run * (64 * PART), mask=there[:, None], other=0)
        low = tl.load(row_at + run * RUN, mask=some, other=NONE)
        high = tl.load(row_at + run * RUN + PART, mask=some, other=NONE)
        group = tl.minimum(run + 1, runs - 1) // RUNS_A_GROUP
        if LEVELS:
            both = code[:, None]
            code = tl.load(zero_at + group * 64, mask=there, other=0)
            acc = tl.dot(_int8(packed & 15, both), low, acc, out_dtype=SUM)
            acc = tl.dot(_int8(packed >> 4, both), high, acc, out_dtype=SUM)
        else:
            later = tl.load(scale_at + group * 64, mask=there, other=0.0)
            if ASYMMETRIC:
                zero = (code.to(tl.float32) + OFFSET).to(dtype)
                code = tl.load(zero_at + group * 64, mask=there, other=0)
            if WORDS:
                third = tl.load(row_at + run * RUN + 2 * PART, mask=some, other=NONE)
                fourth = tl.load(row_at + run * RUN + 3 * PART, mask=some, other=NONE)
                a, b, c, d = _quarters(packed, zero[:, None], dtype)
                part = tl.dot(a, low, input_precision=PRECISION, out_dtype=SUM)
                part = tl.dot(b, high, part, input_precision=PRECISION, out_dtype=SUM)
                part = tl.dot(c, third, part, input_precision=PRECISION, out_dtype=SUM)
                part = tl.dot(d, fourth, part, input_precision=PRECISION, out_dtype=SUM)
            else:
                a, b = _numbers(packed & 15, zero[:, None], dtype), _numbers(packed >> 4, zero[:, None], dtype)
                part = tl.dot(a, low, input_precision=PRECISION, out_dtype=SUM)
                part = tl.dot(b, high, part, input_precision=PRECISION, out_dtype=SUM)
            acc += part.to(tl.float32) * scale.to(tl.float32)[:, None]
            scale = later

    wanted = (o < outputs)[:, None] & some
    if SPLITS > 1:
        number = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
        place = partials + (number.to(tl.int64) * SPLITS * BLOCK_O + tl.arange(0, BLOCK_O)[:, None]) * BLOCK_N
        place += tl.arange(0, BLOCK_N)[None, :]
        tl.store(place + split * (BLOCK_O * BLOCK_N), acc, mask=wanted)
        if not arrive_last(arrived, number, SPLITS):
            return
        acc = tl.zeros([BLOCK_O, BLOCK_N], TOTAL)
        for each in range(SPLITS):
            acc += tl.load(place + each * (BLOCK_O * BLOCK_N), mask=wanted, other=0, cache_modifier=".cg")
    total = acc.to(tl.float32)
    if LEVELS:
        total *= tl.load(scales + o, mask=o < outputs, other=0.0)[:, None]
    if SCALED:
        total *= tl.load(x_scales + n, mask=n < rows, other=0.0)[None, :]
    if BIAS:
        total += tl.load(bias + o, mask=o < outputs, other=0.0).to(tl.float32)[:, None]
    tl.store(out + n.to(tl.int64)[None, :] * stride + o[:, None], total.to(out.dtype.element_ty), mask=wanted)


def product(x: Tensor, weight: TritonWeight, bias: Tensor | None, out: Tensor, x_scales: Tensor | None = None) -> None:
    """Multiply rows x [N, I] by the weight, plus the bias [O], into `out` [N, O], whose rows may be apart. `x_scales`
    [N] are the scales of rows that are int8 codes."""
    levels = weight.form == "p4a8"
    kind: tuning.Kind = "w4a16" if x_scales is None else "p4a8" if levels else "w4a8"
    assert weight.form == kind
    assert weight.scales is not None
    assert x.is_contiguous()
    assert out.stride(1) == 1
    same_device(x, weight.codes, bias, out)
    rows, (outputs, columns), device = len(x), weight.shape, device_name(x.device)
    if x_scales is None and rows >= tuning.rows_from("widened", device):
        matrix = dense(weight, x.dtype)
        torch.mm(x, matrix.T, out=out) if bias is None else torch.addmm(bias.to(x.dtype), x, matrix.T, out=out)
        return
    runs, none = columns // weight.run, nothing(x.device)
    config = tuning.config(kind, rows, outputs, columns, processors(x.device), device)
    grid, partials = language.cut(config, rows, outputs, x, torch.int32 if levels else torch.float32)
    _product[grid](
        x, none if x_scales is None else x_scales, weight.codes, weight.scales,
        none if weight.zeros is None else weight.zeros, none if bias is None else bias, out, partials,
        counters(x.device), rows, outputs, runs, out.stride(0), SCALED=x_scales is not None, OFFSET=_offset(x.dtype),
        RUN=weight.run, RUNS_A_GROUP=weight.group // weight.run,
        ASYMMETRIC=weight.zeros is not None and not levels, LEVELS=levels, BIAS=bias is not None,
        SPLITS=config.splits, BLOCK_O=config.outputs, BLOCK_N=config.rows, PRECISION=language.ACCUMULATE,
        num_warps=config.warps, num_stages=config.stages,
    )  # fmt: skip


@kernel
def _widen(
    codes: tl.tensor, scales: tl.tensor, zeros: tl.tensor, which: tl.tensor, out: tl.tensor, runs: tl.tensor,
    factor: tl.tensor, RUN: tl.constexpr, RUNS_A_GROUP: tl.constexpr, ASYMMETRIC: tl.constexpr, LEVELS: tl.constexpr,
    CHOSEN: tl.constexpr, COUNT: tl.constexpr,
) -> None:  # fmt: skip
    WORDS: tl.constexpr = codes.dtype.element_ty == tl.int16
    PART: tl.constexpr = RUN // 4 if WORDS else RUN // 2
    row = tl.program_id(0).to(tl.int64)
    o = tl.load(which + row).to(tl.int64) if CHOSEN else row
    run = tl.program_id(1) * COUNT + tl.arange(0, COUNT)
    held = run < runs
    j = tl.arange(0, PART)
    packed = tl.load(
        codes + ((o // 64 * runs + run)[:, None] * 64 + o % 64) * PART + j[None, :], mask=held[:, None], other=0
    )
    group = o // 64 * (runs // RUNS_A_GROUP) + run // RUNS_A_GROUP
    at = out + row * runs * RUN + run[:, None] * RUN + j[None, :]
    zero, both = tl.full([COUNT], 8, tl.float32), tl.full([COUNT], 0, tl.int16)
    if LEVELS:
        scale = tl.load(scales + o)
        both = tl.load(zeros + group * 64 + o % 64, mask=held, other=0)
    else:
        scale = tl.load(scales + group * 64 + o % 64, mask=held, other=0.0).to(tl.float32)[:, None]
        if ASYMMETRIC:
            zero = tl.load(zeros + group * 64 + o % 64, mask=held, other=0).to(tl.float32)
    for part in tl.static_range(RUN // PART):
        nibbles = (packed >> 4 * part) & 15
        if LEVELS:
            wide = _int8(nibbles, both[:, None]).to(tl.float32) * scale
        else:
            wide = (nibbles.to(tl.float32) - zero[:, None]) * scale
        numbers = wide.to(out.dtype.element_ty)
        if CHOSEN:
            numbers = (numbers * factor).to(numbers.dtype)
        tl.store(at + part * PART, numbers, mask=held[:, None])


def dense(weight: TritonWeight, dtype: torch.dtype, which: Tensor | None = None, factor: float = 1.0) -> Tensor:
    """Return the weight [O, I] in `dtype`; or its rows `which` [N], times `factor`, as an embedding reads them."""
    assert weight.form in NIBBLES
    assert weight.scales is not None
    outputs, columns = weight.shape
    runs, device = columns // weight.run, weight.codes.device
    out = torch.empty((outputs if which is None else len(which), columns), dtype=dtype, device=device)
    none, count, levels = nothing(device), min(language.next_power(runs), 16), weight.form == "p4a8"
    if len(out):
        _widen[(len(out), -(-runs // count))](
            weight.codes, weight.scales, none if weight.zeros is None else weight.zeros,
            none if which is None else which, out, runs, factor, RUN=weight.run,
            RUNS_A_GROUP=weight.group // weight.run, ASYMMETRIC=weight.zeros is not None and not levels,
            LEVELS=levels, CHOSEN=which is not None, COUNT=count, num_warps=4,
        )  # fmt: skip
    return out


def _offset(dtype: torch.dtype) -> int:
    """Return the offset of the bits that `_numbers` adds."""
    return {torch.bfloat16: 128, torch.float16: 1024}.get(dtype, 0)
