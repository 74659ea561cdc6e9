"""Orthogonal matrices to rotate a model by, drawn from a seed.

Usually signs and a Hadamard matrix, which spreads whatever stands out in one coordinate evenly over all of them and is
applied in n log n; without such a matrix of the size, or on request, one drawn evenly from all orthogonal ones. Where
the mean of a row must stay (LayerNorm), H^T M H: since the first row of H is ones, signs and an order M that leave the
first coordinate alone leave the vector of ones where it is.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from attar.errors import UserError, code_of
from attar.kernels import hadamard


@dataclass(eq=False)
class Rotation:
    """An orthogonal matrix R [n, n] of float64: D H / sqrt(n) of signs D and a Hadamard matrix H, one that leaves the
    vector of ones alone, or any `matrix`."""

    size: int
    signs: Tensor  # [n], float64
    order: Tensor | None = None  # [n]: R is H^T M H / n, M these signs of the coordinates in this order
    matrix: Tensor | None = None  # [n, n]

    def apply(self, x: Tensor) -> Tensor:
        """Return rows x [..., m n] times R in each of their m blocks of columns."""
        blocks: Tensor = x.unflatten(-1, (-1, self.size))
        if self.matrix is not None:
            turned = blocks @ self.matrix
        elif self.order is not None:
            inner = hadamard.rotate(blocks, self.size, transposed=True)[..., self.order] * self.signs
            turned = hadamard.rotate(inner, self.size)
        else:
            turned = hadamard.rotate(blocks * self.signs, self.size)
        return turned.flatten(-2)


def draw(kind: str, size: int, seed: int, number: int, keeps_mean: bool = False) -> Rotation:
    """Draw rotation `number` of a seed. Raises ValueError, naming the size, where there is no Hadamard matrix of it."""
    raw = np.random.Philox(key=np.array([seed, number % 2**64], dtype=np.uint64), counter=np.array([0, 0, 3, 0]))
    signs = torch.from_numpy((raw.random_raw(size) >> np.uint64(63)).astype(np.float64)) * 2 - 1
    if kind == "orthogonal":
        return Rotation(size, signs, matrix=_orthogonal(size, raw))
    try:
        hadamard.factors(size)
    except ValueError as error:
        raise UserError(code_of(error), f"{error}: `rotation: orthogonal` in a recipe file does without") from None
    if not keeps_mean:
        return Rotation(size, signs)
    signs[0] = 1
    order = torch.from_numpy(raw.random_raw(size).argsort(kind="stable"))
    return Rotation(size, signs, order=torch.cat([torch.zeros(1, dtype=order.dtype), order[order != 0]]))


def _orthogonal(size: int, raw: np.random.Philox) -> Tensor:
    """Return Q of the QR decomposition of Gaussian numbers, with column signs that make R's diagonal positive."""
    words = torch.from_numpy((raw.random_raw(size * size) >> np.uint64(11)).astype(np.float64)) * 2.0**-53
    gaussian = torch.erfinv((2 * words - 1).clamp(-1 + 2.0**-52, 1 - 2.0**-52)).view(size, size)
    q, r = torch.linalg.qr(gaussian)
    found: Tensor = q * r.diagonal().sign()
    return found
