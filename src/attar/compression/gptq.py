"""GPTQ (Frantar et al. 2022): round a weight column by column; the columns still to come make up for the error.

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
  way, and gains nothing that could be measured (docs/LOG.md, "When GPTQ sets its scales");
* scales are rounded to the dtype they are stored in before a code is chosen, so codes are right for what is stored;
* a column whose input was always zero gets weight zero;
* where H cannot be factored, this raises. It never falls back to rounding.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attar.compression import rtn
from attar.compression.recipe import Order, ScaleSearch
from attar.formats import affine
from attar.formats.packed import PackedTensor
from attar.formats.scheme import FLOAT8, Grid, Scheme

TOKENS_AT_ONCE = 2048
ROWS_AT_ONCE = 512
COLUMNS_AT_ONCE = 1024


class Hessian:
    """E[x x^T] of a linear's I inputs: the running mean, over all rows seen, in one matrix of `dtype`.

    float32 is enough: entries are means of squares, and what rounding is left lies far below the damping. The value
    depends on how rows were split into calls, in the last bits only; the same calls give the same bits.
    """

    def __init__(self, columns: int, dtype: torch.dtype = torch.float32, device: torch.device | None = None) -> None:
        self.mean = torch.zeros((columns, columns), dtype=dtype, device=device)
        self.tokens = 0

    def add(self, x: Tensor) -> None:
        """Take in rows x [N, I] of any float dtype."""
        for part in x.split(TOKENS_AT_ONCE):
            part = part.to(self.mean.dtype)
            total = self.tokens + len(part)
            self.mean.addmm_(part.T, part, beta=self.tokens / total, alpha=1 / total)
            self.tokens = total

    def merge(self, other: Hessian) -> None:
        """Take in the rows that `other` saw."""
        total = self.tokens + other.tokens
        if total:
            self.mean.mul_(self.tokens / total).add_(other.mean, alpha=other.tokens / total)
        self.tokens = total


@dataclass(frozen=True, eq=False)
class Prepared:
    """All that `solve` needs to know of the inputs; linears that read the same rows share it.

    `sweep` is the order of columns. `upper` holds V of H = V D V^T in that order, as the Cholesky factor U^T U of H in
    the reverse order: reversal turns the lower triangle that LAPACK offers into the upper one wanted, V_jk =
    U[n-1-k, n-1-j] / U[n-1-k, n-1-k]. Turning slices around when they are needed saves a third matrix.
    """

    hessian: Tensor  # [I, I], undamped
    sweep: Tensor  # [I] int64
    upper: Tensor  # [I, I]
    order: Order

    def rows(self, start: int, stop: int) -> Tensor:
        """V^T for columns start .. stop of the sweep: [stop - start, stop], unit lower triangular at its end."""
        n = len(self.upper)
        part = self.upper[n - stop : n - start, n - stop :].flip(0, 1)
        return part / part[:, start:].diagonal()[:, None]


@dataclass(frozen=True, eq=False)
class GptqResult:
    """The compressed weight and what it costs: tr(E H E^T) / tr(W H W^T), E the difference to the original weight.

    That is the squared error of the outputs relative to the outputs, on the calibration tokens. `rtn_error` is what
    rounding to nearest on the same grid, found by the same scale search, would cost.
    """

    packed: PackedTensor
    error: float
    rtn_error: float


def prepare(hessian: Hessian, damping: float = 0.01, order: Order = "activation") -> Prepared:
    """Damp and factor a Hessian, whose matrix is kept, unchanged, beside the factor.

    Raises ValueError where it saw no token or only zeros, holds a NaN or an infinity, or is not positive definite after
    damping.
    """
    mean = hessian.mean
    diagonal = mean.diagonal()
    if not diagonal.isfinite().all():
        raise ValueError("the calibration inputs of this linear hold a NaN or an infinity, or overflow when squared")
    if not diagonal.any():
        raise ValueError("no calibration token reached this linear: give more calibration text, or keep it as it is")
    if order == "natural":
        sweep = torch.arange(len(mean), device=mean.device)
    else:
        sweep = diagonal.argsort(descending=True, stable=True)
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
        raise ValueError(
            f"the Hessian of this linear is not positive definite with damping {damping}: give more calibration tokens "
            f"or a larger damping, such as {max(10 * damping, 0.01):g}"
        )
    return Prepared(mean, sweep, upper, order)


def solve(
    weight: Tensor,
    prepared: Prepared,
    scheme: Scheme,
    *,
    block: int = 128,
    scale_search: ScaleSearch = "mse",
    static_groups: bool = True,
) -> GptqResult:
    """Compress a weight [O, I] of any float dtype whose inputs are those that `prepared` knows.

    `block` sets how many columns share one product with all before them: speed, not results. Groups that are not static
    are their own blocks; only natural order has them. Raises ValueError as `affine.min_max` and `affine.qparams` do.
    """
    assert static_groups or prepared.order == "natural", "activation order visits groups in pieces"
    rows, columns = weight.shape
    hessian, sweep, dtype = prepared.hessian, prepared.sweep, prepared.hessian.dtype
    grid, groups = scheme.weight, scheme.weight.groups(columns)
    group = columns // groups

    scale, zero, work, energy, rtn_damage = _begin(weight, prepared, scheme, scale_search)
    codes = torch.empty((columns, rows), dtype=_code_dtype(grid), device=weight.device)  # [I, O], in original order
    dynamic = not static_groups and groups > 1
    step = group if dynamic else block
    places = sweep.tolist()
    for start in range(0, columns, step):
        stop = min(start + step, columns)
        pull = prepared.rows(start, stop)  # [b, stop]: row k, column j holds V_jk
        within = pull[:, start:]
        target = pull[:, :start] @ work[:start]  # [b, O]
        if dynamic:
            ahead = torch.linalg.solve_triangular(within, target, upper=False, unitriangular=True)
            one = replace(grid, granularity="channel", group_size=None)
            found = rtn.group_scales((work[start:stop] + ahead).T, one, scale.dtype, scale_search)
            scale[:, start // group] = found[0][:, 0]
            if zero is not None and found[1] is not None:
                zero[:, start // group] = found[1][:, 0]
        target += work[start:stop]
        for k, place in enumerate(places[start:stop]):
            wanted = target[k].addmv_(work[start : start + k].T, within[k, :k])  # [O]
            code, value = _nearest(wanted, *_column(scale, zero, place // group, dtype), grid)
            codes[place] = code
            work[start + k] -= value  # from here on the row holds the difference w_k - w'_k
    packed = _pack(codes.T.contiguous(), scale, zero, scheme, (rows, columns))
    damage, back = 0.0, sweep.argsort()
    for some in _slices(rows):
        damage += _damage(work[:, some].T.index_select(1, back), hessian)
    return GptqResult(packed, damage / energy if energy else 0.0, rtn_damage / energy if energy else 0.0)


def _begin(
    weight: Tensor, prepared: Prepared, scheme: Scheme, scale_search: ScaleSearch
) -> tuple[Tensor, Tensor | None, Tensor, float, float]:
    """(scale, zero, work, tr(W H W^T), damage of rounding to nearest) before the first column is rounded.

    `work` [I, O] is the weight transposed, one row a column, in the order of the sweep.
    """
    hessian = prepared.hessian
    original = weight.to(hessian.dtype, copy=True)
    original[:, hessian.diagonal() == 0] = 0
    scale, zero = rtn.group_scales(original, scheme.weight, getattr(torch, scheme.scale_dtype), scale_search)
    work = torch.empty((weight.shape[1], weight.shape[0]), dtype=hessian.dtype, device=weight.device)
    energy = damage = 0.0
    for some in _slices(len(weight)):
        part = original[some]
        work[:, some] = part.index_select(1, prepared.sweep).T
        energy += _damage(part, hessian)
        damage += _damage(part - _rounded(part, scale, zero, some, scheme.weight), hessian)
    return scale, zero, work, energy, damage


def _nearest(x: Tensor, scale: Tensor, zero: Tensor | None, grid: Grid) -> tuple[Tensor, Tensor]:
    """Codes and values of one column x [O], with scale and zero in its dtype, [O] or [1]: the codecs' arithmetic."""
    scaled = x / scale
    if zero is not None:
        scaled += zero
    scaled.clamp_(grid.qmin, grid.qmax)
    if grid.kind != "int":
        code = scaled.to(_code_dtype(grid))
        return code, code.to(x.dtype) * scale
    code = scaled.round_()
    return code, (code if zero is None else code - zero) * scale


def _column(scale: Tensor, zero: Tensor | None, at: int, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Scale and zero of group `at` in the working dtype, [O], or [1] for the whole tensor."""
    if scale.ndim == 2:
        scale, zero = scale[:, at], None if zero is None else zero[:, at]
    return scale.to(dtype), None if zero is None else zero.to(dtype)


def _code_dtype(grid: Grid) -> torch.dtype:
    dtype = torch.int8 if grid.kind == "int" else getattr(torch, FLOAT8[grid.kind])
    assert isinstance(dtype, torch.dtype)
    return dtype


def _pack(codes: Tensor, scale: Tensor, zero: Tensor | None, scheme: Scheme, shape: tuple[int, int]) -> PackedTensor:
    if scheme.weight.kind == "int":
        return affine.encode(codes, scale, zero, scheme, shape)
    return PackedTensor(scheme, shape, {"codes": codes, "scale": scale})


def _slices(rows: int) -> Iterator[slice]:
    return (slice(at, min(at + ROWS_AT_ONCE, rows)) for at in range(0, rows, ROWS_AT_ONCE))


def _rounded(part: Tensor, scale: Tensor, zero: Tensor | None, rows: slice, grid: Grid) -> Tensor:
    """Rows [R, I] of the weight rounded to nearest."""
    if scale.ndim == 2:
        scale, zero = scale[rows], None if zero is None else zero[rows]
    wide, shift = scale.to(part.dtype)[..., None], None if zero is None else zero.to(part.dtype)[..., None]
    return _nearest(part.unflatten(1, (scale.shape[-1], -1)), wide, shift, grid)[1].flatten(1)


def _damage(delta: Tensor, hessian: Tensor) -> float:
    """tr(delta H delta^T) of [R, I], summed in float64. H is symmetric: blocks below its diagonal count twice."""
    total = 0.0
    for start in range(0, len(hessian), COLUMNS_AT_ONCE):
        stop = start + COLUMNS_AT_ONCE
        pulled = delta[:, start:stop] @ hessian[start:stop, start:stop]
        pulled += 2 * (delta[:, stop:] @ hessian[stop:, start:stop])
        total += float((pulled * delta[:, start:stop]).sum(dtype=torch.float64))
    return total
