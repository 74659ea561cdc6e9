"""Arrival times: a Poisson process by its statistics, traces by their shape."""

from __future__ import annotations

import math
import statistics
from itertools import pairwise

import pytest

from attar.load import schedule
from attar.load.traces import Ask
from tests.errors import user_error

COUNT = 20_000
SIGMAS = 4.0  # of the estimate: one seed in 16,000 would fail


def gaps(rate: float, seed: int) -> list[float]:
    times = [0.0, *(ask.at for ask in schedule.poisson([Ask(0.0, (1,), 1)] * COUNT, rate, seed).asks)]
    return [b - a for a, b in pairwise(times)]


@pytest.mark.parametrize("rate", [0.5, 40.0])
def test_gaps_are_exponential(rate: float) -> None:
    found = gaps(rate, seed=0)
    assert statistics.fmean(found) == pytest.approx(1 / rate, rel=SIGMAS / math.sqrt(COUNT))
    assert statistics.pstdev(found) == pytest.approx(1 / rate, rel=SIGMAS * math.sqrt(2 / COUNT))
    worst = max(
        abs((i + 1) / COUNT - (1 - math.exp(-rate * gap))) for i, gap in enumerate(sorted(found))
    )  # Kolmogorov-Smirnov
    assert worst < 2.0 / math.sqrt(COUNT)


def test_arrivals_of_a_second_scatter_as_poisson_does() -> None:
    """The variance of counts is their mean: arrivals are bunched, not spaced."""
    rate = 10.0
    asks = schedule.poisson([Ask(0.0, (1,), 1)] * COUNT, rate, seed=3).asks
    counts = [0] * int(asks[-1].at)
    for ask in asks:
        if ask.at < len(counts):
            counts[int(ask.at)] += 1
    assert statistics.pvariance(counts) == pytest.approx(statistics.fmean(counts), rel=0.15)


def test_a_seed_fixes_the_times_and_a_rate_stretches_them() -> None:
    asks = [Ask(0.0, (i,), 1) for i in range(50)]
    assert schedule.poisson(asks, 2.0, 7) == schedule.poisson(asks, 2.0, 7)
    assert schedule.poisson(asks, 2.0, 7) != schedule.poisson(asks, 2.0, 8)
    slow, fast = schedule.poisson(asks, 1.0, 7), schedule.poisson(asks, 4.0, 7)
    assert [a.at for a in slow.asks] == pytest.approx([4 * a.at for a in fast.asks])
    assert [a.prompt for a in slow.asks] == [a.prompt for a in asks]


def test_a_trace_keeps_its_times_or_their_shape() -> None:
    asks = [Ask(at, (1,), 1) for at in (0.0, 1.0, 1.0, 4.0, 10.0)]
    assert [ask.at for ask in schedule.as_recorded(asks).asks] == [0.0, 1.0, 1.0, 4.0, 10.0]
    faster = schedule.as_recorded(asks, 2.0)
    assert [ask.at for ask in faster.asks] == pytest.approx([0.0, 0.2, 0.2, 0.8, 2.0])
    assert faster.label == "2/s"
    with user_error("trace_malformed"):
        schedule.as_recorded(asks[:1], 2.0)


def test_clients() -> None:
    load = schedule.closed([Ask(3.0, (1,), 1)], 4)
    assert (load.clients, load.label, load.asks[0].at) == (4, "4 clients", 0.0)


@pytest.mark.parametrize("rate", [0.0, -1.0, math.nan, math.inf])
def test_impossible_rates(rate: float) -> None:
    with user_error("option_out_of_range"):
        schedule.poisson([], rate)


def test_no_clients() -> None:
    with user_error("option_out_of_range"):
        schedule.closed([], 0)
