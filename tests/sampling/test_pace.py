"""How many drafts pay, against a search over all choices; what costs and chances learn."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attar.sampling.pace import REMEASURED, ROW, SAMPLES, Chances, Costs, Pace

SURVIVALS = st.lists(st.lists(st.floats(0.05, 0.95), max_size=4), min_size=1, max_size=3)


def falling(values: list[float]) -> list[float]:
    """Make chances survivals."""
    return list(itertools.accumulate(values, lambda a, b: a * b))


def known(costs: Costs, rows: int, seconds: float) -> None:
    """Record what a size costs, behind a first step that counts for nothing."""
    costs.record(rows, 1e6)
    costs.record(rows, seconds)


@given(SURVIVALS, st.lists(st.floats(0.5, 3.0), min_size=16, max_size=16))
def test_counts_bring_the_most_tokens_a_second(chances: list[list[float]], steps: list[float]) -> None:
    pace = Pace()
    for rows, more in enumerate(itertools.accumulate(steps), 1):
        known(pace.costs, rows, more)
    survivals = [falling(each) for each in chances]

    def speed(counts: tuple[int, ...]) -> float:
        brought = len(counts) + sum(sum(each[:n]) for each, n in zip(survivals, counts, strict=True))
        return brought / pace.costs.of(len(counts) + sum(counts))

    best = max(map(speed, itertools.product(*(range(len(each) + 1) for each in survivals))))
    assert speed(tuple(pace.counts(survivals))) == pytest.approx(best)


def test_no_drafts_where_they_cost_more_than_they_bring() -> None:
    pace = Pace()
    for rows in (1, 2, 3, 4, 5):
        known(pace.costs, rows, float(rows))
    assert pace.counts([[0.9, 0.8, 0.7]]) == [0]
    assert Pace(fixed=True).counts([[0.1, 0.05], []]) == [2, 0]


def test_a_step_without_drafts_comes_now_and_then() -> None:
    pace = Pace()
    counts = [pace.counts([[0.9]])[0] for _ in range(3 * (REMEASURED + 1))]
    assert counts == ([1] * REMEASURED + [0]) * 3


def test_costs_are_medians_and_lie_between_their_neighbours() -> None:
    costs = Costs()
    assert costs.of(5) == 1.0
    costs.record(2, 1e6)
    assert not costs.known, "a first step may compile kernels"
    for _ in range(SAMPLES // 2 + 1):
        costs.record(2, 10.0)
    costs.record(2, 99.0)
    assert costs.of(2) == 10.0
    assert costs.of(4) == pytest.approx(10.0 * (1 + 4 * ROW) / (1 + 2 * ROW))
    known(costs, 6, 30.0)
    assert costs.of(3) == pytest.approx(15.0)
    assert costs.of(1) < 10.0
    for _ in range(SAMPLES):
        costs.record(2, 4.0)
    assert costs.of(2) == 4.0


def test_chances_begin_with_those_of_all_and_follow_their_own() -> None:
    everyone = Chances(1000.0)
    for _ in range(300):
        everyone.record(9, right=True)
        everyone.record(1, right=False)
    own = Chances(30.0, everyone)
    assert own.of(9) > 0.95
    assert own.of(1) < 0.05
    assert list(own.survivals(9, 3)) == pytest.approx([own.of(9) ** n for n in (1, 2, 3)])
    for _ in range(60):
        own.record(9, right=False)
    assert own.of(9) < 0.2
    assert everyone.of(9) > 0.7
