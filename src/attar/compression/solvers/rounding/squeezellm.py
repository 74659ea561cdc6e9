"""SqueezeLLM (Kim et al. 2023, arXiv 2306.07629): the table of each row goes where weights matter to the loss.

Statistic: the sensitivity of the loss to each weight, the diagonal of the Fisher matrix, F = E[(dL/dw)^2]
(`Sensitivity`). The gradient of a weight is g_j x_i summed over tokens; with labels sampled from the model itself,
gradients of different positions' losses are uncorrelated, and what is left of the square of the sum is near the sum of
squares,

    F_ji = sum over tokens of g_j^2 x_i^2,

of which a text has as many samples as tokens; the authors square the sum over a sequence, and have as many as
sequences. Solve: for every row the 2^b numbers that minimise sum F (w - value)^2, and outliers stored apart, the most
sensitive and the largest (`codecs.lookup`, `codecs.kmeans`: the best cells by dynamic programming, then Lloyd's).

Nothing compensates for anything: rows, columns and layers are rounded each on its own, in the metric of the original
model. `gptq-lut4` does the opposite, tables by the inputs alone and then columns that make up for one another.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attar.formats.codecs import lookup
from attar.formats.packed import PackedTensor
from attar.formats.scheme import Scheme


class Sensitivity:
    """Sensitivity of the loss to each entry of a linear [O, I]: the sum of g^2 x^2 over all tokens seen so far."""

    def __init__(self, shape: tuple[int, int]) -> None:
        self.total = torch.zeros(shape)

    def add(self, x: Tensor, g: Tensor) -> None:
        """Add rows x [N, I] and the gradients g [N, O] at their outputs."""
        self.total += g.float().square().T @ x.float().square()


def solve(weight: Tensor, scheme: Scheme, sensitivity: Tensor) -> PackedTensor:
    """Return the weight [O, I], any float dtype, in tables for these sensitivities [O, I], in any unit. Raises
    ValueError as `lookup.quantize`."""
    return lookup.quantize(weight.float(), scheme, sensitivity)


def damage(weight: Tensor, packed: PackedTensor, sensitivity: Tensor) -> float:
    """Return sum F (W' - W)^2 / sum F W^2."""
    wide = weight.double()
    wrong = (packed.dequantize().double() - wide).square()
    whole = (sensitivity * wide.square()).sum()
    return float((sensitivity * wrong).sum() / whole) if whole > 0 else 0.0
