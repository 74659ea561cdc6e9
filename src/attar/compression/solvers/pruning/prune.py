"""Pruning as one problem: all positions of a linear's zeros together, then the best weights for them.

SparseGPT decides column by column and never looks back; what it leaves behind is not even the best weight matrix with
its own zeros. Both can be had. With the Hessian H of the inputs, the loss of W' is tr((W - W') H (W - W')^T).

1. *Places.* The alternating direction method of multipliers (Boyd et al. 2011; for this problem, ALPS: Meng et al.
   2024) splits W' in two, X that fits and Z that has the zeros, and makes them agree under a penalty rho |X - Z + U|^2:

       X = (W H + rho (Z - U)) (H + rho I)^-1,   Z = the pattern's largest of X + U, else zero,   U = U + X - Z

   H is scaled to a diagonal of ones first (X column by column by its root), so that "largest" means what Wanda means by
   it. rho grows geometrically from `FIRST`, where X is nearly W, to `LAST`, where nothing changes place any more; the
   slower, the better the places: 130 steps gain another percent on 60. One eigendecomposition of H serves every rho.
2. *Weights.* Given the places every row is a least-squares problem of its own, H_SS w' = H_S W^T, solved for all rows
   at once by conjugate gradients on products with the whole of H, zeros masked out: `DESCENTS` of them, since ADMM ends
   close by. The loss never rises.

With a scheme the weights are then rounded: column after column as GPTQ does, with the places given and towards the
weights just found. Those are optimal, hence what rounding costs is exactly tr((X - Q) H (X - Q)^T) on top. The sweep
believes that later columns may all move, though some are zero, so codes are then improved one by one (`_descend`).

H is damped in all of it, as for GPTQ. What this costs is about 4 O I^2 multiplications a step and 9 I^3 once, where
GPTQ takes O I^2 in all. Tried and left out, as they gain less than 0.2 % after ADMM, n:m groups enumerated one by one
at their exact optimum given all others, and exchanges of single places within a row, taken back where a row got worse.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attar.compression.recipe.methods import ScaleSearch
from attar.compression.recipe.pattern import Pattern
from attar.compression.solvers.pruning import sparsegpt, zeros
from attar.compression.solvers.rounding import gptq
from attar.compression.solvers.rounding.gptq import GptqResult, Hessian
from attar.compression.solvers.rounding.levels import Uniform
from attar.formats.packed import PackedTensor
from attar.formats.scheme import Scheme

FIRST, LAST = 0.02, 5.0  # rho, beside a Hessian with ones on its diagonal
DESCENTS = 20
ROUNDS = 2  # rounds of improving codes
COLUMNS_AT_ONCE = 128  # columns of one product with all columns: speed, not results


@dataclass(frozen=True, eq=False)
class Prepared(gptq.Prepared):
    """Factor of H for `solve` with: H damped, the roots of its diagonal, and, of H divided by them, the eigenvalues
    and, in columns, eigenvectors."""

    damped: Tensor  # [I, I]
    root: Tensor  # [I]
    strengths: Tensor  # [I]
    vectors: Tensor  # [I, I]


def prepare(hessian: Hessian, damping: float = 0.01) -> Prepared:
    """Damp and factor a Hessian. Raises ValueError as `gptq.prepare` does."""
    known = gptq.prepare(hessian, damping, "natural")
    mean = known.hessian
    level = mean.diagonal().mean()
    damped = mean.clone()
    # An input that was always zero couples to nothing, and its weights are zero: any positive number will do.
    damped.diagonal().add_(damping * level + torch.where(mean.diagonal() == 0, level, 0))
    root = damped.diagonal().sqrt()
    strengths, vectors = torch.linalg.eigh(damped / root / root[:, None])
    return Prepared(mean, known.sweep, known.upper, known.order, damped, root, strengths, vectors)


def solve(
    weight: Tensor,
    prepared: Prepared,
    pattern: Pattern,
    scheme: Scheme | None = None,
    *,
    steps: int = 60,
    scale_search: ScaleSearch = "mse",
) -> GptqResult:
    """Prune a weight [O, I] of any float dtype whose inputs are those of `prepared`. The result's `rtn_error` is that
    of pruning by magnitude. Raises ValueError where the groups of the pattern, or of the scheme, do not divide I."""
    pattern.check(weight.shape[1])
    original = weight.to(prepared.hessian.dtype, copy=True)
    original[:, prepared.hessian.diagonal() == 0] = 0
    start = places(original, prepared, pattern, steps)
    found = refit(start, original, prepared.damped, start == 0)
    stored = found.to(weight.dtype) if scheme is None else _rounded(found, prepared, scheme, scale_search)
    return zeros.result(stored, original, prepared.hessian, pattern, scheme, scale_search)


def places(weight: Tensor, prepared: Prepared, pattern: Pattern, steps: int) -> Tensor:
    """Return a weight [O, I] with the pattern's zeros at good positions, by `steps` of the alternating directions. The
    other weights are close to the best for these positions."""
    strengths, vectors = prepared.strengths, prepared.vectors
    whole = weight * prepared.root
    pull = (whole @ vectors) * strengths  # W H, in the eigenvectors' basis
    sparse, dual = whole, torch.zeros_like(whole)
    for step in range(steps):
        rho = FIRST * (LAST / FIRST) ** (step / max(steps - 1, 1))
        dual += ((pull + rho * ((sparse - dual) @ vectors)) / (strengths + rho)) @ vectors.T
        sparse = dual.masked_fill(zeros.mask(dual.abs(), pattern), 0)
        dual -= sparse
    return sparse / prepared.root


def refit(start: Tensor, weight: Tensor, hessian: Tensor, gone: Tensor) -> Tensor:
    """Return the best weights [O, I] that are zero where `gone` is, from a `start` that has these zeros too."""
    found = start.clone()
    scale = 1 / hessian.diagonal()
    residual = ((weight - found) @ hessian).masked_fill_(gone, 0)
    direction = residual * scale
    strength = (residual * direction).sum(1, keepdim=True)
    for _ in range(DESCENTS):
        turned = (direction @ hessian).masked_fill_(gone, 0)
        length = strength / (direction * turned).sum(1, keepdim=True)
        length = length.nan_to_num(0.0, 0.0, 0.0)  # a row that has converged already
        found += length * direction
        residual -= length * turned
        before, ahead = strength, residual * scale
        strength = (residual * ahead).sum(1, keepdim=True)
        direction = ahead + (strength / before).nan_to_num(0.0, 0.0, 0.0) * direction
    return found


def _rounded(target: Tensor, prepared: Prepared, scheme: Scheme, search: ScaleSearch) -> PackedTensor:
    """Return the levels [O, I] near a pruned target, by their cost; its zeros stay."""
    gone = (target == 0).T
    levels = Uniform.of(target, scheme, search)
    found, codes = sparsegpt.sweep(target, prepared, gone.T, levels)
    for _ in range(ROUNDS):
        _descend(found, codes, target, prepared.damped, levels, gone)
    return levels.pack(codes)


def _descend(found: Tensor, codes: Tensor, target: Tensor, hessian: Tensor, levels: Uniform, gone: Tensor) -> None:
    """Move every weight that is not zeroed to the level nearest to its best value given all others. `found`, `codes`
    and `gone` are [I, O]; the first two change."""
    columns = len(found)
    for start in range(0, columns, COLUMNS_AT_ONCE):
        stop = min(start + COLUMNS_AT_ONCE, columns)
        own = hessian[start:stop, start:stop]
        pull = hessian[start:stop] @ (target.T - found)  # [b, O]
        moved = torch.zeros_like(pull)
        for k, column in enumerate(range(start, stop)):
            wanted = found[column] + (pull[k] - own[k, :k] @ moved[:k]) / own[k, k]
            code, value = levels.nearest(column, wanted.masked_fill_(gone[column], 0))
            moved[k] = value - found[column]
            codes[column], found[column] = code, value
