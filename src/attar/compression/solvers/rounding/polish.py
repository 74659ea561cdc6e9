"""Coordinate descent after GPTQ: codes, scales and zero points, one at a time, each at its best.

Statistic: the Hessian that GPTQ used. GPTQ fixes a column once, knowing only those before it; afterwards every column
can be rounded again knowing all others. With E = W' - W the damage tr(E H E^T) is a parabola in any one value of W', so
its lowest point is known, and of the values a column may take (`levels`) the nearest to that is the best:

    w'_k <- nearest(w'_k - (E H)_k / H_kk)

Before the codes of a group, the scale and zero point they share are fitted in the same way (`Levels.refit`). No step
raises the damage, in exact arithmetic: staying is always among the choices. Rows are independent, so a step is one
column of all rows; the products with all other columns are one matrix product for a block of columns, as in GPTQ.
Sweeps over codes alone are QuantEase (Behdin et al. 2023).

H is damped as for GPTQ, so what descends is the damage plus damping * |E|^2 (times the mean diagonal): without it the
descent follows the noise in H. Not done: moves of two codes at once, which would find what no single one improves.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attar.compression.solvers.rounding.levels import Levels

COLUMNS_AT_ONCE = 128  # they share one matrix product with all others: speed, not results


def descend(
    codes: Tensor, levels: Levels, target: Tensor, hessian: Tensor, sweeps: int, damping: float = 0.01
) -> Tensor:
    """Improve codes [I, O] and the fitted numbers of `levels`, both in place, towards `target` [O, I], given H [I, I].
    Returns the remaining error E^T, [I, O]. tr(E H' E^T) never rises, where H' is H with `damping` times its mean
    diagonal added to the diagonal. Columns whose input was always zero are drawn to zero, whatever the target."""
    diagonal = hessian.diagonal()
    ridge = damping * diagonal.mean() + torch.where(diagonal == 0, diagonal.mean(), 0)  # [I]
    error = torch.empty_like(codes, dtype=hessian.dtype)  # [I, O]
    groups = [slice(at, at + levels.width) for at in range(0, len(codes), levels.width)]
    for group in groups:
        wanted = target[:, group].T.where(diagonal[group, None] != 0, 0.0)
        error[group] = levels.values(group, codes[group].to(error.dtype)) - wanted
    for _ in range(sweeps):
        for group in groups:
            pull = _pull(group, error, hessian, ridge)
            own = hessian[group, group].clone()
            own.diagonal().add_(ridge[group])
            change = levels.refit(group, codes[group].to(error.dtype), pull, own)
            if change is not None:
                error[group] += change
            for start in range(group.start, group.stop, COLUMNS_AT_ONCE):
                _round(slice(start, min(start + COLUMNS_AT_ONCE, group.stop)), codes, levels, error, hessian, ridge)
    return error


def _pull(some: slice, error: Tensor, hessian: Tensor, ridge: Tensor) -> Tensor:
    """Return (E H')^T of some columns, [w, O]."""
    return (hessian[some] @ error).add_(ridge[some, None] * error[some])


def _round(some: slice, codes: Tensor, levels: Levels, error: Tensor, hessian: Tensor, ridge: Tensor) -> None:
    """Choose the codes of some columns anew, one column after another."""
    pull, own = _pull(some, error, hessian, ridge), hessian[some, some]
    value = levels.values(some, codes[some].to(error.dtype))  # [w, O]
    moved = torch.zeros_like(pull)  # change of each column's values
    for k, curve in enumerate((own.diagonal() + ridge[some]).tolist()):
        code, found = levels.nearest(some.start + k, value[k] - pull[k].addmv_(moved[:k].T, own[k, :k]) / curve)
        moved[k] = found - value[k]
        codes[some.start + k] = code
    error[some] += moved
