"""The engine's process: one model, one Unix socket, one loop of steps.

The server starts it with its settings on standard input, and keeps that pipe open: when the pipe ends, the server has
died, of any cause, and the engine ends too. Commands are read between steps, and on a GPU also within one, while the
device works; refusals are sent at once, not after the step that follows. With nothing to do the process sleeps in the
kernel. A server that does not take its events is disconnected when `MAX_UNSENT` bytes wait for it.

A step may be long: a prompt of thousands of tokens, a large model. So a second thread, the heartbeat, reports twice a
second that the process runs. Kernels and torch let it run (they release Python's lock). It reports how long the present
step has lasted, so that the server can tell a long step from a stopped process and from a step that never ends. Where
such a step is under way when the server goes, the heartbeat ends the process.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import select
import selectors
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import NoReturn

import msgspec

from attar import env, faults, logs, machine
from attar.checkpoints.fingerprints import ChangedError
from attar.engine import startup
from attar.engine.blocks.moves import BlockMoves
from attar.engine.engine import Engine
from attar.engine.outbox import Outbox, framed
from attar.engine.startup import Shared
from attar.execution.parallel.executor import ParallelRunner
from attar.execution.parallel.worker_group import polled
from attar.protocol import framing, messages
from attar.protocol.messages import (
    BEAT_SECONDS,
    Beat,
    Cancel,
    Command,
    Drain,
    Embed,
    Event,
    QueryStatus,
    Ready,
    Submit,
    TakeOver,
)
from attar.protocol.settings import BLOCKS_SOCKET, CHANGED, HOPELESS, Settings

MAX_UNSENT = 64 << 20
STATS_SECONDS = 0.1
READ_SECONDS = 0.05  # for reading between two steps, or the last step's time if longer
REST_SECONDS = 0.01  # of waiting for the rest of a frame: it comes when the server has seen that there is room
ORPHAN_SECONDS = 10.0  # for the loop to see by itself that the server is gone

logger = logging.getLogger(__name__)


class Loop:
    """The loop over steps of `engine`, for one connected server at a time."""

    def __init__(self, engine: Engine, ready: Ready, listener: socket.socket, parent: int | None) -> None:
        self.engine, self.ready, self.listener, self.parent = engine, ready, listener, parent
        self.draining = self.ended = False
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)
        if parent is not None:
            self._selector.register(parent, selectors.EVENT_READ)
        if engine.moves is not None:
            self._selector.register(engine.moves.descriptor, selectors.EVENT_READ, engine.moves)
        self._server: socket.socket | None = None
        self._outbox: Outbox | None = None
        self._decoder = msgspec.msgpack.Decoder(list[Command])
        self._in = bytearray()
        self._told, self._said_idle = 0.0, True
        self._left: float | None = None  # time at which the step began; None between steps
        self._step_seconds = 0.0  # duration of the last step
        self._stopped, self._socket = threading.Event(), _place(listener)
        if engine.overlaps:
            engine.meanwhile = self._attend

    def run(self) -> None:
        """Loop until the parent has gone, or everything has ended after a Drain."""
        heart = threading.Thread(target=self._beat, name="heart", daemon=True)
        heart.start()
        try:
            while not self.ended:
                # As long as a step at most: a flood of commands gets half of the time.
                self._listen(0 if self._busy() else self._patience(), max(READ_SECONDS, self._step_seconds))
                if self._busy():
                    self._left = began = time.monotonic()
                    self._say(self.engine.step())
                    self._left, self._step_seconds = None, time.monotonic() - began
                if self.draining and self.engine.idle and not (self._outbox and self._outbox.waiting):
                    break
            self._say(self.engine.close())
        finally:
            self._stopped.set()
            heart.join()
            if self.engine.moves is not None:
                self.engine.moves.close()

    def _beat(self) -> None:
        last, busy, alone = None, 0.0, 0.0
        while not self._stopped.wait(BEAT_SECONDS):
            orphaned = self.parent is not None and polled(self.parent, 0, 0.0)  # nobody can write to the parent's pipe
            alone = alone + BEAT_SECONDS if orphaned else 0.0
            if alone > ORPHAN_SECONDS:
                path = Path(self.listener.getsockname())
                machine.remove_private_folder(path.parent, path.name, BLOCKS_SOCKET)
                _end_at_once("the server has gone, and a step does not end")
            left, outbox = self._left, self._outbox
            busy = grown(busy if left == last else 0.0, left, time.monotonic())
            last = left
            if outbox is not None:
                with contextlib.suppress(OSError):  # the loop sees it by itself
                    outbox.beat(messages.encode([Beat(busy)]))

    def _attend(self, events: list[Event]) -> None:
        """Send events and read commands while the device works at a step."""
        self._say(events)
        self._listen(0)

    def _busy(self) -> bool:
        """Return whether a step can do anything now."""
        return bool(not self.engine.idle and (self.engine.runnable or self._patience() == 0))

    def _patience(self) -> float | None:
        wake = self.engine.scheduler.wake()
        return None if wake is None else max(0.0, wake - self.engine.clock())

    def _listen(self, patience: float | None, seconds: float = 0.0) -> None:
        """Wait for a connection or data, and handle it; read from the server for at most about `seconds`."""
        for key, ready in self._selector.select(patience):
            if key.fileobj is self.listener:
                self._accept()
            elif isinstance(key.data, BlockMoves):
                key.data.settle()
                self._say([])  # of what was saved
            elif key.fileobj is self._server:
                if ready & selectors.EVENT_READ:
                    self._read(seconds)
                if ready & selectors.EVENT_WRITE and self._server is not None:
                    self._write()
            elif key.fileobj == self.parent and not os.read(key.fd, 4096):  # nothing is ever written to it
                self.ended = True

    def _accept(self) -> None:
        if self._server is not None:
            self._hang_up("another server came")
        self._server, _ = self.listener.accept()
        self._selector.register(self._server, selectors.EVENT_READ)
        self._outbox = Outbox(self._server, messages.encode([self.ready, *self.engine.cached(whole=True)]))
        self._write()

    def _read(self, seconds: float) -> None:
        """Read and execute the server's commands. The socket holds some 200 KB, several times a long prompt, and the
        last command may make the next step needless. So it is read until no more comes, for `seconds` at most."""
        assert self._server is not None
        limit, told = time.monotonic() + seconds, []
        while True:
            try:
                data = self._server.recv(1 << 20)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            if not data:
                self._hang_up("the server went away")
                return
            self._in += data
            if (events := self._heard()) is None:
                return
            told += events
            left = limit - time.monotonic()
            if left <= 0 or not polled(self._server, select.POLLIN, min(left, REST_SECONDS) if self._in else 0):
                break
        # Requests that were refused or cancelled need no step.
        if events := [*told, *self.engine.requests.take()]:
            self._say(events)

    def _heard(self) -> list[Event] | None:
        """Execute the complete frames; returns the reports asked for, None where the server was disconnected."""
        told: list[Event] = []
        while True:
            try:
                if (body := framing.take(self._in, messages.MAX_FRAME)) is None:
                    return told
                commands = self._decoder.decode(body)
            except (msgspec.MsgspecError, ValueError) as error:
                what = "too long" if isinstance(error, framing.FrameTooLong) else "not of commands"
                self._hang_up(f"a frame is {what}")
                return None
            for command in commands:
                match command:
                    case Submit():
                        self.engine.submit(command)
                    case Embed():
                        self.engine.embed(command)
                    case Cancel():
                        self.engine.cancel(command.id)
                    case TakeOver():
                        self.engine.take_over(Path(command.blocks_at))
                    case Drain():
                        self.draining = True
                    case QueryStatus():
                        told += self.engine.requests.told(command.ids)

    def _say(self, events: list[Event]) -> None:
        now, idle = time.monotonic(), self.engine.idle
        if self._outbox is None:
            return
        events = [*self.engine.cached(), *events]  # before the events of the step that changed it
        if idle or now >= self._told + STATS_SECONDS or idle != self._said_idle:  # always before a pause
            self._told, self._said_idle = now, idle
            events = [*events, self.engine.take_steps(), self.engine.stats(blocks=True)]
        if events:
            lost: set[str] = set()
            self._write(framed(events, lost))
            for id in lost:
                self.engine.requests.drop(id)

    def _write(self, frames: bytes = b"") -> None:
        assert self._server is not None
        assert self._outbox is not None
        try:
            self._outbox.put(frames)
        except OSError:
            self._hang_up("the server went away")
            return
        if self._outbox.waiting > MAX_UNSENT:
            self._hang_up("the server does not take its events")
            return
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._outbox.waiting else 0)
        self._selector.modify(self._server, wanted)

    def _hang_up(self, why: str) -> None:
        assert self._server is not None
        assert self._outbox is not None
        if not self.draining:
            logger.info("%s", why)
        self._selector.unregister(self._server)
        self._outbox.close()
        self._server = self._outbox = None
        self._in.clear()
        self.engine.close()
        # Temporary folders are cleaned, also of needed files.
        if not (self.draining or self.ended or _place(self.listener) == self._socket):
            _end_at_once("the engine's socket was removed: no server can connect any more")


def grown(busy: float, left: float | None, now: float) -> float:
    """Return the seconds that a step begun at `left` has run, after `busy` at the last beat, without the time for which
    this process was stopped."""
    return 0.0 if left is None else min(now - left, busy + 2 * BEAT_SECONDS)


def listen(path: Path) -> socket.socket:
    """Open a Unix socket that only this user can reach. Raises OSError where `path` is taken."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)
    try:
        listener.bind(str(path))
    finally:
        os.umask(before)
    listener.listen(1)
    return listener


def _end_at_once(why: str) -> NoReturn:
    """Exit at once: the model is lost, in part or whole, and the loop may wait for it for ever. The process's
    supervisor starts another."""
    logger.error("%s", why)
    logging.shutdown()
    os._exit(1)


def main() -> int:
    """Run an engine. Exit statuses other than 0 are in `protocol/settings.py`."""
    logs.begin("engine: %(message)s")
    ignore_signals()
    return run()


def ignore_signals() -> None:
    """Ignore signals that are sent to whole process groups: the server says when to end."""
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)


def run(shared: Shared | None = None) -> int:
    """Read settings from standard input, load the model unless there is one, and serve. Returns the exit status."""
    settings = Settings.of(sys.stdin.buffer.readline())
    try:
        faults.arm_from(env.get().faults)
        engine, ready = startup.start_engine(settings, shared)
    except (ValueError, OSError) as error:
        return explained(error)
    if isinstance(engine.runner, ParallelRunner):
        workers = engine.runner.workers

        def lost(why: str) -> None:
            machine.remove_folder(workers.folder)
            _end_at_once(why)

        workers.on_lost = lost
        if workers.lost:  # before the watcher was set
            lost(workers.lost)
    gc.freeze()  # torch and the model stay: no collection between two steps need walk through them
    path = Path(settings.socket)
    try:
        listener = listen(path)
    except OSError as error:
        _end_at_once(f"no server could connect: {error}")
    with listener:
        loop = Loop(engine, ready, listener, sys.stdin.fileno())
        loop.run()
    if loop.ended:
        machine.remove_private_folder(path.parent, path.name, BLOCKS_SOCKET)
    return 0


def explained(error: Exception) -> int:
    """Print why an engine cannot start; returns the exit status."""
    logs.say(f"error: {error}")
    return CHANGED if isinstance(error, ChangedError) else HOPELESS


def _place(listener: socket.socket) -> tuple[int, int] | None:
    """Return device and inode of the socket's file, which tell it from a later one; None where there is none."""
    try:
        status = os.lstat(listener.getsockname())
    except OSError:
        return None
    return status.st_dev, status.st_ino


if __name__ == "__main__":
    sys.exit(main())
