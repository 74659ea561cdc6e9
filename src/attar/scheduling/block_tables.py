"""The blocks of running sequences: how a sequence gets them, what the prefix tree keeps of them, and their release.

A sequence's table is `Sequence.blocks`. Layers with a sliding window have a table beside it (`sliding.py`). Nothing
here decides which sequence runs: the caller asks for blocks that are there.

*Sparse attention.* Rows of outputs may read few keys, and rows of prompts read all. So the tree has tokens of outputs
only up to the length at which every row reads all (`whole`), and a sequence that starts over takes no more from it.
With sparse prefill (`prefill`), the last rows of a prompt read all, and would not in the middle of a longer one. So the
tree has no tokens from there on, and a prompt takes no others for its last.

*Drafts.* A draft takes a block only where enough stay free for what is certain. Drafts may be a tree
(`draft_tree.py`), whose branches take blocks of their own for the step. If the tokens follow such a branch, the
sequence gets that branch's blocks for its own: no key is moved.

*Steps under way.* A step may still use blocks that a sequence gives up. The step holds them until its commit.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Collection

from attar.faults import point
from attar.kv.sparse_prefill import SparsePrefill
from attar.plan.fit import kept_free
from attar.scheduling import evicting
from attar.scheduling.block_pool import BlockPool
from attar.scheduling.draft_tree import DraftTree, branches, cut, depth_of, depths
from attar.scheduling.fetching import Kept
from attar.scheduling.prefix_cache import PrefixCache
from attar.scheduling.sequence import Sequence, Status
from attar.scheduling.sliding import SlidingBlocks
from attar.scheduling.step_plan import StepPlan

ADAPTER = 4  # bytes of a salt that name the adapter (`block_digests.salt_of`)


class BlockTables:
    """The tables of all sequences over one pool, and the prefix tree that shares their blocks.

    `headroom` is the part of the pool that drafts leave free. `whole` is the greatest length at which rows of outputs
    read every key; None where they always do. `prefill` says which rows of prompts read few keys; None where none does.
    With `sliding`, which is `cache.beside`, layers with a sliding window have blocks of their own.
    """

    def __init__(
        self,
        pool: BlockPool,
        cache: PrefixCache,
        headroom: float,
        whole: int | None = None,
        sliding: SlidingBlocks | None = None,
        prefill: SparsePrefill | None = None,
    ) -> None:
        assert cache.beside is sliding
        self.pool, self.cache, self.sliding = pool, cache, sliding
        self._headroom, self._whole, self._prefill = headroom, whole, prefill
        self.kept: deque[Kept] | None = None
        """Beginnings that went into the tree, the newest last; its reader removes them. None: they are not wanted."""

    # ---- what sequences share

    def alike(self, sequence: Sequence, length: int) -> int:
        """Return how many of the first `length` tokens have keys and values that any sequence with this prefix may use.

        Output tokens whose rows read few keys are excluded, because as part of a prompt they would read all. So are
        tokens at the end of a prompt that would read few keys in the middle of a longer one, and tokens behind an
        eviction.
        """
        if sequence.eviction is not None:
            length = min(length, sequence.eviction.plain(sequence.prompt))
        if self._whole is not None:
            length = min(length, max(sequence.prompt, self._whole))
        return length if self._prefill is None else min(length, self._prefill.alike(sequence.prompt))

    def reusable(self, sequence: Sequence) -> int:
        """Return how many of a sequence's first tokens may come from the tree, where it bypasses nothing."""
        alike = self.alike(sequence, len(sequence.tokens) - 1)  # the last has to be run, for its logits
        return alike if sequence.eviction is None else min(alike, sequence.eviction.reusable(sequence.prompt))

    def keep(self, sequence: Sequence, step: StepPlan | None) -> None:
        """Put the sequence's computed tokens into the tree, as far as others can use them: before it drops any. `step`
        is the last that may use its blocks, where one is under way."""
        if sequence.dropped:
            return
        tokens = sequence.tokens[: self.alike(sequence, sequence.computed)]
        self.cache.insert(sequence.salt, tokens, sequence.blocks, self._let_go(step))
        if self.sliding is not None:
            self.sliding.remember(sequence, self.pool)
        whole = len(tokens) - len(tokens) % self.pool.size
        if self.kept is not None and whole > sequence.offered and not sequence.images:  # whose ids are this process's
            sequence.offered = whole
            self.kept.append(Kept(sequence.cache_salt[ADAPTER:], sequence.salt, tokens[:whole]))

    # ---- what a sequence gets

    def allocate(self, n: int) -> list[int]:
        """Take n blocks; the tree evicts some for them where too few are free."""
        if n > self.pool.free:
            self.cache.evict(n - self.pool.free)
        return self.pool.allocate(n)

    def missing(self, sequence: Sequence) -> int:
        """Return how many blocks the sequence lacks for all its expected tokens; negative where it has more."""
        return self.pool.needed(sequence.slots(sequence.expected)) - len(sequence.blocks)

    def cover(self, sequence: Sequence, tokens: int) -> None:
        """Give the sequence blocks of layers with a sliding window for its first `tokens` tokens."""
        if self.sliding is not None:
            self.sliding.cover(sequence, tokens)

    def evict(self, step: StepPlan, sequence: Sequence) -> int:
        """Evict before the next row of a sequence, and return how many tokens lost their slots. There are blocks for
        it."""
        before = sequence.dropped
        evicting.evict(step, sequence, self.pool, lambda n: self._taken(sequence, n))
        sequence.evicted += sequence.dropped - before
        return sequence.dropped - before

    def drafts(self, sequence: Sequence, budget: int) -> tuple[tuple[int, ...], DraftTree | None]:
        """Return the drafts that the sequence's step takes, with blocks for all of them; the others are dropped.

        They are as many as the budget allows, none past the last token that the sequence may run or past its horizon.
        No sequence loses a block for them. Blocks of drafts that turn out wrong stay: the next tokens use them.
        """
        drafts, parents = sequence.drafts, sequence.parents
        sequence.drafts, sequence.parents = (), ()
        longest = sequence.longest if not sequence.horizon else min(sequence.longest, sequence.horizon)
        drafts, parents = cut(drafts, parents, budget, min(longest, sequence.cut) - sequence.expected)
        if not drafts or sequence.status is not Status.DECODE:
            return (), None
        assert len(sequence.tokens) == sequence.expected, "drafts behind a token that is not known"
        missing = self.pool.needed(sequence.slots(sequence.expected + depth_of(drafts, parents))) - len(sequence.blocks)
        if missing > 0:
            if self._affordable(missing):
                sequence.blocks += self.allocate(missing)
            else:
                room = len(sequence.blocks) * self.pool.size - sequence.slots(sequence.expected)
                drafts, parents = cut(drafts, parents, budget, room)
        self.cover(sequence, sequence.expected + depth_of(drafts, parents))
        return (drafts, None) if not parents else self._branches(sequence, drafts, parents)

    def take_branch(self, step: StepPlan, sequence: Sequence, tree: DraftTree, row: int) -> None:
        """Give the sequence the blocks of the branch that holds the last row that stays; the step releases its own."""
        branch = next(i for i, rows in enumerate(branches(tree.parents)) if row in rows)
        for place, block in enumerate(tree.blocks[branch - 1] if branch else (), tree.first):
            step.held.remove(block)
            step.held += sequence.blocks[place : place + 1]
            sequence.blocks[place : place + 1] = [block]
        for place, block in enumerate(tree.sliding[branch - 1] if branch and tree.sliding else (), tree.first):
            step.sliding_held.remove(block)
            step.sliding_held += sequence.sliding[place : place + 1]
            sequence.sliding[place : place + 1] = [block]

    def hold_branches(self, step: StepPlan, tree: DraftTree) -> None:
        """Leave the blocks of a tree's branches to the step that runs it."""
        step.held += itertools.chain.from_iterable(tree.blocks)
        if self.sliding is not None:
            self.sliding.lend(step, list(itertools.chain.from_iterable(tree.sliding)))

    # ---- what it gives back

    def slide(self, sequence: Sequence) -> None:
        """Release the blocks behind the windows of its layers that have one."""
        if self.sliding is not None:
            self.sliding.slide(sequence)

    def release(self, sequence: Sequence, step: StepPlan | None, keep: bool = True) -> None:
        """Take the sequence's blocks away; `step` is as for `keep`. With `keep` the tree remembers their tokens; if
        that raises, only the tree misses them."""
        try:
            if keep:
                point("scheduler.release", sequence.id)
                self.keep(sequence, step)
        finally:
            self._let_go(step)([*sequence.blocks, *sequence.pristine, *sequence.spare])
            if self.sliding is not None:
                self.sliding.release(sequence, step)
            sequence.drafts, sequence.parents = (), ()
            sequence.blocks, sequence.computed, sequence.planned, sequence.inflight_tokens = [], 0, 0, 0
            sequence.pristine, sequence.spare, sequence.dropped = [], [], 0

    def settle(self, step: StepPlan) -> None:
        """Release what a step held that is committed."""
        self.pool.drop(step.held)
        if self.sliding is not None:
            self.sliding.settle(step)

    def check(self, running: Collection[Sequence]) -> None:
        """Assert the invariants of the running sequences' second tables. For tests."""
        if self.sliding is not None:
            self.sliding.check(running, self.pool)

    def _let_go(self, step: StepPlan | None) -> Callable[[list[int]], None]:
        """Return the function that takes blocks given up: a step that may still use them holds them."""
        return self.pool.drop if step is None else step.held.extend

    def _taken(self, sequence: Sequence, n: int) -> list[int]:
        """Take n blocks, first those that the sequence has in reserve."""
        own = sequence.spare[:n]
        found = own + self.allocate(n - len(own))
        del sequence.spare[:n]
        return found

    def _branches(
        self, sequence: Sequence, drafts: tuple[int, ...], parents: tuple[int, ...]
    ) -> tuple[tuple[int, ...], DraftTree | None]:
        """Return a tree of drafts with blocks for its branches; the chain of its first branch where they are short."""
        own, *others = branches(parents)
        first, of = sequence.expected // self.pool.size, depths(parents)
        needed = [self.pool.needed(sequence.expected + of[rows[-1]]) - first for rows in others]
        count = sum(needed)
        if not self._affordable(count) or (self.sliding is not None and count > self.sliding.unpromised):
            return drafts[: len(own) - 1], None
        allocated, beside = self.allocate(count), list[int]()
        if self.sliding is not None:
            try:
                beside = self.sliding.allocate(count)
            except BaseException:
                self.pool.drop(allocated)
                raise
        return drafts, DraftTree(parents, first, _divided(allocated, needed), _divided(beside, needed))

    def _affordable(self, blocks: int) -> bool:
        """Return whether drafts may have so many blocks: those kept free are for what is certain."""
        return blocks + kept_free(self.pool.total, self._headroom) <= self.pool.available


def _divided(blocks: list[int], counts: list[int]) -> tuple[tuple[int, ...], ...]:
    """Return the blocks as tuples of these lengths; nothing where there are no blocks."""
    each = iter(blocks)
    return tuple(tuple(itertools.islice(each, n)) for n in counts) if blocks else ()
