"""Writer of GGUF: the header is laid out first, and tensors are written at their offsets, in any order.

Once its header is known, a GGUF file has the form that `writer.ShardWriter` writes: named slots of known size after
some fixed bytes. So `plan` makes a `FilePlan` whose tensors are arrays of bytes, and that writer does the rest: it
reserves space before any work, and reports a full disk in a sentence. `atomic_gguf` puts a file in place whole or not
at all. The bytes are deterministic: the same keys and tensors in the same order give the same file.

Files are of version 3, little-endian, with the default alignment unless the metadata say otherwise, tensors in the
order given and padded at the end too, as llama.cpp requires. A model in parts (`parts.py`) has the metadata in the
first. Its first part is put in place last, so that a set that is not whole has none.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from attar.checkpoints.gguf.header import (
    ALIGNMENT,
    DEFAULT_ALIGNMENT,
    MAGIC,
    MAX_KEY,
    MAX_KEYS,
    MAX_NAME,
    MAX_RANK,
    MAX_TENSORS,
    PART_KEYS,
    padded,
)  # fmt: skip
from attar.checkpoints.gguf.parts import MAX_PARTS, PartName, check_target, outputs_of, part_paths
from attar.checkpoints.gguf.values import SCALARS, Typed, encode, text
from attar.checkpoints.receipts.place import receipt_path
from attar.checkpoints.safetensors import Slot
from attar.checkpoints.strict_io import check_name
from attar.checkpoints.writer import FilePlan, ShardWriter, Workspace, locked, remove, sync_path, writing
from attar.errors import UserError
from attar.formats.codecs.ggml import GgmlType
from attar.formats.scheme import Part

VERSION = 3

Tensors = Mapping[str, tuple[GgmlType, tuple[int, ...]]]
"""Types and shapes by name; shapes are in torch's order, rows last."""


@dataclass(frozen=True)
class GgufPlan(FilePlan):
    """Layout of a GGUF file before it exists. Its slots are uint8 arrays: the bytes of each tensor's rows."""

    alignment: int
    indexed: ClassVar[bool] = False

    @property
    def size(self) -> int:
        return padded(super().size, self.alignment)


def plan(name: str, metadata: Mapping[str, Any], tensors: Tensors) -> GgufPlan:
    """Lay out the file `name`. Values of `metadata` are plain or `Typed`.

    Raises ValueError for a name, value or shape that a GGUF file cannot hold.
    """
    alignment = _alignment(metadata)
    if len(metadata) > MAX_KEYS or len(tensors) > MAX_TENSORS:
        raise UserError("gguf_inexpressible", f"a GGUF file holds at most {MAX_KEYS} keys and {MAX_TENSORS} tensors")
    counts = SCALARS["u32"].pack(VERSION) + SCALARS["u64"].pack(len(tensors)) + SCALARS["u64"].pack(len(metadata))
    header = bytearray(MAGIC + counts)
    for key, value in metadata.items():
        _check(key, "key", MAX_KEY)
        header += encode(key, value)
    slots: dict[str, Slot] = {}
    at = 0
    for tensor, (kind, shape) in tensors.items():
        _check(tensor, "tensor", MAX_NAME - 1)  # llama.cpp needs room for a closing zero
        header += text(tensor.encode()) + _described(tensor, kind, shape) + SCALARS["u64"].pack(at)
        part = Part("uint8", (*shape[:-1], kind.row_bytes(shape[-1])))
        slots[tensor] = Slot(part, at, at + part.bytes)
        at = padded(at + part.bytes, alignment)
    header += bytes(-len(header) % alignment)
    return GgufPlan(name, slots, bytes(header), alignment)


def plan_parts(name: str, metadata: Mapping[str, Any], tensors: Tensors, most: int | None) -> list[GgufPlan]:
    """Lay out the file `name`, or parts of it with at most `most` bytes of tensors each, as llama.cpp's `gguf-split`
    does; a larger tensor has a part of its own. None: one file. Raises ValueError as `plan`, and for too many parts."""
    alignment, shares, used = _alignment(metadata), [dict[str, tuple[GgmlType, tuple[int, ...]]]()], 0
    for tensor, (kind, shape) in tensors.items():
        size = padded(kind.bytes(shape), alignment)
        if most is not None and shares[-1] and used + size > most:
            shares.append({})
            used = 0
        shares[-1][tensor] = (kind, shape)
        used += size
    count = len(shares)
    if count == 1:
        return [plan(name, metadata, tensors)]
    if count > MAX_PARTS:
        raise UserError(
            "option_out_of_range", f"parts of at most {most} bytes would be {count}, more than {MAX_PARTS}: allow more"
        )
    plans = []
    for index, share in enumerate(shares):
        own = metadata if index == 0 else {key: metadata[key] for key in metadata if key == ALIGNMENT}
        place = (Typed("u16", index), Typed("u16", count), Typed("i32", len(tensors)))
        found = str(PartName(Path(name).stem, index + 1, count))
        plans.append(plan(found, {**own, **dict(zip(PART_KEYS, place, strict=True))}, share))
    return plans


def _alignment(metadata: Mapping[str, Any]) -> int:
    value = metadata.get(ALIGNMENT, DEFAULT_ALIGNMENT)
    value = value.value if hasattr(value, "value") else value
    if not isinstance(value, int) or not 8 <= value <= 65536 or value & (value - 1):
        raise ValueError(f"{ALIGNMENT} must be a power of two from 8 to 65536, not {value!r}")
    return value


def _check(name: str, what: str, limit: int) -> None:
    if problem := check_name(name):
        raise UserError("gguf_inexpressible", f"a {what} cannot be written under {problem}")
    if len(name.encode()) > limit:
        raise UserError("gguf_inexpressible", f"the name of {what} {name!r} is longer than {limit} bytes")


def _described(name: str, kind: GgmlType, shape: tuple[int, ...]) -> bytes:
    """Return rank, shape and type of a tensor in the form of a header. Raises ValueError for an invalid shape."""
    if not 1 <= len(shape) <= MAX_RANK or min(shape) < 1:
        raise UserError(
            "gguf_inexpressible",
            f"tensor {name!r}: it must have 1 to {MAX_RANK} dimensions of 1 or more, not {list(shape)}",
        )
    try:
        kind.row_bytes(shape[-1])
    except ValueError as error:
        raise UserError("gguf_inexpressible", f"tensor {name!r} of shape {list(shape)}: {error}") from None
    sizes = b"".join(SCALARS["u64"].pack(size) for size in reversed(shape))
    return SCALARS["u32"].pack(len(shape)) + sizes + SCALARS["u32"].pack(kind.id)


def output_path(dst: Path, plans: Sequence[FilePlan]) -> Path:
    """Return the path by which the output `dst` is opened: of its first part, where it has several."""
    return dst if len(plans) == 1 else Path(os.path.realpath(dst)).with_name(plans[0].name)


def _put(folder: Path, names: list[str], target: Path) -> None:
    """Move the finished files `names` from `folder` to their place, where they replace earlier outputs."""
    before = outputs_of(target)
    for path in before:
        receipt_path(path).unlink(missing_ok=True)  # it would belong to another file
    if [path.name for path in before] != [target.name] or names != [target.name]:
        for path in before:
            path.unlink()
    for name in reversed(names):
        (folder / name).replace(target.with_name(name))
    sync_path(target.parent)


@contextlib.contextmanager
def atomic_gguf(
    dst: str | os.PathLike[str],
    metadata: Mapping[str, Any],
    tensors: Tensors,
    overwrite: bool = False,
    most: int | None = None,
) -> Iterator[ShardWriter]:
    """Write the file `dst`, or its parts of at most `most` bytes of tensors: give each tensor's bytes to the writer;
    leaving the context puts the files in place.

    They grow in a hidden folder beside `dst`, which is removed when the body fails. Raises ValueError as `plan_parts`
    does and where a tensor was not written. Raises CheckpointError where `dst` exists (unless `overwrite`, and it is a
    file), where another process is writing it, and where the disk is full.
    """
    target = Path(os.path.realpath(dst))
    planned = plan_parts(target.name, metadata, tensors, most)
    check_target(target, overwrite)
    partial = target.parent / f".{target.name}.attar-partial"
    with locked(partial, target):
        try:
            check_target(target, overwrite)  # again: the previous holder of the lock may have made it
            with ShardWriter(partial, planned) as writer:
                yield writer
                writer.finish()
            with writing(target):
                _put(partial, [each.name for each in planned], target)
        finally:
            for each in planned:
                (partial / each.name).unlink(missing_ok=True)


@contextlib.contextmanager
def atomic_file(dst: str | os.PathLike[str], overwrite: bool = False) -> Iterator[Workspace]:
    """Write the one file `dst`, or the parts of it, and the receipt beside it atomically, as `writer.atomic_folder`
    does for a folder.

    All grow in `out` under their final names. After an exception or a kill the hidden folder stays, and the next call
    with the same `dst` finds `out` and `state` as they were left. The model is put in place first: a kill between
    leaves a model without a receipt, never one with another's. Raises CheckpointError as `atomic_gguf` does.
    """
    target = Path(os.path.realpath(dst))
    check_target(target, overwrite)
    partial = target.parent / f".{target.name}.attar-partial"
    work = Workspace(partial / "out", partial / "state")
    with locked(partial, target, work.out, work.state):
        check_target(target, overwrite)  # again: the previous holder of the lock may have made it
        left = work.out.exists() and any(work.out.iterdir())
        if left and not _whole(outputs_of(work.out / target.name)):  # by a run that was killed when it was almost done
            remove(work.out, work.state)
        work.out.mkdir(exist_ok=True)
        work.state.mkdir(exist_ok=True)
        yield work
        names = [path.name for path in outputs_of(work.out / target.name)]
        beside = [path for path in work.out.iterdir() if path.name not in names]
        for path in beside:
            target.with_name(path.name).unlink(missing_ok=True)
        _put(work.out, names, target)
        for path in beside:
            path.replace(target.with_name(path.name))
        sync_path(target.parent)


def _whole(files: list[Path]) -> bool:
    return bool(files) and [path for path in part_paths(files[0]) if path not in files] == []
