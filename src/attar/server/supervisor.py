"""`attar serve`: the HTTP process, which starts the engine's and looks after it.

The engine is a child with its settings on standard input, a pipe that stays open: when this process dies, of whatever,
the engine's end of it does too, and the engine ends. When the engine dies, open requests have failed within the moment
(`client.py`), and a new one is started; one that could not serve its model at all (exit status 2) is not. One that is
stopped is left alone: whoever stopped it may continue it.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

import msgspec

from attar import env, faults
from attar.engine.settings import Settings
from attar.server.door import Options
from attar.text.tokenizer import Tokenizer

HOPELESS = 2  # exit status of an engine that cannot serve its model
RESTARTS, WITHIN = 5, 600.0  # more deaths in so many seconds end the server
END_SECONDS = 10.0  # that an engine has to end

logger = logging.getLogger(__name__)


class EngineProcess:
    """The engine as a child process. `gave_up(status)` is called, from another thread, when there will be none."""

    def __init__(self, settings: Settings, gave_up: Callable[[int], None]) -> None:
        self.settings, self.gave_up = settings, gave_up
        self.child: subprocess.Popen[bytes] | None = None
        self._ending = threading.Event()
        self._deaths: deque[float] = deque()
        self._watcher = threading.Thread(target=self._watch, name="engine-watch", daemon=True)

    def start(self) -> None:
        """Start the engine, and watch it from now on."""
        self._spawn()
        self._watcher.start()

    def end(self) -> None:
        """See that the engine has ended. It was asked to; one that does not is killed."""
        self._ending.set()
        child = self.child
        if child is None:
            return
        if child.stdin is not None:
            with contextlib.suppress(OSError):
                child.stdin.close()
        try:
            child.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        self._watcher.join(1.0)

    def _spawn(self) -> None:
        Path(self.settings.socket).unlink(missing_ok=True)
        self.child = subprocess.Popen([sys.executable, "-m", "attar.engine.process"], stdin=subprocess.PIPE)
        assert self.child.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it died at once: the watcher sees that
            self.child.stdin.write(msgspec.json.encode(self.settings) + b"\n")
            self.child.stdin.flush()

    def _watch(self) -> None:
        while True:
            assert self.child is not None
            status = self.child.wait()
            if self._ending.is_set() or status == 0:  # it was told to end, and may be quicker than `end`
                return
            now = time.monotonic()
            self._deaths.append(now)
            while self._deaths[0] < now - WITHIN:
                self._deaths.popleft()
            if status == HOPELESS or len(self._deaths) > RESTARTS:
                self.gave_up(HOPELESS if status == HOPELESS else 1)
                return
            logger.error("the engine ended with status %d; starting a new one", status)
            self._spawn()


def run(settings: Settings, tokenizer: Tokenizer, options: Options, started: Callable[[str], None]) -> int:
    """Serve until told to stop; returns the exit status: 0, 1 if the engine kept dying, 2 if it cannot serve its model.

    The socket of `settings` is chosen here. Raises OSError when the address cannot be had, ValueError for faults to be
    armed (`attar/faults.py`) that do not exist.
    """
    faults.arm_from(env.get().faults)
    status = 0
    with tempfile.TemporaryDirectory(prefix="attar-") as folder:  # of this user alone
        path = Path(folder) / "engine"

        async def main() -> None:
            loop = asyncio.get_running_loop()

            def give_up(code: int) -> None:
                nonlocal status
                status = code
                for _ in range(2):
                    loop.call_soon_threadsafe(lambda: server.stop())  # there is one whenever the loop gets to this

            engine = EngineProcess(msgspec.structs.replace(settings, socket=str(path)), give_up)
            engine.start()
            try:
                from attar.server.serve import Server  # a fifth of a second, in which the engine's process starts

                server = Server(path, tokenizer, options)
                await server.run(started)
            finally:
                await loop.run_in_executor(None, engine.end)

        gc.freeze()  # modules and tables stay: a full collection that walks through them is 20 ms for every stream
        asyncio.run(main())
    return status
