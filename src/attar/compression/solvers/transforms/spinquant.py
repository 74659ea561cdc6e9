"""SpinQuant (Liu et al. 2024): learn, by descent, a rotation that leaves the fewest outliers to round.

SpinQuant descends on the loss of the network with rounded activations, which takes the whole network in memory and a
backward pass a step. What a rotation R changes in that loss is how coarse the scales are, and this is known without the
network: a row r of activations that shares one scale is rounded with steps of max|r R| / 2^(b-1), and so with a squared
error in proportion to max|r R|^2, whichever way that points. Hence here

    L(R) = mean over rows of c_r max_j (r R)_j^2,

with c_r the cost of an error of the row. The number of bits drops out, and with it the network. Where R turns each of m
blocks of a row, as it does the heads whose mixed values o reads, the maximum is over all of them.

R stays orthogonal: a step goes along the skew part A of the gradient, R <- (1 + t/2 A)^-1 (1 - t/2 A) R (Cayley; Li,
Fuxin and Todorovic 2020), with momentum. Rows come in batches, drawn from counters of the seed.

Legend: N rows of m blocks of I columns.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

MOMENTUM = 0.9
LARGEST_TURN = 0.15  # radians, of the plane that a step turns most: how far the subgradient of a maximum can be trusted


@dataclass(frozen=True)
class Learned:
    """The rotation [I, I], float64, and the loss of all rows by the initial rotation and by it."""

    matrix: Tensor
    before: float
    after: float


def loss(rows: Tensor, costs: Tensor, matrix: Tensor) -> Tensor:
    """Return the mean over rows [N, m I] of cost [N] times the squared largest entry of blocks times matrix [I, I]."""
    return (costs * _turned(rows, matrix).abs().amax(1).square()).mean()


def solve(rows: Tensor, costs: Tensor, start: Tensor, *, steps: int, batch: int, seed: int) -> Learned:
    """Descend from the orthogonal matrix `start` [I, I] on rows [N, m I] with costs [N]. Returns `start` itself where
    no iterate is better."""
    rows, costs = rows.float(), (costs / costs.mean()).float()
    matrix, size = start.double(), start.shape[0]
    eye = torch.eye(size, dtype=torch.float64)
    before = float(loss(rows, costs, start.float()))
    momentum = torch.zeros_like(matrix)
    random = np.random.Philox(key=np.array([seed, 0], dtype=np.uint64), counter=np.array([0, 0, 4, 0]))
    for step in range(steps):
        chosen = torch.from_numpy((random.random_raw(min(batch, len(rows))) % np.uint64(len(rows))).astype(np.int64))
        momentum = MOMENTUM * momentum + _gradient(rows[chosen], costs[chosen], matrix.float()).double()
        skew = momentum @ matrix.T
        skew = skew - skew.T
        momentum = skew @ matrix / 2  # its part tangent to the orthogonal matrices
        skew *= LARGEST_TURN * (1 - step / steps) / _spectral_norm(skew)
        matrix = torch.linalg.solve(eye + skew / 2, (eye - skew / 2) @ matrix)
    # Project to the nearest orthogonal matrix, which removes accumulated rounding errors.
    u, _, vt = torch.linalg.svd(matrix)
    matrix = u @ vt
    after = float(loss(rows, costs, matrix.float()))
    return Learned(matrix, before, after) if after < before else Learned(start.double(), before, before)


def _gradient(rows: Tensor, costs: Tensor, matrix: Tensor) -> Tensor:
    """Return the gradient of `loss` by the matrix: for each row, only the column where it is largest counts."""
    turned, size = _turned(rows, matrix), len(matrix)
    where = turned.abs().argmax(1, keepdim=True)
    slopes = torch.zeros_like(turned).scatter_(1, where, 2 * turned.gather(1, where) * costs[:, None] / len(rows))
    return rows.view(-1, size).T @ slopes.view(-1, size)


def _turned(rows: Tensor, matrix: Tensor) -> Tensor:
    return (rows.view(-1, len(matrix)) @ matrix).view(rows.shape)


def _spectral_norm(skew: Tensor) -> float:
    """Return the approximate spectral norm, by a few rounds of the power method, at least the root mean square."""
    x = torch.ones(len(skew), 1, dtype=skew.dtype) / math.sqrt(len(skew))
    for _ in range(8):
        x = skew.T @ (skew @ x)
        x = x / x.norm().clamp(min=1e-300)
    return max(float((skew @ x).norm()), float(skew.norm()) / math.sqrt(len(skew)), 1e-300)
