"""The soak of `bench/soak.py`, short: the embedded model under load of every kind, without the gates that time it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from soaks import disconnects, mixed
from soaks.served import Gate, Served

CLIENTS, SECONDS = 24, 3.0
DISCONNECTS = 192


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    if not Path("/proc/self/task").is_dir():
        pytest.skip("looks at processes by /proc")
    made = Served("--max-running", "16", *mixed.OPTIONS)
    try:
        yield made
    finally:
        made.end()


def held(gates: list[Gate]) -> bool:
    failed = [gate for gate in gates if gate.held is False and not gate.timed]
    assert not failed, failed
    return any(gate.held for gate in gates)


def test_every_answer_of_a_mixed_load_is_right_and_nothing_stays(served: Served) -> None:
    assert held(asyncio.run(mixed.run(served, SECONDS, lambda text: None, CLIENTS)))


def test_clients_that_leave_at_every_phase_leave_nothing(served: Served) -> None:
    assert held(asyncio.run(disconnects.run(served, DISCONNECTS, lambda text: None)))
