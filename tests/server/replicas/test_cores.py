"""Cores of replicas, on machines that are folders."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from attar import machine
from attar.server.replicas import cores
from tests.errors import user_error


@pytest.fixture
def computer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Makes a machine of pairs of hyper-threads: (processors of a core, memory node)."""

    def make(*found: tuple[tuple[int, ...], int], most: int = 1000) -> Path:
        for cpus, node in found:
            for cpu in cpus:
                folder = tmp_path / f"sys/devices/system/cpu/cpu{cpu}"
                (folder / "topology").mkdir(parents=True)
                (folder / f"node{node}").mkdir()
                (folder / "topology/thread_siblings_list").write_text(",".join(map(str, cpus)) + "\n")
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {cpu for cpus, _ in found for cpu in cpus})
        monkeypatch.setattr(machine, "cores", lambda root=None: min(most, len(found)))
        return tmp_path

    return make


def test_shares_are_whole_cores_of_one_node(computer: Callable[..., Path]) -> None:
    root = computer(((0, 4), 0), ((1, 5), 1), ((2, 6), 0), ((3, 7), 1))
    assert cores.shares(2, (), root) == [(0, 2, 4, 6), (1, 3, 5, 7)]
    assert cores.shares(4, (), root) == [(0, 4), (2, 6), (1, 5), (3, 7)]
    assert cores.threads((0, 2, 4, 6), 2, root) == 2
    assert {cores.node(cpu, root) for cpu in (0, 2, 4, 6)} == {0}


def test_uneven_shares_differ_by_one_core(computer: Callable[..., Path]) -> None:
    root = computer(*(((at,), 0) for at in range(5)))
    shares = cores.shares(3, (), root)
    assert sorted(cpu for share in shares for cpu in share) == list(range(5))
    assert {len(share) for share in shares} == {1, 2}


def test_a_control_group_limits_replicas_and_their_threads(computer: Callable[..., Path]) -> None:
    root = computer(*(((at,), 0) for at in range(8)), most=4)
    assert [cores.threads(share, 2, root) for share in cores.shares(2, (), root)] == [2, 2]
    with user_error("option_out_of_range", "4 cores"):
        cores.shares(5, (), root)


def test_listed_processors_are_taken_as_they_are(computer: Callable[..., Path]) -> None:
    root = computer(*(((at,), 0) for at in range(6)))
    assert cores.shares(2, ["0-2", "5,3"], root) == [(0, 1, 2), (3, 5)]
