"""The server's end of engines that are forked from one process (`engine/fork_server.py`), and share its weights."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import socket
import subprocess
import threading
from collections.abc import Sequence
from typing import IO

from attar.protocol.forking import MAX_MESSAGE, Ended, Kill, Load, Loaded, Start, decode_report, encode
from attar.protocol.settings import Settings
from attar.server.supervisor import END_SECONDS, on_cores

PIPE_BYTES = 1 << 20  # settings lie in a pipe until the model is loaded, so it has to hold all of them


class ForkedEngine:
    """One forked engine, in place of a `subprocess.Popen`: `stdin`, `wait` and `kill`."""

    def __init__(self, server: ForkServerProcess, number: int, stdin: IO[bytes]) -> None:
        self.stdin: IO[bytes] | None = stdin
        self._server, self._number = server, number
        self._status: int | None = None
        self._over = threading.Event()

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit status once it has ended. Raises subprocess.TimeoutExpired where it runs for longer."""
        if not self._over.wait(timeout):
            raise subprocess.TimeoutExpired(f"engine {self._number}", timeout or 0.0)
        assert self._status is not None
        return self._status

    def kill(self) -> None:
        """Kill it, where it runs."""
        self._server.kill(self._number)

    def ended(self, status: int) -> None:
        """Note that it has ended."""
        self._status = status
        self._over.set()


class ForkServerProcess:
    """Starts a process by `command` that loads the model of `settings` on `cores`, and forks engines from it. Where it
    was lost, with all of its engines, the next start begins another."""

    def __init__(self, command: Sequence[str], settings: Settings, cores: Sequence[int]) -> None:
        self._command, self._settings, self._cores = command, settings, cores
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._engines: dict[int, ForkedEngine] = {}
        self._process: subprocess.Popen[bytes] | None = None  # None where there is none, or it was lost
        self._control: socket.socket | None = None
        self._loaded = False

    def start(self, cores: Sequence[int]) -> ForkedEngine:
        """Start an engine on `cores`, which reads its settings from `stdin`. Raises OSError where the process that
        loads cannot be started."""
        with self._lock:
            if self._process is None:
                self._begin()
            assert self._control is not None
            number = next(self._numbers)
            read, write = _pipe()
            engine = self._engines[number] = ForkedEngine(self, number, os.fdopen(write, "wb"))
            try:
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # lost: its reader tells all engines
                    socket.send_fds(self._control, [encode(Start(number, tuple(cores)))], [read])
            finally:
                os.close(read)
            return engine

    def kill(self, number: int) -> None:
        """Kill an engine where it runs. One that waits for the model ends with the process that loads it."""
        with self._lock:
            if number not in self._engines or self._process is None or self._control is None:
                return
            if self._loaded:
                with contextlib.suppress(OSError):
                    self._control.send(encode(Kill(number)))
            else:
                self._process.kill()

    def end(self) -> None:
        """End the process, whose engines have ended; kill it if need be."""
        with self._lock:
            process, control = self._process, self._control
        if process is None or control is None:
            return
        with contextlib.suppress(OSError):
            control.shutdown(socket.SHUT_RDWR)
        try:
            process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _begin(self) -> None:
        """Start the process and tell it what to load; a thread reads its reports."""
        control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with theirs, on_cores(self._cores):
                process = subprocess.Popen(self._command, stdin=theirs.fileno())
            read, write = _pipe()
            with os.fdopen(write, "wb") as line:
                line.write(self._settings.line())
            try:
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it died: the reader sees that
                    socket.send_fds(control, [encode(Load())], [read])
            finally:
                os.close(read)
        except OSError:
            control.close()
            raise
        self._process, self._control, self._loaded = process, control, False
        threading.Thread(target=self._read, args=(process, control), name="fork-server", daemon=True).start()

    def _read(self, process: subprocess.Popen[bytes], control: socket.socket) -> None:
        """Pass ends of engines on, until the process is lost, which is the end of all."""
        with control:
            while data := _received(control):
                match decode_report(data):
                    case Loaded():
                        with self._lock:
                            self._loaded = True
                    case Ended(number, status):
                        with self._lock:
                            engine = self._engines.pop(number, None)
                        if engine is not None:
                            engine.ended(status)
            status = process.wait()
        with self._lock:
            lost = [*self._engines.values()]
            self._engines.clear()
            self._process = self._control = None
        for engine in lost:
            engine.ended(status or 1)


def _pipe() -> tuple[int, int]:
    read, write = os.pipe()
    with contextlib.suppress(PermissionError):  # a system with a lower limit: 64 KB, which holds what is usual
        fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    return read, write


def _received(control: socket.socket) -> bytes:
    try:
        return control.recv(MAX_MESSAGE)
    except OSError:
        return b""
