"""Latencies under load: requests run through steps of a scheduler, each as long as the step-time model says.

The policy is that of attar's continuous scheduler in short. Every running sequence gets a row a step, and prompts get
what is left of the step's tokens, first come first served. A sequence is admitted while its whole length fits into the
cache and the number of sequences allows it. Between two events only contexts grow, so several such steps are taken at
once. Torch-free; two runs on one profile are identical.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from attar.plan.goals.techniques import Changed
from attar.plan.rates.step_time import StepModel
from attar.protocol.scheduler_config import TOWER_SHARE

Steps = StepModel | Changed

AT_ONCE = 32  # decode steps taken together: a context grows little
MOST_USERS = 24  # that are simulated
MOST_REQUESTS = 256  # of a trace
ROUNDS = 3  # requests of each user without a trace; the first of each is not counted
MANY, FEWER = 8, 2  # users from which so many requests of each are enough


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request: seconds from the beginning, tokens of prompt and answer, and seconds of a vision tower for its
    images."""

    at: float
    prompt: int
    answer: int
    encoding: float = 0.0

    @property
    def length(self) -> int:
        return self.prompt + self.answer


@dataclass(frozen=True, slots=True)
class Capacity:
    """What runs at once: rows of a step, sequences, and positions of the cache."""

    rows: int
    sequences: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Latencies:
    """Seconds to the first token and per further token by quantile, and the tokens a second of all users together."""

    ttft: Mapping[str, float]
    tpot: Mapping[str, float]
    tokens_per_second: float


@dataclass(slots=True)
class _Request:
    arrival: Arrival
    left: int  # tokens of the prompt that are not computed yet
    round: int
    encoding: float = 0.0  # seconds that the tower has to work before the prompt
    first: float = 0.0  # when its first token came
    end: float = 0.0
    done: int = 0  # tokens of the answer

    @property
    def context(self) -> int:
        return self.arrival.prompt - self.left + self.done


def quantiles(values: Sequence[float]) -> dict[str, float]:
    """Return p50, p95 and p99 of values, by nearest rank."""
    ordered = sorted(values)
    shares = {"p50": 0.50, "p95": 0.95, "p99": 0.99}
    return {name: ordered[max(0, math.ceil(share * len(ordered)) - 1)] for name, share in shares.items()}


def unloaded(model: Steps, prompt: int, answer: int, rows: int, encoding: float = 0.0) -> Latencies:
    """Return the latencies of one request at a time."""
    first = encoding + model.prefill(prompt, chunk=rows)
    each = model.decode(1, prompt + answer // 2).total
    every = {"p50": each, "p95": each, "p99": each}
    return Latencies(dict.fromkeys(every, first), every, answer / (first + each * (answer - 1)))


def closed(model: Steps, users: int, prompt: int, answer: int, capacity: Capacity, encoding: float = 0.0) -> Latencies:
    """Return the latencies of `users` users. Each sends the next request when the last is answered.

    More than `MOST_USERS` are not simulated: each then waits for its prompt and one step, and prompts of all others
    come between its tokens evenly.
    """
    together = min(users, capacity.sequences)
    if users > MOST_USERS:
        step = model.decode(together, prompt + answer // 2).total
        prefill = encoding + model.prefill(prompt, chunk=capacity.rows)
        cycle = answer * step + together * prefill
        first = (prefill + step) * -(-users // together)
        every = {"p50": cycle / answer, "p95": cycle / answer, "p99": cycle / answer}
        return Latencies(dict.fromkeys(every, first), every, together * answer / cycle)
    alone = unloaded(model, prompt, answer, capacity.rows, encoding)
    length = alone.ttft["p50"] + answer * alone.tpot["p50"]
    first_ones = [Arrival(length * number / users, prompt, answer, encoding) for number in range(users)]
    return _run(model, first_ones, capacity, ROUNDS if users < MANY else FEWER)


def traced(model: Steps, arrivals: Sequence[Arrival], capacity: Capacity) -> Latencies:
    """Return the latencies of a trace's first `MOST_REQUESTS` requests."""
    return _run(model, arrivals[:MOST_REQUESTS], capacity, 1)


class _Run:
    """One simulation: requests that wait, that run and that ended, at one moment."""

    def __init__(self, model: Steps, arrivals: Sequence[Arrival], capacity: Capacity, rounds: int) -> None:
        self.model, self.capacity, self.rounds = model, capacity, rounds
        self.waiting = deque(_Request(each, each.prompt, 1, each.encoding) for each in arrivals)
        self.running: list[_Request] = []
        self.ended: list[_Request] = []
        self.now, self.held = 0.0, 0

    def admit(self) -> None:
        """Start requests that have arrived, while sequences and cache allow it."""
        while self.waiting and len(self.running) < self.capacity.sequences:
            arrival = self.waiting[0].arrival
            if arrival.at > self.now or (self.running and self.held + arrival.length > self.capacity.tokens):
                return
            self.held += arrival.length
            self.running.append(self.waiting.popleft())

    def step(self) -> None:
        """Take one step, or several where only contexts grow. Before each the tower works for one request."""
        seeing = next((each for each in self.running if each.encoding), None)
        decoding = [each for each in self.running if not each.left]
        room, filled = self.capacity.rows - len(decoding), list[tuple[_Request, int]]()
        for each in self.running:
            if each.left and room > 0 and not each.encoding:
                filled.append((each, min(room, each.left)))
                room -= filled[-1][1]
        if seeing is not None and not decoding and not filled:
            self.now, seeing.encoding = self.now + seeing.encoding, 0.0
            return
        steps = 1 if filled else min(AT_ONCE, *(each.arrival.answer - each.done for each in decoding))
        chunks = [(each.context + steps // 2, 1, 1) for each in decoding]
        chunks += [(each.arrival.prompt - each.left, rows, int(rows == each.left)) for each, rows in filled]
        seconds = self.model.of(chunks).total
        if steps > 1 and self.waiting and (until := self.waiting[0].arrival.at - self.now) > 0:
            steps = max(1, min(steps, math.ceil(until / seconds)))
        if seeing is not None:
            each_step = TOWER_SHARE * seconds
            steps = min(steps, math.ceil(seeing.encoding / each_step))
            worked = min(seeing.encoding, steps * each_step)
            self.now, seeing.encoding = self.now + worked, seeing.encoding - worked
        self.now += steps * seconds
        for each in decoding:
            each.done += steps
        for each, rows in filled:
            each.left -= rows
            if not each.left:
                each.first, each.done = self.now, 1
        self.running = [each for each in self.running if not self.finished(each)]

    def finished(self, each: _Request) -> bool:
        """Return whether a request has its answer; its user then sends the next one."""
        arrival = each.arrival
        if each.left or each.done < arrival.answer:
            return False
        each.end = self.now
        self.held -= arrival.length
        if self.rounds == 1 or each.round > 1:
            self.ended.append(each)
        if each.round < self.rounds:
            following = replace(arrival, at=self.now)
            self.waiting.append(_Request(following, arrival.prompt, each.round + 1, arrival.encoding))
        return True


def _run(model: Steps, arrivals: Sequence[Arrival], capacity: Capacity, rounds: int) -> Latencies:
    run = _Run(model, arrivals, capacity, rounds)
    while run.waiting or run.running:
        run.admit()
        if run.running:
            run.step()
        else:
            run.now = max(run.now, run.waiting[0].arrival.at)
    ttft = [each.first - each.arrival.at for each in run.ended]
    tpot = [(each.end - each.first) / max(1, each.arrival.answer - 1) for each in run.ended]
    tokens = sum(each.arrival.answer for each in run.ended)
    if rounds == 1:
        return Latencies(quantiles(ttft), quantiles(tpot), tokens / max(1e-9, run.now))
    lasted = sum(each.end - each.arrival.at for each in run.ended)  # Little: users over the time of a request
    return Latencies(quantiles(ttft), quantiles(tpot), len(arrivals) * tokens / lasted)
