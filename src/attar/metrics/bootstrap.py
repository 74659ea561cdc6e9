"""Confidence intervals of measured figures, by resampling whole windows (the bootstrap of Efron 1979).

Tokens of one window share a past, so their losses are not independent; windows nearly are. The bootstrap therefore
draws windows, not tokens: as many as there are, with replacement, again and again. The interval is read off the
percentiles of the figure. Where two models are compared, both are read on the same drawn windows (paired). Pairing
cancels the variance that the windows themselves contribute, which makes a small difference between two methods visible.

The draws come from Philox words, whose values numpy fixes, and not from numpy's distributions, whose values it does not
fix: an interval in a receipt must be the same under any numpy.

Not done: bias-corrected (BCa) intervals. With tens of windows, their correction is smaller than the error that the
windows' own dependence leaves. Legend: N tokens, W windows, R resamples.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from attar.errors import UserError

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

RESAMPLES = 1000
LEVEL = 0.95
SEED = 0


@dataclass(frozen=True, slots=True)
class Interval:
    """A figure and its 95 % confidence interval; low and high are None for one window, which cannot be resampled."""

    value: float
    low: float | None
    high: float | None

    def map(self, f: Callable[[float], float]) -> Interval:
        """Return the interval of f(figure), for a non-decreasing f."""
        return Interval(
            f(self.value), None if self.low is None else f(self.low), None if self.high is None else f(self.high)
        )


@functools.lru_cache(maxsize=4)
def resamples(windows: int, seed: int = SEED, count: int = RESAMPLES) -> Ints:
    """Return how often each window is drawn in each resample: int64 [R, W], every row summing to W."""
    words = np.asarray(np.random.Philox(key=np.array([seed, windows], dtype=np.uint64)).random_raw(count * windows))
    drawn = ((words >> np.uint64(32)) * np.uint64(windows)) >> np.uint64(32)  # top 32 bits to 0 .. W-1
    return np.stack([np.bincount(row, minlength=windows) for row in drawn.astype(np.int64).reshape(count, windows)])


def mean(values: Floats, window: Ints, seed: int = SEED) -> Interval:
    """Return the mean of values [N] whose windows [N] are numbered from 0. Windows of more tokens weigh more."""
    return ratio(per_window(values, window), np.bincount(window).astype(np.float64), seed)


def per_window(values: Floats, window: Ints) -> Floats:
    """Sum values [N] over each window: [W]."""
    return np.bincount(window, weights=values).astype(np.float64)


def ratio(a: Floats, b: Floats, seed: int = SEED) -> Interval:
    """Return sum(a) / sum(b) of per-window sums a, b [W], both read on the same drawn windows."""
    value = float(a.sum() / b.sum())
    if len(a) < 2:
        return Interval(value, None, None)
    counts = resamples(len(a), seed)
    return _interval(value, (counts @ a) / (counts @ b))


def paired_bootstrap_ratio(kl_a: Floats, kl_b: Floats, seed: int = SEED) -> Interval:
    """Return sum(kl_a) / sum(kl_b) over the same windows, with its interval: a claim "A beats B" needs `high` < 1. kl_a
    and kl_b are per-window sums (or means, of windows of one length) [W]. Raises ValueError for different shapes, for
    fewer than two windows, and where a window of B has no divergence."""
    kl_a, kl_b = np.asarray(kl_a, dtype=np.float64), np.asarray(kl_b, dtype=np.float64)
    if kl_a.shape != kl_b.shape or kl_a.ndim != 1:
        raise UserError(
            "window_invalid", f"paired figures need the same windows: got shapes {kl_a.shape} and {kl_b.shape}"
        )
    if len(kl_a) < 2:
        raise UserError(
            "text_too_short", "one window gives nothing to resample: use a longer text or a shorter context"
        )
    if not (kl_b > 0).all():
        raise UserError("window_invalid", "a window of the second model shows no divergence: the ratio is not defined")
    return ratio(kl_a, kl_b, seed)


def quantile(values: Floats, window: Ints, q: float, seed: int = SEED) -> Interval:
    """Return the smallest of values [N] that at least a fraction q of them do not exceed; no interpolation."""
    order = np.argsort(values, kind="stable")
    ranked, ranked_window = values[order], window[order]
    windows = int(window.max()) + 1
    value = _at(ranked, np.ones(len(ranked), dtype=np.int64), q)
    if windows < 2:
        return Interval(value, None, None)
    return _interval(value, np.array([_at(ranked, drawn[ranked_window], q) for drawn in resamples(windows, seed)]))


def _at(ranked: Floats, weights: Ints, q: float) -> float:
    """Return the quantile of sorted values [N] that each count `weights` [N] times."""
    below = weights.cumsum()
    rank = max(1, math.ceil(q * int(below[-1]) - 1e-9))  # 0.999 * 1000 must not become 1000 by rounding
    return float(ranked[np.searchsorted(below, rank)])


def _interval(value: float, figures: Floats) -> Interval:
    tail = (1 - LEVEL) / 2
    low, high = np.quantile(figures, (tail, 1 - tail), method="inverted_cdf")
    return Interval(value, float(low), float(high))
