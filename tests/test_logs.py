"""A log whose reader stops reading."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterator

import pytest

from attar.logs import WAITING, Log

SECONDS = 20.0
PIPE = 1 << 16  # bytes that a pipe holds, as a rule


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    read, write = os.pipe()
    yield read, write
    for end in (read, write):
        os.close(end)


def record(text: str) -> logging.LogRecord:
    return logging.LogRecord("attar", logging.INFO, "", 0, "%s", (text,), None)


def until(read: int, line: str) -> list[str]:
    """Lines up to one."""
    found, end = b"", time.monotonic() + SECONDS
    while not found.endswith(f"{line}\n".encode()):
        assert time.monotonic() < end
        found += os.read(read, PIPE)
    return found.decode().splitlines()


def test_lines_come_in_order_and_whole(pipe: tuple[int, int]) -> None:
    log = Log(pipe[1])
    for i in range(100):
        log.handle(record(f"line {i}"))
    log.handle(record("\udcff"))
    log.close()
    assert until(pipe[0], "\\udcff") == [*(f"line {i}" for i in range(100)), "\\udcff"]


def test_nobody_waits_for_a_reader_who_has_stopped(pipe: tuple[int, int]) -> None:
    log = Log(pipe[1])
    count = 3 * WAITING
    text = "x" * (PIPE // WAITING)
    for _ in range(count):  # of which the pipe holds fewer than 1,000, and the queue 1,000
        log.handle(record(text))
    began = time.monotonic()
    log.close()
    assert time.monotonic() - began < SECONDS
    os.set_blocking(pipe[0], False)
    found, end = b"", time.monotonic() + SECONDS
    while log._thread.is_alive():  # or it would write to whoever gets the descriptor next
        assert time.monotonic() < end
        with contextlib.suppress(BlockingIOError):
            found += os.read(pipe[0], PIPE)
        if log._lines.empty():
            log.close()
    assert len(found.splitlines()) < count


def test_what_was_dropped_is_said_once_there_is_room(pipe: tuple[int, int]) -> None:
    log, count = Log(pipe[1]), 3 * WAITING
    text = "x" * (PIPE // WAITING)
    for _ in range(count):
        log.handle(record(text))
    found = b""
    while not log._lines.empty():
        found += os.read(pipe[0], PIPE)
    log.handle(record("last"))
    lines = found.decode().split("\n")
    rest = until(pipe[0], "last")
    lines = [*lines[:-1], lines[-1] + rest[0], *rest[1:]]
    told = [int(line.split()[0]) for line in lines if line.endswith(" lines of this log were dropped: nobody read it")]
    assert told
    assert sum(told) == count - lines.count(text), "it may have had room for a moment before"
    log.close()


def test_a_closed_descriptor_ends_the_writing_and_nothing_else() -> None:
    read, write = os.pipe()
    os.close(read)
    log = Log(write)
    for _ in range(2 * WAITING):
        log.handle(record("unread"))
    log.close()
    os.close(write)
