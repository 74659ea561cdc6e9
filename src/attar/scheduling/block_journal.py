"""The journal of the prefix tree's whole blocks, as digests: what was stored and evicted since it was last taken.

It holds the net change only. A block that was stored and evicted in between is not told of at all. So both lists
together never have more digests than twice the pool's blocks.
"""

from __future__ import annotations

from collections.abc import Iterable


class BlockJournal:
    """Stored and evicted digests, in order. Those that were taken count as told."""

    def __init__(self) -> None:
        self._stored: dict[int, None] = {}
        self._evicted: dict[int, None] = {}

    def __bool__(self) -> bool:
        return bool(self._stored or self._evicted)

    def store(self, digests: Iterable[int]) -> None:
        """Note that the tree gained these blocks."""
        for digest in digests:
            if digest in self._evicted:
                del self._evicted[digest]
            else:
                self._stored[digest] = None

    def evict(self, digests: Iterable[int]) -> None:
        """Note that the tree lost these blocks."""
        for digest in digests:
            if digest in self._stored:
                del self._stored[digest]
            else:
                self._evicted[digest] = None

    def take(self) -> tuple[list[int], list[int]]:
        """Return the digests stored and evicted since the last call."""
        stored, evicted = list(self._stored), list(self._evicted)
        self._stored.clear()
        self._evicted.clear()
        return stored, evicted
