"""The engine's process: one model, one Unix socket, one loop of steps.

The server starts it with its settings on standard input, and keeps that pipe open: when the pipe ends, whoever wanted
the engine is gone, whatever it died of, and the engine ends too. Commands are read between steps. With nothing to do it
sleeps in the kernel. A server that does not take its events is given up when `MAX_UNSENT` bytes wait for it.
"""

from __future__ import annotations

import logging
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from attar.engine import loading
from attar.engine.engine import Engine
from attar.engine.messages import (
    MAX_FRAME,
    Cancel,
    Command,
    Drain,
    Embed,
    Event,
    Failed,
    Ready,
    Stats,
    Submit,
    encode,
)
from attar.engine.settings import Settings

MAX_UNSENT = 64 << 20
STATS_SECONDS = 0.1

logger = logging.getLogger(__name__)


class Loop:
    """Steps of `engine`, and the one server that is connected at a time."""

    def __init__(self, engine: Engine, ready: Ready, listener: socket.socket, parent: int | None) -> None:
        self.engine, self.ready, self.listener, self.parent = engine, ready, listener, parent
        self.draining = self.ended = False
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)
        if parent is not None:
            self._selector.register(parent, selectors.EVENT_READ)
        self._server: socket.socket | None = None
        self._decoder = msgspec.msgpack.Decoder(list[Command])
        self._in, self._out = bytearray(), bytearray()
        self._told = 0.0
        self._said_idle = True

    def run(self) -> None:
        """Until the parent has gone, or everything has ended after a Drain."""
        while not self.ended:
            self._listen(0 if self._busy() else self._patience())
            if self._busy():
                self._say(self.engine.step())
            if self.draining and self.engine.idle and not self._out:
                break
        self._say(self.engine.close())

    def _busy(self) -> bool:
        """Whether a step can do anything now."""
        return bool(not self.engine.idle and (self.engine.runnable or self._patience() == 0))

    def _patience(self) -> float | None:
        wake = self.engine.scheduler.wake()
        return None if wake is None else max(0.0, wake - self.engine.clock())

    def _listen(self, patience: float | None) -> None:
        for key, ready in self._selector.select(patience):
            if key.fileobj is self.listener:
                self._accept()
            elif key.fileobj is self._server:
                if ready & selectors.EVENT_READ:
                    self._read()
                if ready & selectors.EVENT_WRITE and self._server is not None:
                    self._write()
            elif not os.read(self.parent or 0, 4096):  # nothing is ever written to it
                self.ended = True

    def _accept(self) -> None:
        if self._server is not None:
            self._hang_up("another server came")
        self._server, _ = self.listener.accept()
        self._server.setblocking(False)
        self._selector.register(self._server, selectors.EVENT_READ)
        self._say([self.ready])

    def _read(self) -> None:
        assert self._server is not None
        try:
            data = self._server.recv(1 << 20)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._hang_up("the server went away")
            return
        self._in += data
        while len(self._in) >= 4:
            size = int.from_bytes(self._in[:4], "little")
            if size > MAX_FRAME:
                self._hang_up("a frame is too long")
                return
            if len(self._in) < 4 + size:
                return
            frame = bytes(self._in[4 : 4 + size])
            del self._in[: 4 + size]
            try:
                commands = self._decoder.decode(frame)
            except (msgspec.MsgspecError, ValueError):
                self._hang_up("a frame is not of commands")
                return
            self._obey(commands)

    def _obey(self, commands: Sequence[Command]) -> None:
        for command in commands:
            match command:
                case Submit():
                    self.engine.submit(command)
                case Embed():
                    self.engine.embed(command)
                case Cancel():
                    self.engine.cancel(command.id)
                case Drain():
                    self.draining = True

    def _say(self, events: list[Event]) -> None:
        now, idle = time.monotonic(), self.engine.idle
        if self._server is None:
            return
        if now >= self._told + STATS_SECONDS or idle != self._said_idle:
            self._told, self._said_idle = now, idle
            stats: Stats = self.engine.stats(blocks=True)
            events = [*events, stats]
        if events:
            self._out += _framed(events)
            self._write()

    def _write(self) -> None:
        assert self._server is not None
        try:
            sent = self._server.send(self._out) if self._out else 0
        except BlockingIOError:
            sent = 0
        except OSError:
            self._hang_up("the server went away")
            return
        del self._out[:sent]
        if len(self._out) > MAX_UNSENT:
            self._hang_up("the server does not take its events")
            return
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._out else 0)
        self._selector.modify(self._server, wanted)

    def _hang_up(self, why: str) -> None:
        assert self._server is not None
        logger.info("%s", why)
        self._selector.unregister(self._server)
        self._server.close()
        self._server = None
        self._in.clear()
        self._out.clear()
        self.engine.close()


def _framed(events: Sequence[Event]) -> bytes:
    """One frame, or, where that is too long, one an event; an event that no frame holds becomes a failure."""
    try:
        return encode(events)
    except ValueError:
        if len(events) > 1:
            return b"".join(_framed([event]) for event in events)
        (event,) = events
        assert not isinstance(event, Ready | Stats), "these are short"
        return encode([Failed(event.id, "too_long", "the answer is too long to be sent")])


def listen(path: Path) -> socket.socket:
    """A Unix socket that only this user can reach. Raises OSError where `path` is taken."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)
    try:
        listener.bind(str(path))
    finally:
        os.umask(before)
    listener.listen(1)
    return listener


def main() -> int:
    """Read settings from standard input, load, and run. Exit status 2 where the model cannot be served."""
    logging.basicConfig(level=logging.INFO, format="engine: %(message)s")
    for each in (signal.SIGINT, signal.SIGTERM):  # they reach whole groups of processes; the server says when to end
        signal.signal(each, signal.SIG_IGN)
    settings = msgspec.json.decode(sys.stdin.buffer.readline(), type=Settings)
    try:
        engine, ready = loading.engine(settings)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    with listen(Path(settings.socket)) as listener:
        Loop(engine, ready, listener, sys.stdin.fileno()).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
