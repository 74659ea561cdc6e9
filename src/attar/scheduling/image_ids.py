"""Token ids of images: each feature row of an image is a negative id, so that prefix cache and sequences need no more.

The embedding of a text token is a row of a table; that of an image's token is a row that the vision tower computes. An
image is known by its key, a digest of what the tower reads and of the salt. While a sequence or the prefix tree has one
of its rows, it has a number, and row r is the id `~(number << 15 | r)`. Equal ids are therefore equal rows. So a prefix
match ends exactly before the first image that differs.

A number returns when nobody holds it, and is given out again as late as possible. Number 0 is never given out: small
negative numbers mark other things elsewhere.
"""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass

from attar.protocol.image_limits import MAX_ROWS

ROW_BITS = (MAX_ROWS - 1).bit_length()  # 15
MAX_IMAGES = (1 << (31 - ROW_BITS)) - 1  # at a time


class ImagesExhausted(RuntimeError):
    """The refusal of an image because every number is held."""


@dataclass(eq=False, slots=True)
class ImageSpan:
    """An image in a sequence: its rows lie among the tokens `start` to `end - 1`, perhaps with markers between them.

    `ready`: its features are there, and stay until they are no longer needed. No row of it can be run before. `whole`:
    its rows see each other, so all of them are run in one step.
    """

    number: int
    start: int
    end: int
    ready: bool = False
    whole: bool = False


def row_ids(number: int, rows: int) -> range:
    """Return the ids of an image's rows, in order."""
    first = ~(number << ROW_BITS)
    return range(first, first - rows, -1)


def number_of(token: int) -> int:
    """Return the number of the image of which a negative id is a row."""
    return ~token >> ROW_BITS


def row_of(token: int) -> int:
    """Return the row of its image that a negative id stands for."""
    return ~token & ((1 << ROW_BITS) - 1)


class ImageIds:
    """The numbers of images, at most `most` at a time, each with a count of its holders.

    Holders are sequences, and tokens of the prefix tree.
    """

    def __init__(self, most: int = MAX_IMAGES) -> None:
        assert 0 < most <= MAX_IMAGES
        self.most = most
        self._numbers: dict[bytes, int] = {}
        self._keys: dict[int, bytes] = {}
        self._holders: Counter[int] = Counter()
        self._returned: deque[int] = deque()
        self._fresh = 1

    def __len__(self) -> int:
        return len(self._keys)

    def hold(self, key: bytes) -> int:
        """Return the number of an image, and hold it. Raises ImagesExhausted where there is none left."""
        if (number := self._numbers.get(key)) is None:
            if self._fresh <= self.most:
                number, self._fresh = self._fresh, self._fresh + 1
            elif self._returned:
                number = self._returned.popleft()
            else:
                raise ImagesExhausted(f"{self.most} images are in use")
            self._numbers[key], self._keys[number] = number, key
        self._holders[number] += 1
        return number

    def hold_again(self, number: int, times: int = 1) -> None:
        """Hold a number that is held already."""
        assert self._holders[number] > 0, "an image that nobody holds"
        self._holders[number] += times

    def drop(self, number: int, times: int = 1) -> None:
        """Drop a number; with its last holder it goes."""
        assert self._holders[number] >= times, "an image is dropped more often than it was held"
        self._holders[number] -= times
        if not self._holders[number]:
            del self._holders[number], self._numbers[self._keys.pop(number)]
            self._returned.append(number)

    def hold_tokens(self, tokens: array[int]) -> None:
        """Hold the image of each negative id once."""
        for number, times in _images(tokens):
            self.hold_again(number, times)

    def drop_tokens(self, tokens: array[int]) -> None:
        """Drop the image of each negative id once."""
        for number, times in _images(tokens):
            self.drop(number, times)

    def key_of(self, number: int) -> bytes:
        """Return the key of an image that is held."""
        return self._keys[number]

    def check(self, holders: Counter[int]) -> None:
        """Assert that the images are held by these, and that no number is lost. Linear: for tests."""
        assert +self._holders == +holders, "other holders"
        assert self._keys.keys() == self._holders.keys(), "an image without a holder"
        assert {number: key for key, number in self._numbers.items()} == self._keys, "two numbers for one image"
        assert sorted([*self._keys, *self._returned]) == list(range(1, self._fresh)), "a number was lost, or is twice"


def _images(tokens: Iterable[int]) -> Iterable[tuple[int, int]]:
    return Counter(number_of(token) for token in tokens if token < 0).items()
