"""The router: its loads against a list of requests, and what it makes of traces beside simpler policies."""

from __future__ import annotations

import random
import time
from array import array
from collections.abc import Collection

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from attar.protocol import block_digests
from attar.routing.costs import Costs
from attar.routing.router import AGAIN, BALANCE, SLACK, Asked, Router
from tests.routing.simulation import (
    BLOCK,
    ByCost,
    LeastLoaded,
    Outcome,
    Policy,
    RoundRobin,
    shared_prefixes,
    simulate,
    skewed,
)

ENGINES = 3
PLACES = 4
ROUTING_SECONDS = 1e-3  # of a prompt of 8,192 tokens, hashed, among 8 engines with 10^5 blocks together
SLOWER = 10  # times that a busy test machine may be


def plainly(router: Router, asked: Asked, among: Collection[int], now: float, avoid: Collection[int]) -> int | None:
    """The decision as the head of `router.py` has it, one engine after another."""
    loads, costs = router.loads, router.costs
    able = [each for each in among if loads[each].waiting + asked.choices <= loads[each].places]
    able = [each for each in able if each not in avoid] or able
    mean = sum(loads[each].recent(now) for each in among) / max(1, len(among))
    fair = [each for each in able if loads[each].recent(now) <= BALANCE * mean + SLACK] or able

    def cost(engine: int) -> tuple[float, int, int]:
        has = set[int]()
        for digest in asked.digests:
            if router.prefixes.matched([digest], [engine])[engine] == 0:
                break
            has.add(digest)
        queued = AGAIN * max(1, asked.tokens - len(has) * router.block) + loads[engine].queued
        return queued * costs.prefill + loads[engine].rows * costs.decode, loads[engine].rows, engine

    return min(fair, key=cost, default=None)


class Requests(RuleBasedStateMachine):
    """Requests that come, begin and end in any order, at engines that come and go."""

    def __init__(self) -> None:
        super().__init__()
        self.router = Router(ENGINES, 4)
        self.now, self.number = 0.0, 0
        self.open: dict[str, tuple[int, int]] = {}
        self.begun: set[str] = set()
        for engine in range(ENGINES):
            self.router.begin(engine, 8, PLACES)

    @rule(
        tokens=st.integers(1, 40), choices=st.integers(1, 5), among=st.sets(st.integers(0, ENGINES - 1)),
        avoid=st.sets(st.integers(0, ENGINES - 1)), seconds=st.floats(0, 100),
    )  # fmt: skip
    def route(self, tokens: int, choices: int, among: set[int], avoid: set[int], seconds: float) -> None:
        self.now += seconds
        self.number += 1
        id = str(self.number)
        waiting = [
            sum(count for each, (engine, count) in self.open.items() if engine == at and each not in self.begun)
            for at in range(ENGINES)
        ]
        able = {each for each in among if waiting[each] + choices <= PLACES}
        expected = plainly(self.router, Asked(tokens, range(tokens // 4), choices), among, self.now, avoid)
        found = self.router.route(id, Asked(tokens, range(tokens // 4), choices), among, self.now, avoid)
        if found is None:
            assert not able
            return
        assert found.engine == expected
        assert found.engine in able
        assert found.engine not in avoid or able <= avoid
        assert 1 <= found.uncached <= tokens == found.uncached + found.cached
        self.open[id] = (found.engine, choices)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        id = data.draw(st.sampled_from(sorted(self.open)))
        self.router.begun(id)
        self.begun.add(id)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        id = data.draw(st.sampled_from(sorted(self.open)))
        self.router.ended(id)
        del self.open[id]

    @rule(engine=st.integers(0, ENGINES - 1), digests=st.lists(st.integers(0, 9), unique=True))
    def tell(self, engine: int, digests: list[int]) -> None:
        self.router.prefixes.stored(engine, digests)

    @rule(engine=st.integers(0, ENGINES - 1))
    def restart(self, engine: int) -> None:
        for id in [id for id, (at, _) in self.open.items() if at == engine]:
            self.router.ended(id)
            del self.open[id]
        self.router.begin(engine, 8, PLACES)

    @invariant()
    def is_sound(self) -> None:
        self.router.check()
        assert set(self.router.routed) == set(self.open)


TestRequests = Requests.TestCase
TestRequests.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_a_prompt_goes_where_it_is_cached_until_waiting_costs_more() -> None:
    router = Router(2, 4, Costs(prefill=0.01, decode=0.0))
    for engine in range(2):
        router.begin(engine, 100, 100)
    router.prefixes.stored(1, [1, 2, 3])
    chosen = [router.route(str(at), Asked(16, [1, 2, 3], 1), range(2), 0.0) for at in range(7)]
    found = [(each.engine, each.cached) for each in chosen if each is not None]
    assert found == [(1, 12)] * 6 + [(0, 0)], "6 * 4 tokens wait there, and twice 4 more are as many as twice 16"


def test_equal_costs_go_to_the_engine_with_fewest_choices_and_then_to_the_first() -> None:
    router = Router(3, 4, Costs(prefill=1.0, decode=0.0))
    for engine in range(3):
        router.begin(engine, 100, 100)
    assert [router.route(str(at), Asked(1), range(3), 0.0) for at in range(3)] != [None] * 3
    assert [router.routed[str(at)].engine for at in range(3)] == [0, 1, 2]


def test_the_same_calls_give_the_same_decisions() -> None:
    trace = shared_prefixes(random.Random(3), 8, 8, 20.0)
    runs = [simulate(trace, 4, 64, ByCost(4, 64)) for _ in range(2)]
    assert runs[0] == runs[1]


POLICIES: dict[str, type[Policy]] = {"round robin": RoundRobin, "least loaded": LeastLoaded}


def compared(trace: list[object], blocks: int) -> dict[str, Outcome]:
    found = {name: simulate(trace, 4, blocks, policy(4)) for name, policy in POLICIES.items()}  # type: ignore[arg-type, call-arg]
    return found | {
        "cost": simulate(trace, 4, blocks, ByCost(4, blocks)),
        "one": simulate(trace, 1, 4 * blocks, RoundRobin(1)),
    }  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(3))
def test_prefixes_are_found_as_by_one_engine_with_all_blocks(seed: int) -> None:
    """64 prefixes, 8 requests each, on 4 engines that hold a third of them."""
    trace = shared_prefixes(random.Random(seed), 64, 8, 12.0)
    found = compared(list(trace), 64 * 18 // 3)
    assert found["cost"].hit_rate >= 0.95 * found["one"].hit_rate
    assert found["cost"].computed * 1.5 <= found["round robin"].computed
    assert found["cost"].computed * 1.5 <= found["least loaded"].computed
    assert found["cost"].p90 <= found["least loaded"].p90


@pytest.mark.parametrize("seed", range(3))
def test_a_hot_prefix_loads_no_engine_much_more_than_the_mean(seed: int) -> None:
    trace = skewed(random.Random(seed), 1500, 0.6, 12.0)
    found = compared(list(trace), 400)
    assert found["cost"].skew <= 1.3
    assert found["cost"].computed < found["round robin"].computed


def test_work_is_bounded_whatever_the_prefixes_are() -> None:
    """All requests of one prefix that one engine has: no engine has more than BALANCE times the mean, and SLACK."""
    router = Router(4, BLOCK)
    for engine in range(4):
        router.begin(engine, 100, 10**6)
    router.prefixes.stored(2, [1, 2, 3])
    for at in range(400):
        assert router.route(str(at), Asked(3 * BLOCK + 1, [1, 2, 3]), range(4), at * 0.01) is not None
        router.ended(str(at))
        recent = [load.recent(at * 0.01) for load in router.loads]
        each = (3 * BLOCK + 1) * router.costs.prefill + router.costs.output * router.costs.decode
        assert max(recent) <= BALANCE * sum(recent) / 4 + SLACK + each


def test_a_decision_takes_less_than_a_millisecond() -> None:
    """8 engines with 100,000 blocks, and a prompt of 8,192 tokens whose digests are made in this time."""
    router, draw = Router(8, 64), random.Random(0)
    for engine in range(8):
        router.begin(engine, 12_500, 10**6)
        router.prefixes.stored(engine, [draw.randrange(2**64) for _ in range(12_500)])
    key, prompt = block_digests.key_of(b"salt"), array("i", range(8192))
    router.prefixes.stored(3, block_digests.chain(key, prompt, 64)[:100])
    seconds = []
    for at in range(50):
        began = time.perf_counter()
        digests = block_digests.chain(key, prompt, 64)
        router.route(str(at), Asked(len(prompt), digests), range(8), at)
        seconds.append(time.perf_counter() - began)
        router.ended(str(at))
    assert min(seconds) <= ROUTING_SECONDS
    assert sorted(seconds)[len(seconds) // 2] <= SLOWER * ROUTING_SECONDS
