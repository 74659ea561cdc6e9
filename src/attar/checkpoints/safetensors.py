"""Reader of one safetensors file: a strict header parser, and plain reads instead of a memory map.

A safetensors file is eight bytes of little-endian length, that many bytes of JSON, and the tensors back to back. The
JSON is untrusted, so everything in it is checked: every key once, every number an integer, every tensor exactly as long
as its dtype and shape say, and the tensors tiling the data without overlap, hole or rest. The `safetensors` package is
laxer (a repeated key silently wins, any name passes); it is the oracle of the tests and nothing more. Refused here and
not there are duplicate and unknown keys, and names that are empty, do not print or hold a `..` component. So are more
than `MAX_TENSORS` tensors or `MAX_RANK` dimensions, headers of more than `MAX_HEADER` bytes, metadata of more than
`MAX_METADATA`, more than `MAX_ODD` of unusual names, and dtypes that attar does not use.

A header is read entry by entry, by one pattern, and never as JSON. Whatever it holds, it takes little time, and little
memory beside four times its size. A few bytes of JSON may become a hundred times as large in Python, and one character
of four bytes makes every other of its string as wide.

Tensors are read with `pread` into memory of their own. A map would be shorter, but a truncated file turns a map into
SIGBUS, which ends the process; a short read is an error with a name. `pread` has no file position, so that threads may
read at the same time. Torch is imported only when a tensor is read: listing a checkpoint is quick.

Not done: big-endian hosts, and the sub-byte dtypes of the format.
"""

from __future__ import annotations

import ctypes
import json
import math
import mmap
import os
import re
import reprlib
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from attar.checkpoints.strict_io import (
    CONVERT,
    MAX_NAME,
    PICKLES,
    CheckpointError,
    OpenFile,
    check_name,
    kind_of,
    near,
    parse_json,
)
from attar.formats.scheme import ITEM_BITS, Part

if TYPE_CHECKING:
    from torch import Tensor

MAX_TENSORS = 100_000
MAX_HEADER = 1 << 24  # bytes; with many tensors, 150 are usual for each, half of them its name
MAX_ODD = 4_000_000  # bytes of all names together that hold more than letters, digits, dots, dashes and underscores
MAX_METADATA = 4_000_000  # bytes
MAX_MARKS = 400_000  # quotation marks of the metadata, those in its texts included
MAX_RANK = 16
MAPPED = 1 << 20  # bytes from which mapping pays

DTYPES: Mapping[str, str] = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "I16": "int16", "I32": "int32", "I64": "int64",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F16": "float16", "BF16": "bfloat16", "F32": "float32",
    "F64": "float64",
}  # fmt: skip
"""Names of dtypes: safetensors' -> torch's."""

_SPLIT = " (save_pretrained's max_shard_size)"
_KNOWN = {name.encode(): (torch_name, ITEM_BITS[torch_name] // 8) for name, torch_name in DTYPES.items()}
_FORMS = 1024  # cached dtypes and shapes: benign files have few
_JSON = json.JSONDecoder()

_S, _INT = r"[ \t\n\r]*+", r"(?!0[0-9])[0-9]{1,19}+"
_RUN = rf'[^"\\\x00-\x1f]{{0,{MAX_NAME}}}+'
_ENTRY = re.compile(
    (
        rf'{_S}"(?:(?!\.\.")([\w.-]{{1,{MAX_NAME}}}+)|({_RUN}(?:\\.{_RUN}){{0,{MAX_NAME}}}+))"{_S}:{_S}\{{{_S}(?:(?:'
        rf'"dtype"{_S}:{_S}"(\w{{1,32}}+)"|'
        rf'"shape"{_S}:{_S}\[{_S}((?:{_INT}{_S}(?:,{_S}{_INT}{_S}){{0,{MAX_RANK - 1}}}+)?+)\]|'
        rf'"data_offsets"{_S}:{_S}\[{_S}({_INT}){_S},{_S}({_INT}){_S}\]'
        rf'){_S}(?:,{_S}(?=")|(?=\}}))){{3}}\}}{_S}([,}}])'
    ).encode()
)
"""A tensor entry of a header, with the comma or the brace that follows: name (a plain one, which needs no check, or
another), dtype, shape, offsets. Whatever the input, no byte is tried more than twice."""
_METADATA = re.compile(rf'{_S}"__metadata__"{_S}:{_S}(\{{(?:[^"{{}}]++|"(?:[^"\\]++|\\.)*+")*+\}}){_S}([,}}])'.encode())
_NOTHING = re.compile(rf"{_S}\}}".encode())


class Slot(NamedTuple):
    """Position of a tensor: its dtype and shape, and the bytes [begin, end) counted from the start of the data."""

    part: Part
    begin: int
    end: int


def parse_header(
    header: bytes | bytearray, data_bytes: int, where: str | Path
) -> tuple[dict[str, Slot], dict[str, str]]:
    """Check a header and return its tensors, in order of their offsets, and its metadata.

    `header` is the JSON as stored, padding included; `data_bytes` is the size of what follows it in the file. Raises
    CheckpointError naming the tensor.
    """
    if header[:1] != b"{":
        raise CheckpointError(
            "file_wrong_kind", f"{where}: the header does not begin with '{{': not a safetensors file"
        )
    if (count := header.count(b'"data_offsets"')) > MAX_TENSORS:
        raise CheckpointError(
            "checkpoint_too_large",
            f"{where}: {count} tensors; attar accepts {MAX_TENSORS} in a file: save the model in several{_SPLIT}",
        )
    names, parts, begins, ends, metadata = _read(header, where)
    if len(set(names)) != len(names):
        twice, _ = Counter(names).most_common(1)[0]
        raise _malformed(where, f"header: key {reprlib.repr(twice)} is given twice")
    places: Iterable[int] = range(len(names))
    if [*begins, data_bytes] != [0, *ends]:
        places = _tiling(names, begins, ends, data_bytes, where)
    return {names[i]: Slot(parts[i], begins[i], ends[i]) for i in places}, metadata


def _tiling(names: list[str], begins: list[int], ends: list[int], data_bytes: int, where: str | Path) -> list[int]:
    """Return the indices of the tensors, in the order in which they tile the data. Raises CheckpointError naming one
    that does not begin where another ends."""
    order = sorted(range(len(names)), key=ends.__getitem__)
    order.sort(key=begins.__getitem__)
    at = 0
    for i in order:
        if (begin := begins[i]) != at:
            what = "overlaps the one before it" if begin < at else f"leaves a hole of {begin - at} bytes"
            raise _malformed(where, f"tensor {names[i]!r} {what} (begins at {begin}, not {at})")
        at = ends[i]
    if data_bytes < at:
        raise CheckpointError(
            "checkpoint_incomplete",
            f"{where}: truncated: expected {at} bytes of tensors, the file has {data_bytes}; download or copy it again",
        )
    if data_bytes > at:
        raise _malformed(where, f"{data_bytes - at} bytes after the last tensor; download or copy it again")
    return order


def _read(
    header: bytes | bytearray, where: str | Path
) -> tuple[list[str], list[Part], list[int], list[int], dict[str, str]]:
    """Return the tensors of a header, each checked by itself: their names, parts, begins and ends; and its metadata.

    The result is columns, because a hundred thousand rows keep Python's garbage collector busy for a fifth of the time.
    """
    names: list[str] = []
    parts: list[Part] = []
    begins: list[int] = []
    ends: list[int] = []
    known: dict[tuple[bytes, bytes], tuple[Part, int]] = {}  # (dtype, shape) -> their `Part`, and its size in bytes
    metadata: dict[str, str] | None = None
    at, more, odd = 1, b",", 0
    if nothing := _NOTHING.match(header, at):
        at, more = nothing.end(), b"}"
    while more == b",":
        entry = _ENTRY.match(header, at)
        if entry is None and metadata is None and (found := _METADATA.match(header, at, at + MAX_METADATA)):
            metadata, more, at = _metadata(found[1], where), found[2], found.end()
            continue
        if entry is None:
            raise _neither(header, at, where)
        plain, raw, dtype, shape, begin, end, more = entry.groups()
        if dtype is None or shape is None or begin is None:  # another is given twice
            raise _neither(header, at, where)
        at = entry.end()
        if plain is None and (odd := odd + len(raw)) > MAX_ODD:
            raise CheckpointError(
                "checkpoint_too_large",
                f"{where}: names with more than letters, digits, '.', '-' and '_' take over {MAX_ODD} bytes together",
            )
        name = _name(raw, where) if plain is None else plain.decode()
        if (form := known.get((dtype, shape))) is None:
            form = _form(dtype, shape, name, where)
            if len(known) < _FORMS:
                known[dtype, shape] = form
        part, size = form
        first, last = int(begin), int(end)
        if last - first != size:
            what = f"takes {size} bytes, but its data_offsets [{first}, {last}] span {last - first}"
            raise _malformed(where, f"tensor {name!r}: {dtype.decode()} {list(part.shape)} {what}")
        names.append(name)
        parts.append(part)
        begins.append(first)
        ends.append(last)
    if header[at:].strip(b" \t\n\r"):
        raise _malformed(where, "header: not valid JSON: text follows its end")
    if "__metadata__" in names:
        raise _malformed(where, "__metadata__ must map strings to strings")
    return names, parts, begins, ends, metadata or {}


def _malformed(where: str | Path, text: str) -> CheckpointError:
    return CheckpointError("checkpoint_malformed", f"{where}: {text}")


def _neither(header: bytes | bytearray, at: int, where: str | Path) -> CheckpointError:
    return _malformed(
        where,
        "header: neither a tensor, with dtype, shape and data_offsets and nothing else, nor metadata of at "
        f"most {MAX_METADATA} bytes: {reprlib.repr(bytes(header[at : at + 64]))}",
    )


def _metadata(text: bytes, where: str | Path) -> dict[str, str]:
    if text.count(b'"') > MAX_MARKS:
        raise CheckpointError("checkpoint_too_large", f"{where}: more than {MAX_MARKS} quotation marks in __metadata__")
    value = parse_json(text, f"{where}: header")
    if not all(isinstance(each, str) for each in value.values()):
        raise _malformed(where, "__metadata__ must map strings to strings")
    return dict(value)


def _name(raw: bytes, where: str | Path) -> str:
    try:
        name = raw.decode()
        if "\\" in name:
            name = str(_JSON.raw_decode(f'"{name}"')[0])
    except ValueError as error:
        raise _malformed(where, f"header: not valid JSON: {error}") from None
    if problem := check_name(name):
        raise _malformed(where, f"a tensor has {problem}")
    return name


def _form(dtype: bytes, shape: bytes, name: str, where: str | Path) -> tuple[Part, int]:
    """Return a tensor's dtype and shape, and its size in bytes."""
    sizes = tuple(map(int, shape.split(b","))) if shape else ()
    count = math.prod(sizes)
    if (count or math.prod(filter(None, sizes))) >= 2**60:
        raise _malformed(where, f"tensor {name!r}: shape {list(sizes)} must hold fewer than 2^60 elements")
    if dtype not in _KNOWN:
        what = f"dtype {dtype.decode()!r} is unknown: attar reads {', '.join(DTYPES)}"
        raise _malformed(where, f"tensor {name!r}: {what}")
    kind, item = _KNOWN[dtype]
    return Part(kind, sizes), item * count


def byte_view(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor of any dtype, writable, without a copy. The tensor must outlive the
    view."""
    assert tensor.is_contiguous()
    assert tensor.device.type == "cpu"
    size = tensor.numel() * tensor.element_size()
    return memoryview((ctypes.c_ubyte * size).from_address(tensor.data_ptr())) if size else memoryview(b"")


class TensorFile(OpenFile):
    """One open safetensors file with a checked header. Reading is thread-safe.

    Raises CheckpointError as `OpenFile` does, and where the file is truncated, of another format, or malformed.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        if (where := Path(path)).suffix in PICKLES:
            raise CheckpointError("file_unsafe", f"{where}: not safetensors. {CONVERT}")
        super().__init__(path)
        try:
            self._data, self._slots, self.metadata = self._open()
        except CheckpointError:
            self.close()
            raise

    def _open(self) -> tuple[int, dict[str, Slot], dict[str, str]]:
        prefix = bytearray(min(64, self.size))
        self.fill(memoryview(prefix), 0)
        length = int.from_bytes(prefix[:8], "little")
        if prefix[8:9] != b"{" and (kind := kind_of(bytes(prefix))):
            raise self.error("file_wrong_kind", f"not safetensors: it is {kind}")
        if self.size < 8:
            raise self.error("checkpoint_incomplete", f"truncated: {self.size} bytes; download or copy it again")
        if length > MAX_HEADER:
            raise self.error(
                "checkpoint_too_large",
                f"its first 8 bytes mean a header of {length} bytes, and attar accepts {MAX_HEADER}: not a safetensors "
                f"file, or one to save in several{_SPLIT}",
            )
        if length > self.size - 8:
            raise self.error(
                "checkpoint_incomplete",
                f"truncated: expected {length} bytes of header, the file has {self.size - 8}; download or copy it "
                "again",
            )
        header = bytearray(length)
        self.fill(memoryview(header), 8)
        slots, metadata = parse_header(header, self.size - 8 - length, self.path)
        return 8 + length, slots, metadata

    def names(self) -> tuple[str, ...]:
        """Return the tensors' names, in the order of their data in the file."""
        return tuple(self._slots)

    def __contains__(self, name: str) -> bool:
        return name in self._slots

    def info(self, name: str) -> Part:
        """Return a tensor's torch dtype name and shape. Raises CheckpointError naming near misses."""
        return self._slot(name).part

    def read(self, name: str, out: Tensor | None = None) -> Tensor:
        """Return the tensor, in memory of its own or in `out` (contiguous, on the CPU, same dtype and shape)."""
        slot = self._slot(name)
        return self._read(slot.part, self._data + slot.begin, out)

    def map(self, name: str) -> Tensor:
        """Return the tensor on the pages of the file itself, for one pass over it: nothing is copied or zeroed first.

        Writing to it changes a private copy. A file that is truncated while it is mapped ends the process, where `read`
        raises an error: map a tensor only for the moment of converting it.
        """
        import torch

        slot = self._slot(name)
        dtype, at, size = getattr(torch, slot.part.dtype), self._data + slot.begin, slot.part.bytes
        if size < MAPPED or at % dtype.itemsize:
            return self.read(name)
        start = at // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        pages = mmap.mmap(self.fd, at - start + size, offset=start, access=mmap.ACCESS_COPY)
        if hasattr(mmap, "MADV_POPULATE_READ"):
            pages.madvise(mmap.MADV_POPULATE_READ)
        return torch.frombuffer(pages, dtype=dtype, count=size // dtype.itemsize, offset=at - start).view(
            slot.part.shape
        )

    def read_rows(self, name: str, start: int, stop: int) -> Tensor:
        """Return rows start..stop-1 of the first dimension: [stop - start, ...]. For tables too large to hold whole."""
        slot = self._slot(name)
        shape = slot.part.shape
        assert len(shape) > 0, name
        assert 0 <= start <= stop <= shape[0], (name, shape, start, stop)
        row, rows = (Part(slot.part.dtype, (*lead, *shape[1:])) for lead in ((), (stop - start,)))
        return self._read(rows, self._data + slot.begin + start * row.bytes, None)

    def _slot(self, name: str) -> Slot:
        if name not in self._slots:
            raise self.error("checkpoint_incomplete", f"has no tensor {name!r}{near(name, self._slots)}")
        return self._slots[name]

    def _read(self, part: Part, offset: int, out: Tensor | None) -> Tensor:
        import torch

        dtype = getattr(torch, part.dtype)
        if out is None:
            out = torch.empty(part.shape, dtype=dtype)
        assert (out.dtype, tuple(out.shape)) == (dtype, part.shape), (out.dtype, out.shape, part)
        self.fill(byte_view(out), offset)
        return out
