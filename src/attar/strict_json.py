"""Bytes from strangers to Python values, strictly: bodies of requests (`loads`), and JSON of files (`parse`).

The parser is the standard library's. It is laxer than RFC 8259 and I-JSON (RFC 7493) in what it lets through, and
each laxity has cost somebody: NaN that fails only when it is written again, a key given twice of which two programs
read different ones, a BOM or UTF-16 that slips past a filter, a lone surrogate that no encoder takes, a nesting that
ends the process. So the text is decoded first, as UTF-8 and nothing else, and the two things that are gone after
parsing (constants and double keys) are caught by the parser's own hooks. Of a request, one walk over the values does
the rest.

The parser lets no other thread run until it has ended. It takes its time by what it builds, not by bytes: a megabyte
of text is nothing, and one of empty lists an eighth of a second, in which no stream gets on. So a request's lists,
objects and keys are counted first. Numbers are legal by the million, in prompts of token ids: so long lists of them are
taken out of the text and read a piece at a time, and of what is left there may be as much as any request could need.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Callable, Iterator
from typing import Annotated, Any

MAX_DEPTH = 64
MAX_PARTS = 100_000  # lists, objects and keys of a body: ten thousand messages have fewer
MAX_QUOTES = 4 * MAX_PARTS  # of their texts
MAX_VALUES = 4 * MAX_PARTS  # what commas part, long lists of numbers aside: 2,048 lists that are not long have fewer
MIN_INT, MAX_INT = -(2**63), 2**63 - 1
FEW = 16 << 10  # commas of a body that is read in one go, in less than a millisecond
PIECE = 64 << 10  # characters of a list of numbers that are read at a time, in less than two
LONG = 256  # characters of such a list, at least

_TOO_MANY = f"the body has more than {MAX_PARTS} lists, objects and keys, or texts"
_NUMBERS = re.compile(rf"\[[-+.0-9eE, \t\r\n]{{{LONG},}}+\]")


class JSONError(ValueError):
    """It is not JSON as we take it: one sentence that says what and where, with nothing of the content but a key."""


def parse(data: bytes | bytearray) -> Any:
    """Return the value that a file holds, of any depth and any integers. Raises JSONError."""
    return _parsed(_decoded(data), _finite)


def parse_as_python(data: bytes | bytearray) -> Any:
    """Return the value that a file holds to Python's own reader, which wrote it: NaN and Infinity are numbers, and the
    last of equal keys counts. Raises JSONError."""
    return _parsed(_decoded(data), float, float, pairs=dict)


def loads(body: bytes) -> Any:
    """Return the value that a request's body holds, within the limits above. Raises JSONError."""
    if not body.strip(b" \t\r\n"):
        raise JSONError("the body is empty: it must be a JSON object")
    if _parts(body) > MAX_PARTS:
        raise JSONError(_TOO_MANY)
    text = _decoded(body)
    rest, lists, known = _taken_out(text) if text.count(",") > FEW else (text, [], set())
    waiting: Iterator[Any] = iter(lists)
    value = _parsed(rest, _number, (lambda name: next(waiting)) if lists else _constant, text)
    _check(value, known)
    return value


def _decoded(data: bytes | bytearray) -> str:
    if data.startswith((b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff")):
        raise JSONError("it starts with a byte order mark: it must be plain UTF-8")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise JSONError(f"it is not UTF-8 at byte {error.start}") from error


def _parsed(
    text: str, number: Callable[[str], Any], constant: Callable[[str], Any] | None = None, whole: str = "", at: int = 0,
    pairs: Callable[[list[tuple[str, Any]]], dict[str, Any]] | None = None,
) -> Any:  # fmt: skip
    """Parse `text`, which stands at a place of the `whole` that errors are to be found in."""
    try:
        return json.loads(
            text, object_pairs_hook=pairs or _object, parse_constant=constant or _constant, parse_float=number
        )
    except JSONError:
        raise
    except json.JSONDecodeError as error:
        raise _syntax(error.msg, whole or text, at + error.pos) from error
    except RecursionError as error:
        raise JSONError(f"nested too deeply: deeper than {MAX_DEPTH} levels") from error
    except ValueError as error:  # Python refuses to read integers of more than 4300 digits
        raise JSONError("an integer has too many digits") from error


def _syntax(what: str, text: str, at: int) -> JSONError:
    error = json.JSONDecodeError(what, text, at)
    return JSONError(f"{what} at line {error.lineno}, column {error.colno}")


def _taken_out(text: str) -> tuple[str, list[list[Any]], set[int]]:
    """The text with a constant and blanks in place of each long list of numbers; those lists; and which of them, by
    `id`, hold integers alone that fit 64 bits."""
    masked = text.replace("\\\\", "__").replace('\\"', "__")  # as long, and its quotes begin and end texts
    lists: list[list[Any]] = []
    known: set[int] = set()
    rest: list[str] = []
    quotes = at = 0
    for found in _NUMBERS.finditer(masked):
        start, end = found.span()
        quotes += masked.count('"', at, start)
        rest.append(text[at:start])
        if quotes % 2:  # it is part of a text
            rest.append(text[start:end])
        else:
            rest.append("NaN".ljust(end - start))  # which no JSON has, and the parser's hook gets to see
            numbers, integers = _numbers(text, start + 1, end - 1)
            lists.append(numbers)
            if integers:
                known.add(id(numbers))
        at = end
    rest.append(text[at:])
    short = "".join(rest)
    _check_rest(short, len(lists))
    return short, lists, known


@functools.cache
def _integers() -> Callable[[str], list[int]]:
    """Return msgspec's reader of a list of integers, several times as fast as the standard library's. Only requests
    have such lists: programs that read files alone, as on a GPU machine under test, need no msgspec."""
    import msgspec

    return msgspec.json.Decoder(list[Annotated[int, msgspec.Meta(ge=MIN_INT, le=MAX_INT)]]).decode


def _numbers(text: str, at: int, end: int) -> tuple[list[Any], bool]:
    """Return the numbers of a list between two places of `text`, and whether all are integers that fit 64 bits."""
    begin, found, integers = at, [], True
    while at <= end:
        cut = text.find(",", at + PIECE, end) if end - at > PIECE else -1
        cut = end if cut < 0 else cut
        piece = text[at:cut]
        if not piece.strip() and (at, cut) != (begin, end):
            raise _syntax("Expecting value", text, cut)
        try:
            found += _integers()(f"[{piece}]")
        except ValueError:
            integers = False
            found += _parsed(f"[{piece}]", _number, whole=text, at=at - 1)
        at = cut + 1
    return found, integers


def _check_rest(text: str, constants: int) -> None:
    """Check what is left of a long body, in which so many constants stand for lists. Raises JSONError."""
    masked = text.replace("\\\\", "").replace('\\"', "")
    if masked.count('"') > MAX_QUOTES:
        raise JSONError(_TOO_MANY)
    between = "".join(masked.split('"')[::2])  # what stands between texts
    if between.count(",") > MAX_VALUES:
        raise JSONError(f"the body has more than {MAX_VALUES} values, long lists of numbers aside")
    for name, own in (("NaN", constants), ("Infinity", 0)):
        if between.count(name) > own:
            _constant(name)


def _parts(body: bytes) -> int:
    """Count lists, objects and keys: exactly where there may be too many of them, else no fewer than there are."""
    found = _marks(body)
    if found > MAX_PARTS:
        unescaped = body.replace(b"\\\\", b"").replace(b'\\"', b"")
        if unescaped.count(b'"') <= MAX_QUOTES:
            found = _marks(b"".join(unescaped.split(b'"')[::2]))  # what stands between texts
    return found


def _marks(data: bytes) -> int:
    return sum(map(data.count, (b"[", b"{", b":")))


def shown(name: str, limit: int = 64) -> str:
    """Return a name out of a request as an error message shows it: short, and without control characters."""
    return "".join(char if char.isprintable() else "?" for char in name[:limit]) + ("..." if len(name) > limit else "")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise JSONError(f"the key `{shown(key)}` is there twice in one object")
            seen.add(key)
    return found


def _number(text: str) -> float:
    """A number with a point or an exponent. `1.0` is the integer 1 to JSON Schema, and to languages of one number."""
    value = float(text)
    return int(value) if value.is_integer() and MIN_INT <= value < -MIN_INT else value


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise JSONError(f"{shown(text)} is out of range")
    return value


def _constant(name: str) -> Any:
    raise JSONError(f"{name} is not JSON")


def _check(value: Any, known: set[int]) -> None:
    """Check depth, range of numbers and Unicode text, without recursion; lists whose `id` is `known` need no check."""
    waiting: list[tuple[Any, int, Any]] = [(value, 0, None)]  # value, depth of what holds it, path (holder's, its key)
    while waiting:
        value, depth, path = waiting.pop()
        if isinstance(value, dict | list):
            depth += 1
            if depth > MAX_DEPTH:
                raise JSONError(f"nested deeper than {MAX_DEPTH} levels at {_where(path)}")
            if isinstance(value, dict):
                for key, inner in value.items():
                    _scalar(key, path)
                    waiting.append((inner, depth, (path, key)))
                continue
            if id(value) in known:
                continue
            for at, inner in enumerate(value):  # long lists are of numbers: those need no entry of their own
                if isinstance(inner, dict | list):
                    waiting.append((inner, depth, (path, at)))
                else:
                    _scalar(inner, path, at)
        else:
            _scalar(value, path)


def _scalar(value: Any, path: Any, at: int | None = None) -> None:
    kind = type(value)
    if kind is int:
        if not MIN_INT <= value <= MAX_INT:
            raise JSONError(f"the integer at {_where(path, at)} does not fit 64 bits, signed")
    elif kind is float:
        if not math.isfinite(value):
            raise JSONError(f"the number at {_where(path, at)} is too large")
    elif kind is str and not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise JSONError(f"a lone surrogate, which is not Unicode, in the text at {_where(path, at)}") from error


def _where(path: Any, at: int | None = None) -> str:
    """`$.messages[3].content`, from links of (the rest, key)."""
    parts = [] if at is None else [f"[{at}]"]
    while path is not None:
        path, key = path
        parts.append(f"[{key}]" if isinstance(key, int) else f".{shown(key)}")
    return "$" + "".join(reversed(parts))[:256]
