"""The block pool: states follow from owners, whatever is done in whatever order."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from attar.scheduling.block_pool import ACTIVE, CACHED, FREE, BlockPool

BLOCKS = 6


class Pool(RuleBasedStateMachine):
    """Against two plain dictionaries: how often each block is held, and whether it is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(BLOCKS, 4)
        self.held = dict.fromkeys(range(BLOCKS), 0)
        self.kept = dict.fromkeys(range(BLOCKS), False)

    def used(self) -> list[int]:
        return [block for block in range(BLOCKS) if self.held[block] or self.kept[block]]

    @rule(data=st.data())
    def allocate(self, data: st.DataObject) -> None:
        unused = set(range(BLOCKS)) - set(self.used())
        blocks = self.pool.allocate(data.draw(st.integers(0, len(unused))))
        assert len(set(blocks)) == len(blocks)
        assert unused.issuperset(blocks)
        self.held.update(dict.fromkeys(blocks, 1))

    @precondition(lambda self: self.used())
    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(self.used()))
        self.pool.hold([block])
        self.held[block] += 1

    @precondition(lambda self: any(self.held.values()))
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from([block for block in self.held if self.held[block]]))
        self.pool.drop([block])
        self.held[block] -= 1

    @precondition(lambda self: any(self.held[block] and not self.kept[block] for block in self.held))
    @rule(data=st.data())
    def keep(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from([b for b in self.held if self.held[b] and not self.kept[b]]))
        self.pool.keep([block])
        self.kept[block] = True

    @precondition(lambda self: any(self.kept.values()))
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from([block for block in self.kept if self.kept[block]]))
        self.pool.forget([block])
        self.kept[block] = False

    @invariant()
    def agrees(self) -> None:
        pool = self.pool
        pool.check()
        states = [ACTIVE if self.held[b] else CACHED if self.kept[b] else FREE for b in range(BLOCKS)]
        assert list(pool.states()) == states
        assert [pool.free, pool.active, pool.cached] == [states.count(state) for state in (FREE, ACTIVE, CACHED)]
        assert pool.available == BLOCKS - pool.active
        assert [pool.holders(b) for b in range(BLOCKS)] == list(self.held.values())
        assert [pool.kept(b) for b in range(BLOCKS)] == list(self.kept.values())


TestPool = Pool.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_the_last_block_freed_is_the_first_taken() -> None:
    pool = BlockPool(4, 16)
    a, b, c = pool.allocate(3)
    assert (a, b, c) == (0, 1, 2)
    pool.drop([a, c])
    assert pool.allocate(3) == [c, a, 3]


def test_what_would_corrupt_the_pool_is_an_error() -> None:
    pool = BlockPool(2, 16)
    (block,) = pool.allocate(1)
    for wrong in (
        lambda: pool.allocate(2),
        lambda: pool.hold([1]),
        lambda: pool.keep([1]),
        lambda: pool.forget([block]),
        lambda: pool.drop([1]),
    ):
        with pytest.raises(AssertionError):
            wrong()
    pool.keep([block])
    with pytest.raises(AssertionError):
        pool.keep([block])


def test_blocks_needed() -> None:
    pool = BlockPool(1, 16)
    assert [pool.needed(tokens) for tokens in (0, 1, 16, 17, 32)] == [0, 1, 1, 2, 2]


@pytest.mark.parametrize("blocks,size", [(0, 16), (-1, 16), (4, 0)])
def test_an_empty_pool_is_refused(blocks: int, size: int) -> None:
    with pytest.raises(ValueError, match="at least one block"):
        BlockPool(blocks, size)
