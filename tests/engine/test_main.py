"""The engine's loop over a real socket, with a small model behind it."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from attar.engine import main
from attar.engine.main import Loop, grown, listen
from attar.model.decoder import Decoder
from attar.protocol.messages import (
    MAX_FRAME,
    Beat,
    Cancel,
    Command,
    Delta,
    Drain,
    Event,
    Failed,
    Finished,
    QueryStatus,
    Ready,
    RequestStatus,
    Stats,
    Submit,
    encode,
)
from attar.protocol.request import SamplingParams
from attar.protocol.scheduler_config import SchedulerConfig
from attar.protocol.settings import Settings
from tests.engine.conftest import make_engine

SECONDS = 20.0  # that anything here may take
END_AT_ONCE = main._end_at_once  # which is not to end the tests
GREEDY = SamplingParams(max_tokens=5, temperature=0, seed=0)


class Running:
    """A loop in a thread, and the pipe that keeps it alive."""

    def __init__(self, path: Path, decoder: Decoder) -> None:
        self.path = path
        self.engine = make_engine(decoder, 8, SchedulerConfig(max_step_tokens=32), context=128)
        self.ready = Ready("tiny", 128, decoder.config.vocab_size, 8, 64, 256, (("weights", 1),))
        self.listener = listen(path)
        self.parent, self.pipe = os.pipe()
        self.loop = Loop(self.engine, self.ready, self.listener, self.parent)
        self.thread = threading.Thread(target=self.loop.run, daemon=True)
        self.thread.start()

    def join(self) -> None:
        self.thread.join(SECONDS)
        assert not self.thread.is_alive(), "the loop does not end"

    def stop(self) -> None:
        if self.thread.is_alive():
            os.close(self.pipe)
            self.join()
        self.listener.close()


class Client:
    """What the server does, in a few lines."""

    def __init__(self, path: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(SECONDS)
        self.socket.connect(str(path))
        self.limit = time.monotonic() + 10 * SECONDS  # beats come for ever
        self.stream = self.socket.makefile("rb")

    def send(self, *commands: Command) -> None:
        self.socket.sendall(encode(commands))

    def frame(self) -> list[Event]:
        assert time.monotonic() < self.limit, "what is waited for does not come"
        head = self.stream.read(4)
        if len(head) < 4:
            raise EOFError
        return msgspec.msgpack.decode(self.stream.read(int.from_bytes(head, "little")), type=list[Event])

    def end(self) -> None:
        """Read until the other side closes."""
        with contextlib.suppress(EOFError, ConnectionError):
            while self.frame():
                pass

    def until(self, kind: type[Event]) -> list[Event]:
        """Everything up to the frame with an event of a kind."""
        found: list[Event] = []
        while not any(isinstance(event, kind) for event in found):
            found += self.frame()
        return found


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hearts beat fast: beats come between all that these tests look at."""
    monkeypatch.setattr(main, "BEAT_SECONDS", 0.002)

    def end(why: str) -> None:
        raise AssertionError(f"this process would have ended: {why}")

    monkeypatch.setattr(main, "_end_at_once", end)


@pytest.fixture
def running(tmp_path: Path, tiny_decoder: Callable[..., Decoder]) -> Iterator[Running]:
    made = Running(tmp_path / "engine", tiny_decoder())
    yield made
    made.stop()


def test_a_request_and_the_state_behind_it(running: Running) -> None:
    client = Client(running.path)
    assert client.frame()[0] == running.ready
    client.send(Submit("a", (1, 2, 3), GREEDY))
    events = client.until(Finished)
    assert len([event for event in events if isinstance(event, Delta)]) == 5
    stats = events[-1]  # it has fallen idle
    assert isinstance(stats, Stats)
    assert (stats.running, stats.waiting, stats.generated_tokens) == (0, 0, 5)
    assert len(stats.blocks) == 8


@pytest.fixture
def steps(running: Running, monkeypatch: pytest.MonkeyPatch) -> threading.Semaphore:
    """A step is made for each that is released: whoever has to look at a running request is never too late."""
    permits, step = threading.Semaphore(3), running.engine.step

    def permitted() -> list[Event]:
        assert permits.acquire(timeout=SECONDS)
        return step()

    monkeypatch.setattr(running.engine, "step", permitted)
    return permits


def test_how_far_requests_are(running: Running, steps: threading.Semaphore) -> None:
    client = Client(running.path)
    client.send(
        QueryStatus(("a",)),
        Submit("a", (1, 2, 3), SamplingParams(max_tokens=100, temperature=0, seed=0)),
        QueryStatus(("b", "a")),
    )
    [told] = [event for event in client.until(RequestStatus) if isinstance(event, RequestStatus)]
    assert (told.id, told.report.prompt_tokens, told.report.reuse_ended) == ("a", 3, "")
    client.until(Delta)
    client.send(QueryStatus(("a",)))
    steps.release(1000)
    [told] = [event for event in client.until(RequestStatus) if isinstance(event, RequestStatus)]
    assert told.report.prefill > 0
    [end] = [event for event in client.until(Finished) if isinstance(event, Finished)]
    assert end.report is not None
    assert end.report.decode >= told.report.decode


def test_what_has_ended_wakes_nobody(running: Running) -> None:
    """Else a server with nothing to do would take a whole core from the first deadline on."""
    client = Client(running.path)
    client.send(Submit("a", (1, 2, 3), GREEDY, deadline=SECONDS))
    client.until(Finished)
    assert running.loop._patience() is None


def test_only_this_user_can_reach_the_socket(running: Running) -> None:
    assert running.path.stat().st_mode & 0o777 == 0o600


def test_a_cancelled_request_says_so(running: Running) -> None:
    client = Client(running.path)
    client.send(Submit("a", (1,), SamplingParams(max_tokens=100, temperature=0, seed=0)), Cancel("a"))
    assert [event.code for event in client.until(Failed) if isinstance(event, Failed)] == ["cancelled"]


def test_it_ends_when_its_parent_does(running: Running, steps: threading.Semaphore) -> None:
    client = Client(running.path)
    client.send(Submit("a", (1,), SamplingParams(max_tokens=120, temperature=0, seed=0)))
    client.until(Delta)
    os.close(running.pipe)
    steps.release(1000)
    running.join()
    client.until(Failed)


def test_it_drains_before_it_ends(running: Running) -> None:
    client = Client(running.path)
    client.send(Submit("a", (1, 2), GREEDY), Drain())
    client.until(Finished)
    running.join()
    os.close(running.pipe)


@pytest.mark.parametrize(
    "sent",
    [
        (MAX_FRAME + 1).to_bytes(4, "little"),
        b"\x03\x00\x00\x00\xc1\xc1\xc1",
        b"\x09\x00\x00\x00\x90",
        b"\xff" * 64,
    ],
    ids=["too long", "not msgpack", "short", "noise"],
)
def test_what_it_cannot_read_ends_the_connection_and_not_the_engine(running: Running, sent: bytes) -> None:
    client = Client(running.path)
    client.frame()
    client.socket.sendall(sent)
    client.socket.shutdown(socket.SHUT_WR)
    client.end()
    again = Client(running.path)
    again.send(Submit("a", (1,), GREEDY))
    again.until(Finished)


def test_a_server_that_leaves_takes_its_requests_along(running: Running) -> None:
    client = Client(running.path)
    client.send(Submit("a", (1,), SamplingParams(max_tokens=100, temperature=0, seed=0)))
    client.until(Delta)
    client.stream.close()
    client.socket.close()
    again = Client(running.path)
    again.send(Submit("b", (1,), GREEDY))
    events = again.until(Finished)
    assert {event.id for event in events if isinstance(event, Delta | Finished)} == {"b"}
    assert running.engine.pool.active == 0


def test_an_engine_that_no_server_can_reach_any_more_ends(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its folder was cleaned away, and its server went: another engine has to take its place."""
    ended = threading.Event()
    monkeypatch.setattr(main, "_end_at_once", lambda why: ended.set())
    client = Client(running.path)
    client.until(Ready)
    client.socket.shutdown(socket.SHUT_WR)
    client.end()
    again = Client(running.path)
    again.until(Ready)
    assert not ended.is_set()
    running.path.unlink()
    again.socket.shutdown(socket.SHUT_WR)
    assert ended.wait(SECONDS)


def test_an_engine_that_was_told_to_end_does_so_without_its_socket_too(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another in its place would be one too many."""
    ends: list[str] = []
    monkeypatch.setattr(main, "_end_at_once", ends.append)
    long, begun, go_on = held(running.engine.step)
    monkeypatch.setattr(running.engine, "step", long)
    client = Client(running.path)
    client.until(Ready)
    client.send(Submit("a", (1,), SamplingParams(max_tokens=100, temperature=0, seed=0)))
    assert begun.wait(SECONDS)
    running.path.unlink()
    client.send(Drain())
    client.socket.shutdown(socket.SHUT_WR)
    client.socket.close()
    go_on.set()
    running.join()
    assert ends == []


def test_a_socket_that_cannot_be_made_is_said_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Exit status 1: whoever watches the process starts another."""
    read, write = os.pipe()
    os.write(write, msgspec.json.encode(Settings("", str(tmp_path / "gone" / "engine"))) + b"\n")
    os.close(write)
    monkeypatch.setattr(main.sys, "stdin", os.fdopen(read))
    monkeypatch.setattr(main.signal, "signal", lambda *_: None)
    monkeypatch.setattr(main.gc, "freeze", lambda: None)
    monkeypatch.setattr(main.logs, "begin", lambda _: None)
    monkeypatch.setattr(main.startup, "start_engine", lambda *_: (SimpleNamespace(runner=None), None))
    monkeypatch.setattr(main.logging, "shutdown", lambda: None)
    monkeypatch.setattr(main, "_end_at_once", END_AT_ONCE)
    monkeypatch.setattr(main.os, "_exit", sys.exit)
    with pytest.raises(SystemExit, match="1"):
        main.main()
    assert "no server could connect" in caplog.text


def held(step: Callable[[], list[Event]]) -> tuple[Callable[[], list[Event]], threading.Event, threading.Event]:
    """A step that takes until it may go on, an event for when it has begun, and one to let it."""
    begun, go_on = threading.Event(), threading.Event()

    def long() -> list[Event]:
        begun.set()
        assert go_on.wait(SECONDS)
        return step()

    return long, begun, go_on


def test_it_beats_while_it_waits_and_through_a_long_step(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    client, (long, begun, go_on) = Client(running.path), held(running.engine.step)

    def beat() -> float:
        return next(event.busy for event in client.until(Beat) if isinstance(event, Beat))

    while beat():  # it may still be at something
        pass
    monkeypatch.setattr(running.engine, "step", long)
    client.send(Submit("a", (1,), GREEDY))
    assert begun.wait(SECONDS)
    while not (first := beat()):
        pass
    while beat() <= first:  # it counts on
        pass
    go_on.set()
    client.until(Finished)
    while beat():
        pass


def test_a_step_that_does_not_end_does_not_outlive_the_server(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, (long, begun, go_on) = Client(running.path), held(running.engine.step)
    ended = threading.Event()
    monkeypatch.setattr(main, "ORPHAN_SECONDS", 0.01)
    monkeypatch.setattr(main, "_end_at_once", lambda why: ended.set())
    monkeypatch.setattr(running.engine, "step", long)
    client.send(Submit("a", (1,), GREEDY))
    assert begun.wait(SECONDS)
    assert not ended.wait(0.1)  # as long as somebody wants it
    os.close(running.pipe)
    assert ended.wait(SECONDS)
    assert not running.path.exists()
    go_on.set()
    running.join()


def test_an_engine_leaves_alone_what_lies_in_its_folders_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its folder was cleaned away, and somebody made a link of the name."""
    folder, other = tmp_path / "attar", tmp_path / "other"
    for each in (folder, other):
        each.mkdir(0o700)
    (other / "engine").touch()
    read, write = os.pipe()
    os.write(write, msgspec.json.encode(Settings("", str(folder / "engine"))) + b"\n")
    os.close(write)

    def run(loop: Loop) -> None:
        loop.ended = True
        (folder / "engine").unlink()
        folder.rmdir()
        folder.symlink_to(other)

    monkeypatch.setattr(main.sys, "stdin", os.fdopen(read))
    monkeypatch.setattr(main.signal, "signal", lambda *_: None)
    monkeypatch.setattr(main.gc, "freeze", lambda: None)
    monkeypatch.setattr(main.logs, "begin", lambda _: None)
    engine = SimpleNamespace(runner=None, overlaps=False, moves=None)
    monkeypatch.setattr(main.startup, "start_engine", lambda *_: (engine, None))
    monkeypatch.setattr(main.Loop, "run", run)
    assert main.main() == 0
    assert (other / "engine").is_file()
    assert folder.is_symlink()


@pytest.mark.parametrize("behind", [b"", encode([Cancel("a")])[:-1]], ids=["nothing", "part of a frame"])
def test_who_is_refused_is_told_before_the_next_step(
    running: Running, monkeypatch: pytest.MonkeyPatch, behind: bytes
) -> None:
    """A step may take seconds, and until it is told a stream's status has to wait, or is wrong."""
    client, (long, begun, go_on) = Client(running.path), held(running.engine.step)
    client.until(Ready)
    monkeypatch.setattr(running.engine, "step", long)
    client.socket.sendall(encode([Submit("a", (1,), GREEDY), Submit("b", (), GREEDY)]) + behind)
    assert begun.wait(SECONDS)
    assert [event.id for event in client.until(Failed) if isinstance(event, Failed)] == ["b"]
    go_on.set()
    client.until(Finished)


def test_time_for_which_the_process_was_stopped_is_not_the_step_s() -> None:
    """Else a server would take a step for one that never ends."""
    beat = main.BEAT_SECONDS
    assert grown(0.0, None, 100.0) == 0.0
    assert grown(0.0, 100.0, 100.0 + beat / 2) == pytest.approx(beat / 2)
    assert grown(beat, 100.0, 100.0 + 2 * beat) == pytest.approx(2 * beat)
    assert grown(beat, 100.0, 1100.0) == 3 * beat


@pytest.mark.parametrize("changed", [{"preset": "fast"}, {"max_running": 0}, {"policy": "none?"}])
def test_settings_that_cannot_be(changed: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        msgspec.structs.replace(Settings("m", "s"), **changed).limits()
