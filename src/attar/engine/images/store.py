"""Features of images, within a number of bytes: those in use, and of the others the last used.

A key is of one image and one cache salt, so that no client learns from an answer's speed what another has sent.
Features in use are held. They are promised room before they are computed, all of a sequence at once, so that two
sequences never wait for each other.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping

from torch import Tensor


class FeatureStore:
    """Features [rows, I] by key, at most `limit` bytes, those that are promised room among them."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0  # bytes, promised ones included
        self._known: OrderedDict[bytes, Tensor] = OrderedDict()  # least recently used first
        self._sizes: dict[bytes, int] = {}  # of the known and the promised
        self._holders: Counter[bytes] = Counter()

    def __contains__(self, key: bytes) -> bool:
        return key in self._known

    def __len__(self) -> int:
        return len(self._known)

    def hold(self, sizes: Mapping[bytes, int]) -> bool:
        """Hold the features of these keys, with their bytes; return whether there was room. If not, nothing changes."""
        new = sum(size for key, size in sizes.items() if key not in self._sizes)
        idle = [key for key in self._known if not self._holders[key] and key not in sizes]
        if self.used + new - sum(self._sizes[key] for key in idle) > self.limit:
            return False
        for key in idle:
            if self.used + new <= self.limit:
                break
            self.used -= self._sizes.pop(key)
            del self._known[key]
        for key, size in sizes.items():
            self.used += size if key not in self._sizes else 0
            self._sizes.setdefault(key, size)
            self._holders[key] += 1
        return True

    def drop(self, key: bytes) -> None:
        """Drop a held key. Features stay while there is room; room that was only promised is given back."""
        assert self._holders[key] > 0, "features that nobody holds"
        self._holders[key] -= 1
        if not self._holders[key]:
            del self._holders[key]
            if key not in self._known:
                self.used -= self._sizes.pop(key)

    def put(self, key: bytes, features: Tensor) -> None:
        """Store the features of a held key, in the room that was promised."""
        assert self._holders[key], "features that nobody holds"
        assert features.nbytes <= self._sizes[key], "more features than there is room for"
        self._known[key] = features

    def get(self, key: bytes) -> Tensor:
        """Return the features of a held key, and count this as a use."""
        assert self._holders[key], "features that nobody holds"
        self._known.move_to_end(key)
        return self._known[key]

    def check(self) -> None:
        """Assert that the bytes are right: for tests."""
        assert self.used == sum(self._sizes.values()) <= self.limit, "bytes were lost, or are too many"
        assert self._sizes.keys() == self._known.keys() | self._holders.keys(), "room of no one"
