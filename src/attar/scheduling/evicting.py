"""Eviction of keys within a sequence, on integers: blocks, and how many tokens have no slot any more.

`Eviction.cut` says before which token keys are dropped; a plan evicts when a sequence's next row is that token's
(`Sequence.due`). Slots are then fewer than positions by `Sequence.dropped`.

*Sinks and a window.* A whole block of tokens is dropped each time. So every other token keeps its place within a block,
and the sequence's table is shifted by one. The first block of a table holds the sinks, in its first slots: they are
written there anew, turned from the block in which they were first computed (`Sequence.pristine`), which stays. The old
first block becomes the last: from the second eviction on no block is taken or given back.

*Behind a prompt.* A policy that drops keys once takes fresh blocks for those that it keeps, and gives up the prompt's:
each head keeps other tokens, so that no block stays what it was.

*Shared blocks.* The prefix tree keeps the blocks of tokens before the first eviction, which are those of any request.
An eviction writes no block of the tree: the first one takes copies, and gives up all shared blocks but the first.
Holders therefore never increase along a path of the tree. Tokens behind an eviction never go into the tree.

*Room.* A sequence may need its table twice at its first eviction (`reserve`). One that is not preempted any more gets
these blocks when it is admitted.
"""

from __future__ import annotations

from collections.abc import Callable

from attar.scheduling.block_pool import BlockPool
from attar.scheduling.sequence import Sequence
from attar.scheduling.step_plan import Copy, Evicted, StepPlan


def reserve(sequence: Sequence, pool: BlockPool) -> int:
    """Return the blocks that evictions take besides a table, at most, of a sequence that has dropped nothing."""
    if sequence.eviction is None or sequence.longest <= sequence.cut:
        return 0
    if sequence.eviction.once:
        return pool.needed(sequence.eviction.budget + sequence.longest - sequence.prompt)
    return pool.needed(sequence.eviction.budget)


def needed(sequence: Sequence, pool: BlockPool) -> int:
    """Return the fresh blocks that the eviction due now takes."""
    assert sequence.due
    assert sequence.eviction is not None
    if sequence.eviction.once:
        return max(len(sequence.spare), pool.needed(sequence.eviction.budget + sequence.expected - sequence.prompt))
    if sequence.dropped:
        return 0
    return 1 + sum(_shared(block, pool) for block in sequence.blocks[1:])


def evict(step: StepPlan, sequence: Sequence, pool: BlockPool, take: Callable[[int], list[int]]) -> None:
    """Evict before the sequence's next row, in `step`; `take` allocates blocks, and may raise before anything is
    changed."""
    fresh = take(needed(sequence, pool))
    assert sequence.eviction is not None
    if sequence.eviction.once:
        kept = fresh[: pool.needed(sequence.eviction.budget)]
        sequence.dropped = sequence.prompt - sequence.eviction.budget
        step.evictions.append(Evicted(sequence, tuple(sequence.blocks), tuple(kept), sequence.dropped))
        step.held += sequence.blocks
        sequence.blocks = fresh
        return
    first, *rest = sequence.blocks
    if sequence.dropped:
        sequence.blocks = [*rest, first]
    else:
        assert len(sequence.blocks) == pool.needed(sequence.planned), "blocks behind an eviction"
        for place, block in enumerate(rest):
            if _shared(block, pool):
                rest[place] = fresh.pop()
                step.copies.append(Copy(block, rest[place], pool.size, sequence))  # whose commit releases the source
        sequence.pristine, sequence.blocks = [first], [*rest, *fresh]
        pool.drop(sequence.spare)  # it needs no more from now on
        sequence.spare = []
    sequence.dropped += pool.size
    step.evictions.append(Evicted(sequence, tuple(sequence.pristine), (sequence.blocks[0],), sequence.dropped))


def _shared(block: int, pool: BlockPool) -> bool:
    return pool.kept(block) or pool.holders(block) > 1
