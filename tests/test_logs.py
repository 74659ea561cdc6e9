"""A log whose reader stops reading."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from attar import logs
from attar.logs import CLOSE_SECONDS, LINE, WAITING, Log

SECONDS = 20.0
PIPE = 1 << 16  # bytes that a pipe holds, as a rule
LINES = 1000  # that the queue holds where it is `short`
TEXT = "x" * (PIPE // LINES)
DROPPED = " lines of this log were dropped: they could not be written as fast as they came"


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    read, write = os.pipe()
    yield read, write
    for end in (read, write):
        os.close(end)


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """The queue, for a pipe to be as long as it."""
    monkeypatch.setattr(logs, "WAITING", LINES * (len(TEXT) + LINE))


def record(text: str) -> logging.LogRecord:
    return logging.LogRecord("attar", logging.INFO, "", 0, "%s", (text,), None)


def until(read: int, line: str) -> list[str]:
    """Lines up to one."""
    found, end = b"", time.monotonic() + SECONDS
    while not found.endswith(f"{line}\n".encode()):
        assert select.select([read], [], [], max(0.0, end - time.monotonic()))[0], found
        found += os.read(read, PIPE)
    return found.decode().splitlines()


def test_lines_come_in_order_and_whole(pipe: tuple[int, int]) -> None:
    log = Log(pipe[1])
    for i in range(100):
        log.handle(record(f"line {i}"))
    log.handle(record("\udcff"))
    log.close()
    assert until(pipe[0], "\\udcff") == [*(f"line {i}" for i in range(100)), "\\udcff"]


@pytest.mark.usefixtures("short")
def test_nobody_waits_for_a_reader_who_has_stopped(pipe: tuple[int, int]) -> None:
    log = Log(pipe[1])
    count = 3 * LINES
    for _ in range(count):  # of which the pipe holds fewer than 1,000, and the queue 1,000
        log.handle(record(TEXT))
    began = time.monotonic()
    log.close()
    assert time.monotonic() - began < 4 * CLOSE_SECONDS
    os.set_blocking(pipe[0], False)
    found, end = b"", time.monotonic() + SECONDS
    while log._thread.is_alive():  # or it would write to whoever gets the descriptor next
        assert time.monotonic() < end
        with contextlib.suppress(BlockingIOError):
            found += os.read(pipe[0], PIPE)
        if log._lines.empty():
            log.close()
    assert len(found.splitlines()) < count


@pytest.mark.usefixtures("short")
def test_what_was_dropped_is_said_once_there_is_room(pipe: tuple[int, int]) -> None:
    log, count = Log(pipe[1]), 3 * LINES
    for _ in range(count):
        log.handle(record(TEXT))
    lines = until(pipe[0], DROPPED)
    log.handle(record("last"))
    lines += until(pipe[0], "last")
    told = [int(line.split()[0]) for line in lines if line.endswith(DROPPED)]
    assert told
    assert sum(told) == count - lines.count(TEXT), "it may have had room for a moment before"
    log.close()


def test_a_burst_to_a_file_is_written_whole(tmp_path: Path) -> None:
    """What writes it runs in turn with what is logged, and gets behind by thousands of lines."""
    with (tmp_path / "log").open("wb") as file:
        log = Log(file.fileno())
        lines = [f"127.0.0.1 - a line as access logs have them, of a usual length: {i}" for i in range(20_000)]
        for line in lines:
            log.handle(record(line))
        end = time.monotonic() + SECONDS
        while log._thread.is_alive():
            assert time.monotonic() < end
            log.close()
    assert (tmp_path / "log").read_text().splitlines() == lines


def test_the_queue_holds_so_many_characters_and_no_more(pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines of no characters among them, which cost memory too."""
    write, go_on = os.write, threading.Event()

    def held(descriptor: int, data: bytes) -> int:
        assert descriptor != pipe[1] or go_on.wait(SECONDS)
        return write(descriptor, data)

    monkeypatch.setattr(logs.os, "write", held)
    log = Log(pipe[1])
    log.handle(record("first"))
    while not log._lines.empty():
        time.sleep(0.001)
    for _ in range(100):
        log.handle(record("x" * (1 << 20)))
    assert log._lines.qsize() == WAITING // ((1 << 20) + LINE)
    for _ in range(WAITING // LINE):
        log.handle(record(""))
    assert 1 < log._lines.qsize() <= WAITING // LINE
    assert log._waiting <= WAITING
    os.set_blocking(pipe[0], False)
    go_on.set()
    end = time.monotonic() + SECONDS
    while log._thread.is_alive():
        assert time.monotonic() < end
        with contextlib.suppress(BlockingIOError):
            os.read(pipe[0], PIPE)
        if log._lines.empty():
            log.close()
    assert log._waiting == 0


@pytest.mark.usefixtures("short")
def test_a_closed_descriptor_ends_the_writing_and_nothing_else() -> None:
    read, write = os.pipe()
    os.close(read)
    log = Log(write)
    for _ in range(3 * LINES):
        log.handle(record("unread"))
    log.close()
    os.close(write)


def test_a_full_disk_costs_the_lines_that_it_did_not_take(
    pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one of which it took a part."""
    write, left = os.write, [4]

    def full(descriptor: int, data: bytes) -> int:
        if descriptor == pipe[1] and left:
            if not left[0]:
                raise OSError(errno.ENOSPC, "no space left on device")
            data = data[: left[0]]
            left[0] -= len(data)
        return write(descriptor, data)

    monkeypatch.setattr(logs.os, "write", full)
    log = Log(pipe[1])
    for text in ("torn", "lost", "lost"):
        log.handle(record(text))
    end = time.monotonic() + SECONDS
    while log._dropped < 3:
        assert time.monotonic() < end
        time.sleep(0.001)
    left.clear()  # there is room again
    log.handle(record("kept"))
    found = b""
    while found.count(b"\n") < 3:
        assert select.select([pipe[0]], [], [], SECONDS)[0], found
        found += os.read(pipe[0], PIPE)
    assert sorted(found.decode().splitlines()) == sorted(["torn", "kept", f"3{DROPPED}"])
    log.close()


@pytest.mark.usefixtures("short")
def test_the_end_of_a_process_does_not_wait_for_itself(pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """`logging.shutdown` holds the handler's lock while it closes it."""
    monkeypatch.setattr(logs, "CLOSE_SECONDS", SECONDS)
    log = Log(pipe[1])
    for _ in range(3 * LINES):
        log.handle(record(TEXT))
    reader = threading.Thread(target=until, args=(pipe[0], DROPPED))
    began = time.monotonic()
    log.acquire()
    reader.start()
    log.close()
    log.release()
    reader.join()
    assert time.monotonic() - began < SECONDS / 2


def test_a_descriptor_that_does_not_block_loses_nothing(pipe: tuple[int, int]) -> None:
    os.set_blocking(pipe[1], False)
    log, text = Log(pipe[1]), "x" * 1000
    for _ in range(LINES // 2):  # many pipes full
        log.handle(record(text))
    log.handle(record("last"))
    assert until(pipe[0], "last") == [text] * (LINES // 2) + ["last"]
    log.close()


def test_a_text_stands_between_lines_as_it_is(pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    log = Log(pipe[1])
    log.setFormatter(logging.Formatter("engine: %(message)s"))
    monkeypatch.setattr(logging.getLogger(), "handlers", [logging.NullHandler(), log])
    logging.getLogger("attar.test").warning("before")
    logs.say("a table\nof two lines")
    assert until(pipe[0], "of two lines") == ["engine: before", "a table", "of two lines"]
    log.close()


def test_without_a_log_a_text_goes_to_stderr(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    logs.say("a table")
    assert capsys.readouterr().err == "a table\n"


@pytest.mark.parametrize(("end", "made"), [("2>&-", "NullHandler"), ("", "Log")])
def test_a_closed_stderr_is_not_written_to(end: str, made: str, tmp_path: Path) -> None:
    """Whatever is opened next may get its number."""
    script = tmp_path / "script.py"
    script.write_text(
        "import logging, os\nfrom attar import logs\n"
        "file = os.open('opened', os.O_CREAT | os.O_WRONLY)\n"
        "logs.begin()\nlogging.getLogger('httpx2').info('a request of our own')\n"
        "logging.getLogger('attar').warning('a line')\nlogs.say('a text')\n"
        "print(*(type(each).__name__ for each in logging.getLogger().handlers))\n"
    )
    done = subprocess.run(
        f"{sys.executable} script.py {end}", shell=True, cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.split() == [made]
    assert done.stderr == ("a line\na text\n" if made == "Log" else "")
    assert (tmp_path / "opened").read_bytes() == b""
