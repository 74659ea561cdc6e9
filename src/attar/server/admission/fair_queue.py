"""Places in the engine's queue, as API keys share them: none can fill it and keep the others out.

A choice takes a place when it is sent to the engine and gives it back when the first is heard of it, its token or its
end. So what a prompt is being computed for still counts as waiting; nobody here is told when that begins.

With several keys two things hold of a queue of `size` places. Up to half of it is kept in equal parts of whole places,
one for each key: a key always gets in with as many as are within its part. And where m keys wait, each may have
size / m, or the choices of one prompt where there is room for them: so one alone takes what the others' parts leave,
and when others come, it gets no more until it is down to its share. A key that would have more is refused; nobody who
waits is ever sent away. Where there are more keys than half of the places there are no parts, and a key may have to
wait until a place comes free.

One key, or none, has all, and may have more waiting than there are places: as many as may still begin to run (`slots`),
whose prompts are being computed, or will be in the step after this one. Beyond that the engine would refuse it, but
only when it has come to the end of its step. What is refused here is known at once.
"""

from __future__ import annotations


class Places:
    """Who waits. `keys` is how many there are that could ask, each known by its salt; `slots`, how many can run."""

    def __init__(self, keys: int = 0) -> None:
        self.keys, self.size, self.slots = keys, 0, 0
        self.running = 0
        """Choices that have been heard of and not ended, those that gave way among them."""
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
        """Places that are kept for each key; 0 where there are more keys than half of the places."""
        return self.size // (2 * self.keys)

    def waiting(self, key: bytes) -> int:
        """Places that a key has."""
        return self._waiting.get(key, 0)

    def fit(self, key: bytes, count: int) -> bool:
        """Whether so many more of a key may wait. Without several keys the engine may still say no."""
        if self.keys < 2:
            return self.total + count <= self.size + max(0, self.slots - self.running)
        kept, own = self._kept, self.waiting(key) + count
        others = [taken for each, taken in self._waiting.items() if each != key]
        owed = kept * (self.keys - 1) - sum(min(kept, taken) for taken in others)
        share = max(kept, self.size // (1 + len(others)), count)  # all choices of a prompt wait together
        return self.total + count + owed <= self.size and own <= share

    def take(self, key: bytes, count: int) -> None:
        """So many more wait: those that fit."""
        self._waiting[key] = self.waiting(key) + count

    def give(self, key: bytes, count: int) -> None:
        """So many wait no more."""
        left = self.waiting(key) - count
        assert left >= 0, "a place was given back twice"
        if left:
            self._waiting[key] = left
        else:
            self._waiting.pop(key, None)
