"""One process that loads a model, and forks engines that share its weights.

`attar serve --replicas` starts it, with a socket as its standard input (`protocol/forking.py`). Pages that nobody
writes stay the same memory in all forked processes, so the weights are held once, whatever the number of engines. A
restarted engine is ready at once, because nothing is loaded again.

A forked process has one thread, that which called `fork`. So nothing may depend on another:

- The model is loaded in a thread of its own. Torch's threads belong to the thread that uses them, so they end with it,
  and every engine makes its own.
- The kernels' pool begins anew in a forked process (`csrc/pool.cpp`), and so does the log.

Engines end with this process, at once. It waits for nothing but messages and ends of engines, so it ends before them
only where it is killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import os
import selectors
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
from pathlib import Path
from typing import NoReturn

from attar import env, faults, logs
from attar.engine import main as engine
from attar.engine import startup
from attar.engine.startup import Shared
from attar.protocol.forking import MAX_MESSAGE, Ended, Kill, Load, Loaded, Start, decode_order, encode
from attar.protocol.settings import Settings

PR_SET_PDEATHSIG = 1
LAST_SECONDS = 15.0  # for engines to end when the server has gone: they see that by themselves
FAILED = 1  # the status of an engine that could not be forked, or raised

logger = logging.getLogger(__name__)


class ForkServer:
    """Forks engines that serve a loaded model, as told through the socket `control`."""

    def __init__(self, control: socket.socket, shared: Shared) -> None:
        self._control, self._shared = control, shared
        self._numbers: dict[int, int] = {}  # of engines, by process id
        self._parent = os.getpid()
        self._woken, waker = socket.socketpair()
        for each in (self._woken, waker):
            each.setblocking(False)
        self._waker = waker
        signal.signal(signal.SIGCHLD, lambda *_: None)  # a handler: an ignored signal wakes nobody
        signal.set_wakeup_fd(waker.fileno())

    def run(self) -> None:
        """Fork engines and report their ends, until the server has gone and its engines too."""
        with selectors.DefaultSelector() as selector:
            for each in (self._control, self._woken):
                selector.register(each, selectors.EVENT_READ)
            gone: float | None = None
            while gone is None or (self._numbers and time.monotonic() < gone):
                for key, _ in selector.select(None if gone is None else max(0.0, gone - time.monotonic())):
                    if key.fileobj is self._woken:
                        with contextlib.suppress(BlockingIOError):
                            self._woken.recv(MAX_MESSAGE)
                    elif not self._take():
                        selector.unregister(self._control)
                        gone = time.monotonic() + LAST_SECONDS
                self._reap()

    def _take(self) -> bool:
        """Carry out one order; returns False where the server has gone."""
        order, pipe = receive(self._control)
        match order:
            case Start() if pipe is not None:
                try:
                    self._fork(order, pipe)
                except OSError as error:
                    logger.error("no process for an engine could be forked: %s", error)
                    self._tell(order.number, FAILED)
                finally:
                    os.close(pipe)
            case Kill():
                for pid in [pid for pid, number in self._numbers.items() if number == order.number]:
                    os.kill(pid, signal.SIGKILL)  # it is no other process's: only `_reap` gives the number back
        return order is not None

    def _fork(self, order: Start, pipe: int) -> None:
        if pid := os.fork():
            self._numbers[pid] = order.number
        else:
            self._become(order, pipe)

    def _become(self, order: Start, pipe: int) -> NoReturn:
        """Be an engine, in a process that was just forked."""
        status = FAILED
        try:
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != self._parent:
                os._exit(status)  # the fork server ended before that was set
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.dup2(pipe, sys.stdin.fileno())
            os.close(pipe)
            for each in (self._control, self._woken, self._waker):
                each.close()
            os.sched_setaffinity(0, order.cores)
            logs.go_on_in_fork()
            with contextlib.suppress(OSError):  # the name that `top` shows
                Path("/proc/self/comm").write_text("attar-engine")
            status = engine.run(self._shared)
        except BaseException:  # whatever it is: this process must not go on as a second fork server
            logs.say(traceback.format_exc())
        finally:
            logging.shutdown()
            os._exit(status)

    def _reap(self) -> None:
        """Report the engines that have ended."""
        while self._numbers:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            if (number := self._numbers.pop(pid, None)) is not None:
                self._tell(number, os.waitstatus_to_exitcode(status))

    def _tell(self, number: int, status: int) -> None:
        with contextlib.suppress(OSError):  # the server has gone
            self._control.send(encode(Ended(number, status)))


def receive(control: socket.socket) -> tuple[Load | Start | Kill | None, int | None]:
    """Wait for an order; returns it with its pipe, or None where the server has gone. Raises msgspec.MsgspecError for
    what is no order."""
    data, pipes, _, _ = socket.recv_fds(control, MAX_MESSAGE, 1)
    return (decode_order(data) if data else None), next(iter(pipes), None)


def loaded(settings: Settings) -> Shared | Exception:
    """Load a model in a thread of its own, which leaves no threads behind; returns why it cannot be."""
    found: list[Shared | Exception] = []

    def load() -> None:
        try:
            found.append(startup.load_shared(settings))
        except (ValueError, OSError) as error:
            found.append(error)

    thread = threading.Thread(target=load, name="load")
    thread.start()
    thread.join()
    return found[0]


def main() -> int:
    """Load a model as the server tells it, and fork engines. Returns the exit status: that of an engine that cannot
    load, 0 where the server has gone."""
    logs.begin("engine: %(message)s")
    engine.ignore_signals()
    warnings.filterwarnings("ignore", "This process", DeprecationWarning)  # Python 3.12 on: of forks beside threads
    with socket.socket(fileno=os.dup(sys.stdin.fileno())) as control:
        order, pipe = receive(control)
        if order is None:
            return 0
        assert isinstance(order, Load)
        assert pipe is not None
        with open(pipe, "rb") as lines:
            settings = Settings.of(lines.readline())
        faults.arm_from(env.get().faults)
        shared = loaded(settings)
        if isinstance(shared, Exception):
            return engine.explained(shared)
        gc.collect()
        gc.freeze()  # a collection in an engine would write to every object, and so copy its page
        control.send(encode(Loaded()))
        ForkServer(control, shared).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
