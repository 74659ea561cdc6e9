"""`attar serve`: the HTTP process, which starts and supervises the engine's process.

The engine is a child with its settings on standard input, a pipe that stays open: when this process dies, of any cause,
the pipe ends, and the engine ends. When the engine dies, open requests fail within the moment
(`engine_client/client.py`), and a new one is started, at once the first time, later after every further death. The
server ends where the first engine could not serve its model at all (exit status 2). Once an engine was ready, the same
status counts as a death: what the new one lacks, memory, a file, a GPU that the old one still holds, may be available
again soon. A process that cannot be started counts as a death too. Files that have changed since the server started end
it (status 1). A stopped engine is left alone, since it may be continued; one that runs without progress is killed
(`heartbeat.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import subprocess
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Protocol

import msgspec

from attar import env, faults, machine
from attar.protocol.settings import BLOCKS_SOCKET, CHANGED, HOPELESS, Settings
from attar.server.http import sockets
from attar.server.options import ServerOptions
from attar.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from attar.server.serve import Server

RESTARTS, WITHIN = 5, 600.0  # more deaths in so many seconds end the server
BACK_OFF = 2.0  # seconds before the second restart within that time; each later one waits twice as long
END_SECONDS = 10.0  # for an engine to end

logger = logging.getLogger(__name__)


class Child(Protocol):
    """What is needed of a `subprocess.Popen`."""

    stdin: IO[bytes] | None

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit status. Raises subprocess.TimeoutExpired."""

    def kill(self) -> None:
        """Kill it where it runs."""


class EngineProcess:
    """The engine as a child process, started by `command`, which reads `settings` from its standard input.

    `gave_up(status)` is called, from another thread, when no further engine will start; `served()` tells whether one
    was ever ready. Without `retries` one that dies before that is given up at once. It runs on `cores`, by default on
    those of this process. Logs call it `name`. Where there is a function `forked`, it starts the process, on cores that
    it is given, in place of `command`.
    """

    def __init__(
        self, command: Sequence[str], settings: Settings, served: Callable[[], bool], gave_up: Callable[[int], None],
        retries: bool = True, cores: Sequence[int] = (), name: str = "the engine",
        forked: Callable[[Sequence[int]], Child] | None = None,
    ) -> None:  # fmt: skip
        self.command, self.settings, self.served, self.gave_up = command, settings, served, gave_up
        self.retries, self.cores, self.name = retries, cores, name
        self.child: Child | None = None
        self._forked = forked
        self._ending = threading.Event()
        self._starting = threading.Lock()  # a child that is started while this ends would be orphaned
        self._deaths: deque[float] = deque()
        self._restarting = False
        self._watcher = threading.Thread(target=self._watch, name="engine-watch", daemon=True)

    def start(self) -> None:
        """Start the engine, and watch it from now on. Raises OSError where the process cannot be started."""
        self._spawn()
        self._watcher.start()

    def kill(self) -> None:
        """Kill an engine that makes no progress: a new one follows."""
        if self.child is not None:
            self.child.kill()

    def restart(self) -> None:
        """End an engine that has nothing to do, which is no death: a new one follows."""
        if (child := self.child) is None:
            return
        self._restarting = True
        if child.stdin is not None:
            with contextlib.suppress(OSError):
                child.stdin.close()
        try:
            child.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            child.kill()

    def end(self) -> None:
        """Make sure that the engine, which was asked to, has ended: kill it if need be. One that still loads its model
        is killed at once: it hears nothing, for minutes maybe, and leaves nothing half done."""
        with self._starting:
            self._ending.set()
        if (child := self.child) is None:
            return
        loaded = Path(self.settings.socket).exists()  # it is made when the model has been loaded
        if child.stdin is not None:
            with contextlib.suppress(OSError):
                child.stdin.close()
        try:
            child.wait(END_SECONDS if loaded else 0)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        self._watcher.join(1.0)

    def _spawn(self) -> None:
        path = Path(self.settings.socket)
        machine.private_folder(path.parent)  # temporary folders are cleaned, also of needed files
        path.unlink(missing_ok=True)
        if self._forked is not None:
            self.child = self._forked(self.cores)
        else:
            with on_cores(self.cores):
                self.child = subprocess.Popen(self.command, stdin=subprocess.PIPE)
        assert self.child.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it died at once: the watcher sees that
            self.child.stdin.write(self.settings.line())
            self.child.stdin.flush()

    def _watch(self) -> None:
        assert self.child is not None
        status = self.child.wait()
        while self._goes_on(status):
            try:
                with self._starting:
                    if self._ending.is_set():
                        return
                    self._spawn()
            except OSError as error:
                logger.error("no process for the engine could be started: %s", error)
                status = 1
            else:
                status = self.child.wait()

    def _goes_on(self, status: int) -> bool:
        """Return whether a new engine is to start after one that ended with `status`; waits until it is time."""
        if self._restarting and not self._ending.is_set():
            self._restarting = False
            return True
        if self._ending.is_set() or status == 0:  # it was told to end, and may be quicker than `end`
            return False
        now = time.monotonic()
        self._deaths.append(now)
        while self._deaths[0] < now - WITHIN:
            self._deaths.popleft()
        deaths, hopeless = len(self._deaths), status == HOPELESS and not self.served()
        early = not self.retries and not self.served()
        if hopeless or early or status == CHANGED or deaths > RESTARTS:
            self.gave_up(HOPELESS if hopeless else CHANGED if status == CHANGED and not self.retries else 1)
            return False
        delay = waits(deaths)
        logger.error("%s ended with status %d; a new one is started in %g s", self.name, status, delay)
        return not self._ending.wait(delay)


@contextlib.contextmanager
def on_cores(cores: Sequence[int]) -> Iterator[None]:
    """Let this thread run on `cores` meanwhile, where there are any: a child inherits them from the thread that starts
    it, before it has threads of its own."""
    if not cores:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def waits(deaths: int) -> float:
    """Return the seconds before a new engine is started, after `deaths` deaths within `WITHIN`."""
    return 0.0 if deaths == 1 else BACK_OFF * 2 ** (deaths - 2)


@contextlib.contextmanager
def private_socket() -> Iterator[Path]:
    """Yield a path for a socket that only this user can reach, as another beside it. Another user's files in the place
    of a folder that was cleaned away are left alone; `TemporaryDirectory` would raise, or empty it."""
    path = Path(tempfile.mkdtemp(prefix="attar-")) / "engine"
    try:
        yield path
    finally:
        machine.remove_private_folder(path.parent, path.name, BLOCKS_SOCKET)


def run(
    settings: Settings, tokenizer: Tokenizer, options: ServerOptions, engine: Sequence[str],
    started: Callable[[str], None],
) -> int:  # fmt: skip
    """Serve until told to stop. Returns the exit status: 0, 1 if the engine kept dying, 2 if it cannot serve its model.

    `engine` is the command line of the engine's process. The socket of `settings` is chosen here. Raises OSError where
    the address is not available, ValueError for unknown faults to be armed (`attar/faults.py`).
    """
    faults.arm_from(env.get().faults)
    sockets.allow(options.max_requests)
    status = 0
    # The address comes first: without it no model is loaded. Early clients wait there until the loop runs.
    with sockets.listen(options.host, options.port) as listener, private_socket() as path:

        async def main() -> None:
            loop = asyncio.get_running_loop()
            server: Server | None = None

            def give_up(code: int) -> None:
                nonlocal status
                status = code
                for _ in range(2):
                    loop.call_soon_threadsafe(stop)

            def stop() -> None:
                if server is not None:  # there is one whenever the loop gets to this, unless making it has failed
                    server.stop()

            def served() -> bool:
                return server is not None and server.engine.was_ready

            child = EngineProcess(engine, msgspec.structs.replace(settings, socket=str(path)), served, give_up)
            child.start()
            try:
                # A fifth of a second, in which the engine's process starts.
                from attar.server.engine_client.client import EngineClient
                from attar.server.serve import Server

                server = Server(path, tokenizer, options, listener)
                if isinstance(server.engine, EngineClient):
                    server.engine.hung = child.kill
                await server.run(started)
            finally:
                await loop.run_in_executor(None, child.end)

        gc.freeze()  # modules and tables stay: a full collection that walks through them is 20 ms for every stream
        asyncio.run(main())
    return status
