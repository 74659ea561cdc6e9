"""The tags of calls, found in renderings of a template: of one call, of one with two parameters, of two calls."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

KEYS, VALUES = ("probe_key", "probe_other"), ("probe_value", "probe_word")
NUMBER = 31337

_MARK = re.compile(r"<[^<>\s{}\"']{2,40}>")

Render = Callable[[Sequence[Mapping[str, Any]]], str | None]
"""Returns the answer that a template renders for calls with these arguments; None where it fails."""


@dataclass(frozen=True)
class Tags:
    """A parameter is `begin`, its name, `middle`, its value and `end`. The value of a string is its text; others are
    JSON, behind `json_middle`."""

    begin: str
    middle: str
    json_middle: str
    end: str


class Found(NamedTuple):
    """A syntax of calls, with the fields of a `ToolFormat`."""

    opening: str
    closing: str
    prefix: str
    suffix: str
    begin: str
    middle: str
    end: str
    separator: str
    parallel: bool
    tags: Tags


def find(render: Render, names: tuple[str, str]) -> Found | None:
    """Return the syntax of calls of tools with these names; None where it is another."""
    key, value = KEYS[0], VALUES[0]
    one, two = render([{key: value}]), render([dict(zip(KEYS, VALUES, strict=True))])
    number, several = render([{key: NUMBER}]), render([{key: [value]}])
    if one is None or two is None or number is None or several is None or json.dumps([value]) not in several:
        return None  # or its lists are no JSON
    before, _, rest = one.partition(names[0])
    between, _, rest = rest.partition(key)
    middle, _, behind = rest.partition(value)
    opened = _MARK.match(before)
    at = between.rfind("<")
    if opened is None or at < 0 or not middle.strip().endswith(">"):
        return None
    begin = between[at:]
    further = _between(two, VALUES[0], KEYS[1])
    end = further.removesuffix(begin)
    if end == further or not end.strip().startswith("</") or not behind.startswith(end):
        return None
    tags = Tags(begin, middle, _between(number, key, str(NUMBER)) or middle, end)
    closing = opened[0].replace("<", "</", 1)
    ends = behind[len(end) :].partition(closing)
    last = ends[0] + closing
    if not ends[1] or not _only_ends(last):
        return None
    found = Found(opened[0], closing, "", "", before, between[:at], last, "", False, tags)
    pair = render([{key: value}] * 2)
    return found if pair is None else _parallel(found, pair, names[1])


def _only_ends(text: str) -> bool:
    """Return whether a text is nothing but tags that end something."""
    while (text := text.lstrip()).startswith("</"):
        text = text.partition(">")[2]
    return not text


def _parallel(found: Found, pair: str, name: str) -> Found:
    """Return a syntax with what stands between two calls: each with its own markers, or all within one pair."""
    start = pair.find(VALUES[0] + found.tags.end)
    between = _between(pair[max(start, 0) :], VALUES[0] + found.tags.end, name)
    if start < 0 or not between:
        return found
    if found.opening in between:
        separator = between.removeprefix(found.end).removesuffix(found.begin)
        alike = between == found.end + separator + found.begin and not separator.strip()
        return found._replace(separator=separator, parallel=True) if alike else found
    begin = found.begin.removeprefix(found.opening).lstrip()
    joined = between.removesuffix(begin)
    same = next((at for at, pair in enumerate(zip(joined, found.end, strict=False)) if pair[0] != pair[1]), len(joined))
    end = joined[:same]
    separator, suffix = joined[len(end) :], found.end[len(end) :]
    if not begin or joined == between or separator.strip() or not end.strip() or not suffix.strip():
        return found
    return found._replace(
        prefix=found.begin.removesuffix(begin), begin=begin, end=end, suffix=suffix, separator=separator, parallel=True
    )


def _between(text: str, first: str, second: str) -> str:
    """Return what stands between two texts; nothing where one of them is missing."""
    _, _, rest = text.partition(first)
    found, sign, _ = rest.partition(second)
    return found if sign else ""
