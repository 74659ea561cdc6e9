"""The worker processes of a model, as their leader sees them: pipes, replies, and their end.

A worker's commands go through the pipe that is its standard input: first its job, then one command after another, each
a length of four bytes and a msgpack value. Its replies come through its standard output. A worker ends the moment its
input does. That one of them is dead shows by the end of the other pipe, for which a thread waits (`watch`). A worker
that lives but is stopped is lost too, once an exchange or a full pipe has waited for it too long.
"""

from __future__ import annotations

import contextlib
import os
import queue
import select
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from attar.errors import UserError
from attar.execution.parallel import commands
from attar.execution.parallel.commands import Command, Job, Reply, encode
from attar.kernels.group import WAIT
from attar.model.parallel import Groups
from attar.protocol import framing

UNREAD_SECONDS = WAIT.total_seconds()  # that a worker may leave a full pipe unread
END_SECONDS = 5.0
MOMENT = 0.5  # seconds between the end of a connection and that of the process behind it


class WorkerGroup:
    """The workers' processes and their state. It knows no model: it ends the processes when that is gone."""

    def __init__(self, folder: Path, jobs: Sequence[Job]) -> None:
        self.folder, self.lost, self.ending = folder, "", False
        self.groups: Groups | None = None
        self.met = 0  # number of repeated rendezvous
        self.heard: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        """Replies of the workers about steps; None where there will be no more."""
        self.on_lost: Callable[[str], None] | None = None
        self.children: list[subprocess.Popen[bytes]] = []
        self.free: int | None = None  # bytes of the fullest of the workers' GPUs, when they started; None on CPUs
        command = [sys.executable, "-m", "attar.execution.parallel.worker"]
        try:
            for job in jobs:
                child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
                self.children.append(child)
                assert child.stdin is not None
                os.set_blocking(child.stdin.fileno(), False)  # of this end alone
                self.write(child, encode(job))
        except BaseException:
            self.end()
            raise

    def tell(self, command: Command) -> None:
        """Send a command to all workers. Raises RuntimeError where a worker is gone."""
        if self.ending or self.lost:
            raise RuntimeError(self.lost or "the processes of the model were ended")
        data = encode(command)
        for child in self.children:
            self.write(child, data)

    def write(self, child: subprocess.Popen[bytes], data: bytes) -> None:
        """Write to a worker, which reads after its earlier commands are done.

        Raises RuntimeError where it reads nothing for longer than it may be behind. It then has a part of a command, so
        no more can be sent.
        """
        assert child.stdin is not None
        view = memoryview(data)
        with contextlib.suppress(BrokenPipeError):  # it is dead: waiting for it will show that
            while view:
                if not polled(child.stdin.fileno(), select.POLLOUT, UNREAD_SECONDS):
                    self.lose(f"process {self.children.index(child) + 1} of the model no longer reads its commands")
                    raise RuntimeError(self.lost)
                view = view[child.stdin.write(view) or 0 :]

    def wait_for(self, what: str, seconds: float) -> None:
        """Wait until every worker has replied `what`. Raises ValueError with the text of one that cannot, RuntimeError
        where one ended, or gives no reply for so long."""
        limit = time.monotonic() + seconds
        for number, child in enumerate(self.children, 1):
            said = _read_said(child, limit)
            if said is None:
                raise RuntimeError(f"process {number} of the model ended before it had {what}")
            if said.what != what:
                raise UserError(said.code, said.text)
            if said.free is not None:
                self.free = said.free if self.free is None else min(self.free, said.free)

    def watch(self) -> None:
        """Read the workers' replies, until one of them ends."""
        children = {child.stdout.fileno(): child for child in self.children if child.stdout is not None}
        poll = select.poll()
        for fd in children:
            poll.register(fd, select.POLLIN)
        while True:
            for fd, _ in poll.poll():
                said: Reply | None = None
                with contextlib.suppress(RuntimeError):
                    if not self.ending:  # which closes the pipes: their numbers may soon be those of other files
                        said = _read_said(children[fd], time.monotonic() + MOMENT)
                if said is None:
                    if not self.ending:
                        number = self.children.index(children[fd]) + 1
                        self.lose(self.ended(END_SECONDS) or f"process {number} of the model closed its output")
                    self.heard.put(None)
                    return
                if said.what not in ("ran", "met"):
                    self.abort()  # this process may wait for it
                self.heard.put(said.what)

    def verdicts(self) -> set[str]:
        """Return all workers' replies to the last step or rendezvous. Raises RuntimeError where one is gone."""
        found = set()
        for _ in self.children:
            try:
                said = self.heard.get(timeout=UNREAD_SECONDS)
            except queue.Empty:
                self.lose("a process of the model did not report the end of a step")
                said = None
            if said is None:
                raise RuntimeError(self.lost)
            found.add(said)
        return found

    def abort(self) -> None:
        """End the exchanges that this process is in."""
        if self.groups is not None:
            self.groups.abort()

    def ended(self, seconds: float = MOMENT) -> str:
        """Return which worker has ended, or does within `seconds`; "" where none has."""
        limit = time.monotonic() + seconds
        while True:
            for number, child in enumerate(self.children, 1):
                if (status := child.poll()) is not None:
                    return f"process {number} of the model ended with status {status}"
            if time.monotonic() > limit:
                return ""
            time.sleep(MOMENT / 50)

    def lose(self, why: str) -> None:
        self.lost = self.lost or why  # the folder stays until `end`: see `kernels/group.py`
        if self.on_lost is not None:
            self.on_lost(why)
        self.abort()

    def end(self) -> None:
        """End all workers."""
        if self.ending:
            return
        self.ending = True
        for child in self.children:
            assert child.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                child.stdin.write(encode(commands.End()))  # one that does not read is not waited for
            child.stdin.close()
        limit = time.monotonic() + END_SECONDS
        for child in self.children:
            try:
                child.wait(max(0.0, limit - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
            if child.stdout is not None:
                child.stdout.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def polled(fd: int | socket.socket, event: int, seconds: float) -> bool:
    """Return whether `fd` can be read from, or written to, in time, or its other end is closed: with `event` 0 that
    alone. `select` is no choice: it stops at descriptor 1023."""
    poll = select.poll()
    poll.register(fd, event)
    return bool(poll.poll(1000 * seconds))


def _read_said(child: subprocess.Popen[bytes], limit: float) -> Reply | None:
    """Read one message of a worker, None where it ended instead. Raises RuntimeError where it comes too late."""
    assert child.stdout is not None
    fd, data = child.stdout.fileno(), b""
    while wanted := framing.missing(data, commands.MAX_FRAME):
        if not polled(fd, select.POLLIN, max(0.0, limit - time.monotonic())):
            raise RuntimeError("the processes of the model did not start in time")
        more = os.read(fd, wanted)
        if not more:
            return None
        data += more
    return msgspec.msgpack.decode(data[framing.HEAD :], type=Reply)
