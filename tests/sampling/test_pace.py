"""How many drafts pay, against a search over all choices; what costs and chances learn."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attar.sampling.pace import (
    REMEASURED,
    ROW,
    SAMPLES,
    SAVED,
    SIZES,
    SOURCE,
    START,
    TRIED,
    Chances,
    Costs,
    Pace,
    Trials,
    kind_of,
)

CHANCES = st.floats(0.05, 0.95)
SURVIVALS = st.lists(st.lists(CHANCES, max_size=4), min_size=2, max_size=3) | st.lists(
    st.lists(CHANCES, max_size=15), min_size=1, max_size=1
)


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

    every = itertools.product(*(range(len(each) + 1) for each in survivals))
    best = max(speed(counts) for counts in every if len(counts) > 1 or 1 + sum(counts) in SIZES)
    assert speed(tuple(pace.counts(survivals))) == pytest.approx(best)


def test_no_drafts_where_they_cost_more_than_they_bring() -> None:
    pace = Pace()
    for rows in (1, 2, 3, 4, 5):
        known(pace.costs, rows, float(rows))
    assert pace.counts([[0.9, 0.8, 0.7]]) == [0]
    assert Pace(fixed=True).counts([[0.1, 0.05], []]) == [2, 0]


def test_a_step_without_drafts_comes_now_and_then() -> None:
    pace = Pace()
    rests = []
    for _ in range(3 * (REMEASURED + 1)):
        rests.append(pace.rests)
        pace.planned(drafts=not pace.rests)
    assert rests == ([False] * REMEASURED + [True]) * 3
    pace.planned(drafts=True)
    pace.planned(drafts=False)
    for _ in range(REMEASURED):
        assert not pace.rests
        pace.planned(drafts=True)
    assert pace.rests
    assert not Pace(fixed=True).rests


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


def test_a_size_that_was_slow_once_is_tried_again() -> None:
    costs = Costs()
    for rows, seconds in ((1, 1.0), (2, 1.9), (4, 1.3), (6, 2.0)):
        known(costs, rows, seconds)
    assert costs.of(2) == costs.of(3) == costs.of(4) == 1.3
    assert costs.of(1) == 1.0
    assert costs.of(5) == pytest.approx(1.65)


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


def test_what_is_not_known_begins_as_the_kind_below() -> None:
    """A second draft that was wrong once is made again, where first ones are mostly right."""
    chances = Chances(1000.0)
    for _ in range(100):
        chances.record(1, right=True)
    assert chances.of(2) > 0.9
    chances.record(2, right=False)
    assert chances.of(2) > 0.7
    assert chances.of(SOURCE + 2) == START, "another source"
    for _ in range(100):
        chances.record(SOURCE + 1, right=False)
    assert chances.of(SOURCE + 2) == START, "of longer matches short ones tell nothing"


def test_kinds_of_evidence_are_octaves_of_each_source() -> None:
    own = [kind_of(evidence) for evidence in (1, 2, 3, 4, 5, 8, 9, 64, 65, SOURCE - 1)]
    assert own == [0, 1, 2, 2, 3, 3, 4, 6, 7, 7]
    assert kind_of(SOURCE + 1) > max(own)
    assert kind_of(SOURCE) not in own
    assert kind_of(-5) == 0


@given(st.lists(st.tuples(st.floats(0.001, 100.0), st.floats(0.001, 10.0)), max_size=60))
def test_trials_take_their_share_of_time_and_no_more(steps: list[tuple[float, float]]) -> None:
    trials, all_of_it, spent = Trials(), 0.0, 0.0
    for seconds, wanted in steps:
        trials.passed(seconds)
        all_of_it += seconds
        if trials.may(wanted):
            spent += wanted
        assert spent <= SAVED + TRIED * all_of_it + 1e-9
    trials = Trials()
    trials.passed(1e6)
    assert trials.may(SAVED)
    assert not trials.may(0.01)


def test_one_draft_more_pays_where_it_brings_tokens_faster_than_the_rest() -> None:
    pace = Pace()
    for rows, seconds in enumerate((1.0, 1.1, 1.2, 1.3, 2.1, 2.1), 1):
        known(pace.costs, rows, seconds)
    assert pace.counts([[0.8, 0.6, 0.4]], drafting=0.2) == [2]
    assert pace.gained == pytest.approx(1 - (1.2 + 0.4) / 2.4)
    speed = 2.4 / 1.6
    assert pace.continues(1.01 * speed * 0.3, 1, 1, 0.2)
    assert not pace.continues(0.99 * speed * 0.3, 1, 1, 0.2)
    assert not pace.continues(0.99, 3, 1, 0.2), "the fifth row is dear"
    assert Pace(fixed=True).continues(0.0, 3, 1, 9.9)
