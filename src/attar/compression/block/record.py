"""The rounding error of a linear as one number: the relative squared error as stored, beside that of plain rounding.

The error is that of the linear's output on calibration rows. Where a recipe reads none, or none reached an expert, it
is that of the weight.

Plain rounding is the same for every recipe and is judged by the same measure: the weight before any transform, rounded
to nearest, with scales searched as the recipe's rounding searches them (`scale_search`). So the difference is the gain
of transforms and codes, not of the search. Behind transforms it is measured on the first rows of the text. It is then
the weight's own even where the error is of a corrected target, which changes it by about 3 %. For pruned weights the
baseline zeroes the smallest of the transformed weights.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attar.compression.calibration.loss_weights import Hints, row_groups
from attar.formats.packed import PackedTensor
from attar.formats.packing import row_slices


@dataclass(frozen=True)
class Record:
    """Relative squared errors of one linear: as stored, and as rounded to nearest before any transform."""

    name: str
    scheme: str
    measure: str  # "output" on calibration rows, "weight", or "sensitivity": weighted by the loss
    error: float
    rtn_error: float


def minded_error(x: Tensor, weight: Tensor, packed: PackedTensor, hints: Hints) -> float:
    """Return the relative output error on the first rows x [N, I] of the calibration text, weighted by the loss.
    `hints` weigh each token and output. Solvers that are given these hints minimise this error."""
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
    """Return the name of the measure of `error_on`."""
    return "weight" if x is None else "output"


def error_on(x: Tensor | None, weight: Tensor, packed: PackedTensor) -> float:
    """Return |x (W' - W)^T|^2 / |x W^T|^2 for rows x [N, I], or |W' - W|^2 / |W|^2 where there are none."""
    wrong = whole = 0.0
    for rows in row_slices(*weight.shape):
        part = weight[rows].float()
        error = packed.dequantize(rows=rows) - part
        whole += float((part if x is None else x @ part.T).double().square().sum())
        wrong += float((error if x is None else x @ error.T).double().square().sum())
    return wrong / whole if whole else 0.0
