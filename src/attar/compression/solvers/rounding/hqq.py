"""HQQ (Badri and Shaji 2023): scales and zero points of least rounding error by a robust norm.

No calibration. A few large weights pull a group's range apart; the squared error would follow them. HQQ minimises the
sum of |W - W'|^p, p = 0.7, instead, under which a large error costs little more than a middling one, by half-quadratic
splitting: with errors E set apart from the rest, minimise |E|^p + beta/2 |W - W' - E|^2 in turn over E and over the
grid, while beta grows. Everything is in units of the step s, W / s = Q - z + error, so that the result does not depend
on the unit of the weights (in units of the weights, errors of 1e-3 all shrink to zero, and p does nothing):

    E = shrink(x),  shrink(x) = sign(x) max(0, |x| - |x|^(p - 1) / beta),  x = W / s - (Q - z)
    z = mean over the group of Q - (W / s - E)

(Others' code keeps 1 / s and calls it the scale.) That z is a real number, and the authors store it so. A grid of whole
zero points, which is what the formats here have, gains nothing from it: it has the mean rounded, and what is left over
is lost. What such a grid can still take up is the scale, the least squares' own for given codes,

    s <- s sum(c (c + x - E)) / sum(c^2),  c = Q - z,

so both are moved, each rounded to what is stored, and of all iterates every group keeps the one with the least
sum |W - W'|^p: never more than plain rounding's. Float8 grids, whose steps differ, are refused.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attar.errors import UserError
from attar.formats import affine
from attar.formats.affine import by_scale
from attar.formats.packed import PackedTensor
from attar.formats.scheme import Grid, Scheme

POWER = 0.7
BETA, GROWTH = 10.0, 1.01
STEPS = 20


def solve(weight: Tensor, scheme: Scheme, *, steps: int = STEPS) -> PackedTensor:
    """Return the weight [O, I], any float dtype, on the grids found in `steps` steps. Raises ValueError on a NaN or an
    infinity, where the group size does not divide I, and off the integer grids."""
    grid = scheme.grid
    if grid.kind != "int":
        raise UserError(
            "scheme_unsupported", f"hqq moves zero points and scales of integer grids, not of {scheme.name}"
        )
    return affine.fitted(weight, scheme, lambda rows: fit(rows, grid, getattr(torch, scheme.scale_dtype), steps))


def fit(weight: Tensor, grid: Grid, scale_dtype: torch.dtype, steps: int) -> tuple[Tensor, Tensor | None]:
    """Return scale in `scale_dtype` and zero point int8 (None on a symmetric grid) of each group of rows [R, I]: [R, G]
    or [1]."""
    scale, zero = affine.qparams(*affine.min_max(weight, grid), grid, scale_dtype)
    x = by_scale(weight, scale.shape[-1])  # [R, G, I/G]
    over = (0, 2) if grid.granularity == "tensor" else (2,)
    best, beta = (scale, zero), BETA
    least = torch.full(scale.shape, torch.inf, device=scale.device)
    for step in range(steps + 1):
        s = scale.float().unsqueeze(-1)
        z = torch.zeros(()) if zero is None else zero.float().unsqueeze(-1)
        scaled = x / s
        code = (scaled + z).clamp(grid.qmin, grid.qmax).round()
        error = scaled - (code - z)
        cost = (error.abs() * s).pow(POWER).sum(over).reshape(scale.shape)
        better = cost < least
        least = torch.where(better, cost, least)
        best = (
            torch.where(better, scale, best[0]),
            None if zero is None or best[1] is None else torch.where(better, zero, best[1]),
        )
        if step == steps:
            break
        kept = scaled - shrink(error, beta)  # W / s without the errors set apart
        if zero is not None:
            z = (code - kept).mean(over, keepdim=True).round().clamp(grid.qmin, grid.qmax).reshape(*scale.shape, 1)
            zero = z[..., 0].to(torch.int8)
        values = code - z
        factor = (values * kept).sum(over) / values.square().sum(over).clamp_min(1e-12)
        moved = (scale.float() * factor.reshape(scale.shape)).to(scale_dtype)
        scale = torch.where(moved > 0, moved, scale)  # a group of zeros has no slope
        beta *= GROWTH
    return best


def shrink(x: Tensor, beta: float, power: float = POWER) -> Tensor:
    """Return HQQ's step towards the least |e|^p + beta/2 (x - e)^2: sign(x) max(0, |x| - |x|^(p - 1) / beta)."""
    size = x.abs()
    return x.sign() * (size - size.clamp_min(torch.finfo(x.dtype).tiny).pow(power - 1) / beta).clamp_min(0)
