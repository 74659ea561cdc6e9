"""The index of cached blocks against sets, one for each engine."""

from __future__ import annotations

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from attar.routing.prefixes import PrefixIndex

ENGINES, MOST = 3, 6
ENGINE = st.integers(0, ENGINES - 1)
DIGESTS = st.lists(st.integers(0, 9), max_size=6, unique=True)


class Index(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex(ENGINES)
        self.sets: list[set[int]] = [set() for _ in range(ENGINES)]
        self.expected: list[Counter[int]] = [Counter() for _ in range(ENGINES)]
        self.noted: list[tuple[int, list[int]]] = []
        for engine in range(ENGINES):
            self.index.resize(engine, MOST)

    @rule(engine=ENGINE, digests=DIGESTS)
    def store(self, engine: int, digests: list[int]) -> None:
        self.index.stored(engine, digests)
        for digest in digests:
            if len(self.sets[engine]) < MOST:
                self.sets[engine].add(digest)

    @rule(engine=ENGINE, digests=DIGESTS)
    def evict(self, engine: int, digests: list[int]) -> None:
        self.index.evicted(engine, digests)
        self.sets[engine] -= set(digests)

    @rule(engine=ENGINE)
    def clear(self, engine: int) -> None:
        self.index.clear(engine)
        self.sets[engine].clear()

    @rule(engine=ENGINE, digests=DIGESTS)
    def expect(self, engine: int, digests: list[int]) -> None:
        noted = digests[: self.index.expect(engine, digests)]
        self.expected[engine].update(noted)
        self.noted.append((engine, noted))
        assert len(self.expected[engine]) <= MOST, "more than an engine can keep"

    @precondition(lambda self: self.noted)
    @rule(data=st.data())
    def settle(self, data: st.DataObject) -> None:
        engine, noted = self.noted.pop(data.draw(st.integers(0, len(self.noted) - 1)))
        self.index.settle(engine, noted)
        self.expected[engine] -= Counter(noted)

    @rule(digests=DIGESTS, engines=st.sets(ENGINE))
    def match(self, digests: list[int], engines: set[int]) -> None:
        found = self.index.matched(digests, engines)
        for engine in engines:
            known = self.sets[engine] | set(self.expected[engine])
            assert found[engine] == next((at for at, each in enumerate(digests) if each not in known), len(digests))
        assert set(found) == engines

    @invariant()
    def is_sound(self) -> None:
        self.index.check()


TestIndex = Index.TestCase
TestIndex.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
