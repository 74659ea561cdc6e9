"""Writer of safetensors: files are laid out first, and tensors written at their offsets.

The schemes determine which tensors a checkpoint will hold, and their sizes, before any weight is read. So all headers
are written and all space is reserved at the start: `posix_fallocate` reports a full disk before the hours of work, not
after. Tensors may arrive in any order, and a killed run resumes where it stopped. The bytes are deterministic: the same
parts in the same order give the same files.

`atomic_folder` makes the output folder absent or complete: work happens in a hidden sibling, which is renamed into
place once everything is on disk. The sibling is kept when a run fails, so that the next one can resume.

Within a file, tensors lie by falling element size, so that each is aligned to its elements, as readers that map the
file need. Plain writes are used rather than a map, in which a full disk becomes SIGBUS.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from attar.checkpoints.folder import CONFIG, INDEX, SINGLE
from attar.checkpoints.safetensors import DTYPES, Slot, byte_view
from attar.checkpoints.strict_io import CheckpointError, check_name
from attar.errors import code_of
from attar.formats.scheme import ITEM_BITS, Part

if TYPE_CHECKING:
    from torch import Tensor

MAX_SHARD = 5_000_000_000
HEADER_BYTES = 3_000_000  # bytes of one file's header: readers, attar's among them, limit it, and parse it slowly
_SAFETENSORS = {torch_name: name for name, torch_name in DTYPES.items()}


@dataclass(frozen=True)
class FilePlan:
    """Layout of one safetensors file before it exists: its name, each tensor's place in its data, and its first
    bytes."""

    name: str
    slots: Mapping[str, Slot]
    header: bytes  # including the length field
    indexed: ClassVar[bool] = True  # several files have an index

    @property
    def size(self) -> int:
        """Return the bytes of the whole file."""
        return len(self.header) + max((slot.end for slot in self.slots.values()), default=0)


def plan_files(parts: Mapping[str, Part], max_shard_bytes: int = MAX_SHARD) -> list[FilePlan]:
    """Lay out tensors, in the order given, into files of at most `max_shard_bytes` of data each, with headers of at
    most `HEADER_BYTES`.

    A larger tensor has a file of its own. Raises ValueError for a name or dtype that a safetensors file cannot hold.
    """
    shards: list[dict[str, Part]] = [{}]
    used = entries = 0
    for name, part in parts.items():
        if problem := check_name(name):
            raise ValueError(f"a tensor cannot be written under {problem}")
        if part.dtype not in _SAFETENSORS:
            raise ValueError(f"tensor {name!r}: safetensors has no dtype {part.dtype}")
        entry = len(json.dumps(name, ensure_ascii=False).encode()) + 100 + 21 * len(part.shape)  # at most
        if shards[-1] and (used + part.bytes > max_shard_bytes or entries + entry > HEADER_BYTES):
            shards.append({})
            used = entries = 0
        shards[-1][name] = part
        used += part.bytes
        entries += entry
    if len(shards) == 1:
        return [_plan_file(SINGLE, shards[0])]
    return [_plan_file(f"model-{i:05}-of-{len(shards):05}.safetensors", shard) for i, shard in enumerate(shards, 1)]


def _plan_file(file: str, parts: Mapping[str, Part]) -> FilePlan:
    slots: dict[str, Slot] = {}
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, part in sorted(parts.items(), key=lambda item: -ITEM_BITS[item[1].dtype]):  # stable
        slots[name] = Slot(part, at, at + part.bytes)
        place = [at, at + part.bytes]
        entries[name] = {"dtype": _SAFETENSORS[part.dtype], "shape": list(part.shape), "data_offsets": place}
        at += part.bytes
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # the data begin at a multiple of 8
    return FilePlan(file, slots, len(text).to_bytes(8, "little") + text)


def index_json(plans: Iterable[FilePlan]) -> bytes:
    """Return the model.safetensors.index.json of several files."""
    weight_map = {name: plan.name for plan in plans for name in plan.slots}
    total = sum(slot.part.bytes for plan in plans for slot in plan.slots.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    return json.dumps(index, indent=2, ensure_ascii=False).encode() + b"\n"


def require_free(path: str | os.PathLike[str], needed: int) -> None:
    """Raise CheckpointError unless the disk that holds `path` (which need not exist yet) has `needed` bytes free."""
    place = Path(path).absolute()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if free < needed:
        raise CheckpointError(
            "disk_full",
            f"{place}: {needed / 1e9:.3g} GB are needed and {free / 1e9:.3g} GB are free; free some space, or choose "
            "an output on another disk",
        )


def allocated(paths: Iterable[Path]) -> int:
    """Return the bytes on disk of the files that exist, reserved ones included."""
    return sum(512 * path.stat().st_blocks for path in paths if path.exists())


FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def disk_error(path: Path, error: OSError) -> CheckpointError:
    if error.errno in FULL:
        return CheckpointError(
            "disk_full",
            f"{path}: no room for it ({error.strerror}); free some space, or choose an output on another disk; what "
            "attar compress has done already is kept",
        )
    return CheckpointError(code_of(error), f"{path}: cannot be written: {error.strerror}")


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise an OSError of the body as `disk_error`."""
    try:
        yield
    except OSError as error:
        raise disk_error(path, error) from error


class ShardWriter:
    """Open files of one checkpoint in `folder`, with all space reserved, to be filled tensor by tensor in any order.

    `written` are the names that an earlier, interrupted run has on disk (it called `sync` before it noted them). Their
    files are kept and continued, and must have exactly the planned header. A file without any of them is made anew.
    Writing a tensor again replaces it. Raises CheckpointError on a full disk or where a file is not as planned. Use as
    a context manager: leaving it closes the files, finished or not.
    """

    def __init__(self, folder: str | os.PathLike[str], plans: Iterable[FilePlan], written: Iterable[str] = ()) -> None:
        self.folder = Path(folder)
        self.plans = list(plans)
        self.written = set(written)
        self._home = {name: plan for plan in self.plans for name in plan.slots}
        if unknown := self.written - self._home.keys():
            tensor = f"{self.folder}: tensor {min(unknown)!r}"
            raise CheckpointError("state_damaged", f"{tensor} is not in the plan; start again")
        self._fds: dict[str, int] = {}
        kept = [plan for plan in self.plans if not self.written.isdisjoint(plan.slots)]
        new = [plan for plan in self.plans if self.written.isdisjoint(plan.slots)]
        try:
            for plan in kept:
                self._reopen(plan)
            for plan in new:
                self._create(plan)
        except BaseException:  # an interrupt too: nothing stays open or reserved
            self.close()
            for plan in new:  # frees the reserved space
                (self.folder / plan.name).unlink(missing_ok=True)
            raise

    def _create(self, plan: FilePlan) -> None:
        fd = self._open(plan, os.O_CREAT | os.O_TRUNC)
        with writing(self.folder / plan.name):
            os.posix_fallocate(fd, 0, plan.size)
            _pwrite(fd, memoryview(plan.header), 0)

    def _reopen(self, plan: FilePlan) -> None:
        fd = self._open(plan, 0)
        if os.fstat(fd).st_size != plan.size or os.pread(fd, len(plan.header), 0) != plan.header:
            problem = "not the file that was begun; remove it and start again"
            raise CheckpointError("state_damaged", f"{self.folder / plan.name}: {problem}")

    def _open(self, plan: FilePlan, flags: int) -> int:
        with writing(self.folder / plan.name):
            fd = os.open(self.folder / plan.name, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | flags, 0o666)
        self._fds[plan.name] = fd
        return fd

    def write(self, name: str, tensor: Tensor) -> None:
        """Write one tensor of the planned dtype and shape."""
        self.write_rows(name, [tensor])

    def write_rows(self, name: str, blocks: Iterable[Tensor]) -> None:
        """Write one tensor given as consecutive blocks of its rows, for tables too large to hold whole."""
        plan = self._home[name]
        slot = plan.slots[name]
        at = begin = len(plan.header) + slot.begin
        self.written.discard(name)  # until it is whole again
        for block in blocks:
            found = Part(str(block.dtype).removeprefix("torch."), tuple(block.shape))
            fits = found.dtype == slot.part.dtype and found.shape[1:] == slot.part.shape[1:]
            if not fits or at + found.bytes > begin + slot.part.bytes:
                raise ValueError(f"tensor {name!r} was planned as {slot.part}, not {found}")
            block = block.detach().cpu().contiguous()
            with writing(self.folder / plan.name):
                _pwrite(self._fds[plan.name], byte_view(block), at)
            at += found.bytes
        if at != begin + slot.part.bytes:
            raise ValueError(f"tensor {name!r}: {at - begin} of {slot.part.bytes} bytes given")
        self.written.add(name)

    def sync(self) -> None:
        """Force written data to disk. Only after this may a state file record it."""
        for name, fd in self._fds.items():
            with writing(self.folder / name):
                os.fsync(fd)

    def finish(self) -> None:
        """Check that every tensor was written, add the index where there are several files, sync and close."""
        if missing := sorted(self._home.keys() - self.written):
            raise ValueError(f"{len(missing)} tensors were never written: {', '.join(missing[:5])}")
        if len(self.plans) > 1 and self.plans[0].indexed:
            with writing(self.folder / INDEX):
                (self.folder / INDEX).write_bytes(index_json(self.plans))
        self.sync()
        self.close()

    def close(self) -> None:
        while self._fds:
            os.close(self._fds.popitem()[1])

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _pwrite(fd: int, view: memoryview, offset: int) -> None:
    while len(view):
        count = os.pwrite(fd, view, offset)
        view, offset = view[count:], offset + count


@dataclass(frozen=True)
class Workspace:
    """Folders of an output in progress: `out` becomes the output; `state` is the run's own and is removed at the
    end."""

    out: Path
    state: Path

    def clear(self) -> None:
        """Remove what an earlier run left."""
        for folder in (self.out, self.state):
            shutil.rmtree(folder)
            folder.mkdir()


@contextlib.contextmanager
def atomic_folder(
    dst: str | os.PathLike[str], overwrite: bool = False, resumes: bool = True, known_by: str = CONFIG
) -> Iterator[Workspace]:
    """Build the folder `dst` in a hidden sibling, `.{name}.attar-partial`, and rename it into place at the end.

    After an exception or a kill the sibling stays, and the next call with the same `dst` finds `out` and `state` as
    they were left. Without `resumes`, an exception removes them, and leftovers of a kill are cleared. An existing `dst`
    is an error unless `overwrite`. Then it is replaced once the new folder is complete, and only if it is empty or
    holds the file `known_by`, which marks the kind of folder that is being made. Raises CheckpointError for these,
    where another process writes the same output, and where the body finds the disk full.
    """
    target = Path(os.path.realpath(dst))
    partial = target.parent / f".{target.name}.attar-partial"
    work, old = Workspace(partial / "out", partial / "state"), partial / "old"
    check_target(target, overwrite, known_by)
    with locked(partial, target, work.out, work.state, old):
        if old.exists() and not target.exists():  # killed between the two renames of `_replace`
            old.rename(target)
        if not work.out.exists():  # killed after them: the state describes a finished run
            remove(old, work.state)
        check_target(target, overwrite, known_by)  # again: the previous holder of the lock may have made it
        work.out.mkdir(exist_ok=True)
        work.state.mkdir(exist_ok=True)
        if not resumes:
            work.clear()
        try:
            yield work
        except BaseException:  # an interrupt too: no later call goes on with this work
            if not resumes:
                work.clear()
            raise
        _sync_tree(work.out)
        _replace(work.out, target, old, overwrite)


@contextlib.contextmanager
def locked(partial: Path, target: Path, *folders: Path) -> Iterator[None]:
    """Hold the lock of the folder `partial`, in which `target` grows. At the end it goes, with its `folders`, unless an
    exception leaves files there that can be resumed.

    Raises CheckpointError where another process holds the lock, and where the body finds the disk full.
    """
    lock = take_lock(partial, target)
    try:
        yield
        remove(*folders)
        give_up_lock(partial)
    except BaseException as error:
        if not any(partial.glob("*/*")):  # nothing to resume: leave no trace
            remove(*folders)
            give_up_lock(partial)
        if isinstance(error, OSError) and error.errno in FULL:
            raise disk_error(target, error) from error
        raise
    finally:
        os.close(lock)


def check_target(target: Path, overwrite: bool, known_by: str = CONFIG) -> None:
    """Raise CheckpointError where the folder `target` may not be made or replaced, as `atomic_folder` says."""
    if not target.exists():
        return
    if not overwrite:
        raise CheckpointError(
            "output_exists", f"{target} exists and is kept; choose another output, or pass --overwrite"
        )
    if not target.is_dir():
        raise CheckpointError("output_invalid", f"{target} is a file and is kept; choose another output")
    if any(target.iterdir()) and not (target / known_by).is_file():
        kind = "model folder" if known_by == CONFIG else f"folder with {known_by}"
        raise CheckpointError(
            "output_invalid", f"{target} is no {kind} and is kept; choose another output or remove it yourself"
        )


def take_lock(partial: Path, target: Path) -> int:
    """Take the lock of a partial folder. Return a descriptor that holds it until it is closed (or the process dies)."""
    while True:
        with writing(target):
            partial.mkdir(parents=True, exist_ok=True)
            try:
                fd = os.open(partial / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
            except FileNotFoundError:  # the holder has just finished and removed the folder
                continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            raise CheckpointError(
                "output_locked", f"{target}: another process is writing it; wait for it, or choose another output"
            ) from None
        # The previous holder may have removed the file between our open and our lock.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(fd), os.stat(partial / "lock")):
                return fd
        os.close(fd)


def _replace(out: Path, target: Path, old: Path, overwrite: bool) -> None:
    try:
        if overwrite and target.exists():
            target.rename(old)
        out.rename(target)
    except OSError as error:
        raise CheckpointError(
            code_of(error), f"{target}: the finished folder {out} cannot be renamed to it: {error.strerror}"
        ) from error
    sync_path(target.parent)


def remove(*folders: Path) -> None:
    for folder in folders:
        if folder.exists():
            shutil.rmtree(folder)


def give_up_lock(partial: Path) -> None:
    (partial / "lock").unlink()
    with contextlib.suppress(OSError):  # not empty: another process has taken it over already
        partial.rmdir()


def _sync_tree(folder: Path) -> None:
    for place, _, files in os.walk(folder):
        for name in (*files, "."):
            sync_path(Path(place, name))


def sync_path(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with writing(path):
            os.fsync(fd)
    finally:
        os.close(fd)
