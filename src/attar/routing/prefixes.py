"""Cached blocks of several engines, by digest: how much of a prompt each engine has.

Engines tell of blocks that they stored and evicted. A prompt that was sent to an engine counts as cached there already,
until the engine has begun to answer: then it has told of its blocks. A prefix cache evicts from the end of a prompt. So
a prompt's blocks are counted from the first one, up to the first that an engine lacks.

Memory is bounded: an engine's stored digests by its number of blocks, and expected ones by the same number.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence


class PrefixIndex:
    """Digests of the blocks of `engines` engines, numbered from 0."""

    def __init__(self, engines: int) -> None:
        self._masks: dict[int, int] = {}  # bit i: engine i has the block
        self._expected_masks: dict[int, int] = {}
        self._expected: list[Counter[int]] = [Counter() for _ in range(engines)]  # by engine: prompts that bring it
        self._sizes = [0] * engines
        self._most = [0] * engines

    def __len__(self) -> int:
        return len(self._masks)

    def held(self, engine: int) -> int:
        """Return how many blocks an engine has told of."""
        return self._sizes[engine]

    def resize(self, engine: int, blocks: int) -> None:
        """Note the number of blocks that an engine's cache has."""
        self._most[engine] = blocks

    def stored(self, engine: int, digests: Iterable[int]) -> None:
        """Note blocks that an engine has now. More than its cache holds are ignored."""
        bit = 1 << engine
        for digest in digests:
            mask = self._masks.get(digest, 0)
            if not mask & bit and self._sizes[engine] < self._most[engine]:
                self._masks[digest] = mask | bit
                self._sizes[engine] += 1

    def evicted(self, engine: int, digests: Iterable[int]) -> None:
        """Note blocks that an engine has no more; unknown ones are ignored."""
        bit = 1 << engine
        for digest in digests:
            mask = self._masks.get(digest, 0)
            if mask & bit:
                self._sizes[engine] -= 1
                if mask == bit:
                    del self._masks[digest]
                else:
                    self._masks[digest] = mask & ~bit

    def clear(self, engine: int) -> None:
        """Forget the stored blocks of an engine. Linear in all blocks; for engines that have ended."""
        bit = 1 << engine
        self._masks = {digest: left for digest, mask in self._masks.items() if (left := mask & ~bit)}
        self._sizes[engine] = 0

    def expect(self, engine: int, digests: Sequence[int]) -> int:
        """Count blocks as an engine's, which will compute them; return how many there was room to note."""
        bit, expected = 1 << engine, self._expected[engine]
        room = max(0, self._most[engine] - len(expected))
        noted = digests[:room] if len(digests) > room else digests
        for digest in noted:
            expected[digest] += 1
            self._expected_masks[digest] = self._expected_masks.get(digest, 0) | bit
        return len(noted)

    def settle(self, engine: int, digests: Iterable[int]) -> None:
        """Undo `expect` for as many digests as it noted."""
        bit, expected = 1 << engine, self._expected[engine]
        for digest in digests:
            expected[digest] -= 1
            if expected[digest] <= 0:
                del expected[digest]
                left = self._expected_masks[digest] & ~bit
                if left:
                    self._expected_masks[digest] = left
                else:
                    del self._expected_masks[digest]

    def matched(self, digests: Sequence[int], engines: Iterable[int]) -> dict[int, int]:
        """Return for each of these engines how many first blocks of a prompt it has, or will have."""
        found = dict.fromkeys(engines, 0)
        alive = 0  # of all engines, those that have each block so far
        for count, digest in enumerate(digests):
            has = self._masks.get(digest, 0) | self._expected_masks.get(digest, 0)
            if not count:
                alive = has
            elif lost := alive & ~has:
                found.update((engine, count) for engine in _bits(lost) if engine in found)
                alive &= has
            if not alive:
                return found
        found.update((engine, len(digests)) for engine in _bits(alive) if engine in found)
        return found

    def check(self) -> None:
        """Assert that counts and masks agree. Linear: for tests."""
        for engine, size in enumerate(self._sizes):
            assert size == sum(mask >> engine & 1 for mask in self._masks.values()) <= self._most[engine]
            expected = {digest for digest, mask in self._expected_masks.items() if mask >> engine & 1}
            assert expected == set(self._expected[engine])
            assert all(count > 0 for count in self._expected[engine].values())
        assert all(self._masks.values())
        assert all(self._expected_masks.values())


def _bits(mask: int) -> Iterator[int]:
    """Yield the numbers of the bits that are set: far fewer than there are engines, as a rule."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low
