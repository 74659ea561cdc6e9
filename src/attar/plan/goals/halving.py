"""Successive halving: experiments that replace predictions, within a limit of time.

The first round measures up to `FIRST` configurations a little, the second the best `SECOND` of them longer, in
interleaved rounds (Jamieson and Talwalkar 2016, with two rungs). Weights that exist come first: compression counts
against the limit. An experiment that does not fit the time left keeps its prediction, and is listed with the seconds
that it still needs. Outcomes are noted as they come, so a run that was killed goes on. Torch-free: a `Bench` does the
work.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from attar.errors import UserError
from attar.plan.goals.candidates import Weights
from attar.plan.goals.cells import Cell
from attar.plan.goals.quality import Quality
from attar.plan.goals.search import Answer, Configuration, judged

FIRST, SECOND, ROUNDS = 8, 3, 2  # configurations of both rungs, and load tests of each in the second
SAME_WEIGHTS = 3  # configurations of one choice of weights in the first rung
TOKENS, MOST_TOKENS, LEAST_TOKENS = 4096, 65_536, 512  # of a divergence
SECONDS, MOST_SECONDS, LEAST_SECONDS = 30.0, 60.0, 2.0  # of a load test
KL_SHARE, LOAD_SHARE = 1 / 16, 1 / 32  # of the limit, for one experiment of the first rung


class OutOfTime(Exception):
    """An experiment does not fit the time left. needed: the seconds that it still takes, None where nothing tells."""

    def __init__(self, needed: float | None) -> None:
        super().__init__(needed)
        self.needed = needed


class Clock:
    """The time that experiments have: `limit` seconds from now."""

    def __init__(self, limit: float, now: Callable[[], float] = time.monotonic) -> None:
        self.limit, self.now, self._begun = limit, now, now()

    @property
    def spent(self) -> float:
        return self.now() - self._begun

    @property
    def left(self) -> float:
        return self.limit - self.spent

    def require(self, seconds: float) -> None:
        """Raise OutOfTime unless so many seconds are left."""
        if seconds > self.left:
            raise OutOfTime(seconds)


class Bench(Protocol):
    """The experiments that halving asks for. Each raises OutOfTime where it does not fit what the clock has left."""

    def made(self, weights: Weights) -> bool:
        """Return whether weights exist: those of the model, of an output, or of an earlier experiment."""

    def make(self, weights: Weights, clock: Clock, reserve: float) -> None:
        """Make the weights by their recipe, and leave `reserve` seconds."""

    def token_seconds(self, weights: Weights) -> float:
        """Return the seconds that a divergence takes for each token: measured, else predicted."""

    def divergence(self, weights: Weights, kv: str, tokens: int, clock: Clock) -> Quality:
        """Measure the divergence from the model as it is stored, on up to so many tokens of the text."""

    def load_seconds(self, of: Configuration) -> float:
        """Return the least seconds that a load test takes: its server's start, and one request of every user."""

    def load(self, of: Configuration, seconds: float, clock: Clock) -> Mapping[str, float]:
        """Serve a configuration to the question's users for about so many seconds; return quantities by the labels of
        goals (ttft_p95 and the like, tokens_per_second)."""


class Notes(Protocol):
    """Outcomes by key, kept from run to run."""

    def get(self, key: str, /) -> Any: ...
    def put(self, key: str, value: Any, /) -> None: ...


@dataclass(frozen=True, slots=True)
class Unmeasured:
    """A configuration that keeps its prediction. needed: seconds that its experiment still takes, None where nothing
    tells. failed: the error that ended the experiment."""

    of: Configuration
    needed: float | None = None
    failed: str | None = None


@dataclass(frozen=True)
class Outcome:
    """The answer by what was measured. pairs: each configuration as predicted and as measured."""

    answer: Answer
    pairs: tuple[tuple[Configuration, Configuration], ...]
    left: tuple[Unmeasured, ...]
    seconds: float


def contenders(answer: Answer) -> list[Configuration]:
    """Return the configurations to measure, in order: those that may meet the goals, by what they promise.

    Without any that may, the nearest misses are measured. Of one choice of weights there are at most `SAME_WEIGHTS`.
    Techniques are left out: no experiment here measures what they cost.
    """
    goals = answer.question.goals
    by_speed = any(goal.name in ("kl", "top1") for goal in goals)

    def may(of: Configuration) -> bool:
        cells = ((goal, of.cell(goal)) for goal in goals)
        return of.fits and all(goal.excess(c.low if goal.bound == "<=" else c.high) <= 1 for goal, c in cells)

    def rank(of: Configuration) -> tuple[float, ...]:
        kl, speed = of.cells["kl"].value, of.cells["tokens_per_second"].value
        return (not of.meets(goals), *((-speed, kl) if by_speed else (kl, -speed)))

    plain = [each for each in answer.all if each.technique is None]
    found = [each for each in plain if may(each)]
    if not found:
        found = [each for each in plain if each.fits]
        found.sort(key=lambda each: max(each.excess(goals).values()))
    else:
        found.sort(key=rank)
    counts: dict[str, int] = {}
    kept = []
    for each in found:
        label = each.weights.label
        counts[label] = counts.get(label, 0) + 1
        if counts[label] <= SAME_WEIGHTS:
            kept.append(each)
    return kept


def halve(
    answer: Answer, bench: Bench, clock: Clock, notes: Notes, tell: Callable[[str], None] = lambda _: None
) -> Outcome:
    """Measure within the clock's time. The answer returned is judged by what was measured, and by predictions
    elsewhere."""
    run = _Run(answer, bench, clock, notes, tell)
    queue = contenders(answer)
    there = {each.weights.label: each for each in reversed(queue) if bench.made(each.weights)}
    first = [*there.values(), *(each for each in queue if each not in there.values())][:FIRST]
    for each in sorted(first, key=lambda each: not bench.made(each.weights)):
        run.first(each)
    for each in (each for each in queue if each not in first):  # where all that was promised fell short
        if run.meeting() or clock.left < bench.load_seconds(each):
            break
        run.first(each)
    run.second()
    measured = {key: run.measured(each) for key, each in run.found.items()}
    found = [measured.get(_key(each), each) for each in answer.all]
    pairs = [(each, measured[_key(each)]) for each in answer.all if _key(each) in measured]
    return Outcome(judged(answer.question, found, answer.excluded), tuple(pairs), tuple(run.left), clock.spent)


def _key(of: Configuration) -> str:
    return f"{of.name}|{of.rows}"


class _Run:
    """One run: what was found, and what did not fit."""

    def __init__(self, answer: Answer, bench: Bench, clock: Clock, notes: Notes, tell: Callable[[str], None]) -> None:
        self.goals, self.bench, self.clock, self.notes, self.tell = answer.question.goals, bench, clock, notes, tell
        self.work = answer.question.workload
        self.found: dict[str, Configuration] = {}
        self.left: list[Unmeasured] = []
        self.loads: dict[str, list[Mapping[str, float]]] = {}
        self.costs: dict[str, tuple[int, Quality]] = {}  # by weights and KV format, of the most tokens

    def meeting(self) -> list[Configuration]:
        """Return what was measured and meets the goals."""
        return [each for each in map(self.measured, self.found.values()) if each.meets(self.goals)]

    def first(self, of: Configuration) -> None:
        """Take a configuration's part in the first rung."""
        self.tell(f"measuring {of.name}, {of.rows} rows a step; {self.clock.left:.0f} s left")
        try:
            seconds = max(LEAST_SECONDS, min(SECONDS, self.clock.limit * LOAD_SHARE))
            tokens = self._tokens(of.weights)
            after = seconds + self.bench.load_seconds(of) + tokens * self.bench.token_seconds(of.weights)
            self.clock.require(after)
            if not self.bench.made(of.weights):
                self.bench.make(of.weights, self.clock, after)
            self._divergence(of, tokens)
            self._load(of, seconds, 0)
        except OutOfTime as late:
            self.left.append(Unmeasured(of, needed=late.needed))
            return
        except UserError as error:
            self.left.append(Unmeasured(of, failed=str(error)))
            return
        self.found[_key(of)] = of

    def second(self) -> None:
        """Measure the best of the first rung longer, each in turn, while there is time."""

        def rank(of: Configuration) -> tuple[float, ...]:
            return (not of.meets(self.goals), max(of.excess(self.goals).values()), -of.cells["tokens_per_second"].value)

        ranked = sorted(map(self.measured, self.found.values()), key=rank)
        meeting = sorted(self.meeting(), key=lambda of: -of.cells["tokens_per_second"].value)
        best = (meeting or ranked)[:SECOND]
        if len(best) < 2 and not meeting:
            return
        share = self.clock.left / (2 * len(best))
        for of in best:
            tokens = min(MOST_TOKENS, int(share / self.bench.token_seconds(of.weights)))
            if tokens >= 2 * self._tokens(of.weights):
                self._longer(of, tokens=tokens)
        for number in range(1, ROUNDS + 1):
            turns = len(best) * (ROUNDS + 1 - number)
            for of in best:
                seconds = min(MOST_SECONDS, 0.9 * self.clock.left / turns - self.bench.load_seconds(of))
                turns -= 1
                if seconds >= LEAST_SECONDS:
                    self._longer(of, seconds=seconds, number=number)

    def _longer(self, of: Configuration, tokens: int = 0, seconds: float = 0.0, number: int = 0) -> None:
        """Measure a configuration's divergence on more tokens, or run a further load test. What does not fit or fails
        leaves the first rung's values."""
        self.tell(f"measuring {of.name} longer; {self.clock.left:.0f} s left")
        try:
            if tokens:
                self._divergence(of, tokens)
            else:
                self._load(of, seconds, number)
        except (OutOfTime, UserError):
            return

    def _tokens(self, weights: Weights) -> int:
        tokens, most = TOKENS, self.clock.limit * KL_SHARE
        while tokens > LEAST_TOKENS and tokens * self.bench.token_seconds(weights) > most:
            tokens //= 2
        return tokens

    def _divergence(self, of: Configuration, tokens: int) -> None:
        """Measure a divergence, unless it is exactly that of the model as it is stored, or known on as many tokens."""
        if of.cells["kl"].evidence == "exact" or (of.name in self.costs and self.costs[of.name][0] >= tokens):
            return
        known = self.notes.get(f"kl|{of.name}")
        if known is None or known[0] < tokens:
            self.clock.require(tokens * self.bench.token_seconds(of.weights))
            found = self.bench.divergence(of.weights, of.kv.name, tokens, self.clock)
            known = [tokens, found.kl, found.low, found.high, found.top1]
            self.notes.put(f"kl|{of.name}", known)
        counted, kl, low, high, top1 = known
        self.costs[of.name] = counted, Quality(kl, low, high, "measured", f"{counted} tokens", top1)

    def _load(self, of: Configuration, seconds: float, number: int) -> None:
        work = self.work
        key = f"load|{_key(of)}|{work.users}|{work.prompt}|{work.answer}|{len(work.trace)}|{number}"
        if (known := self.notes.get(key)) is None:
            self.clock.require(self.bench.load_seconds(of))
            known = dict(self.bench.load(of, seconds, self.clock))
            self.notes.put(key, known)
        self.loads.setdefault(_key(of), []).append(known)

    def measured(self, of: Configuration) -> Configuration:
        """Return a configuration with its quantities replaced by what was measured of it so far."""
        cells = dict(of.cells)
        loads = self.loads.get(_key(of), [])
        for name in loads[0] if loads else ():
            values = [each[name] for each in loads if name in each]
            cells[name] = Cell(statistics.median(values), min(values), max(values), "measured")
        if (known := self.costs.get(of.name)) is not None:
            cost = known[1]
            cells["kl"] = Cell(cost.kl, cost.low, cost.high, "measured")
            share = cost.agreement
            cells["top1"] = Cell(share, share, share, "measured" if cost.top1 is not None else "fitted")
        return replace(of, cells=cells, tried=True)
