"""SparseGPT (Frantar & Alistarh 2023): prune column by column; later columns compensate for the error.

The paper reads everything from the upper Cholesky factor U of H^-1 = U^T U: weight i of those from i on costs
w_i^2 / U_ii^2 to remove, w being the weights with all updates so far. Here it comes, as GPTQ does, from a factor of H
itself, H = V D V^T with V unit upper triangular (`gptq.Prepared`). U is D^(-1/2) V^-1, so that

    w_i^2 / U_ii^2  =  w_i^2 D_ii

and D_ii is the variance of input i that the inputs after it do not explain. What `gptq` calls the wanted value of a
column, w_k + sum over j < k of (w_j - w'_j) V_jk, is its updated weight once the columns before k are fixed. Where
several columns are compared before any of them is fixed (a block of 128 for s50, the group for n:m), the updated
weights of all of them are w_B + E_F V_FB V_BB^-1: the same product, and a triangular solve. Masks and weights are then
those of the authors' code, which the tests hold it to.

With a scheme, kept weights are rounded to its levels as the sweep reaches them, and later columns compensate for it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attar.compression.recipe.methods import ScaleSearch
from attar.compression.recipe.pattern import Pattern
from attar.compression.solvers.pruning import zeros
from attar.compression.solvers.rounding.gptq import GptqResult, Prepared
from attar.compression.solvers.rounding.levels import Uniform
from attar.formats.scheme import Scheme


def solve(
    weight: Tensor,
    prepared: Prepared,
    pattern: Pattern,
    scheme: Scheme | None = None,
    *,
    block: int = 128,
    scale_search: ScaleSearch = "mse",
) -> GptqResult:
    """Prune a weight [O, I] of any float dtype whose inputs are those of `prepared`, in natural order. `block` is how
    many columns share one threshold where the pattern is not n:m, and the unit of lazy updates everywhere. The result's
    `rtn_error` is that of pruning by magnitude. Raises ValueError where the groups of the pattern, or of the scheme, do
    not divide I."""
    pattern.check(weight.shape[1])
    hessian = prepared.hessian
    original = weight.to(hessian.dtype, copy=True)
    original[:, hessian.diagonal() == 0] = 0
    levels = None if scheme is None else Uniform.of(original, scheme, scale_search)
    found, codes = sweep(original, prepared, pattern, levels, block)
    stored = found.T.to(weight.dtype).contiguous() if levels is None else levels.pack(codes)
    return zeros.result(stored, original, hessian, pattern, scheme, scale_search)


def sweep(
    weight: Tensor, prepared: Prepared, pattern: Pattern | Tensor, levels: Uniform | None = None, block: int = 128
) -> tuple[Tensor, Tensor]:
    """Sweep a weight [O, I] in the Hessian's dtype; return the pruned weight and its codes, each [I, O]. Instead of a
    pattern it takes the mask [O, I] of a finished search. Without levels there are no codes, [0]."""
    assert prepared.order == "natural", "groups of a pattern are neighbours"
    columns = weight.shape[1]
    if isinstance(pattern, Pattern) and pattern.grouped:
        block = max(block // pattern.of, 1) * pattern.of
    pivots = prepared.upper.diagonal().flip(0).square()  # D
    work = weight.T.contiguous()  # [I, O]; rows of finished columns hold w_k - w'_k
    found = torch.empty_like(work)
    codes = torch.empty(0) if levels is None else torch.empty_like(work, dtype=levels.code_dtype)
    for start in range(0, columns, block):
        stop = min(start + block, columns)
        pull = prepared.rows(start, stop)  # [b, stop]: row k, column j holds V_jk
        within = pull[:, start:]
        target = pull[:, :start] @ work[:start]  # [b, O]
        here = work[start:stop]
        if isinstance(pattern, Tensor):
            gone = pattern[:, start:stop].T
        elif pattern.grouped:
            gone = torch.empty(here.shape, dtype=torch.bool, device=work.device)
        else:
            gone = zeros.mask(_scores(here, target, within, pivots[start:stop]), pattern)
        for k in range(stop - start):
            if isinstance(pattern, Pattern) and pattern.grouped and k % pattern.of == 0:
                group = slice(k, k + pattern.of)
                pulled = target[group] + within[group, :k] @ here[:k]
                score = _scores(here[group], pulled, within[group, group], pivots[start:stop][group])
                gone[group] = zeros.mask(score.T, pattern).T
            value = (target[k] + here[k]).addmv_(here[:k].T, within[k, :k]).masked_fill_(gone[k], 0)
            if levels is not None:
                code, value = levels.nearest(start + k, value)
                codes[start + k] = code
            found[start + k] = value
            here[k] -= value
    return found, codes


def _scores(here: Tensor, target: Tensor, within: Tensor, pivots: Tensor) -> Tensor:
    """Return the cost of removing each weight of some columns, [b, O], all columns before them being fixed."""
    ahead: Tensor = torch.linalg.solve_triangular(within, target, upper=False, unitriangular=True)
    return (here + ahead).square() * pivots[:, None]
