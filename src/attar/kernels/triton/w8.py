"""Products with 8-bit weights in Triton, of rows that are 8-bit codes themselves or plain rows.

out = (codes of rows x codes of weight) * scale of the row * scale of the output. Sums are int32 or float32; scales are
applied once, at the end. Plain rows have no scale, and the codes are widened to their dtype on the way, which is exact.
Like in `w4.py` the product is computed as W x^T, and a few rows share out the columns.

Where float8 has a scale for every 128 by 128 block of the weight, and rounded rows one for every 128 of their columns,
a step of the sum is one block: it gets both scales as a float32 before it is added. The next step's scales are loaded a
step ahead, like in `w4.py`.

Hopper's tensor cores keep 14 bits of a running sum of float8: it is moved to float32 every 128 columns.

float8 on many rows (`tuning.rows_from`) goes to `torch._scaled_mm`, whose kernels are NVIDIA's own. Its fast
accumulation, which would not move the sums, is left off. A few rows stay here: they are bound by the bytes of the
weight, and torch pads them to its smallest tile.

Blocks may go there too, from as many rows on as were measured to be faster; without a measurement they stay here. torch
has that product for Hopper GPUs since CUDA 12.9, and recognizes it by the scales: those of rows [N, I / 128] column by
column, of a multiple of four rows, those of the weight [I / 128, O / 128] with a column's together. Releases differ in
how such a column is padded to a multiple of four, some silently: so only weights that need no padding are taken. Rows
that are left over, three at most, are multiplied here.

Shapes: N rows, I input columns, O output columns.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from attar.kernels.triton import language, tuning
from attar.kernels.triton.backend import interpreted, same_device
from attar.kernels.triton.language import arrive_last, counters, device_name, kernel, nothing, processors, tl
from attar.kernels.triton.weights import TritonWeight

ROWS_TOGETHER = 4  # rows whose scales torch's product of blocks reads at once: 16 bytes
HOPPER, CUDA_OF_BLOCKS = (9, 0), (12, 9)


@kernel
def _product(
    x: tl.tensor, x_scales: tl.tensor, codes: tl.tensor, scales: tl.tensor, bias: tl.tensor, out: tl.tensor,
    partials: tl.tensor, arrived: tl.tensor, rows: tl.tensor, outputs: tl.tensor, columns: tl.tensor,
    stride: tl.tensor, INTEGER: tl.constexpr, WIDE: tl.constexpr, WHOLE: tl.constexpr, BLOCKED: tl.constexpr,
    BIAS: tl.constexpr, SPLITS: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_I: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    NONE: tl.constexpr = 0 if INTEGER else 0.0
    NO_ROW: tl.constexpr = 0 if INTEGER and not WIDE else 0.0
    SUM: tl.constexpr = tl.int32 if INTEGER and not WIDE else tl.float32
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    o = tl.program_id(1) * BLOCK_O + tl.arange(0, BLOCK_O)
    split = tl.program_id(2)
    i = tl.arange(0, BLOCK_I)
    steps = tl.cdiv(columns, BLOCK_I)
    share = tl.cdiv(steps, SPLITS)
    first = split * share
    x_at = x + n.to(tl.int64)[None, :] * columns + i[:, None]
    at = codes + o.to(tl.int64)[:, None] * columns + i[None, :]
    ours, theirs = (o < outputs)[:, None], (n < rows)[None, :]
    acc = tl.zeros([BLOCK_O, BLOCK_N], SUM)
    block_at = scales + tl.program_id(1) * BLOCK_O // BLOCK_I * steps
    row_at = x_scales + n * steps
    block_scale, row_scale = 1.0, tl.full([BLOCK_N], 1.0, tl.float32)
    if BLOCKED:
        ahead = tl.minimum(first, steps - 1)  # the last splits may have nothing to do
        block_scale = tl.load(block_at + ahead)
        if not WIDE:
            row_scale = tl.load(row_at + ahead, mask=n < rows, other=0.0)
    for step in range(first, tl.minimum(first + share, steps)):
        if WHOLE:
            a = tl.load(at + step * BLOCK_I, mask=ours, other=NONE)
            b = tl.load(x_at + step * BLOCK_I, mask=theirs, other=NO_ROW)
        else:
            inside = step * BLOCK_I + i < columns
            a = tl.load(at + step * BLOCK_I, mask=ours & inside[None, :], other=NONE)
            b = tl.load(x_at + step * BLOCK_I, mask=theirs & inside[:, None], other=NO_ROW)
        if WIDE:
            a = a.to(b.dtype)
        if BLOCKED:
            part = tl.dot(a, b, input_precision=PRECISION, max_num_imprecise_acc=BLOCK_I, out_dtype=SUM)
            acc += part * (block_scale * row_scale)[None, :]
            ahead = tl.minimum(step + 1, steps - 1)
            block_scale = tl.load(block_at + ahead)
            if not WIDE:
                row_scale = tl.load(row_at + ahead, mask=n < rows, other=0.0)
        else:
            acc = tl.dot(a, b, acc, input_precision=PRECISION, max_num_imprecise_acc=BLOCK_I, out_dtype=SUM)

    total = acc.to(tl.float32)
    if SPLITS > 1:
        number = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
        place = partials + (number.to(tl.int64) * SPLITS * BLOCK_O + tl.arange(0, BLOCK_O)[:, None]) * BLOCK_N
        place += tl.arange(0, BLOCK_N)[None, :]
        tl.store(place + split * (BLOCK_O * BLOCK_N), total)
        if not arrive_last(arrived, number, SPLITS):
            return
        total = tl.zeros([BLOCK_O, BLOCK_N], tl.float32)
        for each in range(SPLITS):
            total += tl.load(place + each * (BLOCK_O * BLOCK_N), cache_modifier=".cg")
    if not BLOCKED:
        if not WIDE:
            total *= tl.load(x_scales + n, mask=n < rows, other=0.0)[None, :]
        total *= tl.load(scales + o, mask=o < outputs, other=0.0)[:, None]
    if BIAS:
        total += tl.load(bias + o, mask=o < outputs, other=0.0).to(tl.float32)[:, None]
    tl.store(out + n.to(tl.int64)[None, :] * stride + o[:, None], total.to(out.dtype.element_ty), mask=ours & theirs)


def product(x: Tensor, scales: Tensor | None, weight: TritonWeight, bias: Tensor | None, out: Tensor) -> None:
    """Multiply rows x [N, I] by the weight, plus the bias [O], into `out` [N, O].

    With `scales` [N] the rows are codes of the weight's dtype; a scale that is NaN makes its row NaN. Where the weight
    has scales of blocks, those of the rows are [N, I / 128].
    """
    assert weight.form == ("w8a16" if scales is None else "w8a8")
    assert weight.scales is not None
    assert scales is None or x.dtype == weight.codes.dtype
    assert x.is_contiguous()
    assert out.stride(1) == 1
    same_device(x, weight.codes, bias, out)
    rows, (outputs, columns) = len(x), weight.shape
    integer, device = weight.codes.dtype == torch.int8, device_name(x.device)
    blocked = weight.group > 0
    assert weight.group in (0, tuning.STEP)
    by_torch = rows >= tuning.rows_from("scaled_mm", device) and scaled_mm_fits(out, outputs, columns)
    if scales is not None and not (integer or blocked) and by_torch:
        scaled_mm(x, scales, weight, bias, out)
        return
    if scales is not None and blocked and rows >= tuning.rows_from("scaled_mm_blocks", device):
        whole = rows - rows % ROWS_TOGETHER
        if whole and scaled_mm_against_blocks(x.device, out.dtype, weight.shape) is None:
            scaled_mm(x[:whole], scales[:whole], weight, bias, out[:whole])
            if whole == rows:
                return
            x, scales, out, rows = x[whole:], scales[whole:], out[whole:], rows - whole
    kinds: tuple[tuning.Kind, tuning.Kind] = ("b8a16", "b8a8") if blocked else ("w8a16", "w8a8")
    config = tuning.config(kinds[scales is not None], rows, outputs, columns, processors(x.device), device)
    grid, partials = language.cut(config, rows, outputs, x, torch.float32)
    none = nothing(x.device)
    _product[grid](
        x, none if scales is None else scales, weight.codes, weight.scales, none if bias is None else bias, out,
        partials, counters(x.device), rows, outputs, columns, out.stride(0), INTEGER=integer, WIDE=scales is None,
        WHOLE=columns % tuning.STEP == 0, BLOCKED=blocked, BIAS=bias is not None, SPLITS=config.splits,
        BLOCK_O=config.outputs, BLOCK_N=config.rows, BLOCK_I=tuning.STEP, PRECISION=language.ACCUMULATE,
        num_warps=config.warps, num_stages=config.stages,
    )  # fmt: skip


def scaled_mm_fits(out: Tensor, outputs: int, columns: int) -> bool:
    """Return whether torch's own float8 product takes these shapes."""
    return not interpreted() and out.dtype == torch.bfloat16 and outputs % 16 == 0 and columns % 16 == 0


def scaled_mm(codes: Tensor, scales: Tensor, weight: TritonWeight, bias: Tensor | None, out: Tensor) -> None:
    """Compute the float8 product by torch, of rows that are codes [N, I] and scales [N]; of blocks, N is a multiple of
    four, and the rows' scales are [N, I / 128]."""
    assert weight.scales is not None
    whole = out if out.is_contiguous() else torch.empty_like(out, memory_format=torch.contiguous_format)
    added, matrix = None if bias is None else bias.to(out.dtype), weight.codes.t()
    if weight.group:
        assert len(codes) % ROWS_TOGETHER == 0
        row_scales = scales.t().contiguous().t()
        torch._scaled_mm(codes, matrix, row_scales, weight.scales.t(), out_dtype=out.dtype, out=whole)
        if added is not None:
            whole += added
    else:
        row_scales, column_scales = scales[:, None], weight.scales[None, :]
        torch._scaled_mm(codes, matrix, row_scales, column_scales, added, out_dtype=out.dtype, out=whole)
    if whole is not out:
        out.copy_(whole)


@functools.cache
def scaled_mm_against_blocks(device: torch.device, dtype: torch.dtype, shape: tuple[int, int]) -> str | None:
    """Return why torch's own product of float8 in blocks does not take a weight [O, I] here, or None where it does."""
    if device.type != "cuda" or not torch.version.cuda or torch.cuda.get_device_capability(device) != HOPPER:
        return "torch multiplies float8 in blocks on Hopper cards alone"
    if tuple(map(int, torch.version.cuda.split(".")[:2])) < CUDA_OF_BLOCKS:
        return f"torch multiplies float8 in blocks since CUDA 12.9, and this one is of {torch.version.cuda}"
    if dtype != torch.bfloat16:
        return f"torch multiplies float8 in blocks into bfloat16, not {dtype}"
    outputs, columns = shape
    if outputs % tuning.STEP or columns % (ROWS_TOGETHER * tuning.STEP):
        return f"torch multiplies float8 in whole blocks, four at a time along a row, which {shape} is not made of"
    return None
