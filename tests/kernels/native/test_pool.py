"""The kernels' threads. Whoever computes an item, and how often, the bits are the same. Nobody needs a thread that the
system has put aside."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from attar.formats.scheme import Scheme
from attar.kernels.native import linear as native
from attar.kernels.operands import Linear
from tests.kernels.native.test_linear import prepared, randn, stored, threads

COLUMNS, OUTPUTS = 512, (500, 70, 250)
ROWS = (1, 3, 8)  # few rows, whose pieces may be computed twice, and many
CALLS = 20
pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="helpers are threads of Linux")


def projection() -> list[Linear]:
    """Linears of one call, large enough to be shared out, with pieces that reach from one to the next."""
    scheme = Scheme.parse("w4g32-asym")
    return [prepared(stored(scheme, rows, COLUMNS, bias=rows != 70, seed=rows)) for rows in OUTPUTS]


def alone(linears: list[Linear]) -> list[tuple[Tensor, Tensor]]:
    """Rows, and what one thread makes of them."""
    inputs = [randn(rows, COLUMNS, seed=rows) for rows in ROWS]
    with threads(1):
        return [(x, native.linear(x, linears)) for x in inputs]


def same(linears: list[Linear], expected: list[tuple[Tensor, Tensor]], count: int) -> bool:
    """Whether so many threads make the same of the rows, each time. One thread compares: torch has no other in a forked
    process."""
    for x, out in expected * CALLS:
        with threads(count):
            got = native.linear(x, linears)
        with threads(1):
            if not torch.equal(got, out):
                return False
    return True


def in_child(check: Callable[[], bool]) -> None:
    if not (child := os.fork()):
        try:
            os._exit(0 if check() else 1)
        finally:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0


@pytest.fixture(scope="module")
def busy() -> Iterator[None]:
    """As many busy loops as cores, for a second or two: other tests run beside."""
    loop = [sys.executable, "-S", "-c", "while True: pass"]
    loops = [subprocess.Popen(loop) for _ in range(os.cpu_count() or 1)]
    yield
    for each in loops:
        each.kill()
        each.wait()


@pytest.mark.parametrize("count", [2, 3, 4, 8])
def test_any_number_of_threads_beside_busy_loops(count: int, busy: None) -> None:
    linears = projection()
    assert same(linears, alone(linears), count)


def test_helpers_that_starve_keep_nobody_waiting_and_read_nothing_freed(busy: None) -> None:
    """Helpers that run when nobody else wants a core are put aside within items. Weights go meanwhile."""
    every = [projection() for _ in range(4)]
    expected = alone(every[0])

    def check() -> bool:
        with threads(4):
            native.linear(expected[1][0], every[0])  # helpers have started
        tasks = [each for each in Path("/proc/self/task").iterdir() if "attar-helper" in (each / "comm").read_text()]
        for each in tasks:
            os.sched_setscheduler(int(each.name), os.SCHED_IDLE, os.sched_param(0))
        good = len(tasks) == 3
        while every:
            good = good and same(every.pop(), expected, 4)
        return good

    in_child(check)


def test_a_forked_process_has_helpers_of_its_own() -> None:
    linears = projection()
    expected = alone(linears)
    assert same(linears, expected, 2)
    in_child(lambda: same(linears, expected, 2))


def test_threads_that_share_one_core() -> None:
    linears = projection()
    expected = alone(linears)

    def check() -> bool:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # of helpers too: they start in this process
        return same(linears, expected, 4)

    in_child(check)


def test_several_callers_at_once_each_with_its_own_number_of_threads() -> None:
    linears = projection()
    expected, right = alone(linears), list[bool]()

    def call(count: int) -> None:
        right.append(same(linears, expected, count))

    callers = [threading.Thread(target=call, args=(count,)) for count in (2, 3, 4, 8)]
    for each in callers:
        each.start()
    for each in callers:
        each.join()
    assert right == [True] * 4
