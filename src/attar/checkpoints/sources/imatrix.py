"""Importance matrices in llama.cpp's formats: E[x^2] of each column of a matrix, by the tensor's name in GGUF files.

Two forms are in circulation. The newer is a GGUF file of `general.type` imatrix: for each matrix its sums of squares
(`NAME.in_sum2`, [experts, I]) and the number of rows in them (`NAME.counts`, [experts, 1]). The older has no magic. It
has a count of entries, each a name, a number of chunks and as many floats, the means times that number; then the number
of chunks and the name of the text. Both are read, recognized by their first bytes, and written: the older where a path
ends in .dat.

These files are untrusted input like all files. Every length is checked against the bytes that are left before it is
used. The older form must end where its last field does, and values that are not finite or below zero are refused.
An entry of stacked experts has a row and a count for each of them.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from attar.checkpoints.gguf.file import GgufFile
from attar.checkpoints.gguf.header import MAGIC
from attar.checkpoints.gguf.values import Typed
from attar.checkpoints.gguf.writer import atomic_file, atomic_gguf
from attar.checkpoints.safetensors import byte_view
from attar.checkpoints.strict_io import CheckpointError, OpenFile
from attar.checkpoints.writer import sync_path
from attar.formats.codecs.ggml import TYPES, GgmlType

LEGACY = ".dat"
MAX_BYTES = 1 << 30
MAX_ENTRIES, MAX_NAME = 1 << 16, 1024

_SUM, _COUNT = ".in_sum2", ".counts"
_I32 = struct.Struct("<i")


@dataclass(frozen=True, eq=False)
class Imatrix:
    """An importance matrix. `means` are E[x^2], float32 [I], or [E, I] of stacked experts, by tensor. They are over
    `counts` rows each, of `chunks` chunks of `chunk` tokens of `datasets`."""

    means: Mapping[str, Tensor]
    counts: Mapping[str, int]
    chunks: int
    chunk: int
    datasets: tuple[str, ...] = field(default=())


def read(path: str | Path) -> Imatrix:
    """Read an importance matrix of either form. Raises CheckpointError where it is missing or malformed."""
    path = Path(path)
    if not path.is_file():
        raise CheckpointError("file_not_found", f"{path}: no such file")
    if path.stat().st_size > MAX_BYTES:
        raise CheckpointError("file_too_large", f"{path}: an importance matrix has at most {MAX_BYTES} bytes")
    with path.open("rb") as file:
        first = file.read(len(MAGIC))
    found = _read_gguf(path) if first == MAGIC else _read_legacy(path)
    for name, mean in found.means.items():
        if not (mean.isfinite() & (mean >= 0)).all():
            raise CheckpointError(
                "file_malformed", f"{path}: {name!r} has importances that are below zero or not finite"
            )
    return found


def write(path: str | Path, matrix: Imatrix, overwrite: bool = False) -> None:
    """Write the newer form, or the older where `path` ends in .dat. Raises CheckpointError where it exists already."""
    path = Path(path)
    (_write_legacy if path.suffix == LEGACY else _write_gguf)(path, matrix, overwrite)


# The newer form


def _read_gguf(path: Path) -> Imatrix:
    file = GgufFile(path)
    if file.metadata.get("general.type") != "imatrix":
        raise file.error("file_wrong_kind", "a GGUF file, but no importance matrix (its general.type is not imatrix)")
    means, counts = {}, {}
    for name in file.names():
        if not name.endswith(_SUM):
            continue
        entry = name.removesuffix(_SUM)
        shape = file.info(name).shape
        experts = math.prod(file.info(entry + _COUNT).shape)
        if math.prod(shape) != experts * shape[-1]:
            raise file.error("file_malformed", f"{entry!r} has {list(shape)} sums and {experts} counts")
        total, rows = _floats(file, name).view(experts, -1), _floats(file, entry + _COUNT).view(experts, 1)
        if not rows.isfinite().all() or (rows < 0).any():
            raise file.error("file_malformed", f"{entry!r} has a count that is below zero or not finite")
        if rows.any():  # an entry without rows has no means; an expert without rows counts all columns alike
            mean = torch.where(rows > 0, total / rows, torch.ones(()))
            means[entry], counts[entry] = mean if experts > 1 else mean[0], int(rows.max())
    if not means:
        raise file.error("file_malformed", "holds no importances")
    chunks, chunk = (file.metadata.get(f"imatrix.chunk_{each}", 0) for each in ("count", "size"))
    datasets = file.metadata.get("imatrix.datasets", ())
    if type(chunks) is not int or type(chunk) is not int or isinstance(datasets, str | int | float):
        raise file.error("file_malformed", "the keys imatrix.* are of other types than they should be")
    return Imatrix(means, counts, chunks, chunk, tuple(str(each) for each in datasets))


def _floats(file: GgufFile, name: str) -> Tensor:
    tensor = file.info(name)
    if tensor.kind.name != "F32":
        raise file.error("file_malformed", f"tensor {name!r} must be F32, not {tensor.kind.name}")
    return file.read(name).view(torch.float32)


def _write_gguf(path: Path, matrix: Imatrix, overwrite: bool) -> None:
    metadata = {
        "general.type": "imatrix",
        "imatrix.datasets": Typed("[string]", list(matrix.datasets)),
        "imatrix.chunk_count": matrix.chunks,
        "imatrix.chunk_size": matrix.chunk,
    }
    plain, names = TYPES["F32"], sorted(matrix.means)
    layout: dict[str, tuple[GgmlType, tuple[int, ...]]] = {}
    for name in names:
        experts, columns = matrix.means[name].view(-1, matrix.means[name].shape[-1]).shape
        layout |= {name + _SUM: (plain, (experts, columns)), name + _COUNT: (plain, (experts, 1))}
    with atomic_gguf(path, metadata, layout, overwrite) as writer:
        for name in names:
            count, mean = float(matrix.counts[name]), matrix.means[name].view(-1, matrix.means[name].shape[-1])
            writer.write(name + _SUM, (mean * count).view(torch.uint8))
            writer.write(name + _COUNT, torch.full((len(mean), 1), count).view(torch.uint8))


# The older form


class _Reader(OpenFile):
    """Sequential reader of a file's fields; a field that would reach beyond the end is an error before it is read."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._at = 0

    @property
    def left(self) -> int:
        return self.size - self._at

    def skip(self, count: int, what: str) -> int:
        """Skip `count` bytes and return where they begin. Raises CheckpointError where the file has fewer."""
        if count > self.left:
            raise self.error("file_malformed", f"not an importance matrix, or cut off: {what} reaches beyond its end")
        self._at += count
        return self._at - count

    def take(self, count: int, what: str) -> bytearray:
        at, taken = self.skip(count, what), bytearray(count)
        self.fill(memoryview(taken), at)
        return taken

    def integer(self, what: str, low: int, high: int) -> int:
        (value,) = _I32.unpack(self.take(_I32.size, what))
        if not low <= value <= high:
            raise self.error("file_malformed", f"not an importance matrix: {what} is {value}")
        return int(value)

    def text(self, what: str) -> str:
        try:
            return self.take(self.integer(f"the length of {what}", 0, MAX_NAME), what).decode()
        except UnicodeDecodeError:
            raise self.error("file_malformed", f"not an importance matrix: {what} is not UTF-8") from None


def _read_legacy(path: Path) -> Imatrix:
    with closing(_Reader(path)) as reader:
        entries: dict[str, tuple[int, int, int]] = {}
        for i in range(reader.integer("the number of entries", 1, MAX_ENTRIES)):
            name = reader.text(f"the name of entry {i}")
            if name in entries:
                raise reader.error("file_malformed", f"not an importance matrix: {name!r} is given twice")
            calls = reader.integer(f"the number of chunks of {name!r}", 0, (1 << 31) - 1)
            count = reader.integer(f"the number of values of {name!r}", 1, 1 << 28)
            entries[name] = calls, count, reader.skip(4 * count, f"{name!r}")
        chunks = 0
        datasets: tuple[str, ...] = ()
        if reader.left:  # older versions end here
            chunks = reader.integer("the number of chunks", 0, (1 << 31) - 1)
            datasets = (reader.text("the name of the text"),)
        if reader.left:
            raise reader.error("file_malformed", f"not an importance matrix: {reader.left} bytes follow its end")
        means = {}
        for name, (calls, count, at) in entries.items():  # only now: a malformed file is never held in memory
            means[name] = torch.empty(count)
            reader.fill(byte_view(means[name]), at)
            means[name] /= max(1, calls)
    return Imatrix(means, {name: calls for name, (calls, _, _) in entries.items()}, chunks, 0, datasets)


def _write_legacy(path: Path, matrix: Imatrix, overwrite: bool) -> None:
    calls = max(1, matrix.chunks)
    pieces = [_I32.pack(len(matrix.means))]
    for name in sorted(matrix.means):
        values = (matrix.means[name] * calls).flatten()
        pieces += [_text(name), _I32.pack(calls), _I32.pack(len(values)), values.numpy().astype("<f4").tobytes()]
    pieces += [_I32.pack(matrix.chunks), _text(matrix.datasets[-1] if matrix.datasets else "")]
    with atomic_file(path, overwrite) as work:
        whole = work.out / Path(os.path.realpath(path)).name
        try:
            whole.write_bytes(b"".join(pieces))
            sync_path(whole)
        except BaseException:  # an interrupt too: half a file is useless to another run
            whole.unlink(missing_ok=True)
            raise


def _text(value: str) -> bytes:
    return _I32.pack(len(value.encode())) + value.encode()
