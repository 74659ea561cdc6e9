"""Fleets of engines in virtual time: what a router makes of a trace of requests.

An engine computes prompts one after another and its outputs meanwhile, a step at a time, and keeps the blocks of ended
prompts, the least recently used first to go. Engines tell of their blocks with the end of a prompt, as real ones do.
"""

from __future__ import annotations

import heapq
import itertools
import random
import zlib
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from attar.protocol import block_digests
from attar.routing.costs import Costs
from attar.routing.router import Asked, Router

BLOCK = 16
PREFILL, STEP = 1e-3, 1e-2  # seconds of a prompt token, and of a step
KEY = block_digests.key_of(b"")


@dataclass(frozen=True)
class Arrival:
    """A prompt at a time, and how many tokens it gets."""

    at: float
    prompt: array[int]
    output: int


@dataclass
class Cache:
    """Digests of an engine's blocks, least recently used first."""

    blocks: int
    kept: OrderedDict[int, None] = field(default_factory=OrderedDict)

    def match(self, digests: Sequence[int]) -> int:
        return next((at for at, each in enumerate(digests) if each not in self.kept), len(digests))

    def add(self, digests: Iterable[int]) -> tuple[list[int], list[int]]:
        """Keep a prompt's blocks, the last the first to go; return what was stored and what had to go."""
        digests = list(digests)
        stored = [each for each in digests if each not in self.kept]
        for each in reversed(digests):
            self.kept[each] = None
            self.kept.move_to_end(each)
        evicted = [self.kept.popitem(last=False)[0] for _ in range(max(0, len(self.kept) - self.blocks))]
        return [each for each in stored if each in self.kept], [each for each in evicted if each not in stored]


@dataclass
class Outcome:
    """What became of a trace. `work` is of each engine, in seconds; `waits` are until the first token."""

    asked: int = 0
    computed: int = 0
    work: list[float] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)

    @property
    def hit_rate(self) -> float:
        return 1 - self.computed / self.asked

    @property
    def skew(self) -> float:
        """The most work of an engine, relative to the mean."""
        return max(self.work) * len(self.work) / sum(self.work)

    @property
    def p90(self) -> float:
        return sorted(self.waits)[int(len(self.waits) * 0.9)]


class Policy:
    """Chooses an engine; the other policies are compared with `ByCost`."""

    def choose(self, id: str, asked: Asked, now: float) -> int:
        raise NotImplementedError

    def begun(self, id: str) -> None: ...

    def ended(self, id: str) -> None: ...

    def told(self, engine: int, stored: list[int], evicted: list[int]) -> None: ...


class RoundRobin(Policy):
    def __init__(self, engines: int) -> None:
        self._turns = itertools.cycle(range(engines))

    def choose(self, id: str, asked: Asked, now: float) -> int:
        return next(self._turns)


class LeastLoaded(Policy):
    def __init__(self, engines: int) -> None:
        self._loads, self._at = [0] * engines, dict[str, int]()

    def choose(self, id: str, asked: Asked, now: float) -> int:
        engine = self._at[id] = self._loads.index(min(self._loads))
        self._loads[engine] += 1
        return engine

    def ended(self, id: str) -> None:
        self._loads[self._at.pop(id)] -= 1


class ConsistentHash(Policy):
    """By the hash of a prompt's first FIRST blocks, each on the engine whose own hash is the highest with it."""

    FIRST = 16

    def __init__(self, engines: int) -> None:
        self._engines = engines

    def choose(self, id: str, asked: Asked, now: float) -> int:
        digests = asked.digests[: self.FIRST]
        key = digests[-1] if len(digests) else zlib.crc32(id.encode())
        return max(range(self._engines), key=lambda engine: zlib.crc32(f"{key} {engine}".encode()))


class ByCost(Policy):
    def __init__(self, engines: int, blocks: int, costs: Costs | None = None) -> None:
        self.router = Router(engines, BLOCK, costs or Costs(PREFILL, STEP))
        for engine in range(engines):
            self.router.begin(engine, blocks, 10**6)

    def choose(self, id: str, asked: Asked, now: float) -> int:
        found = self.router.route(id, asked, range(self.router.engines), now)
        assert found is not None
        return found.engine

    def begun(self, id: str) -> None:
        self.router.begun(id)

    def ended(self, id: str) -> None:
        self.router.ended(id)

    def told(self, engine: int, stored: list[int], evicted: list[int]) -> None:
        self.router.prefixes.evicted(engine, evicted)
        self.router.prefixes.stored(engine, stored)


def simulate(trace: Sequence[Arrival], engines: int, blocks: int, policy: Policy) -> Outcome:
    """Run a trace in virtual time on engines of so many blocks each."""
    found, caches = Outcome(work=[0.0] * engines), [Cache(blocks) for _ in range(engines)]
    queues: list[deque[tuple[str, Arrival, array[int]]]] = [deque() for _ in range(engines)]
    busy = [False] * engines
    events: list[tuple[float, int, Callable[[float], None]]] = []
    order = itertools.count()

    def at(time: float, event: Callable[[float], None]) -> None:
        heapq.heappush(events, (time, next(order), event))

    def arrive(id: str, each: Arrival) -> Callable[[float], None]:
        def event(now: float) -> None:
            digests = block_digests.chain(KEY, each.prompt, BLOCK)
            engine = policy.choose(id, Asked(len(each.prompt), digests), now)
            queues[engine].append((id, each, digests))
            start(engine, now)

        return event

    def start(engine: int, now: float) -> None:
        if busy[engine] or not queues[engine]:
            return
        busy[engine] = True
        id, each, digests = queues[engine].popleft()
        computed = max(1, len(each.prompt) - BLOCK * caches[engine].match(digests))
        found.asked += len(each.prompt)
        found.computed += computed
        found.work[engine] += computed * PREFILL + each.output * STEP
        at(now + computed * PREFILL, prefilled(engine, id, each, digests))

    def prefilled(engine: int, id: str, each: Arrival, digests: array[int]) -> Callable[[float], None]:
        def event(now: float) -> None:
            policy.told(engine, *caches[engine].add(digests))
            policy.begun(id)
            found.waits.append(now - each.at)
            busy[engine] = False
            at(now + each.output * STEP, lambda _: policy.ended(id))
            start(engine, now)

        return event

    for number, each in enumerate(trace):
        at(each.at, arrive(str(number), each))
    while events:
        time, _, event = heapq.heappop(events)
        event(time)
    return found


def prompts(draw: random.Random, prefix: Sequence[int], rest: int) -> array[int]:
    return array("i", [*prefix, *(draw.randrange(1000) for _ in range(rest))])


def shared_prefixes(draw: random.Random, prefixes: int, each: int, rate: float) -> list[Arrival]:
    """`each` requests of every one of `prefixes` prefixes of 256 tokens, in random order, `rate` a second."""
    beginnings = [[draw.randrange(1000) for _ in range(256)] for _ in range(prefixes)]
    chosen = [at for at in range(prefixes) for _ in range(each)]
    draw.shuffle(chosen)
    times = itertools.accumulate(draw.expovariate(rate) for _ in chosen)
    return [Arrival(at, prompts(draw, beginnings[which], 24), 16) for at, which in zip(times, chosen, strict=True)]


def skewed(draw: random.Random, count: int, share: float, rate: float) -> list[Arrival]:
    """Requests of which one prefix has `share`, and 31 others the rest."""
    beginnings = [[draw.randrange(1000) for _ in range(256)] for _ in range(32)]
    times = itertools.accumulate(draw.expovariate(rate) for _ in range(count))
    return [
        Arrival(at, prompts(draw, beginnings[0 if draw.random() < share else draw.randrange(1, 32)], 24), 16)
        for at in times
    ]
