"""What rounding did to a linear, in one figure: the relative squared error as stored, beside that of plain rounding.

The error is that of the linear's output on calibration rows, or, where a recipe reads none, or none reached an expert,
that of its weight.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from attar.formats.packed import PackedTensor
from attar.formats.packing import row_slices


@dataclass(frozen=True)
class Record:
    """The relative squared error of one linear: as stored, and had it been rounded to nearest."""

    name: str
    scheme: str
    measure: str  # "output" on calibration rows, "weight", or "sensitivity": each weight as the loss minds it
    error: float
    rtn_error: float


def measure_on(x: Tensor | None) -> str:
    """What `error_on` measures."""
    return "weight" if x is None else "output"


def error_on(x: Tensor | None, weight: Tensor, packed: PackedTensor) -> float:
    """Of the output on rows x [N, I], or, where there are none, of the weight."""
    return weight_error(weight, packed) if x is None else output_error(x, weight, packed)


def output_error(x: Tensor, weight: Tensor, packed: PackedTensor) -> float:
    """|x (W' - W)^T|^2 / |x W^T|^2 of rows x [N, I]."""
    return _relative(lambda part: x @ part.T, weight, packed)


def weight_error(weight: Tensor, packed: PackedTensor) -> float:
    """|W' - W|^2 / |W|^2."""
    return _relative(lambda part: part, weight, packed)


def _relative(see: Callable[[Tensor], Tensor], weight: Tensor, packed: PackedTensor) -> float:
    wrong = whole = 0.0
    for rows in row_slices(*weight.shape):
        part = weight[rows].float()
        whole += float(see(part).double().square().sum())
        wrong += float(see(packed.dequantize(rows=rows) - part).double().square().sum())
    return wrong / whole if whole else 0.0
