"""Fair sharing of the engine's queue: no API key can fill it and keep the others out.

A choice takes a place when it is sent to the engine. It gives the place back at its first event, a token or its end. So
a choice whose prompt is being computed still counts as waiting; the server is not told when that begins.

With several keys two rules hold for a queue of `size` places. Up to half of it is reserved in equal parts of whole
places, one for each key: a key always gets in within its part. Where m keys wait, each may have size / m places, or the
choices of one prompt where there is room for them. So a key alone takes what the others' parts leave; when others come,
it gets no more until it is down to its share. A key that would exceed its share is refused; a waiting choice is never
evicted. With more keys than half of the places there are no parts, and a key may have to wait for a free place.

With one key or none, all places are its own, and `slots` more: as many as may still begin to run, whose prompts are
being computed, or will be in the next step. The engine would refuse any beyond that, but only at the end of its step. A
refusal here is immediate.
"""

from __future__ import annotations


class FairQueue:
    """Waiting choices by key. `keys` is the number of keys, each known by its salt; `slots`, of choices that run."""

    def __init__(self, keys: int = 0) -> None:
        self.keys, self.size, self.slots = keys, 0, 0
        self.running = 0
        """Choices that have had an event and not ended, preempted ones included."""
        self._waiting: dict[bytes, int] = {}

    @property
    def total(self) -> int:
        """Places that are taken."""
        return sum(self._waiting.values())

    @property
    def most(self) -> int:
        """Places that a key may have while no other waits."""
        return self.size if self.keys < 2 else self.size - self._kept * (self.keys - 1)

    @property
    def _kept(self) -> int:
        """Places reserved for each key; 0 where there are more keys than half of the places."""
        return self.size // (2 * self.keys)

    def waiting(self, key: bytes) -> int:
        """Return the number of places that a key has."""
        return self._waiting.get(key, 0)

    def fit(self, key: bytes, count: int) -> bool:
        """Return whether `count` more choices of a key may wait. Without several keys the engine may still refuse."""
        if self.keys < 2:
            return self.total + count <= self.size + max(0, self.slots - self.running)
        kept, own = self._kept, self.waiting(key) + count
        others = [taken for each, taken in self._waiting.items() if each != key]
        owed = kept * (self.keys - 1) - sum(min(kept, taken) for taken in others)
        share = max(kept, self.size // (1 + len(others)), count)  # all choices of a prompt wait together
        return self.total + count + owed <= self.size and own <= share

    def take(self, key: bytes, count: int) -> None:
        """Take `count` places for a key; `fit` must have allowed them."""
        self._waiting[key] = self.waiting(key) + count

    def give(self, key: bytes, count: int) -> None:
        """Give `count` places of a key back."""
        left = self.waiting(key) - count
        assert left >= 0, "a place was given back twice"
        if left:
            self._waiting[key] = left
        else:
            self._waiting.pop(key, None)
