"""Parser and writer of protobuf's text format, as far as settings files use it: fields, lists, messages, comments.

This small parser replaces the protobuf library: it needs no compiled schema, and its bounds are plain. A text has at
most `MAX_BYTES`, messages nest at most `MAX_DEPTH` deep, and integers fit 64 bits; each character is read a constant
number of times. Other features of the format (extensions, expanded `Any`, messages in angle brackets) are refused by
name.

Without a schema, a field that occurs twice and a list of two values are the same: a message is its fields in order, one
entry a value. One extension is read: `${name}` in the place of a value, which templates of such files hold before they
are filled in.

Source: https://protobuf.dev/reference/protobuf/textformat-spec/.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from attar.errors import UserError

MAX_BYTES = 1 << 20
MAX_DEPTH = 16
LEAST, MOST = -(2**63), 2**64 - 1  # of int64 and uint64

TOKEN = re.compile(
    r"""(?P<skip>[ \t\r\n\f\v]+|\#[^\n]*)
    |(?P<name>[A-Za-z_][A-Za-z0-9_]*)
    |(?P<hole>\$\{[A-Za-z_][A-Za-z0-9_]*\})
    |(?P<hex>0[xX][0-9A-Fa-f]+)
    |(?P<number>(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?[fF]?)
    |(?P<string>"(?:[^"\\\n]|\\[^\n])*"|'(?:[^'\\\n]|\\[^\n])*')
    |(?P<mark>[-:{}\[\],;])""",
    re.VERBOSE,
)
HOLE = re.compile(r"\$\{\w+\}")
ESCAPE = re.compile(
    rb"\\(?:([0-7]{1,3})|[xX]([0-9A-Fa-f]{1,2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|([abfnrtv?'\"\\])|(.|$))"
)
PLAIN = {
    b"a": b"\a", b"b": b"\b", b"f": b"\f", b"n": b"\n", b"r": b"\r", b"t": b"\t", b"v": b"\v",
    b"?": b"?", b"'": b"'", b'"': b'"', b"\\": b"\\",
}  # fmt: skip
TRUTH = {"true": True, "True": True, "t": True, "1": True, "false": False, "False": False, "f": False, "0": False}


@dataclass(frozen=True, slots=True)
class Word:
    """A value without quotes: `true`, `KIND_GPU`."""

    text: str


@dataclass(frozen=True, slots=True)
class Hole:
    """A value that a template leaves open: `${name}`."""

    name: str


@dataclass(frozen=True, slots=True)
class Message:
    """Fields of a message in order. A list is several fields of one name; an empty list is none."""

    fields: tuple[tuple[str, Value], ...] = ()

    def all(self, name: str) -> list[Value]:
        """Return the values of a field, in order."""
        return [value for each, value in self.fields if each == name]

    def one(self, name: str) -> Value | None:
        """Return the value of a field that may be given once, None where it is absent.

        Like the methods below, raises ValueError for a field given twice, for a value of another kind, and for one that
        a template left open.
        """
        found = self.all(name)
        if len(found) > 1:
            raise UserError("file_malformed", f"{name} is given {len(found)} times")
        if found and isinstance(found[0], Hole):
            message = f"{name} is still ${{{found[0].name}}}: the template is to be filled in first"
            raise UserError("file_wrong_kind", message)
        return found[0] if found else None

    def messages(self, name: str) -> list[Message]:
        """Return the values of a field that holds messages."""
        found = [each for each in self.all(name) if isinstance(each, Message)]
        if len(found) < len(self.all(name)):
            raise UserError("file_malformed", f"{name}: expected {{ }}, not a value")
        return found

    def message(self, name: str) -> Message:
        """Return the value of a field that holds one message, empty where it is absent."""
        self.one(name)
        return next(iter(self.messages(name)), Message())

    def text(self, name: str) -> str:
        """Return the value of a string field, empty where it is absent or is `${name}` alone."""
        value = self.one(name)
        if value is not None and not isinstance(value, str):
            raise UserError("file_malformed", f"{name}: expected a string in quotes")
        return "" if value is None or HOLE.fullmatch(value) else value

    def count(self, name: str, most: int) -> int | None:
        """Return the value of a number field, from 0 to `most`; None where it is absent."""
        value = self.one(name)
        if value is not None and (not isinstance(value, int) or not 0 <= value <= most):
            raise UserError("file_malformed", f"{name}: expected a number from 0 to {most}")
        return value

    def flag(self, name: str) -> bool | None:
        """Return the value of a boolean field, by any of the format's words for it; None where it is absent."""
        value = self.one(name)
        word = value.text if isinstance(value, Word) else str(value) if isinstance(value, int) else ""
        if value is not None and word not in TRUTH:
            raise UserError("file_malformed", f"{name}: expected true or false")
        return TRUTH.get(word)


Value = int | float | str | Word | Hole | Message


def load(path: Path) -> str:
    """Return the text of a file. Raises ValueError for one that is too long or not UTF-8, OSError where it cannot be
    read."""
    with path.open("rb") as file:
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise UserError("file_too_large", f"{path} is longer than {MAX_BYTES} bytes")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise UserError("text_not_utf8", f"{path} is not UTF-8 text: byte {error.start} does not decode") from None


def parse(text: str) -> Message:
    """Parse a text. Raises ValueError, naming the line, where it is not protobuf's text format or exceeds the
    bounds."""
    if len(text) > MAX_BYTES or len(text.encode("utf-8", "surrogatepass")) > MAX_BYTES:
        raise UserError("file_too_large", f"the text is longer than {MAX_BYTES} bytes")
    return _Reader(text).message(None, 0)


def write(message: Message, indent: str = "") -> str:
    """Return the text of a message, two spaces a level; `parse` reads it back to an equal one."""
    lines = []
    for name, value in message.fields:
        if isinstance(value, Message):
            lines.append(f"{indent}{name} {{\n{write(value, indent + '  ')}{indent}}}\n")
        else:
            lines.append(f"{indent}{name}: {_scalar(value)}\n")
    return "".join(lines)


def paths(message: Message, above: str = "") -> Iterator[str]:
    """Yield the path of every field in order: the shape of a text. A message's own path ends in a dot."""
    for name, value in message.fields:
        if isinstance(value, Message):
            yield f"{above}{name}."
            yield from paths(value, f"{above}{name}.")
        else:
            yield f"{above}{name}"


def _scalar(value: int | float | str | Word | Hole) -> str:
    if isinstance(value, Word):
        return value.text
    if isinstance(value, Hole):
        return f"${{{value.name}}}"
    if isinstance(value, str):
        return '"' + "".join(map(_escaped, value)) + '"'
    return repr(value)


def _escaped(character: str) -> str:
    if character in '"\\':
        return "\\" + character
    return character if character.isprintable() else "".join(f"\\{byte:03o}" for byte in character.encode())


class _Reader:
    """Tokenizer and recursive parser of a text, with one token of lookahead."""

    def __init__(self, text: str) -> None:
        self._text, self._at, self._line = text, 0, 1
        self.kind, self.token = "", ""
        self._next()

    def message(self, end: str | None, depth: int) -> Message:
        """Read fields up to `end`, or to the end of the text."""
        if depth > MAX_DEPTH:
            raise self._error(f"messages nest more than {MAX_DEPTH} deep")
        fields: list[tuple[str, Value]] = []
        while self.token != end or self.kind != "mark":
            if self.kind == "end":
                if end is None:
                    return Message(tuple(fields))
                raise self._error(f"the text ends where {end} is missing")
            if self.token == "[" and self.kind == "mark":
                raise self._error("names in [ ], extensions and the like, are not read")
            name = self._take("name", "the name of a field")
            fields += [(name, value) for value in self._field(depth)]
            if self.kind == "mark" and self.token in ",;":
                self._next()
        self._next()
        return Message(tuple(fields))

    def _field(self, depth: int) -> list[Value]:
        colon = self._skip(":")
        if self._skip("["):
            return self._list(depth)
        if not colon and not (self.kind == "mark" and self.token == "{"):
            raise self._error(f"expected : or {{ behind a field's name, not {self._shown()}")
        return [self._value(depth)]

    def _list(self, depth: int) -> list[Value]:
        values: list[Value] = []
        if self._skip("]"):
            return values
        while True:
            values.append(self._value(depth))
            if self._skip("]"):
                return values
            if not self._skip(","):
                raise self._error(f"expected , or ] in a list, not {self._shown()}")

    def _value(self, depth: int) -> Value:
        if self._skip("{"):
            return self.message("}", depth + 1)
        negative = self._skip("-")
        if self.kind in ("hex", "number"):
            return self._number(negative)
        if negative:
            raise self._error(f"expected a number behind -, not {self._shown()}")
        if self.kind == "string":
            return self._string()
        if self.kind == "hole":
            return Hole(self._take("hole", "")[2:-1])
        return Word(self._take("name", "a value"))

    def _number(self, negative: bool) -> int | float:
        kind, token = self.kind, self.token
        whole = kind == "hex" or token.isdecimal()
        if kind == "number" and whole and len(token) > 1 and token[0] == "0" and not set(token) <= set("01234567"):
            raise self._error(f"{token} begins with 0 and is not octal")
        if len(token) > 64:  # before conversion: Python's integers have no bound
            raise self._error("a number of more than 64 characters")
        if whole:
            base = 16 if kind == "hex" else 8 if len(token) > 1 and token[0] == "0" else 10
            integer = int(token, base) * (-1 if negative else 1)
            if not LEAST <= integer <= MOST:
                raise self._error(f"{integer} does not fit 64 bits")
            self._next()
            return integer
        number = float(token.rstrip("fF")) * (-1 if negative else 1)
        if not math.isfinite(number):
            raise self._error(f"{token} is past what a number can be")
        self._next()
        return number

    def _string(self) -> str:
        """Read one string literal, and the ones that follow it directly."""
        pieces = []
        while self.kind == "string":
            pieces.append(ESCAPE.sub(self._unescaped, self.token[1:-1].encode("utf-8", "surrogatepass")))
            self._next()
        try:
            return b"".join(pieces).decode()
        except UnicodeDecodeError:
            raise self._error("a string that is not UTF-8") from None

    def _unescaped(self, match: re.Match[bytes]) -> bytes:
        octal, hexadecimal, short, long, plain, _ = match.groups()
        if octal is not None and int(octal, 8) < 256:
            return bytes([int(octal, 8)])
        if hexadecimal is not None:
            return bytes([int(hexadecimal, 16)])
        if plain is not None:
            return PLAIN[plain]
        point = int(short or long or b"ffffffff", 16)
        if point > 0x10FFFF or 0xD800 <= point < 0xE000:
            raise self._error(f"a string with the escape {match[0].decode('latin-1')}, which stands for nothing")
        return chr(point).encode()

    def _take(self, kind: str, what: str) -> str:
        if self.kind != kind:
            raise self._error(f"expected {what}, not {self._shown()}")
        token = self.token
        self._next()
        return token

    def _skip(self, mark: str) -> bool:
        if self.kind == "mark" and self.token == mark:
            self._next()
            return True
        return False

    def _next(self) -> None:
        while True:
            if self._at == len(self._text):
                self.kind = self.token = "end"
                return
            found = TOKEN.match(self._text, self._at)
            if found is None:
                raise self._error(self._strange())
            kind = found.lastgroup
            assert kind is not None
            self._at = found.end()
            self._line += found[0].count("\n")
            if kind != "skip":
                self.kind, self.token = kind, found[0]
                break
        follows = self._text[self._at : self._at + 1]
        if self.kind in ("hex", "number") and (follows.isalnum() or follows in ("_", ".")) and follows:
            raise self._error(f"{self.token} runs into {follows}")

    def _strange(self) -> str:
        character = self._text[self._at]
        if character in "<>":
            return "messages in < > are not read: write { }"
        if character in "\"'":
            return "a string that does not end on its line"
        return f"{character!r} begins nothing"

    def _shown(self) -> str:
        return "the end of the text" if self.kind == "end" else repr(self.token[:40])

    def _error(self, sentence: str) -> UserError:
        return UserError("file_malformed", f"line {self._line}: {sentence}")
