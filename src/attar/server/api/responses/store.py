"""Answers that the server keeps in memory, so that a conversation can go on from one by its id.

Each is known to the key that made it alone. Their bytes and their age are bounded, and they are gone when the server
ends. Where there is no room, the oldest of the key with the most bytes goes first: no key displaces another's answers
while it holds more itself.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

MAX_AGE = 24 * 3600.0  # seconds
BASE = 1024  # bytes that an entry of a dictionary and its objects take beside the texts, at most
PER_TEXT = 256  # and those for each text, or id of an item


@dataclass(frozen=True, slots=True)
class Stored:
    """A stored answer, as JSON, with its conversation: `turns`, each a JSON list of items, the answer's own in the
    last. `output` has the ids of the answer's items. Later answers share turns, whose bytes count for each."""

    answer: bytes
    turns: tuple[bytes, ...]
    output: tuple[str, ...] = ()
    made: float = 0.0

    @property
    def size(self) -> int:
        """Bytes that it counts for."""
        texts = len(self.turns) + len(self.output)
        return BASE + PER_TEXT * texts + len(self.answer) + sum(map(len, self.turns))

    def item(self, id: str) -> bytes:
        """Return an item of the answer, as JSON."""
        items = msgspec.json.decode(self.answer)["output"]
        return msgspec.json.encode(next(item for item in items if item["id"] == id))


@dataclass(slots=True)
class _Shelf:
    """Answers of one key, the oldest first. `homes` has the answer of each item, by their ids."""

    answers: OrderedDict[str, Stored] = field(default_factory=OrderedDict)
    homes: dict[str, str] = field(default_factory=dict)
    size: int = 0

    def remove(self, id: str) -> None:
        stored = self.answers.pop(id)
        self.size -= stored.size
        for item in stored.output:
            del self.homes[item]


class ResponseStore:
    """Answers of at most `size` bytes together, none older than `age` seconds."""

    def __init__(self, size: int, age: float = MAX_AGE, clock: Callable[[], float] = time.monotonic) -> None:
        self.size, self._age, self._clock = size, age, clock
        self._shelves: dict[bytes, _Shelf] = {}

    @property
    def held(self) -> int:
        """Bytes of all answers."""
        self._expire()
        return sum(shelf.size for shelf in self._shelves.values())

    def put(self, key: bytes, id: str, answer: bytes, turns: Sequence[bytes], output: Sequence[str] = ()) -> bool:
        """Keep an answer under a new id; return whether it has room at all."""
        stored = Stored(answer, tuple(turns), tuple(output), self._clock())
        if stored.size > self.size:
            return False
        shelf = self._shelves.setdefault(key, _Shelf())
        shelf.answers[id] = stored
        shelf.size += stored.size
        shelf.homes.update(dict.fromkeys(output, id))
        while self.held > self.size:
            self._make_room(key)
        return True

    def get(self, key: bytes, id: str) -> Stored | None:
        """Return the answer that `key` has stored; None where there is none."""
        self._expire()
        shelf = self._shelves.get(key)
        return None if shelf is None else shelf.answers.get(id)

    def item(self, key: bytes, id: str) -> bytes | None:
        """Return an item of an answer that `key` has stored, as JSON; None where there is none."""
        self._expire()
        shelf = self._shelves.get(key)
        if shelf is None or id not in shelf.homes:
            return None
        return shelf.answers[shelf.homes[id]].item(id)

    def remove(self, key: bytes, id: str) -> bool:
        """Forget an answer; return whether `key` had stored it."""
        if self.get(key, id) is None:
            return False
        self._remove(key, id)
        return True

    def _make_room(self, new: bytes) -> None:
        """Forget the oldest answer of the key with the most bytes; never the only one of the key `new`, just stored."""
        shelves = {key: shelf for key, shelf in self._shelves.items() if key != new or len(shelf.answers) > 1}
        key = max(shelves, key=lambda each: shelves[each].size)
        self._remove(key, next(iter(shelves[key].answers)))

    def _expire(self) -> None:
        now = self._clock()
        for key, shelf in list(self._shelves.items()):
            while shelf.answers and now - next(iter(shelf.answers.values())).made > self._age:
                self._remove(key, next(iter(shelf.answers)))

    def _remove(self, key: bytes, id: str) -> None:
        shelf = self._shelves[key]
        shelf.remove(id)
        if not shelf.answers:
            del self._shelves[key]
