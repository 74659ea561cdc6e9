"""The pool of cache blocks, as integers: each block is free, active or cached.

A block is memory for the keys and values of `size` tokens in every layer of a group. Two kinds of owners are counted:

* *holders*: running sequences that read or write the block, one count each;
* the *keeper*: the node of the prefix tree that knows the block's tokens. A block has at most one.

The owners determine its state. Without either it is **free**. With a holder it is **active**, kept or not. Kept without
a holder it is **cached**: useful if its tokens are asked for again, and evicted from the tree as soon as memory is
needed. So free + cached is exactly the number of blocks that can be allocated, and both are counted, never searched
for.

A block is free within the call that removes its last owner; no sweep comes later. The last one freed is the first one
taken, because it may still be in the processor's caches; it also makes every run repeatable.

One pool is one group of layers whose blocks come and go together. Layers with a sliding window may be a second pool
(`sliding.py`). Blocks received from another process are allocated here, too (`fetching.py`).
"""

from __future__ import annotations

from collections.abc import Iterable

from attar.faults import point

FREE, ACTIVE, CACHED = 0, 1, 2


class BlockPool:
    """`blocks` blocks, numbered from 0, of `size` tokens each. Raises ValueError where there would be none."""

    def __init__(self, blocks: int, size: int) -> None:
        if blocks < 1 or size < 1:
            raise ValueError(f"a pool needs at least one block of at least one token, not {blocks} of {size}")
        self.size, self._holders = size, [0] * blocks
        self._kept = bytearray(blocks)
        self._states = bytearray(blocks)  # FREE, ACTIVE or CACHED, from the two above
        self._counts = [blocks, 0, 0]  # blocks in each state
        self._free = list(range(blocks))[::-1]

    @property
    def total(self) -> int:
        return len(self._states)

    @property
    def free(self) -> int:
        return self._counts[FREE]

    @property
    def active(self) -> int:
        return self._counts[ACTIVE]

    @property
    def cached(self) -> int:
        return self._counts[CACHED]

    @property
    def available(self) -> int:
        """Blocks that can be allocated after full eviction: free and cached ones."""
        return self._counts[FREE] + self._counts[CACHED]

    def states(self) -> bytes:
        """Return one byte a block: FREE, ACTIVE or CACHED."""
        return bytes(self._states)

    def holders(self, block: int) -> int:
        return self._holders[block]

    def kept(self, block: int) -> bool:
        return bool(self._kept[block])

    def needed(self, tokens: int) -> int:
        """Return the number of blocks that `tokens` tokens fill."""
        return -(-tokens // self.size)

    def allocate(self, n: int) -> list[int]:
        """Take n free blocks, each with one holder. The caller has made sure that there are n."""
        point("pool.allocate")
        assert n <= len(self._free), f"{n} blocks asked for, {len(self._free)} free"
        blocks = [self._free.pop() for _ in range(n)]
        for block in blocks:
            self._holders[block] = 1
            self._settle(block)
        return blocks

    def hold(self, blocks: Iterable[int]) -> None:
        """Add a holder to each block. A free block cannot be held: it has to be allocated."""
        point("pool.hold")
        for block in blocks:
            assert self._states[block] != FREE, f"block {block} is free"
            self._holders[block] += 1
            self._settle(block)

    def drop(self, blocks: Iterable[int]) -> None:
        """Remove a holder from each block."""
        for block in blocks:
            assert self._holders[block] > 0, f"nobody holds block {block}"
            self._holders[block] -= 1
            self._settle(block)

    def keep(self, blocks: Iterable[int]) -> None:
        """Mark the blocks as kept by the tree. Its caller holds them."""
        for block in blocks:
            assert self._states[block] != FREE, f"block {block} is free"
            assert not self._kept[block], f"block {block} is in the tree already"
            self._kept[block] = True
            self._settle(block)

    def forget(self, blocks: Iterable[int]) -> None:
        """Mark the blocks as no longer kept by the tree."""
        for block in blocks:
            assert self._kept[block], f"block {block} is not in the tree"
            self._kept[block] = False
            self._settle(block)

    def _settle(self, block: int) -> None:
        state = ACTIVE if self._holders[block] else CACHED if self._kept[block] else FREE
        before = self._states[block]
        if state != before:
            self._states[block] = state
            self._counts[before] -= 1
            self._counts[state] += 1
            if state == FREE:
                self._free.append(block)

    def check(self) -> None:
        """Assert every invariant of this module. Linear in the pool: for tests."""
        for block, (holders, kept, state) in enumerate(zip(self._holders, self._kept, self._states, strict=True)):
            assert holders >= 0, f"block {block} has {holders} holders"
            assert state == (ACTIVE if holders else CACHED if kept else FREE), f"block {block} is in the wrong state"
        assert self._counts == [self._states.count(state) for state in (FREE, ACTIVE, CACHED)], "counts are off"
        assert len(self._free) == len(set(self._free)), "a block is free twice"
        assert all(self._states[block] == FREE for block in self._free), "a block in use is on the free list"
        assert len(self._free) == self.free, "a free block is missing from the free list"
