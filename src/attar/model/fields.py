"""Typed reading of untrusted JSON objects: every value is checked on access, by name.

A config.json decides how much memory is reserved and which arithmetic runs, so none of its values is trusted: whole
numbers are whole (and `true` is no number), within bounds that no real model comes near, and numbers are finite. Errors
name the key and the accepted values. Torch-free.
"""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Iterable, Mapping
from typing import TypeVar

from attar.errors import Code, UserError

T = TypeVar("T")

SIZE = 1 << 24  # hidden sizes, feed-forward widths, vocabularies
COUNT = 1 << 14  # layers, heads, head sizes, experts
LENGTH = 1 << 32  # positions
NUMBER = 1e12  # rotary bases, scales, caps
EPSILON = 1.0
WORD = 64  # characters: no name is longer, and difflib takes a time that is quadratic in a word's length


def nearest(word: str, known: Iterable[str]) -> str:
    """Return '; did you mean X?' where one of `known` is close to `word`, else ""."""
    if len(word) > WORD:
        return ""
    lower = {k.lower(): k for k in known}
    near = [k for k in lower if word and k.startswith(word.lower())][:2]
    near = near or difflib.get_close_matches(word.lower(), lower, n=2, cutoff=0.75)
    return f"; did you mean {' or '.join(lower[n] for n in near)}?" if near else ""


class Fields:
    """A JSON object with defaults. `aliases` maps a key to the names it is stored under instead, the usual one first.

    An absent key takes its default. null equals absent, except for the `optional_` readers, which return None for it.
    Readers raise ValueError naming the key.
    """

    def __init__(
        self,
        data: Mapping[str, object],
        defaults: Mapping[str, object] | None = None,
        aliases: Mapping[str, tuple[str, ...]] | None = None,
        where: str = "config.json",
    ) -> None:
        self.data, self.defaults, self.aliases, self.where = data, defaults or {}, aliases or {}, where

    def _find(self, key: str) -> tuple[str, object]:
        """Return the name under which the key is stored, and the stored or default value (None where there is
        neither)."""
        names = self.aliases.get(key, (key,))
        name = next((n for n in names if n in self.data), names[0])
        return name, self.data.get(name, self.defaults.get(key))

    def get(self, key: str) -> object:
        return self._find(key)[1]

    def error(self, key: str, problem: str, code: Code = "config_invalid") -> UserError:
        return UserError(code, f"{self.where}: {self._find(key)[0]} {problem}")

    def _value(self, key: str) -> object:
        value = self.get(key)
        if value is None:
            value = self.defaults.get(key)
        if value is None:
            raise self.error(key, "is missing")
        return value

    def integer(self, key: str, low: int = 1, high: int = SIZE) -> int:
        """Return a whole number in low .. high."""
        value = self._value(key)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.error(key, f"must be a whole number from {low} to {high}, not {_show(value)}")
        return value

    def optional_integer(self, key: str, low: int = 1, high: int = SIZE) -> int | None:
        return None if self.get(key) is None else self.integer(key, low, high)

    def number(self, key: str, low: float = 0.0, high: float = NUMBER) -> float:
        """Return a finite number above `low`, at most `high`."""
        value = self._value(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not low < value <= high:
            raise self.error(key, f"must be a number above {low:g}, at most {high:g}, not {_show(value)}")
        return float(value)

    def optional_number(self, key: str, low: float = 0.0, high: float = NUMBER) -> float | None:
        return None if self.get(key) is None else self.number(key, low, high)

    def flag(self, key: str) -> bool:
        value = self._value(key)
        if not isinstance(value, bool):
            raise self.error(key, f"must be true or false, not {_show(value)}")
        return value

    def choice(self, key: str, choices: Mapping[str, T]) -> T:
        """Return the entry of `choices` for the stored word. Raises ValueError with the known words."""
        value = self._value(key)
        if not isinstance(value, str) or value not in choices:
            near = nearest(value, choices) if isinstance(value, str) else ""
            raise self.error(key, f"is {_show(value)}: supported are {', '.join(choices)}{near}", "feature_unsupported")
        return choices[value]

    def items(self, key: str, count: int | None = None) -> list[object]:
        """Return a list, of `count` entries where that is given."""
        value = self._value(key)
        if not isinstance(value, list | tuple) or (count is not None and len(value) != count):
            raise self.error(key, f"must be a list{'' if count is None else f' of {count}'}, not {_show(value)}")
        return list(value)

    def numbers(self, key: str, count: int) -> tuple[float, ...]:
        """Return `count` finite positive numbers."""
        values = self.items(key, count)
        return tuple(Fields({key: v}, where=self.where).number(key) for v in values)

    def words(self, key: str, count: int, choices: Mapping[str, T]) -> tuple[T, ...]:
        values = self.items(key, count)
        return tuple(Fields({key: v}, where=self.where).choice(key, choices) for v in values)

    def integers(self, key: str, low: int, high: int) -> tuple[int, ...]:
        """Return whole numbers, stored as one or as a list; () for null."""
        value = self.get(key)
        if value is None:
            return ()
        values = value if isinstance(value, list | tuple) else [value]
        return tuple(Fields({key: v}, where=self.where).integer(key, low, high) for v in values)

    def inner(self, key: str) -> Mapping[str, object] | None:
        """Return a nested object; None for null."""
        value = self.get(key)
        if value is not None and not isinstance(value, dict):
            raise self.error(key, f"must be an object, not {_show(value)}")
        return value

    def only(self, key: str, value: object, instead: str) -> None:
        """Refuse any setting of `key` but `value`: `instead` says what the other setting means."""
        found = self.get(key)
        if found is not None and found != value:
            raise self.error(
                key, f"is {_show(found)}: {instead} is not supported, only {_show(value)}", "feature_unsupported"
            )


def _show(value: object) -> str:
    """Show an untrusted value in a message: short, and without spelling out the rest of it."""
    return reprlib.repr(value)
