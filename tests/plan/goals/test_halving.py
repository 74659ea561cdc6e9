"""Successive halving: the limit holds, what exists comes first, outcomes are kept, and measurements decide."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attar.errors import UserError
from attar.plan.costs import Storage
from attar.plan.goals import halving_report, quality, search
from attar.plan.goals.candidates import Weights
from attar.plan.goals.halving import Clock, Outcome, OutOfTime, contenders, halve
from attar.plan.goals.quality import Quality
from attar.plan.goals.search import Configuration
from tests.plan.goals.test_search import question

LATE = 0.1  # share of the limit by which experiments may end late


class PretendBench:
    """Experiments with plain costs in pretended seconds. Divergences and times are predictions by a factor."""

    def __init__(self, block: float = 1.0, token: float = 0.001, factor: float = 1.0) -> None:
        self.time, self.block, self.token, self.factor = 0.0, block, token, factor
        self.done = set[str]()
        self.calls = list[str]()
        self.failing = ""

    def now(self) -> float:
        return self.time

    def made(self, weights: Weights) -> bool:
        return weights.recipe is None or weights.label in self.done

    def make(self, weights: Weights, clock: Clock, reserve: float) -> None:
        for block in range(10):
            self.time += self.block
            clock.require(self.block * (9 - block) + reserve)
        self.calls.append(f"make {weights.label}")
        self.done.add(weights.label)

    def token_seconds(self, weights: Weights) -> float:
        return self.token

    def divergence(self, weights: Weights, kv: str, tokens: int, clock: Clock) -> Quality:
        self.time += tokens * self.token
        self.calls.append(f"kl {weights.label} {kv} {tokens}")
        kl = self.factor * weights.quality.kl + 1e-6
        return Quality(kl, kl, kl, "measured", "", 0.9)

    def load_seconds(self, of: Configuration) -> float:
        return 3.0

    def load(self, of: Configuration, seconds: float, clock: Clock) -> Mapping[str, float]:
        if of.weights.label == self.failing:
            raise UserError("server_unreachable", "it ended")
        self.time += 3.0 + seconds
        self.calls.append(f"load {of.name} {of.rows}")
        names = [name for name in of.cells if name[:4] in ("ttft", "tpot", "toke")]
        return {name: of.cells[name].value for name in names}


def run(goals: str, bench: PretendBench, limit: float, notes: Any = None, **changes: Any) -> Outcome:
    asked = question(goals, **changes)
    kept: dict[str, Any] = {} if notes is None else notes

    class Kept:
        get = staticmethod(kept.get)
        put = staticmethod(kept.__setitem__)

    return halve(search.search(asked), bench, Clock(limit, bench.now), Kept())


def test_measured_values_replace_predictions() -> None:
    bench = PretendBench(factor=0.5)
    outcome = run("kl<=0.2, memory<=2.8GB", bench, 3600)
    assert outcome.answer.best is not None
    assert outcome.answer.best.tried
    assert outcome.answer.best.cells["kl"].evidence == "measured"
    best = outcome.answer.best
    assert best.cells["kl"].value == pytest.approx(0.5 * best.weights.quality.kl + 1e-6)
    assert outcome.pairs
    assert not outcome.left


def test_a_measurement_can_turn_the_answer() -> None:
    """Where all compressed weights prove eight times as bad, what was expected to meet the goal does not."""
    expected = search.search(question("kl<=0.1, memory<=2.6GB"))
    assert expected.met
    outcome = run("kl<=0.1, memory<=2.6GB", PretendBench(factor=8), 36_000)
    assert not outcome.answer.met or outcome.answer.best not in [after for _, after in outcome.pairs]
    for _, after in outcome.pairs:
        assert not after.meets(outcome.answer.question.goals)


@settings(max_examples=40)
@given(st.floats(10, 2000), st.floats(0.01, 100), st.floats(1e-5, 0.1), st.sampled_from(["kl<=0.2", "memory<=2.8GB"]))
def test_the_limit_holds(limit: float, block: float, token: float, goals: str) -> None:
    bench = PretendBench(block, token)
    outcome = run(goals, bench, limit)
    assert bench.time <= limit * (1 + LATE) + block, "a block is the least that compression can be stopped after"
    for each in outcome.left:
        assert each.needed is None or each.needed > 0 or each.failed
    measured = {(after.name, after.rows) for _, after in outcome.pairs}
    assert not measured & {(each.of.name, each.of.rows) for each in outcome.left}


def test_what_exists_comes_first() -> None:
    bench = PretendBench()
    own = Weights("./own", Storage.named("w4g128"), quality.receipt(0.01, 0.01, 0.01, 0.9, "r"), path="./own")
    run("kl<=0.3", bench, 3600, outputs=(own,))
    first = next(at for at, call in enumerate(bench.calls) if call.startswith("make"))
    assert first > 0
    assert all("bf16 " in call or own.label in call for call in bench.calls[:first])
    assert any(own.label in call for call in bench.calls[:first])


def test_what_does_not_fit_keeps_its_prediction_and_says_its_time() -> None:
    bench = PretendBench(block=1000.0)
    outcome = run("kl<=0.2, memory<=2.8GB", bench, 1500)
    assert outcome.left
    assert not outcome.pairs
    assert outcome.left[0].needed is not None
    assert outcome.left[0].needed > 8000
    assert outcome.answer.best is not None
    assert outcome.answer.best.cells["kl"].evidence == "fitted"
    said = halving_report.to_dict(outcome)
    assert said["not_measured"][0]["seconds"] == outcome.left[0].needed


def test_a_second_run_repeats_nothing() -> None:
    notes: dict[str, Any] = {}
    bench = PretendBench()
    first = run("kl<=0.2, memory<=2.8GB", bench, 3600, notes)
    calls, bench.calls = bench.calls, []
    again = run("kl<=0.2, memory<=2.8GB", bench, 3600, notes)
    assert calls
    assert not any(call in calls for call in bench.calls if not call.startswith("kl"))
    assert again.answer.best is not None
    assert first.answer.best is not None
    assert again.answer.best.name == first.answer.best.name


def test_a_failing_experiment_is_named_and_costs_no_other() -> None:
    bench = PretendBench()
    answer = search.search(question("kl<=0.2, memory<=2.8GB"))
    bench.failing = contenders(answer)[0].weights.label
    outcome = run("kl<=0.2, memory<=2.8GB", bench, 36_000)
    assert {each.of.weights.label for each in outcome.left if each.failed} == {bench.failing}
    assert outcome.pairs


def test_nearest_misses_are_measured_where_nothing_may_meet() -> None:
    outcome = run("tpot<=1us", PretendBench(), 3600)
    assert outcome.pairs
    assert not outcome.answer.met


def test_a_clock_names_what_is_needed() -> None:
    clock = Clock(10, lambda: 0.0)
    clock.require(10)
    with pytest.raises(OutOfTime) as late:
        clock.require(11)
    assert late.value.needed == 11
    assert math.isclose(clock.left, 10)
