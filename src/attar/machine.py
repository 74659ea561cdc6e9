"""Memory and cores that this machine lets a process have, by the limits that would stop it first.

A server that asks the hardware alone is killed in a container, so every limit that Linux may set is read. These are the
control groups of both versions, from the process's own group up to the root, the limit on address space, and the memory
available at this moment. On other systems only the physical memory is known. None of these gives the speed of memory:
it is measured (`kernels/native/limits.py`) and passed in by callers that may import torch.

Memory in use by other processes of a group is subtracted, as it is in the available memory: a limit of 16 GB with 12
used leaves 4. Memory held by this process itself counts as available, because planners count all that the process will
hold: itself with torch (`plan/fit.py`), or weights already read (`compression/training/trainable_model.py`). So a
process that has only begun and one that holds a model get the same number.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import resource
import shutil
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

UNLIMITED = 1 << 60  # control groups of version 1 write a number like 2^63 for "no limit"
SHARE = 0.9  # of the available memory, by default: other programs on the machine may grow


@dataclass(frozen=True, slots=True)
class Machine:
    """Memory and cores of a machine.

    `limits` are bytes of memory by source, as `memory_limits` yields them; the least holds. `cores` are physical ones,
    as many as threads can use.
    """

    limits: dict[str, int]
    cores: int

    @property
    def memory(self) -> int:
        """Return the bytes that this process may come to hold, including those it holds already."""
        return min(self.limits.values())

    @property
    def limited_by(self) -> str:
        return min(self.limits, key=lambda name: self.limits[name])

    @property
    def budget(self) -> int:
        """Return the bytes to plan with where the user names none."""
        return int(self.memory * SHARE)


def examine(root: Path = Path("/")) -> Machine:
    """Return this machine's limits; `root` is the folder that holds /proc and /sys."""
    return Machine(dict(memory_limits(root)), cores(root))


def memory_limits(root: Path = Path("/")) -> Iterator[tuple[str, int]]:
    """Yield (source, bytes) of every memory limit that is set; at least one.

    Bytes are what this process may come to hold, including what it holds already. Memory of other processes is
    subtracted, except from the limit on address space, which is this process's own. The kernel frees cached file pages
    that were not read lately before a limit is reached, so they do not count as used.
    """
    own = (_number_of(root / "proc/self/status", "RssAnon:") or 0) * 1024
    for version, controller, limit, usage, idle in (
        ("2", "", "memory.max", "memory.current", "inactive_file"),
        ("1", "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        left = []
        for folder in _groups(root, controller):
            most = _number(folder / limit)
            if most is None or most >= UNLIMITED:
                continue
            others = (_number(folder / usage) or 0) - (_number_of(folder / "memory.stat", idle) or 0) - own
            left.append(max(0, most - max(0, others)))
        if left:
            yield f"left in control group (v{version})", min(left)
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY:
        yield "limit on address space", soft
    if (available := _number_of(root / "proc/meminfo", "MemAvailable:")) is not None:
        yield "available memory", available * 1024 + own
    else:
        yield "physical memory", os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def private_folder(path: Path) -> None:
    """Make a folder that only this user may enter, unless it exists. Raises PermissionError where the path is something
    else: a link, another user's folder, or one that others may enter."""
    with contextlib.suppress(FileExistsError):
        path.mkdir(0o700)
    if not _is_private(path.lstat()):
        raise PermissionError(f"{path} is not a folder of this user alone")


def write_whole(path: Path, text: bytes, mode: int = 0o666) -> None:
    """Write a file whole or not at all: to a temporary one beside it, which is flushed to the disk and renamed.

    `mode` are its permissions, less what the umask takes away.
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.unlink(missing_ok=True)  # of a killed process with this number
    try:
        number = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
        with os.fdopen(number, "wb") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def remove_private_folder(path: Path, *files: str) -> None:
    """Remove the folder that `private_folder` made, and the files expected in it.

    A folder that cannot be removed, or that something else has replaced, stays: nothing is raised, and no link is
    followed.
    """
    with contextlib.suppress(OSError):
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)  # whatever the name means a moment later
        try:
            if not _is_private(os.fstat(folder)):
                return
            for file in files:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(file, dir_fd=folder)
        finally:
            os.close(folder)
        path.rmdir()


def remove_folder(path: Path, seconds: float = 1.0) -> None:
    """Remove a folder and all in it, and retry for `seconds` while other processes still write there. Files that cannot
    be removed stay: nothing is raised."""
    limit = time.monotonic() + seconds
    for tries in itertools.count(1):
        shutil.rmtree(path, ignore_errors=True)
        if not path.exists() or (tries >= 10 and time.monotonic() > limit):  # this process may have been suspended
            return
        time.sleep(0.001)


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Let no cyclic garbage be collected meanwhile. Where a process only gains objects, as in imports and loads,
    collections walk through all of them again and again, and free nothing."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _is_private(status: os.stat_result) -> bool:
    """Return whether the status is that of a folder that only this user may enter."""
    own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
    return own and not stat.S_IMODE(status.st_mode) & 0o077


def cores(root: Path = Path("/")) -> int:
    """Return the number of physical cores that this process may use, at least one.

    It is at most the control group's share of processor time.
    """
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    siblings = (root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list" for cpu in allowed)
    try:
        count = len({path.read_text() for path in siblings})
    except OSError:
        count = len(allowed)
    return max(1, min([count, *(int(quota) for quota in _quotas(root))]))


def _quotas(root: Path) -> Iterator[float]:
    """Yield the control group's quotas of processor time, in processors."""
    for folder in _groups(root, ""):
        words = _words(folder / "cpu.max")
        if len(words) == 2 and words[0].isdecimal() and words[1].isdecimal():
            yield int(words[0]) / int(words[1])
    for folder in _groups(root, "cpu"):
        quota, period = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
        if quota is not None and period:
            yield quota / period


def _groups(root: Path, controller: str) -> list[Path]:
    """Return the folders of the process's control group and of its ancestors. Version 2 has an empty controller name.

    In a container, /proc often gives the host's path to the group, while the group itself is mounted as the root. Then
    the root is all that can be read.
    """
    own = None
    for line in _lines(root / "proc/self/cgroup"):
        _, names, path = line.split(":", 2)
        if controller in names.split(","):
            own = PurePosixPath(path).relative_to("/")
    if own is None:
        return []
    mount = root / "sys/fs/cgroup" / controller
    if not controller and (mount / "unified").is_dir():  # both versions side by side
        mount /= "unified"
    folders = [mount / own, *(mount / above for above in own.parents)]
    return [folder for folder in dict.fromkeys(folders) if folder.is_dir()]


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _words(path: Path) -> list[str]:
    return " ".join(_lines(path)).split()


def _number(path: Path) -> int | None:
    """Return the one number that a file holds; None where there is no file, or a word such as `max` or -1."""
    words = _words(path)
    return int(words[0]) if len(words) == 1 and words[0].isdecimal() else None


def _number_of(path: Path, key: str) -> int | None:
    """Return the number behind the first word `key` of a line; None where there is none."""
    for line in _lines(path):
        match line.split():
            case [name, number, *_] if name == key and number.isdecimal():
                return int(number)
    return None
