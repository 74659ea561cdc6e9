"""Ranges of grids: observers for activations, seen batch by batch, and a search for weights, held whole.

An observer answers with one range over everything it saw, for static per-tensor scales:
* `MinMax` takes the extremes that occurred, or with `momentum` a moving average of each batch's;
* `Percentile` leaves out the same share of values at either end;
* `MSE` shrinks the range until the error of rounding the seen values is least;
* `KL` is the entropy calibration of TensorRT (Migacz, GTC 2017): the cut-off whose clipped and coarsened distribution
  of |x| has the least divergence from the true one.

The last three need the distribution, kept as a histogram of magnitudes whose upper end is a power of two. When a larger
value arrives, the end is doubled and pairs of bins merge exactly, so the histogram depends on the values seen and not
on their batches: a resumed calibration ends with the same scales. A reservoir sample, the usual alternative, has
neither property without carrying its random state along.

For weights, `mse_range` searches the same shrink factors with one range per group. GPTQ's scale search uses it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import torch
from torch import Tensor

from attar.errors import UserError
from attar.formats.affine import by_scale, min_max, qparams, round_to_grid, to_values
from attar.formats.packing import row_slices
from attar.formats.scheme import Grid

FINE_BINS = 1 << 14
"""Histogram bins where bins stand for values: at least 64 a step of an 8-bit grid."""
KL_BINS = 2048
AVERAGE = 0.1
"""Share of the way to each batch's own extremes, where they are averaged."""
SAME_DIVERGENCE = 1e-10
"""Divergences in nats closer than this differ by the rounding of float64 sums."""

AT_ONCE = 1 << 18
"""Weights that the MSE search works on together: they stay in the cache for all steps."""
SURE = 1.0001
"""Factor by which an error must be exceeded for certain, whatever the rounding of its sum."""
SPARSE = 0.75
"""Share of groups still searched below which they are gathered."""

STEPS, LOWEST, NORM = 40, 0.2, 2.4
"""Shrink factors 1, 0.98 .. 0.2 and error norm of the MSE search.

The norm above 2 is GPTQ's authors' choice: it spares the large weights, which matter more than their number suggests.
"""


class Observer(Protocol):
    """An observer of tensors of any shape and float dtype, which answers with a range. `observe` raises ValueError on a
    NaN or an infinity, `range` where nothing was observed. `range` returns (minimum, maximum), both float32 [1], the
    arguments of `affine.qparams`."""

    def observe(self, x: Tensor) -> None: ...

    def range(self) -> tuple[Tensor, Tensor]: ...


class MinMax:
    """The smallest and largest value; with `momentum` m, extremes move by m of the way towards each batch's own."""

    def __init__(self, momentum: float | None = None) -> None:
        if momentum is not None and not 0 < momentum <= 1:
            raise ValueError(f"momentum is above 0 and at most 1, not {momentum}")
        self._momentum = momentum
        self._range: tuple[Tensor, Tensor] | None = None

    def observe(self, x: Tensor) -> None:
        low, high = (extreme.float() for extreme in min_max(x, Grid(granularity="tensor")))
        if self._range is None:
            self._range = low, high
        elif self._momentum is None:
            self._range = torch.minimum(self._range[0], low), torch.maximum(self._range[1], high)
        else:
            self._range = self._range[0].lerp(low, self._momentum), self._range[1].lerp(high, self._momentum)

    def range(self) -> tuple[Tensor, Tensor]:
        if self._range is None:
            raise UserError(
                "linear_without_tokens", "no values were observed: calibration reached this layer with no tokens"
            )
        return self._range


def of_activations(name: str, grid: Grid) -> Observer:
    """Return the observer of a recipe's name (`methods.ActivationRange`); `grid` has integers for mse and kl."""
    if name == "average":
        return MinMax(momentum=AVERAGE)
    if name == "percentile":
        return Percentile()
    if name == "mse":
        return MSE(grid)
    return KL(grid.bits) if name == "kl" else MinMax()


class Histogram:
    """Counts of each magnitude, for either sign, and the exact extremes."""

    _SMALLEST = -100  # exponent of the first upper end: all magnitudes below 2^-100 share one bin

    def __init__(self, bins: int) -> None:
        assert bins & (bins - 1) == 0, "bins merge in pairs"
        self.bins = bins
        self.exponent = self._SMALLEST  # bins cover |x| < 2^exponent
        self.counts = torch.zeros((2, bins), dtype=torch.int64)  # of negative values, of the others
        self._extremes = MinMax()

    @property
    def width(self) -> float:
        return 2.0**self.exponent / self.bins

    @property
    def centres(self) -> Tensor:
        """Return the value of each bin, from the most negative up, float32 [2 * bins]."""
        upwards = (torch.arange(self.bins) + 0.5) * self.width
        return torch.cat([-upwards.flip(0), upwards])

    @property
    def occurrences(self) -> Tensor:
        """Return counts in the order of `centres`."""
        return torch.cat([self.counts[0].flip(0), self.counts[1]])

    def observe(self, x: Tensor) -> None:
        self._extremes.observe(x)
        low, high = self.extremes()
        _, exponent = torch.frexp(torch.maximum(low.abs(), high.abs()))  # magnitudes are below 2^exponent
        self._widen(int(exponent))
        flat = x.detach().flatten()
        for start in range(0, flat.numel(), 1 << 20):  # the indices take eight bytes an element
            values = flat[start : start + (1 << 20)].to("cpu", torch.float32)
            index = (values.abs() / self.width).long() + self.bins * (values >= 0)
            self.counts += torch.bincount(index, minlength=2 * self.bins).view(2, self.bins)

    def extremes(self) -> tuple[Tensor, Tensor]:
        low, high = self._extremes.range()
        return low.cpu(), high.cpu()

    def _widen(self, exponent: int) -> None:
        while self.exponent < exponent:
            self.counts = torch.nn.functional.pad(self.counts.view(2, self.bins // 2, 2).sum(-1), (0, self.bins // 2))
            self.exponent += 1


class Percentile(Histogram):
    """The range that leaves at most (100 - percentile) % of the values out at either end, to a bin's width. It is
    rounded outwards; at 100 it is exactly `MinMax`."""

    def __init__(self, percentile: float = 99.99) -> None:
        if not 50 < percentile <= 100:
            raise ValueError(f"a percentile is above 50 and at most 100, not {percentile}")
        super().__init__(FINE_BINS)
        self._outside = 1 - percentile / 100

    def range(self) -> tuple[Tensor, Tensor]:
        low, high = self.extremes()
        counts, centres = self.occurrences, self.centres
        spare = self._outside * int(counts.sum())
        half = self.width / 2
        first = int((counts.cumsum(0) > spare).int().argmax())  # the first bin not left out
        last = counts.numel() - 1 - int((counts.flip(0).cumsum(0) > spare).int().argmax())
        return torch.maximum(low, centres[first] - half), torch.minimum(high, centres[last] + half)


class MSE(Histogram):
    """The shrunk range with the least error over all values seen, each taken at its bin's centre."""

    def __init__(self, grid: Grid, steps: int = STEPS, lowest: float = LOWEST, norm: float = 2.0) -> None:
        super().__init__(FINE_BINS)
        self._grid, self._search = grid, (steps, lowest, norm)

    def range(self) -> tuple[Tensor, Tensor]:
        seen = self.occurrences > 0
        values, mass = self.centres[seen][None], self.occurrences[seen][None]
        return _shrink(values, mass, *self.extremes(), self._grid, None, self._search)


class KL(Histogram):
    """Entropy calibration for symmetric grids of `bits`; the range is cut to [-t, t], and to the values seen."""

    def __init__(self, bits: int = 8) -> None:
        super().__init__(KL_BINS)
        self._levels = 1 << (bits - 1)

    def range(self) -> tuple[Tensor, Tensor]:
        low, high = self.extremes()
        threshold = kl_threshold(self.counts.sum(0), self._levels) * self.width
        return low.clamp(min=-threshold), high.clamp(max=threshold)


def kl_threshold(counts: Tensor, levels: int = 128) -> int:
    """Return how many leading bins to keep, given a histogram of magnitudes `counts` [B], B > levels. For each i in
    levels .. B, P is the first i bins with all mass beyond them added to the last; Q is the first i bins without that
    mass, averaged over `levels` runs (bin j in run floor(j * levels / i)), each average spread over the nonempty bins
    of its run. The result is the i with the least KL(P || Q), both normalised, the smallest among equals
    (`SAME_DIVERGENCE`). A cut whose last bin is empty but receives outliers has an infinite divergence. Prefix sums
    give every run, so all cuts are scored at once."""
    histogram = counts.double()
    cuts = torch.arange(levels, counts.numel() + 1)
    mass, filled = (torch.nn.functional.pad(each.cumsum(0), (1, 0)) for each in (histogram, (histogram > 0).double()))
    entropy = torch.nn.functional.pad(torch.special.xlogy(histogram, histogram).cumsum(0), (1, 0))

    kept, last = mass[cuts], histogram[cuts - 1]
    outliers = mass[-1] - kept
    total = mass[-1]
    edges = -(-torch.arange(levels + 1) * cuts[:, None] // levels)  # [cuts, levels + 1]
    run_mass, run_filled = mass[edges].diff(), filled[edges].diff()
    log_q = (run_mass / run_filled.clamp(min=1)).log().where(run_mass > 0, 0.0) - kept.log()[:, None]
    # KL(P || Q) = sum p log p - sum p log q, with the last bin of P holding the outliers as well.
    p_log_p = entropy[cuts] - torch.special.xlogy(last, last) + torch.special.xlogy(last + outliers, last + outliers)
    divergence = p_log_p / total - total.log() - ((run_mass * log_q).sum(1) + outliers * log_q[:, -1]) / total
    divergence[(last == 0) & (outliers > 0)] = torch.inf
    return int(cuts[divergence <= divergence.min() + SAME_DIVERGENCE][0])


def mse_range(
    weight: Tensor,
    grid: Grid,
    scale_dtype: torch.dtype | None = None,
    *,
    steps: int = STEPS,
    lowest: float = LOWEST,
    norm: float = NORM,
) -> tuple[Tensor, Tensor]:
    """Return the range of each group of `weight` [O, I] whose grid rounds it with the least error: (minimum, maximum).
    Tries (p * min, p * max) for p = 1 down to `lowest` in `steps` steps and keeps the least sum of |error|^norm, the
    larger p among equals, for every [O, G] (or [1]) on its own. p = 1 is among them, so no group comes out worse than
    by `min_max`; by its squared error where norm is 2. Errors are those of the codes and scales of `qparams` and
    `round_to_grid`, with scales in `scale_dtype`. Raises ValueError like `min_max` and `qparams`."""
    low, high = min_max(weight, grid)
    if low.ndim == 1:
        return _shrink(weight, None, low, high, grid, scale_dtype, (steps, lowest, norm))
    groups = by_scale(weight, low.shape[-1]).flatten(0, 1)
    factors = [1 - (1 - lowest) * step / steps for step in range(steps + 1)]
    found = low.view(-1), high.view(-1)

    def search(part: slice) -> None:
        _shrink_groups(groups[part], found[0][part], found[1][part], grid, scale_dtype, factors, norm)

    _on_threads(search, list(row_slices(len(groups), groups.shape[1], AT_ONCE)), weight.device)
    return low, high


def _on_threads(work: Callable[[slice], None], parts: Sequence[slice], device: torch.device) -> None:
    """Do independent parts of work on as many threads as torch has, each on one. Operations on a part are too short to
    be shared: a search whose operations were shared by two threads, beside other programs, took twice to four times as
    long as on one thread."""
    threads = torch.get_num_threads() if device.type == "cpu" else 1
    if threads == 1 or len(parts) == 1:
        for part in parts:
            work(part)
        return
    inference = torch.is_inference_mode_enabled()  # which holds for one thread

    def do(part: slice) -> None:
        with torch.inference_mode(inference):
            work(part)

    try:
        with ThreadPoolExecutor(min(threads, len(parts)), "search", torch.set_num_threads, (1,)) as pool:
            for _ in pool.map(do, parts):
                pass
    finally:
        torch.set_num_threads(threads)  # which holds for all threads in part


def _shrink_groups(
    x: Tensor,
    low: Tensor,
    high: Tensor,
    grid: Grid,
    scale_dtype: torch.dtype | None,
    factors: Sequence[float],
    norm: float,
) -> None:
    """Replace the extremes [N] of groups x [N, W], in place, by those times the best of the falling `factors`.

    A group leaves the search once its largest magnitude alone, clipped, costs more than the best range so far: smaller
    factors clip it further. Most groups leave after a third of the steps."""
    places, lows, highs = torch.arange(len(x), device=x.device), low.clone(), high.clone()
    peak = torch.maximum(lows.abs(), highs.abs())
    least = torch.full_like(peak, torch.inf, dtype=torch.float32)
    for factor in factors:
        scale, zero = qparams(lows * factor, highs * factor, grid, scale_dtype)
        codes = x / scale[:, None]
        if zero is not None:
            codes += zero[:, None].to(x.dtype)
        values = codes.clamp_(grid.qmin, grid.qmax).round_().to(scale.dtype)
        if zero is not None:
            values -= zero[:, None].to(scale.dtype)
        error = _power(values.mul_(scale[:, None]).float() - x, norm).sum(-1)
        better = error < least
        least = torch.where(better, error, least)
        low[places], high[places] = (
            torch.where(better, ends * factor, best[places]) for ends, best in ((lows, low), (highs, high))
        )
        going = (peak - _reach(scale, zero, grid)).clamp_(min=0).pow_(norm) <= least * SURE
        going |= scale * factors[-1] < torch.finfo(scale.dtype).tiny  # a scale of zero is replaced by a large one
        if int(going.sum()) <= SPARSE * len(x):
            places, lows, highs, peak, least = (each[going] for each in (places, lows, highs, peak, least))
            x = x[going]


def _power(x: Tensor, norm: float) -> Tensor:
    """Return |x|^norm in place. For other powers than squares a logarithm takes a quarter of the time of torch's power,
    which is three quarters of a search; it is exact to 2^-18."""
    return x.square_() if norm == 2 else x.abs_().log2_().mul_(norm).exp2_()


def _reach(scale: Tensor, zero: Tensor | None, grid: Grid) -> Tensor:
    """Return an upper bound of all magnitudes [N] that grids of these scales and of smaller ones represent."""
    most = scale.float() * (1 + torch.finfo(scale.dtype).eps)  # values are rounded to the dtype of scales
    if zero is None:
        return most * max(-grid.qmin, grid.qmax)
    zero = zero.float()  # rounded anew for each scale: it may move by one
    return most * (torch.maximum(grid.qmax - zero, zero - grid.qmin) + 1)


def _shrink(
    x: Tensor,
    mass: Tensor | None,
    low: Tensor,
    high: Tensor,
    grid: Grid,
    scale_dtype: torch.dtype | None,
    search: tuple[int, float, float],
) -> tuple[Tensor, Tensor]:
    """Return `mse_range` for given extremes; `mass` counts how often each x [R, C] occurs. `search` is steps, lowest
    and norm."""
    steps, lowest, norm = search
    best_low, best_high = low.clone(), high.clone()
    least = torch.full(low.shape, torch.inf, dtype=torch.float32, device=x.device)
    for step in range(steps + 1):
        factor = 1 - (1 - lowest) * step / steps
        scale, zero = qparams(low * factor, high * factor, grid, scale_dtype)
        errors = (to_values(round_to_grid(x, scale, zero, grid), scale, zero).float() - x).abs_().pow_(norm)
        if mass is not None:
            errors *= mass
        error = errors.sum().reshape(1) if low.ndim == 1 else by_scale(errors, low.shape[-1]).sum(-1)
        better = error < least
        least = torch.where(better, error, least)
        best_low = torch.where(better, low * factor, best_low)
        best_high = torch.where(better, high * factor, best_high)
    return best_low, best_high
