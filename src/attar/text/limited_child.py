"""A child process for work on untrusted text: one request, one answer, under limits that the operating system holds.

Programs that come with a model or a request can ask for gigabytes, for hours inside a single C call that no Python
signal interrupts, or overflow the stack of a compiler. So they run in another process, which limits its own memory,
processor time, files and output, and this module kills it at a deadline. One such process serves all requests, since
starting Python costs a hundred times more than most of them; after any failure of its own it is replaced. It shares no
memory with the caller: only frames pass between them (`protocol/framing.py`). An answer is `+` and its content, `-` and
one sentence, or `!` and one sentence and the end of that process.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path

from attar.errors import Code, UserError
from attar.protocol import framing

MAX_ANSWER = (4 << 20) + 1
STARVED_SECONDS = 10.0  # in any case: no request can wait for anything but a processor
START_SECONDS = 60.0  # importing packages on a busy machine


class LimitedChild:
    """The owner of such a process, which runs `main` of `module` with `packages` importable.

    It is started on first use, replaced after it was killed, and ended with its owner. `first`, where given, makes the
    first request of each process. `what` it works on is named in errors, which are made by `error`. An answer has at
    `most` so many bytes. Thread-safe; requests wait for each other.
    """

    def __init__(
        self, module: str, packages: tuple[str, ...], what: str, error: Callable[[str, Code | None], UserError],
        first: Callable[[], bytes] | None = None, most: int = MAX_ANSWER,
    ) -> None:  # fmt: skip
        self._most = most
        self._module, self._packages, self._what, self._error, self._first = module, packages, what, error, first
        self.forget()
        _owners.add(self)

    def forget(self) -> None:
        """Drop the child in a forked process: it belongs to the parent, whose answers must not be read here."""
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the process, unless it runs."""
        with self._lock:
            self._running()

    def ask(self, request: bytes, seconds: float) -> str:
        """Return the answer to a request, as text. Raises what `ask_bytes` raises."""
        return self.ask_bytes(request, seconds).decode("utf-8", "replace")

    def ask_bytes(self, request: bytes, seconds: float) -> bytes:
        """Return the answer to a request. Raises the owner's error where it is refused, where none came by the
        deadline, or the child ended instead."""
        with self._lock:
            child = self._running()
            reply = b"!"
            try:
                reply = self._exchange(child, request, seconds)
            finally:
                if reply[:1] == b"!":  # also at Ctrl-C: an unread answer must not become the next one's
                    self.close()
        if reply[:1] != b"+":
            raise self._error(reply[1:].decode("utf-8", "replace"), None)
        return reply[1:]

    def close(self) -> None:
        """End the process."""
        if self._child is not None:
            self._child.kill()
            self._child.communicate()
            self._child = None

    def spawn(self) -> subprocess.Popen[bytes]:
        """Start a process and wait until it reads requests."""
        # No site-packages and no environment: nothing runs before the child's own first line, and it knows no secrets.
        # Some Pythons find their own library only by LD_LIBRARY_PATH.
        program = f"import sys; sys.path += sys.argv[1:]; import {self._module} as child; child.main()"
        child = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", program, *self._folders(), str(Path(__file__).parents[2])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            env={name: value for name, value in os.environ.items() if name == "LD_LIBRARY_PATH"},
            start_new_session=True,  # Ctrl-C in a terminal is for the caller
        )
        assert child.stdin is not None
        os.set_blocking(child.stdin.fileno(), False)  # of this end alone
        self._exchange(child, None, START_SECONDS)
        if self._first is not None:
            self._exchange(child, self._first(), START_SECONDS)
        return child

    def _running(self) -> subprocess.Popen[bytes]:
        if self._child is None or self._child.poll() is not None:
            self.close()
            self._child = self.spawn()
        return self._child

    def _folders(self) -> list[str]:
        """Return the folders that hold the packages, for a Python without site-packages."""
        folders: dict[str, None] = {}
        for name in self._packages:
            spec = importlib.util.find_spec(name)
            if spec is None or spec.origin is None:
                message = f"the {self._what} needs the package {name}: pip install {name}"
                raise self._error(message, "package_missing")
            folders[str(Path(spec.origin).parents[1])] = None
        return list(folders)

    def _exchange(self, child: subprocess.Popen[bytes], request: bytes | None, seconds: float) -> bytes:
        """Send a request, if any, and read one answer. Where none comes by the deadline, or the child ends instead, it
        is gone, and the owner's error is raised."""
        assert child.stdin is not None
        assert child.stdout is not None
        deadline = _Deadline(child.pid, seconds)
        try:
            if request is not None:
                _write(child.stdin.fileno(), framing.frame(request), deadline)
            return _read(child.stdout.fileno(), deadline, self._most)
        except (EOFError, BrokenPipeError, TimeoutError, framing.FrameTooLong) as error:
            child.kill()
            status = child.wait()
            if isinstance(error, TimeoutError) or status == -signal.SIGXCPU:
                raise self._error(f"the {self._what} took longer than {seconds:g} s", None) from error
            raise self._error(f"the {self._what} crashed its process (status {status})", None) from error


class _Deadline:
    """The deadline of a process: after `seconds`, if it had a processor for half of them.

    On a machine that is too busy for that it gets more, because a good request must not fail because of other load: up
    to `STARVED_SECONDS`.
    """

    def __init__(self, pid: int, seconds: float) -> None:
        self.pid, self.seconds = pid, seconds
        self._began, self._used = time.monotonic(), _processor_seconds(pid)

    def left(self) -> float:
        """Return the seconds to wait before asking again. Raises TimeoutError where there are none."""
        spent = time.monotonic() - self._began
        if spent < self.seconds:
            return self.seconds - spent
        used = _processor_seconds(self.pid)
        if used is None or self._used is None or spent >= max(self.seconds, STARVED_SECONDS):
            raise TimeoutError
        if (owed := self.seconds / 2 - (used - self._used)) <= 0:
            raise TimeoutError
        return max(owed, 0.01)


def _processor_seconds(pid: int) -> float | None:
    """Return the processor seconds of a process; None where the system does not say."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _write(fd: int, data: bytes, deadline: _Deadline) -> None:
    """Write to a pipe that does not block."""
    poll, view = select.poll(), memoryview(data)
    poll.register(fd, select.POLLOUT)
    while view:
        if poll.poll(1000 * deadline.left()):
            with contextlib.suppress(BlockingIOError):
                view = view[os.write(fd, view) :]


def _read(fd: int, deadline: _Deadline, most: int) -> bytes:
    """One answer."""
    poll, data = select.poll(), bytearray()
    poll.register(fd, select.POLLIN)
    while wanted := framing.missing(data, most):
        if poll.poll(1000 * deadline.left()):
            more = os.read(fd, wanted)
            if not more:
                raise EOFError
            data += more
    if len(data) == framing.HEAD:
        raise EOFError
    return bytes(data[framing.HEAD :])


_owners: weakref.WeakSet[LimitedChild] = weakref.WeakSet()


def _forget() -> None:
    for owner in list(_owners):
        owner.forget()


os.register_at_fork(after_in_child=_forget)
