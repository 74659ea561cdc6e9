"""StepLimits of memory and time, read from made-up /proc and /sys trees."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest

from attar import machine

GB = 10**9


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A machine of 64 GB available and one core, without control groups."""
    put(tmp_path / "proc/meminfo", f"MemTotal: {80 * GB // 1024} kB\nMemAvailable: {64 * GB // 1024} kB\n")
    for cpu in os.sched_getaffinity(0):
        put(tmp_path / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list", f"{cpu}\n")
    return tmp_path


def put(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_what_is_available_holds_where_nothing_else_does(root: Path) -> None:
    found = machine.examine(root)
    assert found.limits["available memory"] == 64 * GB // 1024 * 1024
    assert found.limited_by in ("available memory", "limit on address space")
    assert found.budget == int(found.memory * 0.9)


def test_the_least_limit_of_a_group_and_those_above_it_holds(root: Path) -> None:
    put(root / "proc/self/cgroup", "0::/a/b\n")
    put(root / "sys/fs/cgroup/a/b/memory.max", "max\n")
    put(root / "sys/fs/cgroup/a/memory.max", f"{4 * GB}\n")
    put(root / "sys/fs/cgroup/memory.max", f"{5 * GB}\n")
    found = machine.examine(root)
    assert (found.memory, found.limited_by) == (4 * GB, "left in control group (v2)")


def test_a_container_s_group_is_mounted_as_the_root(root: Path) -> None:
    put(root / "proc/self/cgroup", "0::/docker/0123\n")
    put(root / "sys/fs/cgroup/memory.max", f"{3 * GB}\n")
    assert machine.examine(root).memory == 3 * GB


def test_groups_of_the_first_version(root: Path) -> None:
    put(root / "proc/self/cgroup", "4:memory:/jobs/7\n2:cpu,cpuacct:/jobs\n0::/\n")
    put(root / "sys/fs/cgroup/memory/jobs/7/memory.limit_in_bytes", f"{2 * GB}\n")
    put(root / "sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n")
    found = machine.examine(root)
    assert (found.memory, found.limited_by) == (2 * GB, "left in control group (v1)")


def test_no_limit_is_no_limit(root: Path) -> None:
    put(root / "proc/self/cgroup", "4:memory:/\n")
    put(root / "sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n")
    put(root / "sys/fs/cgroup/memory/memory.usage_in_bytes", f"{3 * GB}\n")
    assert machine.examine(root).memory == 64 * GB // 1024 * 1024
    assert not any("control group" in name for name in machine.examine(root).limits)


def test_what_a_group_uses_already_is_not_left(root: Path) -> None:
    """16 GB with 12 used leave 4: but for what of files nobody has read lately, and never less than nothing."""
    put(root / "proc/self/cgroup", "0::/a\n")
    group = root / "sys/fs/cgroup/a"
    put(group / "memory.max", f"{16 * GB}\n")
    put(group / "memory.current", f"{12 * GB}\n")
    assert machine.examine(root).memory == 4 * GB
    assert machine.examine(root).budget == int(3.6 * GB)
    put(group / "memory.stat", f"anon {11 * GB}\nfile {GB}\nactive_file 0\ninactive_file {GB}\n")
    assert machine.examine(root).memory == 5 * GB
    put(group / "memory.current", f"{18 * GB}\n")
    assert machine.examine(root).memory == 0
    put(group / "memory.current", f"{GB // 2}\n")
    assert machine.examine(root).memory == 16 * GB


def test_what_a_group_above_uses_may_leave_less(root: Path) -> None:
    """The one with the larger limit is fuller; one without a limit says nothing."""
    put(root / "proc/self/cgroup", "0::/a/b/c\n")
    for folder, limit, used in (("a", str(10 * GB), 8), ("a/b", "max", 7), ("a/b/c", str(4 * GB), 1)):
        put(root / "sys/fs/cgroup" / folder / "memory.max", f"{limit}\n")
        put(root / "sys/fs/cgroup" / folder / "memory.current", f"{used * GB}\n")
    assert machine.examine(root).memory == 2 * GB


def test_what_a_group_of_the_first_version_uses(root: Path) -> None:
    put(root / "proc/self/cgroup", "4:memory:/jobs/7\n")
    for folder, limit, used in (("jobs/7", 9 * GB, 5 * GB), ("jobs", 2**63 - 4096, 40 * GB), ("", 60 * GB, 57 * GB)):
        put(root / "sys/fs/cgroup/memory" / folder / "memory.limit_in_bytes", f"{limit}\n")
        put(root / "sys/fs/cgroup/memory" / folder / "memory.usage_in_bytes", f"{used}\n")
    assert machine.examine(root).memory == 3 * GB
    stat = f"inactive_file 0\ntotal_inactive_file {4 * GB}\n"  # the first is without those of groups below
    put(root / "sys/fs/cgroup/memory/memory.stat", stat)
    assert machine.examine(root).memory == 4 * GB


def test_what_this_process_holds_is_still_its_own(root: Path) -> None:
    """Whoever plans counts all that the process will hold, so it is no less before a model is loaded than after."""
    put(root / "proc/self/cgroup", "0::/a\n")
    put(root / "sys/fs/cgroup/a/memory.max", f"{16 * GB}\n")
    put(root / "sys/fs/cgroup/a/memory.current", f"{12 * GB}\n")
    held = 2 * GB // 1024
    put(root / "proc/self/status", f"Name: python\nVmRSS: {2 * held} kB\nRssAnon:\t {held} kB\n")
    assert machine.examine(root).limits["left in control group (v2)"] == 4 * GB + held * 1024
    assert machine.examine(root).limits["available memory"] == 64 * GB // 1024 * 1024 + held * 1024


def test_both_versions_side_by_side(root: Path) -> None:
    put(root / "proc/self/cgroup", "4:memory:/x\n0::/x\n")
    put(root / "sys/fs/cgroup/unified/x/memory.max", "max\n")
    put(root / "sys/fs/cgroup/memory/x/memory.limit_in_bytes", f"{6 * GB}\n")
    assert machine.examine(root).memory == 6 * GB


def test_a_limit_on_address_space_counts(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.resource, "getrlimit", lambda which: (GB, GB))
    found = machine.examine(root)
    assert (found.memory, found.limited_by) == (GB, "limit on address space")


def test_without_proc_there_is_the_physical_memory(tmp_path: Path) -> None:
    limits = dict(machine.memory_limits(tmp_path))
    assert limits["physical memory"] == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def test_hyper_threads_are_one_core(root: Path) -> None:
    allowed = sorted(os.sched_getaffinity(0))
    assert machine.cores(root) == len(allowed)
    for cpu in allowed:
        put(root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list", "0-7\n")
    assert machine.cores(root) == 1


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("quota, threads", [(50_000, 1), (150_000, 1), (199_999, 1), (250_000, 2)])
def test_a_share_of_time_bounds_the_threads(root: Path, version: int, quota: int, threads: int) -> None:
    """One and a half processors' worth is one thread: two would be stopped for a quarter of the time."""
    if version == 2:
        put(root / "proc/self/cgroup", "0::/a\n")
        put(root / "sys/fs/cgroup/a/cpu.max", f"{quota} 100000\n")
    else:
        put(root / "proc/self/cgroup", "3:cpu:/a\n")
        put(root / "sys/fs/cgroup/cpu/a/cpu.cfs_quota_us", f"{quota}\n")
        put(root / "sys/fs/cgroup/cpu/a/cpu.cfs_period_us", "100000\n")
    assert machine.cores(root) == min(threads, len(os.sched_getaffinity(0)))


def test_unlimited_time_is_all_cores(root: Path) -> None:
    everything = machine.cores(root)
    put(root / "proc/self/cgroup", "0::/a\n3:cpu:/a\n")
    put(root / "sys/fs/cgroup/a/cpu.max", "max 100000\n")
    put(root / "sys/fs/cgroup/cpu/a/cpu.cfs_quota_us", "-1\n")
    assert machine.cores(root) == everything


def test_this_machine_has_something() -> None:
    found = machine.examine()
    assert found.memory > 0
    assert found.cores >= 1


def test_of_a_private_folder_nothing_is_left_and_of_anything_else_everything(tmp_path: Path) -> None:
    """Folders for what is temporary are cleaned, and names in them are free for all."""
    folder, victim = tmp_path / "own", tmp_path / "victim"
    for there in (("socket",), ()):
        machine.private_folder(folder)
        for name in there:
            (folder / name).touch()
        machine.remove_private_folder(folder, "socket")
        assert not folder.exists()
    machine.remove_private_folder(folder, "socket")
    for mode in (0o700, 0o750):
        victim.mkdir(exist_ok=True)
        (victim / "socket").touch()
        victim.chmod(mode)
        folder.symlink_to(victim)
        machine.remove_private_folder(folder, "socket")
        assert (victim / "socket").is_file(), "a link was followed"
        assert folder.is_symlink()
        folder.unlink()
    machine.remove_private_folder(victim, "socket")
    assert (victim / "socket").is_file(), "others may enter it, so it is not what was made"
    folder.touch()
    machine.remove_private_folder(folder, "socket")
    assert folder.is_file()
    full = tmp_path / "full"
    machine.private_folder(full)
    (full / "other").touch()
    machine.remove_private_folder(full, "socket")
    assert [each.name for each in full.iterdir()] == ["other"]


def test_a_folder_goes_with_what_others_write_there_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, rmdir, left = tmp_path / "folder", os.rmdir, [3]
    (folder / "deeper").mkdir(parents=True)
    (folder / "deeper/file").touch()

    def late(path: str | Path, dir_fd: int | None = None) -> None:
        if left[0] and Path(path).name == "folder":
            left[0] -= 1
            (folder / "store").touch()
        rmdir(path, dir_fd=dir_fd)

    monkeypatch.setattr(os, "rmdir", late)
    machine.remove_folder(folder)
    assert left == [0]
    assert not folder.exists()
    machine.remove_folder(folder)
    folder.mkdir()
    left[0] = 10**9
    machine.remove_folder(folder, 0.05)
    assert folder.exists(), "it gives up"


def test_a_private_folder_is_made_once_and_is_nobody_elses(tmp_path: Path) -> None:
    folder = tmp_path / "own"
    for _ in range(2):
        machine.private_folder(folder)
        assert folder.stat().st_mode & 0o777 == 0o700
    link, file, wide = tmp_path / "link", tmp_path / "file", tmp_path / "wide"
    link.symlink_to(folder)
    file.touch()
    wide.mkdir()
    wide.chmod(0o750)
    for other in (link, file, wide):
        with pytest.raises(PermissionError, match=f"{other.name} is not a folder of this user alone"):
            machine.private_folder(other)


def test_no_garbage_is_collected_meanwhile_also_where_two_meet() -> None:
    assert gc.isenabled()
    with machine.uncollected():
        assert not gc.isenabled()
        with machine.uncollected():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ValueError), machine.uncollected():
        raise ValueError
    assert gc.isenabled()


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, killed = tmp_path / "file", tmp_path / f"file.{os.getpid()}.tmp"
    killed.write_bytes(b"of a killed process with this number")
    machine.write_whole(path, b"old", 0o600)
    assert path.stat().st_mode & 0o777 == 0o600

    def full(descriptor: int) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space"):
        machine.write_whole(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]
