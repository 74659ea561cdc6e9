"""Filling kernel layouts (`layouts`): the stored parts of weights of every scheme go into the kernels' memory.

GGML's blocks are split in C++, in one call. Other formats become a byte a code and arrays of scales here, some rows at
a time, by their own codec's functions, so temporaries stay small.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attar.formats import packing
from attar.formats.codecs import fp4, nf4, sparse24
from attar.formats.codecs.llm_int8 import LARGEST
from attar.formats.packed import PackedTensor
from attar.formats.packing import row_slices
from attar.formats.scheme import Grid, Scheme
from attar.formats.weight_formats import Fp8Blocks, GgmlBlocks, Lookup, Progressive, Sparse24
from attar.kernels.native.extension import library
from attar.kernels.native.layouts import FLOATS, LANES, Layout

if TYPE_CHECKING:
    from attar.kernels.native.extension import Arena, LookupMatrix, Matrix, ProgressiveMatrix

Arrays = tuple[Tensor, Tensor, Tensor | None]
"""Arrays of R rows: codes [R, I], a byte each; scales [R, G]; zero points int8 [R, G], or None."""


def pack_progressive(weight: PackedTensor, arena: Arena) -> ProgressiveMatrix:
    """Lay a weight of two levels out in the memory of `arena`: `csrc/progressive.cpp` says how rows meet it. Raises
    ValueError where a damaged file has numbers that are no int8."""
    form, (rows, columns) = weight.scheme.weight, weight.shape
    assert isinstance(form, Progressive)
    codes, factor, offset = (weight.parts[name].contiguous() for name in ("codes", "factor", "offset"))
    scale = weight.parts["scale"].float().contiguous()
    made: ProgressiveMatrix = library.pack_progressive(
        arena, codes.data_ptr(), rows, columns, form.group, factor.data_ptr(), offset.data_ptr(), scale.data_ptr()
    )
    return made


def pack_lookup(weight: PackedTensor, arena: Arena) -> LookupMatrix:
    """Lay a weight of tables out in the memory of `arena`: `csrc/lookup.h` draws the layout. Raises ValueError where a
    damaged file's outliers lie outside of it."""
    form, (rows, columns), parts = weight.scheme.weight, weight.shape, weight.parts
    assert isinstance(form, Lookup)
    count, starts, places, extras = 0, *(torch.empty(0, dtype=torch.int32),) * 2, torch.empty(0)
    if form.outliers:
        starts, places = parts["starts"].contiguous(), parts["places"].contiguous()
        count, extras = len(places), parts["extras"].float().contiguous()
    made: LookupMatrix = library.make_lookup(
        arena, rows, columns, form.bits, count, starts.data_ptr(), places.data_ptr(), extras.data_ptr()
    )
    for part in row_slices(rows, columns):
        signed = packing.unpack_words(parts["codes"][part], form.bits, columns)
        codes = (signed + (1 << form.bits - 1)).to(torch.uint8).contiguous()
        tables = parts["table"][part].float().contiguous()
        library.fill_lookup(made, part.start, len(codes), codes.data_ptr(), tables.data_ptr())
    return made


def pack(weight: PackedTensor, layout: Layout, arena: Arena) -> Matrix:
    """Lay the weight out in the memory of `arena`. Raises ValueError where the shape has no kernel."""
    (rows, columns), form = weight.shape, weight.scheme.weight
    if layout.number in FLOATS:
        assert layout.sparse
        values, places = weight.parts["values"].contiguous(), weight.parts["places"].contiguous()
        sparse: Matrix = library.pack_sparse(arena, values.data_ptr(), places.data_ptr(), rows, columns, layout.number)
        return sparse
    layout = layout.of(columns)
    table = weight.parts["map"].tolist() if form.kind == "nf4" else list(layout.table)
    made: Matrix = library.make_matrix(
        arena, rows, columns, layout.number, layout.bits, layout.group or columns, layout.scale, layout.zeros,
        layout.offsets, layout.fine, table,
    )  # fmt: skip
    if isinstance(form, GgmlBlocks):
        blocks = weight.parts["blocks"].contiguous()
        library.fill_ggml(made, 0, rows, form.type.name, blocks.data_ptr(), blocks.numel())
        return made
    arrays = _ARRAYS[form.kind]
    step = max(LANES, next(row_slices(rows, columns)).stop // LANES * LANES)
    for first in range(0, rows, step):
        part = slice(first, min(first + step, rows))
        codes, scale, zero = arrays(weight, layout, part)
        codes, scale = codes.contiguous(), scale.to(getattr(torch, layout.scale)).contiguous()
        assert codes.dtype.itemsize == 1
        zero = None if zero is None else zero.contiguous()
        at = 0 if zero is None else zero.data_ptr()
        library.fill_rows(made, first, part.stop - first, codes.data_ptr(), scale.data_ptr(), at)
    return made


def _grid(weight: PackedTensor, layout: Layout, rows: slice) -> Arrays:
    """Return the arrays of grids: float8, and integer ones in groups that no run holds, with each group's scales and
    zeros."""
    (height, columns), grid = weight.shape, weight.scheme.grid
    shape = (rows.stop - rows.start, grid.groups(columns))
    codes, scale, zero = weight.parts["codes"][rows], weight.parts["scale"], weight.parts.get("zero")
    if codes.dtype == torch.int32:
        codes = packing.unpack_words(codes, grid.bits, columns)
    if zero is not None and zero.dtype == torch.int32:
        zero = packing.unpack_words(zero.t().contiguous(), grid.bits, height).t()
    return codes.view(torch.uint8), _spread(scale, rows, shape), None if zero is None else _spread(zero, rows, shape)


def _sparse(weight: PackedTensor, layout: Layout, rows: slice) -> Arrays:
    """Return the codes of all columns; columns that are not kept get the code of zero."""
    form = weight.scheme.weight
    assert isinstance(form, Sparse24)
    assert isinstance(form.values, Grid)
    inner, half = Scheme(form.values, scale_dtype=weight.scheme.scale_dtype), (weight.shape[0], weight.shape[1] // 2)
    parts = {name: part for name, part in weight.parts.items() if name != "places"}
    kept, scale, zero = _grid(PackedTensor(inner, half, parts), layout, rows)
    zeros = torch.zeros_like(scale, dtype=torch.int8) if zero is None else zero
    spread = sparse24.unpack_24(
        kept.view(torch.int8).short() - zeros.short().repeat_interleave(half[1] // zeros.shape[1], 1),
        weight.parts["places"][rows],
    )
    codes = spread + zeros.short().repeat_interleave(weight.shape[1] // zeros.shape[1], 1)
    if layout.number == "codes":
        codes += 1 << layout.bits - 1
    return codes.to(torch.uint8), scale, zero


def _spread(array: Tensor, rows: slice, shape: tuple[int, int]) -> Tensor:
    return (array if array.ndim == 1 else array[rows]).expand(shape)


def _fp8_blocks(weight: PackedTensor, layout: Layout, rows: slice) -> Arrays:
    assert layout.group is not None
    scale = weight.parts["scale"]
    of_row = torch.arange(rows.start, rows.stop) // Fp8Blocks.size
    of_group = torch.arange(0, weight.shape[1], layout.group) // Fp8Blocks.size
    return weight.parts["codes"][rows].view(torch.uint8), scale[of_row][:, of_group], None


def _fp4(weight: PackedTensor, layout: Layout, rows: slice) -> Arrays:
    """Return codes that stand for twice their values, which are then whole."""
    stored = weight.parts["codes"][rows]
    return torch.stack((stored & 15, stored >> 4), -1).flatten(1), fp4.factors(weight, rows) * 0.5, None


def _nf4(weight: PackedTensor, layout: Layout, rows: slice) -> Arrays:
    stored = weight.parts["codes"].view(weight.shape[0], -1)[rows]
    return torch.stack((stored >> 4, stored & 15), -1).flatten(1), nf4.magnitudes(weight, rows), None


def _int8_rows(weight: PackedTensor, layout: Layout, rows: slice) -> Arrays:
    codes = weight.parts["codes"][rows].view(torch.uint8)
    scale = weight.parts["absmax"][rows, None] / LARGEST
    return codes ^ 128 if layout.number == "codes" else codes, scale, None


_ARRAYS: Mapping[str, Callable[[PackedTensor, Layout, slice], Arrays]] = {
    "int": _grid, "e4m3": _grid, "e5m2": _grid, "fp8-block": _fp8_blocks, "fp4": _fp4, "nf4": _nf4,
    "llm-int8": _int8_rows, "sparse24": _sparse,
}  # fmt: skip
