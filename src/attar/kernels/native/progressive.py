"""Weights of two levels (`formats.progressive`) in the layout of the CPU kernels: `csrc/progressive.cpp` says how rows
are multiplied by them. They are prepared, held and called as all others are (`linear`); this module only knows what is
handed over."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from attar.formats.packed import PackedTensor
from attar.formats.weight_formats import Progressive
from attar.kernels.native.extension import library

if TYPE_CHECKING:
    from attar.kernels.native.extension import Arena, LookupMatrix, Matrix, ProgressiveFactors, ProgressiveMatrix


def pack(weight: PackedTensor, arena: Arena) -> ProgressiveMatrix:
    """The weight in the memory of `arena`. Raises ValueError where a damaged file has numbers that are no int8."""
    form, (rows, columns) = weight.scheme.weight, weight.shape
    assert isinstance(form, Progressive)
    codes, factor, offset = (weight.parts[name].contiguous() for name in ("codes", "factor", "offset"))
    scale = weight.parts["scale"].float().contiguous()
    made: ProgressiveMatrix = library.pack_progressive(
        arena, codes.data_ptr(), rows, columns, form.group, factor.data_ptr(), offset.data_ptr(), scale.data_ptr()
    )
    return made


def factors(
    weights: Sequence[tuple[Matrix | LookupMatrix | ProgressiveMatrix, int]], at: int, width: int
) -> ProgressiveFactors:
    """The plan of a call: matrices with the addresses of their biases, side by side from column `at` of `width`."""
    made: ProgressiveFactors = library.progressive_factors(list(weights), at, width)
    return made
