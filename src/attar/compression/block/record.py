"""What rounding did to a linear, in one figure: the relative squared error as stored, beside that of plain rounding.

The error is that of the linear's output on calibration rows, or, where a recipe reads none, or none reached an expert,
that of its weight.

Plain rounding is one thing whatever the recipe, and is judged by the same measure: the weight as it was before any
transform, rounded to nearest, its scales searched as the recipe's rounding searches its own (`scale_search`). So what
the figures are apart is what transforms and codes gained, not the search. Behind transforms it is measured on the first
rows of the text, of the weight itself even where the error is of a corrected target, which moves it by some 3 %. Where
weights are pruned it is to zero the smallest, of what transforms left.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from attar.compression.calibration.loss_weights import Hints, row_groups
from attar.formats.packed import PackedTensor
from attar.formats.packing import row_slices


@dataclass(frozen=True)
class Record:
    """The relative squared error of one linear: as stored, and had it been rounded to nearest before any transform."""

    name: str
    scheme: str
    measure: str  # "output" on calibration rows, "weight", or "sensitivity": each weight as the loss minds it
    error: float
    rtn_error: float


def minded_error(x: Tensor, weight: Tensor, packed: PackedTensor, hints: Hints) -> float:
    """As `output_error`, on the first rows x [N, I] of the calibration text, each token and output counting as the loss
    minds it: what solvers that are given these hints go by."""
    counts = None
    if hints.weights is not None:
        each = hints.weights[: len(x)].to(x)
        each = each / each.sum(0).clamp(min=torch.finfo(x.dtype).tiny)
        sizes = [rows.stop - rows.start for rows in row_groups(len(weight), each.shape[1])]
        counts = each.repeat_interleave(torch.tensor(sizes, device=x.device), 1).sqrt()  # [N, O]

    def form(part: Tensor) -> float:
        seen = x @ part.T
        seen = seen if counts is None else seen * counts
        coupled = seen if hints.outputs is None else seen @ hints.outputs.to(x)
        return float((coupled * seen).sum(dtype=torch.float64))

    whole = form(weight.float())
    return form(packed.dequantize() - weight) / whole if whole else 0.0


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
