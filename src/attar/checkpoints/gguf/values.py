"""Values of GGUF metadata: their thirteen types, read from a checked header, and written.

A value is read as its Python type: str, int, float, bool, or an `Array` of one of these. A `Typed` value is written
with its stored type, so that a copy of a file's metadata can equal the file's metadata. A plain Python value is written
as the type that GGUF files in circulation use for it: u32 for a whole number that is not negative, f32, i32 in arrays.

Metadata are passed on as a mapping whose arrays are decoded on iteration. Opening a file must not cost as much as
decoding the strings of its vocabulary. A caller that expects one value must not pay for a million in an untrusted file,
so the type and length of an `Array` cost nothing. Torch-free.
"""

from __future__ import annotations

import logging
import math
import struct
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from attar.checkpoints.strict_io import CheckpointError
from attar.errors import UserError

logger = logging.getLogger(__name__)

SCALARS: Mapping[str, struct.Struct] = {
    name: struct.Struct(f"<{code}")
    for name, code in {
        "u8": "B", "i8": "b", "u16": "H", "i16": "h", "u32": "I", "i32": "i", "f32": "f", "bool": "B",
        "u64": "Q", "i64": "q", "f64": "d",
    }.items()
}  # fmt: skip
"""Types of values that have a fixed size. A bool is a byte of 0 or 1."""

STRING, ARRAY = "string", "array"
VALUE_TYPES = ("u8", "i8", "u16", "i16", "u32", "i32", "f32", "bool", STRING, ARRAY, "u64", "i64", "f64")
"""Names of the types of values, by their number in files."""

SAME = 1e-6  # relative: rounding of a number to float32

_LENGTH = SCALARS["u64"]


class Typed(NamedTuple):
    """A value with its stored type: one of `VALUE_TYPES`, or, for example, `[u8]` for an array."""

    type: str
    value: Any


class Entry(NamedTuple):
    """A value in the header: a type (for arrays, of the elements), the number of elements, and the position of the
    first."""

    type: str
    length: int | None
    at: int


class Array(Collection[Any]):
    """An array of a header. Iteration decodes it, and raises CheckpointError where a string is not UTF-8."""

    def __init__(self, metadata: Metadata, key: str, entry: Entry) -> None:
        self._metadata, self._key, self._entry = metadata, key, entry

    def __len__(self) -> int:
        assert self._entry.length is not None
        return self._entry.length

    def __iter__(self) -> Iterator[Any]:
        return self._metadata._elements(self._key, self._entry.type, self._entry.at, len(self))

    def __contains__(self, value: object) -> bool:
        return any(each == value for each in self)

    def __repr__(self) -> str:
        return f"an array of {len(self)} {self._entry.type}"


class Metadata(Mapping[str, Any]):
    """Keys of a file with their values: str, int, float, bool, or an `Array` of one of these."""

    def __init__(self, header: bytearray, entries: Mapping[str, Entry], where: Path) -> None:
        self._header, self._entries, self._where = header, entries, where

    def __getitem__(self, key: str) -> Any:
        entry = self._entries[key]
        return self._scalar(key, entry) if entry.length is None else Array(self, key, entry)

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def type_of(self, key: str) -> str:
        """Return the stored type of a key's value, in the form of `Typed`."""
        entry = self._entries[key]
        return entry.type if entry.length is None else f"[{entry.type}]"

    def _scalar(self, key: str, entry: Entry) -> Any:
        if entry.type == STRING:
            return self._text(key, entry.at)
        (value,) = SCALARS[entry.type].unpack_from(self._header, entry.at)
        return value == 1 if entry.type == "bool" else value

    def _elements(self, key: str, kind: str, at: int, count: int) -> Iterator[Any]:
        if kind != STRING:
            values = struct.unpack_from(f"<{count}{SCALARS[kind].format[1:]}", self._header, at)
            yield from (value == 1 for value in values) if kind == "bool" else values
            return
        header, unpack = self._header, _LENGTH.unpack_from
        try:
            for _ in range(count):  # of a quarter of a million: a call for each takes as long again
                begin = at + _LENGTH.size
                at = begin + unpack(header, at)[0]
                yield header[begin:at].decode()
        except UnicodeDecodeError:
            raise CheckpointError("gguf_malformed", f"{self._where}: key {key!r}: a string is not UTF-8") from None

    def _text(self, key: str, at: int) -> str:
        """Return a string that is the value of a key. Bytes that are not UTF-8 become U+FFFD, with a warning: llama.cpp
        loads such files."""
        (length,) = _LENGTH.unpack_from(self._header, at)
        data = self._header[at + _LENGTH.size : at + _LENGTH.size + length]
        try:
            return data.decode()
        except UnicodeDecodeError:
            logger.warning("%s: key %r: the string is not UTF-8, and is read as far as it is", self._where, key)
            return data.decode(errors="replace")


# Writing


def encode(key: str, value: Any) -> bytes:
    """Return a key with its value in the form of a header. Raises ValueError for what a GGUF file cannot hold."""
    typed = value if isinstance(value, Typed) else Typed(_usual_type(key, value), value)
    name = key.encode()
    if typed.type[0] != "[":
        stored = _number(typed.type) + _values(key, typed.type, [typed.value])
    else:
        element = typed.type[1:-1]
        count = _LENGTH.pack(len(typed.value))
        stored = _number(ARRAY) + _number(element) + count + _values(key, element, typed.value)
    return text(name) + stored


def text(data: bytes) -> bytes:
    """Return a string in the form of files: its length, and its bytes."""
    return _LENGTH.pack(len(data)) + data


def _usual_type(key: str, value: Any) -> str:
    if isinstance(value, list | tuple):
        if not value:
            raise ValueError(f"key {key!r}: an empty array has no type: give it as Typed")
        kinds = {_usual_type(key, each) for each in value}
        if kinds <= {"u32", "i32"}:
            return "[i32]"
        if len(kinds) > 1 or "[" in next(iter(kinds)):
            raise ValueError(f"key {key!r}: an array holds values of one type, none of them an array")
        return f"[{kinds.pop()}]"
    for kind, name in ((bool, "bool"), (float, "f32"), (str, STRING)):
        if isinstance(value, kind):
            return name
    if isinstance(value, int):  # after bool, which is an int in Python
        return "u32" if value >= 0 else "i32"
    raise ValueError(f"key {key!r}: a {type(value).__name__} cannot be stored in GGUF metadata")


def _number(kind: str) -> bytes:
    if kind not in VALUE_TYPES:
        raise ValueError(f"{kind!r} is not a type of GGUF values: known are {', '.join(VALUE_TYPES)}")
    return SCALARS["u32"].pack(VALUE_TYPES.index(kind))


def _values(key: str, kind: str, values: Sequence[Any]) -> bytes:
    try:
        if kind == STRING:
            return b"".join(text(value.encode()) for value in values)
        return struct.pack(f"<{len(values)}{SCALARS[kind].format[1:]}", *values)
    except (struct.error, OverflowError, AttributeError, KeyError) as error:
        raise UserError("gguf_inexpressible", f"key {key!r}: not a value of type {kind}: {error}") from None


def as_stored(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return plain values with their numbers rounded to float32, as they are stored."""

    def rounded(value: Any) -> Any:
        if isinstance(value, list):
            return [rounded(each) for each in value]
        return SCALARS["f32"].unpack(SCALARS["f32"].pack(value))[0] if isinstance(value, float) else value

    return {key: rounded(value) for key, value in metadata.items()}


def same(ours: object, theirs: object) -> bool:
    """Return whether two values are equal but for the rounding of numbers to float32."""
    if isinstance(ours, tuple) and isinstance(theirs, tuple):
        return len(ours) == len(theirs) and all(map(same, ours, theirs))
    if isinstance(ours, float) and isinstance(theirs, float):
        return math.isclose(ours, theirs, rel_tol=SAME)
    return ours == theirs
