"""The second group of layers: those with a sliding window, whose blocks are released behind it.

Layers without a window have the blocks of `Scheduler.pool`, which the prefix tree's edges name. Layers with one have
blocks of a pool of their own, and each sequence a second table (`Sequence.sliding`). A place of that table is filled
when a step first writes it, and released when a step is committed behind which no row reads it. What stays in a
released place of the table is never read.

*Promises.* An admitted sequence is promised the most blocks that its window can touch; the rows of steps under way have
blocks besides, counted once for all sequences (`plan/sliding.py`). No more is promised than there is, so a running
sequence always gets its blocks, and nothing is preempted for this group's sake. Blocks that a step holds until its
commit (sources of copies, branches of drafts, blocks of a sequence that ended meanwhile) are `lent`.

*Prefixes.* The tree's edges are unchanged. Each of its blocks may have a block of this group *beside* it, with the
keys of the same tokens. A block that a sequence releases stays there, cached, until memory is needed; it is evicted
alone, which leaves a hole. A match ends at the greatest length whose window has no hole (`reach`), so the group that
has least decides. A block of the tree that is evicted takes the one beside it along. A sequence that computes what the
tree has already goes on using its own sliding block, and fills holes.

*Eviction* takes the block released longest ago, from one of two queues. A long prompt releases many blocks that no
request may ever ask for, while the windows at the ends of prompts and answers are few, and are where a next turn
begins. So blocks that a window has passed, and that no match has taken yet, queue apart (2Q; Johnson and Shasha 1994).
That queue goes first while it has at least one in `PASSED` of all blocks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from collections.abc import Sequence as List
from typing import NamedTuple

from attar.plan.sliding import SlidingLimits
from attar.scheduling.block_pool import CACHED, BlockPool
from attar.scheduling.prefix_cache import Match
from attar.scheduling.sequence import Sequence
from attar.scheduling.step_plan import Copy, StepPlan

PASSED = 4  # one in so many blocks may be cached for what no match has asked for


class Beside(NamedTuple):
    """The blocks of a sequence that is to be admitted, held: those of its match's window, and the ones behind it.

    Where the match ends inside a block, the first of these is a copy of `source`.
    """

    window: list[int]
    own: list[int]
    source: int | None = None


class SlidingBlocks:
    """The sliding group's blocks, over `pool`, for rows that read `window` positions.

    `step_rows` are the rows of all steps that may be under way together. Raises ValueError where the pool is too small
    for one sequence.
    """

    def __init__(self, pool: BlockPool, window: int, step_rows: int) -> None:
        self.pool, self.limits = pool, SlidingLimits(window, pool.size, step_rows)
        if pool.total < (least := self.limits.held + self.limits.of_steps):
            raise ValueError(f"a window of {window} tokens takes {least} blocks of {pool.size}: there are {pool.total}")
        self.lent = 0  # blocks that steps hold
        self.released = 0  # blocks that sequences have released behind their windows
        self._promised: dict[Sequence, int] = {}
        self._beside: dict[int, int] = {}  # a block of the tree, and that of this group
        self._tree: dict[int, int] = {}  # the reverse
        # Blocks without a holder, the first to be evicted first: passed by a window, and others.
        self._passed: OrderedDict[int, None] = OrderedDict()
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._matched: set[int] = set()  # blocks of the tree that a match has taken

    @property
    def unpromised(self) -> int:
        """Blocks that are neither promised nor lent."""
        return self.pool.total - self.limits.of_steps - sum(self._promised.values()) - self.lent

    @property
    def sequences(self) -> int:
        """Sequences of any length that can run at a time."""
        return (self.pool.total - self.limits.of_steps) // self.limits.held

    # ---- the prefix tree's blocks

    def beside(self, block: int) -> int | None:
        """Return the block of this group beside a block of the tree; None where there is none."""
        return self._beside.get(block)

    def reach(self, blocks: List[int], length: int) -> int:
        """Return the longest match of at most `length` tokens, in these blocks of the tree, whose window has no hole.

        It is `length`, or ends with a block.
        """
        while length:
            window = range(self.limits.first(length), self.pool.needed(length))
            hole = next((place for place in window if blocks[place] not in self._beside), None)
            if hole is None:
                return length
            length = hole * self.pool.size
        return 0

    def remember(self, sequence: Sequence, tree: BlockPool) -> None:
        """Put a sequence's sliding blocks beside those of its blocks that the tree has."""
        last = self.pool.needed(sequence.computed)
        pairs = zip(sequence.blocks[sequence.slid : last], sequence.sliding[sequence.slid :], strict=False)
        for block, own in pairs:
            if tree.kept(block) and block not in self._beside and not self.pool.kept(own):
                self.pool.keep([own])
                self._beside[block], self._tree[own] = own, block

    def forget(self, blocks: Iterable[int]) -> None:
        """Forget what lies beside blocks that the tree forgets."""
        for block in blocks:
            if (own := self._beside.pop(block, None)) is not None:
                del self._tree[own]
                self._uncache(own)
                self._matched.discard(own)
                self.pool.forget([own])

    # ---- sequences

    def admits(self, sequence: Sequence, copies: bool) -> bool:
        """Return whether a sequence can be promised its blocks, and lent one to copy from."""
        return self.limits.promised(sequence.longest) + copies <= self.unpromised

    def take(self, match: Match, tokens: int) -> Beside:
        """Hold the blocks of a match, and allocate those behind it for the first `tokens` tokens."""
        window = [self._beside[block] for block in match.blocks[self.limits.first(match.length) :]]
        source = None if match.source is None else self._beside[match.source]
        held = window if source is None else [*window, source]
        self._hold(held)
        self._matched |= set(held)
        try:
            own = self.allocate(self.pool.needed(tokens) - len(match.blocks))
        except BaseException:
            self.drop(held)
            raise
        return Beside(window, own, source)

    def give_back(self, beside: Beside) -> None:
        """Drop what `take` returned."""
        self.drop([*beside.window, *beside.own, *([] if beside.source is None else [beside.source])])

    def begin(self, step: StepPlan, sequence: Sequence, match: Match, beside: Beside) -> None:
        """Make these blocks those of an admitted sequence."""
        self._promised[sequence] = self.limits.promised(sequence.longest)
        sequence.slid = self.limits.first(match.length)
        sequence.sliding = [0] * sequence.slid + beside.window + beside.own
        if beside.source is not None:
            self.lend(step, [beside.source])
            step.sliding_copies.append(Copy(beside.source, beside.own[0], match.length % self.pool.size, sequence))

    def cover(self, sequence: Sequence, tokens: int) -> None:
        """Give a running sequence blocks for its first `tokens` tokens."""
        if (missing := self.pool.needed(tokens) - len(sequence.sliding)) > 0:
            sequence.sliding += self.allocate(missing)

    def slide(self, sequence: Sequence) -> None:
        """Release the blocks that no row reads any more once `computed` tokens are, and those of wrong drafts."""
        first, end = self.limits.first(sequence.computed), self.pool.needed(sequence.planned)
        if first > sequence.slid:
            self.drop(sequence.sliding[sequence.slid : first], passed=True)
            self.released += first - sequence.slid
            sequence.slid = first
        if len(sequence.sliding) > end:
            self.drop(sequence.sliding[end:])
            del sequence.sliding[end:]

    def release(self, sequence: Sequence, step: StepPlan | None) -> None:
        """Take all blocks of a sequence; a `step` that may use them drops them at its commit."""
        blocks = sequence.sliding[sequence.slid :]
        if step is None:
            self.drop(blocks)
        else:
            self.lend(step, blocks)
        sequence.sliding, sequence.slid = [], 0
        self._promised.pop(sequence, None)

    # ---- steps

    def lend(self, step: StepPlan, blocks: List[int]) -> None:
        """Leave held blocks to a step, which drops them at its commit."""
        step.sliding_held += blocks
        self.lent += len(blocks)

    def settle(self, step: StepPlan) -> None:
        """Drop what was lent to a step that is committed."""
        self.drop(step.sliding_held)
        self.lent -= len(step.sliding_held)

    # ---- blocks

    def allocate(self, n: int) -> list[int]:
        """Take n blocks; cached ones are evicted for them. There are n: they were promised, or are `unpromised`."""
        while self.pool.free < n:
            first = len(self._passed) * PASSED >= self.pool.total or not self._cached
            queue = self._passed if first else self._cached
            assert queue, "more blocks were promised than there are"
            self.forget([self._tree[next(iter(queue))]])
        return self.pool.allocate(n)

    def drop(self, blocks: List[int], passed: bool = False) -> None:
        """Remove a holder from each block. `passed` are those that a window leaves behind."""
        self.pool.drop(blocks)
        for block in blocks:
            if self.pool.kept(block) and not self.pool.holders(block):
                queue = self._passed if passed and block not in self._matched else self._cached
                queue[block] = None

    def _hold(self, blocks: List[int]) -> None:
        self.pool.hold(blocks)
        for block in blocks:
            self._uncache(block)

    def _uncache(self, block: int) -> None:
        self._passed.pop(block, None)
        self._cached.pop(block, None)

    def check(self, running: Iterable[Sequence], tree: BlockPool) -> None:
        """Assert every invariant of this module. Linear in the pool: for tests."""
        self.pool.check()
        assert set(self._promised) == set(running), "promised to a sequence that does not run, or not to one that does"
        # Blocks of a sequence that ended within a step, for rows of that step, are lent and counted as the steps' too.
        assert self.unpromised >= -self.limits.of_steps, "more is promised than there is"
        assert self._tree == {own: block for block, own in self._beside.items()}, "two blocks beside one"
        assert all(map(tree.kept, self._beside)), "beside a block that the tree does not have"
        states = self.pool.states()
        assert set(self._tree) == {own for own in range(self.pool.total) if self.pool.kept(own)}
        queued = [*self._passed, *self._cached]
        assert len(queued) == len(set(queued)), "a block is to be evicted twice"
        assert set(queued) == {block for block, state in enumerate(states) if state == CACHED}
        assert self._matched <= self._tree.keys(), "a match of what is not there"
        for sequence in self._promised:
            assert sequence.slid <= len(sequence.sliding)
            assert sequence.slid <= self.limits.first(sequence.computed), "a block that is still read was released"
            needed = self.pool.needed(sequence.planned)
            assert len(sequence.sliding) >= needed, "rows without a sliding block"
            assert sequence.under_way or len(sequence.sliding) == needed, "a sliding block of wrong drafts"
