"""StepLimits of memory and time, read from made-up /proc and /sys trees."""

from __future__ import annotations

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
    assert (found.memory, found.limited_by) == (4 * GB, "control group (v2)")


def test_a_container_s_group_is_mounted_as_the_root(root: Path) -> None:
    put(root / "proc/self/cgroup", "0::/docker/0123\n")
    put(root / "sys/fs/cgroup/memory.max", f"{3 * GB}\n")
    assert machine.examine(root).memory == 3 * GB


def test_groups_of_the_first_version(root: Path) -> None:
    put(root / "proc/self/cgroup", "4:memory:/jobs/7\n2:cpu,cpuacct:/jobs\n0::/\n")
    put(root / "sys/fs/cgroup/memory/jobs/7/memory.limit_in_bytes", f"{2 * GB}\n")
    put(root / "sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n")
    found = machine.examine(root)
    assert (found.memory, found.limited_by) == (2 * GB, "control group (v1)")


def test_no_limit_is_no_limit(root: Path) -> None:
    put(root / "proc/self/cgroup", "4:memory:/\n")
    put(root / "sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n")
    assert "control group (v1)" not in machine.examine(root).limits


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


@pytest.mark.parametrize(
    "group, file, text",
    [("0::/a", "sys/fs/cgroup/a/cpu.max", "150000 100000\n"), ("3:cpu:/a", "sys/fs/cgroup/cpu/a/cpu.cfs_quota_us", "")],
)
def test_a_share_of_time_bounds_the_threads(root: Path, group: str, file: str, text: str) -> None:
    """One and a half processors' worth is one thread: two would be stopped for a quarter of the time."""
    put(root / "proc/self/cgroup", group + "\n")
    if text:
        put(root / file, text)
    else:
        put(root / file, "150000\n")
        put((root / file).with_name("cpu.cfs_period_us"), "100000\n")
    assert machine.cores(root) == 1


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
