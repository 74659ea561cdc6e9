"""Changes of an engine's prefix cache, numbered, so that a reader who lost its connection goes on where it was.

Memory is bounded: the present blocks by the cache itself, and past changes by MAX_KEPT digests. A reader that lags
further behind gets all present blocks instead. So no reader has a queue of its own.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import deque

from attar.protocol import block_digests
from attar.protocol.messages import CachedBlocks

MAX_KEPT = 1 << 17  # digests in past changes


class Journal:
    """The changes of one engine's cache after another. `seq` is the number of the last one; `epoch` names the engine,
    whose changes began at 0. `changed` is set, and replaced, with each change."""

    def __init__(self, kept: int = MAX_KEPT) -> None:
        self.epoch, self.seq = secrets.token_hex(8), 0
        self.blocks: set[int] = set()
        self.changed = asyncio.Event()
        self._most, self._kept = kept, 0
        self._past: deque[tuple[int, CachedBlocks]] = deque()

    def begin(self) -> None:
        """Begin anew, for another engine: nothing is cached."""
        self.epoch, self.seq = secrets.token_hex(8), 0
        self.blocks.clear()
        self._forget()
        self._wake()

    def take(self, told: CachedBlocks) -> None:
        """Take a change that the engine told. Raises ValueError for one that is not of digests."""
        stored, evicted = block_digests.unpacked(told.stored), block_digests.unpacked(told.evicted)
        self.seq += 1
        if told.whole:
            self.blocks.clear()
            self._forget()
        else:
            self._past.append((self.seq, told))
            self._kept += len(stored) + len(evicted)
        self.blocks.difference_update(evicted)
        self.blocks.update(stored)
        while self._kept > self._most:
            _, oldest = self._past.popleft()
            self._kept -= (len(oldest.stored) + len(oldest.evicted)) // block_digests.BYTES
        self._wake()

    def since(self, epoch: str, seq: int) -> list[CachedBlocks] | None:
        """Return the changes after number `seq` of an engine; None where they are not known any more."""
        first = self.seq - len(self._past)  # number of the last forgotten change
        if epoch != self.epoch or not first <= seq <= self.seq:
            return None
        return [told for number, told in self._past if number > seq]

    def whole(self) -> CachedBlocks:
        """Return all present blocks."""
        return CachedBlocks(block_digests.packed(self.blocks), whole=True)

    def _forget(self) -> None:
        self._past.clear()
        self._kept = 0

    def _wake(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()
