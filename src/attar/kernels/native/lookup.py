"""Weights of tables (`formats.codecs.lookup`) in the layout of the CPU kernels.

`csrc/lookup.h` draws the layout; `lookup.cpp` multiplies rows by it. `linear` prepares, holds and calls them like all
others; this module only hands over their parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from attar.formats.packed import PackedTensor
from attar.formats.packing import row_slices, unpack_words
from attar.formats.weight_formats import Lookup
from attar.kernels.native.extension import library
from attar.kernels.operands import Linear

if TYPE_CHECKING:
    from attar.kernels.native.extension import Arena, LookupFactors, LookupMatrix, Matrix, ProgressiveMatrix


def pack(weight: PackedTensor, arena: Arena) -> LookupMatrix:
    """Lay the weight out in the memory of `arena`. Raises ValueError where a damaged file's outliers lie
    outside of it."""
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
        signed = unpack_words(parts["codes"][part], form.bits, columns)
        codes = (signed + (1 << form.bits - 1)).to(torch.uint8).contiguous()
        tables = parts["table"][part].float().contiguous()
        library.fill_lookup(made, part.start, len(codes), codes.data_ptr(), tables.data_ptr())
    return made


def factors(
    one: Linear, weights: Sequence[tuple[Matrix | LookupMatrix | ProgressiveMatrix, int]], at: int, width: int
) -> LookupFactors:
    """Return the plan of a call: matrices with the addresses of their biases, side by side from column `at` of `width`.

    Rows are reordered and divided like those of `one`.
    """
    order = 0 if one.permutation is None else one.permutation.data_ptr()
    divisor = 0 if one.input_scale is None else one.input_scale.data_ptr()
    made: LookupFactors = library.lookup_factors(list(weights), at, width, order, divisor)
    return made
