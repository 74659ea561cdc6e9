"""GPTQ (Frantar et al. 2022): round a weight column by column; later columns compensate for the error.

Statistic: H = E[x x^T], the mean over calibration tokens of a linear's inputs (`Hessian`). Replacing W by W' costs
tr((W - W') H (W - W')^T), the mean squared error of the outputs. Solve: once column k is fixed, the best change of the
columns after it is known in closed form from the inverse of what remains of H (OBS; GPTQ equations 2 and 3).

The original keeps the updated weights and reads the update from the Cholesky factor of H^-1. Here the same numbers come
from a factor of H itself: with H = V D V^T, V unit upper triangular, column k is rounded at

    w_k + sum over j < k of (w_j - w'_j) V_jk

which is GPTQ exactly (Chee et al. 2023, theorem 6 of QuIP). One Cholesky factorisation instead of two and an inversion
means a third of the work, better conditioning, and a peak of two I x I matrices, H and the factor. What earlier columns
contribute to a block of columns is one matrix product (the "lazy batch update" seen from the other side); within the
block only [block, O] is touched. Arithmetic is done in the dtype of H: float32, or float64 to compare with an oracle.

Where peers go wrong, or differ:

* damping is a fraction of the *mean diagonal* of H, not an absolute number;
* scales belong to a (row, input group), and are set before the sweep from the original weights (static groups): columns
  may then go by falling H_kk (activation order) and what is stored needs no permutation;
* in natural order they may instead be set when the sweep reaches the group (`static_groups` false), from weights that
  hold all updates so far, those of columns in the same block too (the authors' code misses these). That is the paper's
  way, and gains nothing that could be measured (docs/log/2026-11.md, "When GPTQ sets its scales");
* scales are rounded to the dtype they are stored in before a code is chosen, so codes are right for what is stored;
* a column whose input was always zero gets weight zero; where all of them were, nothing is known of what any column
  counts, all count alike, and codes are those of rounding to nearest;
* where H cannot be factored, this raises. It never falls back to rounding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attar.compression.recipe.methods import Gptq, Order, ScaleSearch
from attar.compression.solvers.rounding.form_levels import LEVELLED, Scaled, Tables, levels_of
from attar.compression.solvers.rounding.ggml_levels import Ggml
from attar.compression.solvers.rounding.levels import Levels, Uniform
from attar.compression.solvers.rounding.polish import descend
from attar.compression.solvers.rounding.progressive_levels import TwoLevel
from attar.errors import UserError
from attar.formats import affine
from attar.formats.packed import PackedTensor
from attar.formats.scheme import Grid, Scheme
from attar.formats.weight_formats import GgmlBlocks, Progressive

TOKENS_AT_ONCE = 2048
ROWS_AT_ONCE = 512
COLUMNS_AT_ONCE = 1024
SIDE = 512  # columns of the blocks in which only one half of a symmetric matrix is computed


class Hessian:
    """E[x x^T] of a linear's I inputs: the running mean, over all rows seen, in one matrix of `dtype`. float32 is
    enough: entries are means of squares, and its rounding errors lie far below the damping. The value depends on how
    rows were split into calls, in the last bits only; the same calls give the same bits. The matrix lies on the device
    of the rows. Of one wider than `SIDE` only the blocks up to the diagonal are summed; `mean` copies them across."""

    def __init__(self, columns: int, dtype: torch.dtype = torch.float32, device: torch.device | None = None) -> None:
        self._mean = torch.zeros((columns, columns), dtype=dtype, device=device)
        self._whole = True  # whether it holds the blocks above its diagonal
        self.tokens = 0.0  # number of tokens seen, or the sum of their weights

    def add(self, x: Tensor, weights: Tensor | None = None) -> None:
        """Add rows x [N, I] of any float dtype, each counted by its non-negative weight [N]."""
        if self._mean.device != x.device:
            assert not self.tokens, "rows of two devices"
            self._mean = torch.zeros_like(self._mean, device=x.device)
        for at, part in enumerate(x.split(TOKENS_AT_ONCE)):
            part, count = part.to(self._mean.dtype), float(len(part))
            if weights is not None:
                some = weights[at * TOKENS_AT_ONCE :][: len(part)].to(part)
                part, count = part * some.sqrt()[:, None], float(some.sum())
            if count:
                total = self.tokens + count
                for side in slices(len(self._mean), SIDE):
                    lower, left = self._mean[side, : side.stop], part[:, : side.stop]
                    lower.addmm_(part[:, side].T, left, beta=self.tokens / total, alpha=1 / total)
                self._whole, self.tokens = len(self._mean) <= SIDE, total

    @property
    def mean(self) -> Tensor:
        """Return the matrix [I, I]."""
        if not self._whole:
            for some in slices(len(self._mean), SIDE):
                self._mean[: some.start, some] = self._mean[some, : some.start].T
            self._whole = True
        return self._mean

    @mean.setter
    def mean(self, value: Tensor) -> None:
        self._mean, self._whole = value, True

    def merge(self, other: Hessian) -> None:
        """Add the rows that `other` saw."""
        total = self.tokens + other.tokens
        if total:
            self.mean.mul_(self.tokens / total).add_(other.mean, alpha=other.tokens / total)
        self.tokens = total

    @property
    def silent(self) -> bool:
        """Return whether the matrix has no information: no row was seen, or all were zero, or too small to square."""
        return bool(self.mean.diagonal().max() < torch.finfo(self.mean.dtype).tiny)

    def weigh_alike(self) -> None:
        """Make all columns count alike and independently, for inputs of which nothing is known."""
        self.mean.zero_().fill_diagonal_(1.0)


@dataclass(frozen=True, eq=False)
class Prepared:
    """The factored inputs for `solve`; linears that read the same rows share it. `sweep` is the order of columns.
    `upper` holds V of H = V D V^T in that order, as the Cholesky factor U^T U of H in the reverse order: reversal turns
    the lower triangle of LAPACK into the upper one wanted, V_jk = U[n-1-k, n-1-j] / U[n-1-k, n-1-k]. Reversing slices
    when they are needed saves a third matrix."""

    hessian: Tensor  # [I, I], undamped
    sweep: Tensor  # [I] int64
    upper: Tensor  # [I, I]
    order: Order

    def rows(self, start: int, stop: int) -> Tensor:
        """Return V^T for columns start .. stop of the sweep: [stop - start, stop], unit lower triangular at its end."""
        n = len(self.upper)
        part = self.upper[n - stop : n - start, n - stop :].flip(0, 1)
        return part / part[:, start:].diagonal()[:, None]

    def solve(self, right: Tensor) -> Tensor:
        """Return H^-1 right of the damped H, for right [I, N]."""
        backwards = self.sweep.flip(0)
        return torch.cholesky_solve(right[backwards], self.upper, upper=True).index_select(0, backwards.argsort())


@dataclass(frozen=True, eq=False)
class GptqResult:
    """The compressed weight and its cost: `damage` is tr(E H E^T), E the difference to the weight asked for, and
    `energy` tr(W H W^T). `rtn_damage` is the cost of rounding to nearest on the initial levels. Errors are relative:
    the squared error of the outputs over the outputs, on the calibration tokens."""

    packed: PackedTensor | Tensor  # a tensor where weights are pruned and stay dense
    damage: float
    rtn_damage: float
    energy: float

    @property
    def error(self) -> float:
        return self.damage / self.energy if self.energy else 0.0

    @property
    def rtn_error(self) -> float:
        return self.rtn_damage / self.energy if self.energy else 0.0


def stacked(parts: Sequence[GptqResult]) -> GptqResult:
    """Stack the results of a weight's rows that were solved for some at a time, in order."""
    if len(parts) == 1:
        return parts[0]
    damage, rtn_damage, energy = (
        sum(figures) for figures in zip(*((p.damage, p.rtn_damage, p.energy) for p in parts), strict=True)
    )
    packs = [part.packed for part in parts if isinstance(part.packed, PackedTensor)]
    if not packs:
        dense = torch.cat([part.packed for part in parts if isinstance(part.packed, Tensor)])
        return GptqResult(dense, damage, rtn_damage, energy)
    first = packs[0]
    rows, columns = sum(part.shape[0] for part in packs), first.shape[1]
    assert first.scheme.weight.by_row, "what all rows share is not known from some"
    if isinstance(first.scheme.weight, Grid) and first.scheme.weight.kind == "int":
        codes, scales, zeros = zip(*(affine.decode(part) for part in packs), strict=True)
        zero = None if zeros[0] is None else torch.cat(zeros)
        packed = affine.encode(torch.cat(codes), torch.cat(scales), zero, first.scheme, (rows, columns))
    else:
        joined = {name: torch.cat([part.parts[name] for part in packs]) for name in first.parts}
        packed = PackedTensor(first.scheme, (rows, columns), joined)
    return GptqResult(packed, damage, rtn_damage, energy)


def prepare(hessian: Hessian, damping: float = 0.01, order: Order = "activation") -> Prepared:
    """Damp and factor a Hessian, whose matrix is kept, unchanged, beside the factor. The columns of one that is
    `silent`, though it saw tokens, are made to count alike first. Raises ValueError where it saw no token, holds a NaN
    or an infinity, or is not positive definite after damping."""
    mean = hessian.mean
    diagonal = mean.diagonal()
    if not diagonal.isfinite().all():
        raise UserError(
            "not_finite", "the calibration inputs of this linear hold a NaN or an infinity, or overflow when squared"
        )
    if hessian.silent:
        if not hessian.tokens:
            raise UserError(
                "linear_without_tokens",
                "no calibration token reached this linear: give more calibration text, or keep it as it is",
            )
        hessian.weigh_alike()
    places = torch.arange(len(mean), device=mean.device)
    sweep = places if order == "natural" else diagonal.argsort(descending=True, stable=True)
    backwards = sweep.flip(0)
    upper = torch.empty_like(mean, memory_format=torch.contiguous_format)
    for at, part in zip(range(0, len(mean), ROWS_AT_ONCE), backwards.split(ROWS_AT_ONCE), strict=True):
        upper[at : at + len(part)] = mean[part].index_select(1, backwards)
    # An input that was always zero couples to nothing: any positive number in its place gives the same codes.
    level = diagonal.mean()
    upper.diagonal().add_(damping * level + torch.where(diagonal == 0, level, 0)[backwards])
    failed = torch.empty((), dtype=torch.int32, device=mean.device)
    torch.linalg.cholesky_ex(upper.mT, out=(upper.mT, failed))  # in place: column-major is what LAPACK wants
    if failed:
        raise UserError(
            "hessian_singular",
            f"the Hessian of this linear is not positive definite with damping {damping}: give more calibration tokens "
            f"or a larger damping, such as {max(10 * damping, 0.01):g}",
        )
    return Prepared(mean, sweep, upper, order)


def solve(
    weight: Tensor,
    prepared: Prepared,
    scheme: Scheme,
    options: Gptq = Gptq(),  # noqa: B008
    *,
    largest: Tensor | None = None,
    importance: Tensor | None = None,
) -> GptqResult:
    """Compress a weight [O, I] of any float dtype whose inputs are those of `prepared`. The options' `block` sets how
    many columns share one product with all before them: speed, not results. Groups that are not static are their own
    blocks; only natural order has them. The sweeps of `polish.descend` follow. `largest` and `importance` are as in
    `begin`. Raises ValueError as `affine.min_max` and `affine.qparams` do."""
    assert options.static_groups or prepared.order == "natural", "activation order visits groups in pieces"
    columns = weight.shape[1]
    hessian, sweep = prepared.hessian, prepared.sweep
    original, levels = begin(weight, prepared, scheme, options.scale_search, largest, importance)
    work, energy, rtn_damage = _transposed(original, levels, prepared)
    del original
    codes = torch.empty(weight.shape[::-1], dtype=levels.code_dtype, device=weight.device)  # [I, O], in original order
    dynamic = not options.static_groups and isinstance(levels, Uniform) and levels.width < columns
    step = levels.width if dynamic else options.block
    places = sweep.tolist()
    for start in range(0, columns, step):
        stop = min(start + step, columns)
        pull = prepared.rows(start, stop)  # [b, stop]: row k, column j holds V_jk
        within = pull[:, start:]
        target = pull[:, :start] @ work[:start]  # [b, O]
        if dynamic and isinstance(levels, Uniform):
            ahead = torch.linalg.solve_triangular(within, target, upper=False, unitriangular=True)
            levels.reset(start // step, (work[start:stop] + ahead).T, options.scale_search)
        target += work[start:stop]
        for k, place in enumerate(places[start:stop]):
            wanted = target[k].addmv_(work[start : start + k].T, within[k, :k])  # [O]
            code, value = levels.nearest(place, wanted)
            codes[place] = code
            work[start + k] -= value  # the row now holds the difference w_k - w'_k
    back = sweep.argsort()
    if options.polish:
        del work  # a matrix of the same size follows
        work = descend(codes, levels, weight, hessian, options.polish, options.damping)
        back = torch.arange(columns, device=sweep.device)
    damage = sum(_damage(work[:, some].T.index_select(1, back), hessian) for some in slices(len(weight), ROWS_AT_ONCE))
    return GptqResult(levels.pack(codes), damage, rtn_damage, energy)


def begin(
    weight: Tensor,
    prepared: Prepared,
    scheme: Scheme,
    scale_search: ScaleSearch,
    largest: Tensor | None = None,
    importance: Tensor | None = None,
) -> tuple[Tensor, Uniform | Ggml | Scaled | Tables]:
    """Return the weight [O, I] in the solver's dtype, columns without input zero, and the levels for it. Scales of GGML
    blocks, and tables, are weighted by columns: by `importance` [I], such as a matrix measured on more text, or else by
    the mean square of each input. `largest` [1] is that of all NVFP4 weights that engines fuse with this one."""
    original, seen = weight.to(prepared.hessian.dtype, copy=True), prepared.hessian.diagonal().float()
    original[:, seen == 0] = 0
    importance = seen if importance is None else importance.to(seen)
    if isinstance(scheme.weight, GgmlBlocks):
        return original, Ggml(original, scheme, importance)
    if isinstance(scheme.weight, LEVELLED):
        return original, levels_of(original, scheme, importance, scale_search, largest)
    if isinstance(scheme.weight, Progressive):
        return original, TwoLevel.of(original, scheme, scale_search)
    return original, Uniform.of(original, scheme, scale_search)


def _transposed(weight: Tensor, levels: Levels, prepared: Prepared) -> tuple[Tensor, float, float]:
    """Return the weight transposed [I, O], one row a column in the order of the sweep, with tr(W H W^T) and the damage
    of rounding to nearest."""
    work = torch.empty(weight.shape[::-1], dtype=weight.dtype, device=weight.device)
    energy = damage = 0.0
    for some in slices(len(weight), ROWS_AT_ONCE):
        part = weight[some]
        work[:, some] = part.index_select(1, prepared.sweep).T
        energy += _damage(part, prepared.hessian)
        damage += _damage(part - levels.rounded(part, some), prepared.hessian)
    return work, energy, damage


def slices(size: int, step: int) -> Iterator[slice]:
    """Return slices that cover `size` in order, each of `step` but the last."""
    return (slice(at, min(at + step, size)) for at in range(0, size, step))


def _damage(delta: Tensor, hessian: Tensor) -> float:
    """Return tr(delta H delta^T) of [R, I], summed in float64. H is symmetric: blocks below its diagonal count
    twice."""
    total = 0.0
    for start in range(0, len(hessian), COLUMNS_AT_ONCE):
        stop = start + COLUMNS_AT_ONCE
        pulled = delta[:, start:stop] @ hessian[start:stop, start:stop]
        pulled += 2 * (delta[:, stop:] @ hessian[stop:, start:stop])
        total += float((pulled * delta[:, start:stop]).sum(dtype=torch.float64))
    return total
