"""Pruning: which weights become zero.

Four methods choose, each better and more expensive than the one before:

* magnitude: the smallest |w| of the matrix. Needs no data;
* Wanda (Sun et al. 2023): the smallest |w_ij| |x_j|_2 of each row, by the norm of every input over the calibration
  tokens (`means`). What stays is left as it is;
* SparseGPT (Frantar & Alistarh 2023): the weights of least output error, column by column; later
  columns compensate for it (`sparsegpt`);
* `prune`: attar's own: all positions at once, and then the best weights for them.

This module has their common parts, and the first two. A score [O, I] and a `Pattern` give the mask: n:m within every m
consecutive inputs, others over the whole matrix or within each row. Counts are exact, and equal scores go by place, so
that the same weights always give the same mask. With a scheme, what is kept is rounded to its grid, which holds zero
exactly whether it is symmetric or not.

A zero gains speed only where a kernel skips it, and no kernel here does. Pruned weights are stored dense, with zeros in
them, unless the scheme is `sparse24`: then two of every four are stored, and where they were. Solvers know nothing of
that: `solved_as` says in which scheme they are to solve, `stored_as` turns what they found into the one wanted.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from attar.compression.recipe.methods import ScaleSearch
from attar.compression.recipe.pattern import Pattern
from attar.compression.solvers.rounding import rtn
from attar.compression.solvers.rounding.gptq import GptqResult
from attar.formats import affine
from attar.formats.codecs import sparse24
from attar.formats.packed import PackedTensor
from attar.formats.scheme import Grid, Scheme
from attar.formats.weight_formats import Sparse24

ROWS_AT_ONCE = 512

Unit = Literal["row", "matrix"]


def mask(score: Tensor, pattern: Pattern, unit: Unit = "matrix") -> Tensor:
    """Return the mask, bool [O, I], of the weights to zero: the smallest of a finite score [O, I]. n:m patterns compare
    within their groups whatever the unit. Raises ValueError where groups do not divide I."""
    rows, columns = score.shape
    pattern.check(columns)
    if pattern.grouped:
        return _lowest(score.reshape(rows, columns // pattern.of, pattern.of), pattern.zeros).reshape(rows, columns)
    if unit == "row":
        return _lowest(score, columns * pattern.zeros // pattern.of)
    return _lowest_of_all(score.reshape(-1), score.numel() * pattern.zeros // pattern.of).view(rows, columns)


def _lowest(score: Tensor, count: int) -> Tensor:
    """Mark the `count` smallest of each last dimension."""
    chosen = score.argsort(dim=-1, stable=True)[..., :count]
    return torch.zeros(score.shape, dtype=torch.bool, device=score.device).scatter_(-1, chosen, True)


def _lowest_of_all(score: Tensor, count: int) -> Tensor:
    """Mark the `count` smallest of a vector, without the indices of a sort, which would be larger than a matrix of
    weights."""
    if count == 0:
        return torch.zeros(len(score), dtype=torch.bool, device=score.device)
    edge = score.kthvalue(count).values
    chosen = score < edge
    chosen[(score == edge).nonzero()[: count - int(chosen.sum()), 0]] = True
    return chosen


def rounded(weight: Tensor, gone: Tensor, scheme: Scheme | None, search: ScaleSearch) -> Tensor | PackedTensor:
    """Return a weight [O, I] of any float dtype with zeros where `gone` says, and the rest rounded to nearest."""
    sparse = weight.masked_fill(gone, 0)
    return sparse if scheme is None else rtn.solve(sparse, scheme, scale_search=search)


def by_magnitude(weight: Tensor, pattern: Pattern, scheme: Scheme | None, search: ScaleSearch) -> GptqResult:
    """Zero the smallest weights of a matrix [O, I]. Errors are the weight's own, as if inputs were alike."""
    return by_wanda(weight, torch.ones(weight.shape[1]), pattern, scheme, search, "matrix")


def by_wanda(
    weight: Tensor, squares: Tensor, pattern: Pattern, scheme: Scheme | None, search: ScaleSearch, unit: Unit = "row"
) -> GptqResult:
    """Zero the smallest |w| sqrt(mean x^2) of each row of a matrix [O, I], given the mean squares [I]. Errors are those
    of outputs with uncorrelated inputs: Wanda knows only the Hessian's diagonal. The result's `rtn_error` is that of
    pruning by magnitude."""
    wide = weight.float()
    found = rounded(weight, mask(wide.abs() * squares.sqrt(), pattern, unit), scheme, search)
    plain = rounded(weight, mask(wide.abs(), pattern), scheme, search)
    parts = (values(found) - wide, values(plain) - wide, wide)
    cost, plain_cost, energy = (float((each.square() * squares).sum(dtype=torch.float64)) for each in parts)
    return GptqResult(found, cost, plain_cost, energy)


def result(
    found: Tensor | PackedTensor,
    weight: Tensor,
    hessian: Tensor,
    pattern: Pattern,
    scheme: Scheme | None,
    search: ScaleSearch,
) -> GptqResult:
    """Return a solver's weight [O, I] as a result, with its cost on these inputs and that of pruning by magnitude."""
    plain = rounded(weight, mask(weight.abs(), pattern), scheme, search)
    cost, plain_cost = (damage(weight - values(each).to(weight.dtype), hessian) for each in (found, plain))
    return GptqResult(found, cost, plain_cost, damage(weight, hessian))


def solved_as(scheme: Scheme | None) -> Scheme | None:
    """Return the scheme to solve in for a weight that is to be stored in `scheme`. In a scheme of values and positions,
    a group of kept values spans twice as many columns."""
    if scheme is None or not isinstance(scheme.weight, Sparse24):
        return scheme
    grid = scheme.weight.values
    if grid is None:
        return None
    assert isinstance(grid, Grid)
    wide = replace(grid, group_size=None if grid.group_size is None else 2 * grid.group_size)
    return Scheme(wide, scale_dtype=scheme.scale_dtype)


def stored_as(found: Tensor | PackedTensor, scheme: Scheme | None) -> Tensor | PackedTensor:
    """Return a weight [O, I] that was solved for in `solved_as(scheme)` in its stored form: the same numbers."""
    if scheme is None or not isinstance(scheme.weight, Sparse24):
        return found
    if isinstance(found, Tensor):
        return sparse24.quantize(found, scheme)
    grid, (rows, columns) = scheme.weight.values, found.shape
    assert isinstance(grid, Grid)
    kept, places = sparse24.pack_24(found.dequantize())
    _, scale, zero = affine.decode(found)
    codes = affine.round_to_grid(kept, scale.float(), zero, grid)  # exact, for values on the grid
    half = affine.encode(codes, scale, zero, Scheme(grid, scale_dtype=scheme.scale_dtype), (rows, columns // 2))
    return PackedTensor(scheme, found.shape, {**half.parts, "places": places})


def values(weight: Tensor | PackedTensor) -> Tensor:
    """Return the weight [O, I] in float32 or wider, from any stored form."""
    if isinstance(weight, PackedTensor):
        return weight.dequantize()
    return weight if weight.dtype == torch.float64 else weight.float()


def damage(delta: Tensor, hessian: Tensor) -> float:
    """Return tr(delta H delta^T) of a difference [O, I], summed in float64."""
    return sum(float(((part @ hessian) * part).sum(dtype=torch.float64)) for part in delta.split(ROWS_AT_ONCE))
