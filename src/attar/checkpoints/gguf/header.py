"""The header of a GGUF file, checked: version, typed metadata, and the position of each tensor.

A GGUF file is a magic word and a version, two counts, that many keys with typed values, that many descriptions of
tensors, padding, and the tensors themselves. The header's length is not stored: a reader walks through it, and every
length on the way is untrusted. Here each length is compared with what the file still holds before it is used for
anything. Sizes are Python integers, which do not wrap. The walk makes no objects out of arrays, so that a hostile file
is refused before it costs memory. Arrays (a vocabulary of a quarter of a million strings) are decoded on iteration.

Refused, although llama.cpp or its Python package accept some of it, are these: a key or a tensor given twice; names
that do not print; arrays of arrays; a bool that is neither 0 nor 1; an alignment that is no power of two from 8 to
65536; tensors that are empty, overlap, start unaligned or leave a hole; types that were withdrawn; more than the counts
below. Bytes after the last tensor are not read, with a warning. Versions 2 and 3 are read; their differences do not
matter here. Version 1, whose lengths have 32 bits, and big-endian files are each refused with a sentence that names the
remedy.

Torch-free. A shape is in torch's order, rows last; files store the reverse.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from attar.checkpoints.gguf.values import ARRAY, SCALARS, STRING, VALUE_TYPES, Entry, Metadata
from attar.checkpoints.strict_io import CheckpointError, OpenFile, check_name, kind_of
from attar.errors import Code
from attar.formats.codecs.ggml import BY_ID, GgmlType

logger = logging.getLogger(__name__)

MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT = "general.alignment"
DEFAULT_ALIGNMENT = 32
PART_KEYS = ("split.no", "split.count", "split.tensors.count")
"""Keys of parts of a model: which part a file is, from 0 on, their number, and the number of tensors in all."""

MAX_HEADER = 1 << 26
MAX_KEYS = 1 << 14
MAX_TENSORS = 1 << 14  # ten times what the largest models have: experts are stacked
MAX_RANK = 4
MAX_ELEMENTS = 1 << 60
MAX_KEY = 256  # bytes of a key
MAX_NAME = 64  # bytes of a tensor's name, by the format
MAX_STRING = 1 << 24  # bytes of a value
MAX_ITEM = 1 << 16  # bytes of a string in an array
MAX_ITEMS = 1 << 20  # values in one array
MAX_STRINGS = 1 << 20  # strings in all arrays together: the largest vocabularies have 2^18, with 2^19 merges

_U32, _U64 = SCALARS["u32"], SCALARS["u64"]
_WHOLE = ("u8", "i8", "u16", "i16", "u32", "i32", "u64", "i64")
_GONE = dict.fromkeys((4, 5, 31, 32, 33, 36, 37, 38), ": it was withdrawn; convert the model again") | dict.fromkeys(
    (9, 15), ": it belongs to running programs, not to files"
)
_FIRST_READ = 1 << 16
_SMALLEST_KEY = 8 + 1 + 4 + 1  # bytes: a name of one byte, and a value of one
_SMALLEST_TENSOR = 8 + 1 + 4 + 8 + 4 + 8


class GgufTensor(NamedTuple):
    """A tensor's description in the header: bytes [begin, end) are counted from the start of the data."""

    kind: GgmlType
    shape: tuple[int, ...]  # torch's order
    begin: int
    end: int

    @property
    def raw_shape(self) -> tuple[int, ...]:
        """Return the shape of its bytes: rows of whole blocks."""
        return (*self.shape[:-1], self.kind.row_bytes(self.shape[-1]))


class _Walk:
    """Position in a header that is read from the file as far as it is needed."""

    def __init__(self, file: OpenFile) -> None:
        self.file, self.size, self.error = file, file.size, file.error
        self.read = bytearray()
        self.at = 0

    def need(self, count: int, what: str, of: object = None) -> int:
        """Read `count` bytes from the position on into memory and step over them. Return the position they begin at.

        Errors name `what`, with `of` for its owner: the text is only built then, because ten reads a tensor come here.
        """
        at, end = self.at, self.at + count
        if end > self.size:
            raise self.error(
                "checkpoint_incomplete",
                f"truncated: {_spelled(what, of)} would end at byte {end}, the file has {self.size}; "
                "download or copy it again",
            )
        if end > MAX_HEADER:
            raise self.error(
                "checkpoint_too_large", f"the header is longer than the {MAX_HEADER} bytes that attar accepts"
            )
        if end > len(self.read):
            want = min(max(end, 2 * len(self.read), _FIRST_READ), self.size, MAX_HEADER)
            more = bytearray(want - len(self.read))
            self.file.fill(memoryview(more), len(self.read))
            self.read += more
        self.at = end
        return at

    def u32(self, what: str, of: object = None) -> int:
        value: int = _U32.unpack_from(self.read, self.need(4, what, of))[0]
        return value

    def u64(self, what: str, of: object = None) -> int:
        value: int = _U64.unpack_from(self.read, self.need(8, what, of))[0]
        return value

    def text(self, limit: int, what: str, of: object = None) -> str:
        """Read a printable string of 1 to `limit` bytes."""
        length = self.u64(what, of)
        if length > limit:
            raise self.error("checkpoint_too_large", f"{_spelled(what, of)} has {length} bytes, more than {limit}")
        at = self.need(length, what, of)
        try:
            text = self.read[at : self.at].decode()
        except UnicodeDecodeError:
            raise self.error("gguf_malformed", f"{_spelled(what, of)} is not UTF-8") from None
        if problem := check_name(text):
            raise self.error("gguf_malformed", f"{_spelled(what, of)} is {problem}")
        return text

    def fits(self, least: int, what: str) -> None:
        """Raise CheckpointError where the file has fewer than `least` bytes left for `what`."""
        left = self.size - self.at
        if least > left:
            raise self.error(
                "checkpoint_incomplete",
                f"truncated: {what} take {least} bytes or more, the file has {left} left; download or copy it again",
            )


def _spelled(what: str, of: object) -> str:
    return what if of is None else f"{what} {of!r}"


def padded(at: int, alignment: int) -> int:
    return -(-at // alignment) * alignment


@dataclass(frozen=True)
class Part:
    """Place of a file among the parts of a model: the values of `PART_KEYS`."""

    index: int
    count: int
    tensors: int


@dataclass(frozen=True)
class Header:
    """Contents of the header. `tensors` are in the order of their data in the file, from byte `data` on. `part` is None
    for a whole model."""

    version: int
    metadata: Metadata
    alignment: int
    tensors: Mapping[str, GgufTensor]
    bytes: int
    data: int
    part: Part | None


def read_header(file: OpenFile, whole: bool = True) -> Header:
    """Read and check the header of a file. Without `whole`, data behind it may be missing. Raises CheckpointError."""
    walk = _Walk(file)
    version, tensor_count, key_count = _counts(walk)
    metadata = _metadata(walk, key_count)
    alignment = _alignment(walk, metadata)
    part = _part(walk, metadata)
    tensors = _tensors(walk, tensor_count, alignment)
    data = padded(walk.at, alignment)
    _check_data(walk, tensors, data, alignment, whole)
    return Header(version, metadata, alignment, tensors, walk.at, data, part)


def _counts(walk: _Walk) -> tuple[int, int, int]:
    """Return version, tensors and keys. Raises CheckpointError for other formats and for unsupported versions."""
    if walk.size < 4:
        raise walk.error("checkpoint_incomplete", f"truncated: {walk.size} bytes; download or copy it again")
    walk.need(4, "the magic word")
    magic = bytes(walk.read[:4])
    if magic != MAGIC:
        kind = kind_of(bytes(walk.read[:64])) or f"one that begins {magic!r}"
        raise walk.error("file_wrong_kind", f"not a GGUF file: it is {kind}")
    version = walk.u32("the version")
    if version & 0xFFFF == 0 and version >> 16:
        raise walk.error(
            "feature_unsupported",
            "its numbers are big-endian; convert it with gguf-convert-endian, of the gguf package",
        )
    if version == 1:
        raise walk.error("feature_unsupported", "GGUF version 1, of August 2023, is not read; convert the model again")
    if version not in VERSIONS:
        raise walk.error("feature_unsupported", f"GGUF version {version} is unknown: attar reads 2 and 3")
    tensors, keys = walk.u64("the number of tensors"), walk.u64("the number of keys")
    if tensors > MAX_TENSORS:
        raise walk.error("checkpoint_too_large", f"{tensors} tensors; attar accepts {MAX_TENSORS} in a file")
    if keys > MAX_KEYS:
        raise walk.error("checkpoint_too_large", f"{keys} keys; attar accepts {MAX_KEYS} in a file")
    walk.fits(keys * _SMALLEST_KEY + tensors * _SMALLEST_TENSOR, f"{keys} keys and {tensors} tensors")
    return version, tensors, keys


def _metadata(walk: _Walk, keys: int) -> Metadata:
    entries: dict[str, Entry] = {}
    strings = 0
    for i in range(keys):
        key = walk.text(MAX_KEY, "the name of key", i)
        if key in entries:
            raise walk.error("gguf_malformed", f"key {key!r} is given twice")
        what = f"key {key!r}"
        kind = _value_type(walk, what)
        if kind != ARRAY:
            entries[key] = Entry(kind, None, walk.at)
            _step_over(walk, kind, what)
            continue
        element, count = _value_type(walk, what), walk.u64(f"the length of {what}")
        if element == ARRAY:
            raise walk.error("feature_unsupported", f"{what} is an array of arrays, which attar does not read")
        if count > MAX_ITEMS:
            raise walk.error(
                "checkpoint_too_large", f"{what} has {count} elements; attar accepts {MAX_ITEMS} in an array"
            )
        entries[key] = Entry(element, count, walk.at)
        if element == STRING:
            strings += count
            if strings > MAX_STRINGS:
                raise walk.error(
                    "checkpoint_too_large", f"{what}: more than the {MAX_STRINGS} strings that attar accepts"
                )
            walk.fits(8 * count, f"{count} strings of {what}")
            _step_over_strings(walk, count, what)
        else:
            at = walk.need(count * SCALARS[element].size, what)
            if element == "bool" and walk.read[at : walk.at].translate(None, b"\0\1"):
                raise walk.error("gguf_malformed", f"{what} holds a bool that is neither 0 nor 1")
    return Metadata(walk.read, entries, walk.file.path)


def _value_type(walk: _Walk, what: str) -> str:
    number = walk.u32(f"the type of {what}")
    if number >= len(VALUE_TYPES):
        raise walk.error("gguf_malformed", f"{what} has the value type {number}, which does not exist")
    return VALUE_TYPES[number]


def _step_over(walk: _Walk, kind: str, what: str) -> None:
    """Step over a value that is no array, and check its bytes as far as its type allows."""
    if kind != STRING:
        at = walk.need(SCALARS[kind].size, what)
        if kind == "bool" and walk.read[at] > 1:
            raise walk.error("gguf_malformed", f"{what} is a bool of {walk.read[at]}: neither 0 nor 1")
        return
    length = walk.u64(f"the length of {what}")
    if length > MAX_STRING:
        raise walk.error("checkpoint_too_large", f"{what} is a string of {length} bytes, more than {MAX_STRING}")
    walk.need(length, what)


def _step_over_strings(walk: _Walk, count: int, what: str) -> None:
    """Step over the strings of an array: only their lengths are read, a million in a tenth of a second."""
    read, unpack = walk.read, _U64.unpack_from
    at = walk.at
    for i in range(count):
        if at + 8 > len(read):
            walk.at = at
            walk.need(8, f"the length of string {i} of {what}")
        (length,) = unpack(read, at)
        if length > MAX_ITEM:
            raise walk.error("checkpoint_too_large", f"string {i} of {what} has {length} bytes, more than {MAX_ITEM}")
        at += 8 + length
    walk.at = at
    walk.need(0, what)


def _alignment(walk: _Walk, metadata: Metadata) -> int:
    if ALIGNMENT not in metadata:
        return DEFAULT_ALIGNMENT
    kind = metadata.type_of(ALIGNMENT)
    value: int | None = metadata[ALIGNMENT] if kind == "u32" else None  # other types are refused
    if value is None or not 8 <= value <= 65536 or value & (value - 1):
        found = kind if value is None else f"{kind} {value}"
        raise walk.error("gguf_malformed", f"{ALIGNMENT} must be a u32, a power of two from 8 to 65536, not {found}")
    return value


def _part(walk: _Walk, metadata: Metadata) -> Part | None:
    """Return the place of the file among the parts of a model; None where it is whole."""
    given = [key for key in PART_KEYS if key in metadata]
    for key in given:
        if (kind := metadata.type_of(key)) not in _WHOLE:
            raise walk.error("gguf_malformed", f"{key} must be a whole number, not {kind}")
    index, count, tensors = (metadata[key] if key in given else 0 for key in PART_KEYS)
    if count <= 1:
        return None
    if missing := [key for key in PART_KEYS if key not in given]:
        raise walk.error("gguf_malformed", f"has split.count {count}, but no {missing[0]}")
    if not 0 <= index < count:
        raise walk.error("gguf_malformed", f"split.no is {index}, and split.count {count}")
    return Part(index, count, tensors)


def _tensors(walk: _Walk, count: int, alignment: int) -> dict[str, GgufTensor]:
    """Return the descriptions, in the order of their offsets."""
    found: dict[str, GgufTensor] = {}
    for i in range(count):
        name = walk.text(MAX_NAME, "the name of tensor", i)
        if name in found:
            raise walk.error("gguf_malformed", f"tensor {name!r} is given twice")
        found[name] = _tensor(walk, name, alignment)
    return dict(sorted(found.items(), key=lambda item: item[1].begin))


def _tensor(walk: _Walk, name: str, alignment: int) -> GgufTensor:
    def bad(problem: str, code: Code = "gguf_malformed") -> CheckpointError:
        return walk.error(code, f"tensor {name!r} {problem}")

    rank = walk.u32("the number of dimensions of tensor", name)
    if not 1 <= rank <= MAX_RANK:
        raise bad(f"has {rank} dimensions; a GGUF tensor has 1 to {MAX_RANK}")
    shape = tuple(reversed([walk.u64("the shape of tensor", name) for _ in range(rank)]))
    if min(shape) < 1 or math.prod(shape) >= MAX_ELEMENTS:
        raise bad(f"has the shape {list(shape)}: sizes must be positive, and elements fewer than 2^60 in all")
    number = walk.u32("the type of tensor", name)
    if number not in BY_ID:
        raise bad(
            f"has the type {number}, which attar does not know{_GONE.get(number, '')}", "quantization_unsupported"
        )
    kind = BY_ID[number]
    try:
        size = kind.bytes(shape)
    except ValueError as error:
        raise bad(f"has the shape {list(shape)}: {error}") from None
    begin = walk.u64("the offset of tensor", name)
    if begin % alignment:
        raise bad(f"begins at byte {begin} of the data, which is no multiple of the alignment {alignment}")
    return GgufTensor(kind, shape, begin, begin + size)


def _check_data(walk: _Walk, tensors: Mapping[str, GgufTensor], data: int, alignment: int, whole: bool) -> None:
    """Raise CheckpointError where the tensors do not tile the data."""
    at = 0
    for name, tensor in tensors.items():
        if tensor.begin != at:
            what = "overlaps the one before it" if tensor.begin < at else f"leaves a hole of {tensor.begin - at} bytes"
            raise walk.error("gguf_malformed", f"tensor {name!r} {what} (begins at {tensor.begin}, not {at})")
        if whole and data + tensor.end > walk.size:
            raise walk.error(
                "checkpoint_incomplete",
                f"truncated: tensor {name!r} ends at byte {data + tensor.end}, the file has {walk.size}; download "
                "or copy it again",
            )
        at = padded(tensor.end, alignment)
    if walk.size > data + at:
        logger.warning("%s: %d bytes after the last tensor are not read", walk.file.path, walk.size - data - at)
