"""AWQ (Lin et al. 2023): scale up the weight columns whose inputs are large, so that rounding hurts them less.

Statistic: the mean |x| of every input channel (`means`; texts that say "absmax" describe SmoothQuant). Solve:

    s = (mean|x|)^alpha,  alpha in 0, 1/19, .. 1,  divided by sqrt(max s * min s)

A group of linears that share an input (q/k/v, gate/up) shares s; alpha is the one that minimises the mean squared error
of the block's output with W replaced by Q(W diag(s)) diag(s)^-1 and x left alone, which equals the folded form
(diag(s)^-1 on x, never on the output side). alpha = 0 is plain rounding and in the grid, so on the search tokens the
searched objective is never above RTN's. The grid includes 1, which the authors' i/20 never reaches.

This module never runs a block: the caller knows it and passes `loss`. The scales then fold into a norm or the rows of
the linear before (`fold`). Second, `clip` shrinks the range of each (row, group) where that lowers the error of its
product with the inputs; the authors leave out q and k, whose products are multiplied again.

Not done: the w_mean term that others add to s ("duo scaling").
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attar.compression.solvers.transforms import fold
from attar.errors import UserError
from attar.formats.packed import codec
from attar.formats.packing import row_slices
from attar.formats.scheme import Scheme
from attar.formats.weight_formats import Progressive
from attar.kernels.operands import Linear, Norm

SMALLEST = 1e-4  # smallest scale before normalisation, for channels silent in calibration
CLIP_STEPS = 10  # ratios 1, 0.95 .. 0.55
CLIP_STEP = 0.05
CLIP_TOKENS = 512
CHUNK_ELEMENTS = 1 << 20  # weights clipped at a time


@dataclass(frozen=True, eq=False)
class Search:
    """Result of `search_scales`: the scales [I], their alpha, and the loss of every alpha tried, in order from 0."""

    scales: Tensor
    alpha: float
    loss: float
    losses: tuple[float, ...]


def scales_from(stat: Tensor, alpha: float) -> Tensor:
    """Return scales [I], float32, from mean|x| [I]: the geometric mean of the largest and the smallest is 1."""
    powers = stat.float().pow(alpha).clamp(min=SMALLEST)
    return powers / (powers.max() * powers.min()).sqrt()


def scaled_rounding(weight: Tensor, scales: Tensor, scheme: Scheme) -> Tensor:
    """Return Q(W diag(s)) diag(s)^-1 for a weight [O, I]: the effective weight on the unscaled input."""
    found = torch.empty_like(weight)
    rows, columns = weight.shape
    whole = not scheme.weight.by_row  # if true, all rows share a scale
    for part in [slice(0, rows)] if whole else row_slices(rows, columns):
        found[part] = _rounded((weight[part].float() * scales).to(weight.dtype), scheme) / scales
    return found


def search_scales(
    weights: Sequence[Tensor],
    schemes: Sequence[Scheme | None],
    stat: Tensor,
    loss: Callable[[list[Tensor]], float],
    *,
    points: int = 20,
) -> Search:
    """Return the best scales for a group of linears that read one input. `weights` [O, I] and their `schemes` (None:
    stays dense) are those of the group; `stat` [I] is mean|x|. `loss` gets one dense tensor for each weight, in order,
    and returns the mean squared error of the block's output (downstream of the group) with those in place. The first of
    equal losses wins. Raises ValueError where a loss is not finite."""
    assert points >= 2, "the grid holds 0 and 1"
    tried: list[float] = []
    for i in range(points):
        s = scales_from(stat, i / (points - 1))
        pairs = zip(weights, schemes, strict=True)
        # No name for the list: the candidates are gone before the next ones are made.
        tried.append(loss([w if q is None else scaled_rounding(w, s, q) for w, q in pairs]))
        if not tried[-1] < float("inf"):
            raise UserError(
                "not_finite",
                f"the block's output error is {tried[-1]} at alpha {i / (points - 1):.3f}: its inputs overflow",
            )
    best = min(range(points), key=tried.__getitem__)
    alpha = best / (points - 1)
    return Search(scales_from(stat, alpha), alpha, tried[best], tuple(tried))


def apply(before: Norm | Linear, linears: Sequence[Linear], scales: Tensor) -> Tensor:
    """Fold scales [I] into the producer of the linears' input and into their columns; return the scales [I] as stored.
    `before` is the norm before q/k/v and gate/up (then `linears` must be all that read it), `up` before `down`, and `v`
    before `o` where `foldable` is true."""
    taken = fold.into_norm(before, scales) if isinstance(before, Norm) else fold.into_rows(before, scales)
    fold.into_columns(linears, taken)
    return taken


def foldable(before: Linear, after: Linear) -> bool:
    """Return whether each input column of `after` is one output row of `before`: false for v and o under grouped
    queries."""
    return before.shape[0] == after.shape[1]


def clip(weight: Tensor, x: Tensor, scheme: Scheme) -> Tensor:
    """Return the weight [O, I] with the values of each (row, group) limited to its best range, in the weight's dtype.
    Both ends of each range are shrunk to 1, 0.95 .. 0.55 of their size, and the ratio is kept that minimises the
    squared error of the group's product with the inputs `x` [N, I], of which at most 512 rows, evenly spaced, are used.
    Errors of different groups may add up in a row's output, so a row that becomes worse as a whole is left unchanged:
    on those tokens no row is ever worse than unclipped. Min-max scales of the result are those of the shrunk ranges."""
    rows, columns = weight.shape
    x = x[:: -(-len(x) // CLIP_TOKENS)].float()  # [N, I]
    groups = (scheme.weight if isinstance(scheme.weight, Progressive) else scheme.grid).groups(columns)
    # |X_g d| = |R_g d| where X_g = Q R_g: where groups are smaller than 512, fewer rows to multiply by.
    factors = torch.stack([torch.linalg.qr(part, mode="r").R for part in x.chunk(groups, 1)])  # [G, K, g]
    # A scale shared by all rows cannot be judged by some of them.
    step = rows if not scheme.weight.by_row else max(1, CHUNK_ELEMENTS // columns)
    clipped = torch.empty_like(weight)
    for part, into in zip(weight.split(step), clipped.split(step), strict=True):
        into.copy_(_clip_rows(part, x, factors, scheme))
    return clipped


def _clip_rows(weight: Tensor, x: Tensor, factors: Tensor, scheme: Scheme) -> Tensor:
    shared = not scheme.weight.by_row
    parts = weight.unflatten(1, (len(factors), -1)).transpose(0, 1)  # [G, R, g]
    over = (1, 2) if shared else 2
    low, high = parts.amin(over, keepdim=True), parts.amax(over, keepdim=True)

    def error(candidate: Tensor) -> Tensor:
        """Return the squared error of rounding [G, R, g]: [G, R, 1], or [G, 1, 1] where rows share a scale."""
        rounded = _rounded(candidate.transpose(0, 1).flatten(1), scheme).unflatten(1, (len(factors), -1))
        errors: Tensor = (rounded.transpose(0, 1) - parts.float()) @ factors.mT
        return errors.square().sum(over, keepdim=True)

    best, least = parts, error(parts)
    for i in range(1, CLIP_STEPS):
        ratio = 1 - i * CLIP_STEP
        candidate = parts.clamp(low * ratio, high * ratio)
        found = error(candidate)
        best, least = torch.where(found < least, candidate, best), torch.minimum(found, least)

    clipped = best.transpose(0, 1).flatten(1)
    before, after = ((x @ (_rounded(w, scheme) - weight.float()).T).square().sum(0) for w in (weight, clipped))  # [R]
    worse = (after.sum() > before.sum()).expand(len(weight)) if shared else after > before
    return torch.where(worse[:, None], weight, clipped)


def _rounded(weight: Tensor, scheme: Scheme) -> Tensor:
    return codec(scheme.weight.kind).quantize(weight, scheme).dequantize(torch.float32)
