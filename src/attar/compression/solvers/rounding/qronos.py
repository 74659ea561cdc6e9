"""Target correction: round the weight that fits the compressed model's inputs best, not the one trained on others.

Statistic: `Drift`, E[(x - x~) x~^T], where x is a linear's input in the original model and x~ its input behind
compressed layers. Solve: the weight that brings W* x~ closest to W x, drawn towards W by the damping l of the Hessian,

    W* = argmin E|W x - W* x~|^2 + l |W* - W|^2 = W + W D (H + l)^-1,      H = E[x~ x~^T]

It is then rounded as any other. Qronos (Zhang et al. 2025) rounds its first column against the original inputs, and
proves that all others then follow as in GPTQ; aiming at W* is equivalent. GPTAQ corrects column by column instead. It
only helps as far as earlier errors can be told from x~.

A linear whose outputs are added to the residual stream can also correct the error there, r - r~: then W* also has R (H
+ l)^-1 times the share asked for, R = E[(r - r~) x~^T].
"""

from __future__ import annotations

import torch
from torch import Tensor

from attar.compression.solvers.rounding.gptq import Prepared


class Drift:
    """E[(x - x~) x~^T] of a linear's I inputs, the running mean over all pairs of rows seen: float32 [I, I]. `residual`
    [O, I] is E[(r - r~) x~^T] where the linear has so many rows that are added to a stream; else None."""

    def __init__(self, columns: int, rows: int = 0) -> None:
        self.mean = torch.zeros((columns, columns))
        self.residual = torch.zeros((rows, columns)) if rows else None
        self.tokens = 0.0

    def add(self, original: Tensor, x: Tensor, weights: Tensor | None = None, residual: Tensor | None = None) -> None:
        """Add rows x~ [N, I] with the same tokens' rows in the original model, each counted by its weight [N].
        `residual` [N, O] is r - r~."""
        if self.mean.device != x.device:
            assert not self.tokens, "rows of two devices"
            self.mean = torch.zeros_like(self.mean, device=x.device)
            self.residual = None if self.residual is None else torch.zeros_like(self.residual, device=x.device)
        gone = original - x
        if weights is not None:
            weights = weights.to(x.device)
            gone *= weights[:, None]
            residual = None if residual is None else residual * weights[:, None]
        count = float(len(x)) if weights is None else float(weights.sum())
        if count:
            total = self.tokens + count
            self.mean.addmm_(gone.T, x, beta=self.tokens / total, alpha=1 / total)
            if self.residual is not None:
                assert residual is not None
                self.residual.addmm_(residual.T, x, beta=self.tokens / total, alpha=1 / total)
            self.tokens = total


def corrected(
    weight: Tensor, drift: Drift, prepared: Prepared, share: float = 0.0, rows: slice = slice(None)
) -> Tensor:
    """Return W* [O, I], float32, for the `rows` of a linear given as a weight [O, I] of any float dtype. `share` is the
    fraction of the residual stream's error that it corrects."""
    moved = weight.float() @ drift.mean  # W D
    if drift.residual is not None:
        moved.add_(drift.residual[rows], alpha=share)
    return prepared.solve(moved.T).T.add_(weight)
