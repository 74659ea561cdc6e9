"""Routers before 64 and 1,024 engines in virtual time, where a step takes what the step-time model says.

    python bench/fleets.py --mooncake FILE --azure FILE [--engines 64 1024] [--load 0.8] [--requests 20] [--gpu h100]

An engine has continuous batching: each step computes a token for every running choice and, with what is left of
`BUDGET` tokens, the prompts that came first. A step takes the time of a model in 16 bits on a GPU's data sheet
(`plan/rates/step_time.py`). Times are limits of such a card; the routers are compared with each other. `--load` is of
what engines without prefix caches finish, found by one engine with a full queue.

Traces, as many requests as there are engines times `--requests`:

- Mooncake's conversations, with lengths over 16 and equal prefixes where they were equal. Copies of its first 2,000
  requests have prefixes of their own, and times shifted at random within its span.
- Azure's conversations, with lengths and times of their own and no common prefixes: they show the balance alone.

`approximate` guesses what engines cache from what it sent there, as routers without events do: the engine with the
longest match, if that is half of the prompt and no engine has 32 requests and 1.1 times more than another; else the one
with the fewest requests. The last line is JSON.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import heapq
import itertools
import json
import lzma
import random
import sys
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from attar.kv.schemes import SCHEMES
from attar.model.shapes import shape
from attar.plan.costs import Storage
from attar.plan.gpus import GPUS
from attar.plan.rates.step_time import StepModel, of_gpu
from attar.protocol import block_digests
from attar.routing.costs import Costs
from attar.routing.router import Asked
from tests.routing.simulation import BLOCK, KEY, ByCost, Cache, ConsistentHash, LeastLoaded, Policy, RoundRobin

SCALE = 16  # of Mooncake's lengths: its blocks of 512 tokens have 32
FIRST = 2000  # requests of its trace
BUDGET, TOGETHER = 512, 32  # tokens of a step, and choices that run
FULL = 400  # requests that find what an engine without a cache finishes


@dataclass(frozen=True)
class Arrival:
    """A prompt of `tokens` tokens at a time, the digests of its blocks, and how many tokens it gets."""

    at: float
    tokens: int
    digests: array[int]
    output: int


@dataclass
class Running:
    """A request at an engine: `left` tokens of its prompt are to be computed, `output` of its answer to be drawn."""

    id: str
    arrival: Arrival
    left: int
    output: int


@dataclass
class Engine:
    """One engine: its cache, who waits, who computes a prompt, and who is answered."""

    cache: Cache
    queue: deque[tuple[str, Arrival]] = field(default_factory=deque)
    prompts: deque[Running] = field(default_factory=deque)
    answers: list[Running] = field(default_factory=list)
    stepping: bool = False
    busy: float = 0.0


@dataclass
class Outcome:
    """What became of a trace: tokens of prompts, seconds until first tokens and ends, and busy seconds by engine."""

    asked: int = 0
    computed: int = 0
    first: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)
    end: float = 0.0
    choosing: float = 0.0  # seconds of this machine


class Approximate(Policy):
    """By prefixes that were sent to an engine, in place of those that it has told of."""

    SHARE, APART, TIMES = 0.5, 32, 1.1

    def __init__(self, engines: int, blocks: int) -> None:
        self._sent = [Cache(blocks) for _ in range(engines)]
        self._holders: dict[int, set[int]] = {}  # engines by digest
        self._loads, self._at = [0] * engines, dict[str, int]()

    def choose(self, id: str, asked: Asked, now: float) -> int:
        least, most = min(self._loads), max(self._loads)
        engine = self._loads.index(least)
        if not (most - least > self.APART and most > self.TIMES * least) and len(asked.digests):
            holders, matched, longest = set[int](), 0, set[int]()
            for count, digest in enumerate(asked.digests, 1):
                here = self._holders.get(digest, set())
                holders = here if count == 1 else holders & here
                if not holders:
                    break
                matched, longest = count, holders
            if matched * BLOCK >= self.SHARE * asked.tokens:
                engine = min(longest)
        stored, evicted = self._sent[engine].add(asked.digests)
        for digest in stored:
            self._holders.setdefault(digest, set()).add(engine)
        for digest in evicted:
            self._holders[digest].discard(engine)
            if not self._holders[digest]:
                del self._holders[digest]
        self._loads[engine] += 1
        self._at[id] = engine
        return engine

    def ended(self, id: str) -> None:
        self._loads[self._at.pop(id)] -= 1


class Fleet:
    """Engines in virtual time behind a router."""

    def __init__(self, model: StepModel, engines: int, blocks: int, policy: Policy) -> None:
        self._model, self._policy = model, policy
        self._engines = [Engine(Cache(blocks)) for _ in range(engines)]
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = itertools.count()
        self.found = Outcome()

    def run(self, trace: Sequence[Arrival]) -> Outcome:
        """Run a trace to its end."""
        for number, each in enumerate(trace):
            self._at(each.at, lambda now, id=str(number), each=each: self._arrive(id, each, now))  # type: ignore[misc]
        while self._events:
            self.found.end, _, event = heapq.heappop(self._events)
            event(self.found.end)
        self.found.busy = [engine.busy for engine in self._engines]
        return self.found

    def _at(self, at: float, event: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (at, next(self._order), event))

    def _arrive(self, id: str, each: Arrival, now: float) -> None:
        began = time.perf_counter()
        number = self._policy.choose(id, Asked(each.tokens, each.digests), now)
        self.found.choosing += time.perf_counter() - began
        self._engines[number].queue.append((id, each))
        self._step(number, now)

    def _step(self, number: int, now: float) -> None:
        """Begin a step of an engine, unless it is within one or has nothing to do."""
        engine = self._engines[number]
        if engine.stepping:
            return
        left = BUDGET - len(engine.answers)
        chunks = [(each.arrival.tokens + each.arrival.output - each.output, 1, 1) for each in engine.answers]
        work = list[tuple[Running, int]]()
        for each in self._prompts(engine):
            if left <= 0:
                break
            count = min(left, each.left)
            chunks.append((each.arrival.tokens - each.left, count, int(count == each.left)))
            work.append((each, count))
            left -= count
        if chunks:
            seconds = self._model.of(chunks).total
            engine.stepping, engine.busy = True, engine.busy + seconds
            self._at(now + seconds, lambda then: self._stepped(number, work, then))

    def _prompts(self, engine: Engine) -> Iterator[Running]:
        """Yield who computes a prompt, and let others in while there is room."""
        yield from list(engine.prompts)
        while engine.queue and len(engine.prompts) + len(engine.answers) < TOGETHER:
            id, each = engine.queue.popleft()
            left = max(1, each.tokens - BLOCK * engine.cache.match(each.digests))
            self.found.asked += each.tokens
            self.found.computed += left
            engine.prompts.append(Running(id, each, left, each.output))
            yield engine.prompts[-1]

    def _stepped(self, number: int, work: Sequence[tuple[Running, int]], now: float) -> None:
        engine = self._engines[number]
        engine.stepping = False
        for each in engine.answers:
            each.output -= 1
        for each, count in work:
            each.left -= count
            if each.left == 0:
                engine.prompts.popleft()
                each.output -= 1
                engine.answers.append(each)
                self.found.first.append(now - each.arrival.at)
                self._policy.told(number, *engine.cache.add(each.arrival.digests))
                self._policy.begun(each.id)
        for each in engine.answers:
            if each.output <= 0:
                self.found.whole.append(now - each.arrival.at)
                self._policy.ended(each.id)
        engine.answers = [each for each in engine.answers if each.output > 0]
        self._step(number, now)


def mooncake(path: Path, count: int) -> list[Arrival]:
    """Return `count` requests: copies of the first ones, each with prefixes and a shift of its own."""
    draw, found, size = random.Random(0), list[Arrival](), 512 // SCALE
    with lzma.open(path, "rt") as lines:
        first = [json.loads(line) for line in itertools.islice(lines, FIRST)]
    span = first[-1]["timestamp"] / 1000
    for copy in range(-(-count // len(first))):  # the last one is the beginning alone
        shift = draw.uniform(0, span) if copy else 0.0
        for each in first[: count - copy * len(first)]:
            ids = [id + (copy << 20) for id in each["hash_ids"]]
            tokens = [(id * size + at) & 0x7FFFFFFF for id in ids for at in range(size)]
            prompt = array("i", tokens[: max(1, each["input_length"] // SCALE)])
            at = (each["timestamp"] / 1000 + shift) % span
            digests = block_digests.chain(KEY, prompt, BLOCK)
            found.append(Arrival(at, len(prompt), digests, max(1, each["output_length"] // SCALE)))
    return sorted(found, key=lambda each: each.at)


def azure(path: Path, count: int) -> list[Arrival]:
    """Return `count` requests of a trace with times and lengths alone, from its beginning and again if need be."""
    with path.open(newline="") as file:
        rows = [
            (row["TIMESTAMP"], int(row["ContextTokens"]), int(row["GeneratedTokens"])) for row in csv.DictReader(file)
        ]
    times = [datetime.datetime.fromisoformat(row[0][:26]).timestamp() for row in rows]
    span = times[-1] - times[0]
    found = list[Arrival]()
    for number in range(count):
        again, at = divmod(number, len(rows))
        _, prompt, output = rows[at]
        found.append(Arrival(times[at] - times[0] + again * span, max(1, prompt), array("Q"), max(1, output)))
    return found


def finished(model: StepModel, trace: Sequence[Arrival]) -> float:
    """Return the requests a second that one engine without a cache finishes with a full queue."""
    draw = random.Random(1)
    sample = [Arrival(0.0, each.tokens, array("Q"), each.output) for each in draw.sample(trace, min(FULL, len(trace)))]
    return len(sample) / Fleet(model, 1, 0, RoundRobin(1)).run(sample).end


def at_load(trace: Sequence[Arrival], rate: float) -> list[Arrival]:
    """Return the trace with times scaled to `rate` requests a second."""
    factor = len(trace) / rate / (trace[-1].at - trace[0].at)
    return [Arrival((each.at - trace[0].at) * factor, each.tokens, each.digests, each.output) for each in trace]


def told(found: Outcome) -> dict[str, float]:
    """Return the figures of a run, as JSON has them."""

    def at(values: Sequence[float], share: float) -> float:
        return round(sorted(values)[int((len(values) - 1) * share)], 4)

    return {
        "hit_rate": round(1 - found.computed / found.asked, 4),
        "ttft_p50": at(found.first, 0.5), "ttft_p99": at(found.first, 0.99),
        "whole_p50": at(found.whole, 0.5), "whole_p99": at(found.whole, 0.99),
        "busy_max_over_mean": round(max(found.busy) * len(found.busy) / sum(found.busy), 3),
        "busy_share": round(sum(found.busy) / len(found.busy) / found.end, 3),
        "microseconds": round(found.choosing / len(found.whole) * 1e6),
    }  # fmt: skip


def main() -> None:
    """Print a line for each trace, number of engines and router."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mooncake", type=Path)
    parser.add_argument("--azure", type=Path)
    parser.add_argument("--engines", type=int, nargs="+", default=[64, 1024])
    parser.add_argument("--requests", type=int, default=40, help="for each engine")
    parser.add_argument("--load", type=float, default=0.8)
    parser.add_argument("--blocks", type=int, default=1500, help="of each engine's prefix cache")
    parser.add_argument("--gpu", choices=sorted(GPUS), default="h100")
    parser.add_argument("--model", default="llama-3.1-8b", help="a published shape")
    asked = parser.parse_args()
    model = StepModel(shape(asked.model), Storage(None, None, "bfloat16"), SCHEMES["bfloat16"], of_gpu(GPUS[asked.gpu]))
    costs = Costs(model.prefill(BUDGET) / BUDGET, model.decode(8, BUDGET).total)
    found: dict[str, Any] = {}
    for name, path, read in (("mooncake", asked.mooncake, mooncake), ("azure", asked.azure, azure)):
        for engines in asked.engines if path is not None else ():
            trace = read(path, engines * asked.requests)
            rate = asked.load * engines * finished(model, trace)
            timed = at_load(trace, rate)
            policies: dict[str, Policy] = {
                "cost": ByCost(engines, asked.blocks, Costs(costs.prefill, costs.decode)),
                "approximate": Approximate(engines, asked.blocks), "consistent hashing": ConsistentHash(engines),
                "least loaded": LeastLoaded(engines), "round robin": RoundRobin(engines),
            }  # fmt: skip
            for policy, made in policies.items():
                figures = told(Fleet(model, engines, asked.blocks, made).run(timed))
                found[f"{name}, {engines} engines, {policy}"] = figures
                print(f"{name:<9} {engines:>5} engines  {policy:<18}", json.dumps(figures), flush=True)
    settings = {each: str(value) for each, value in vars(asked).items()}
    print(json.dumps({"settings": settings, "found": found}))


if __name__ == "__main__":
    main()
