"""The one thread in which an engine's blocks are copied, read and written, outside of its steps.

Jobs are done in order, urgent ones first. What a job has to say is taken by the engine's own thread: `told` is a queue,
and `descriptor` becomes readable with each entry, so that an engine that sleeps wakes up.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

logger = logging.getLogger(__name__)


class Worker:
    """A thread for jobs, which are functions without arguments. It begins with the first job."""

    def __init__(self, name: str = "blocks") -> None:
        self._urgent: deque[Callable[[], None]] = deque()
        self._jobs: deque[Callable[[], None]] = deque()
        self._told: deque[Any] = deque()
        self._changed = threading.Condition()
        self._closing = self._busy = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.descriptor, self._writes = os.pipe()
        for each in (self.descriptor, self._writes):
            os.set_blocking(each, False)

    def put(self, job: Callable[[], None], urgent: bool = False) -> None:
        """Have a job done: before all others that wait where it is urgent. An exception that it raises is logged."""
        with self._changed:
            (self._urgent if urgent else self._jobs).append(job)
            self._changed.notify_all()
        if self._thread.ident is None:
            self._thread.start()

    def tell(self, what: Any) -> None:
        """Leave something for the engine's thread, and wake it. Any thread may call it, also one that outlives `close`:
        the number of a closed descriptor may be another file's by then, so nothing is written."""
        self._told.append(what)
        with self._changed, contextlib.suppress(BlockingIOError):  # full: it is readable anyhow
            if not self._closing:
                os.write(self._writes, b"!")

    def take(self) -> list[Any]:
        """Return what jobs have said since the last call."""
        with contextlib.suppress(BlockingIOError):
            while os.read(self.descriptor, 4096):
                pass
        found = list[Any]()
        while self._told:
            found.append(self._told.popleft())
        return found

    def wait(self, seconds: float) -> bool:
        """Wait until all jobs are done; return whether they were in time."""
        with self._changed:
            return self._changed.wait_for(lambda: not (self._urgent or self._jobs or self._busy), seconds)

    def close(self, seconds: float) -> bool:
        """Do what was put for `seconds` at most, drop the rest, and end the thread; return whether it has ended. One
        that hangs in a job is left."""
        self.wait(seconds)
        with self._changed:
            self._closing = True
            self._urgent.clear()
            self._jobs.clear()
            self._changed.notify_all()
        if self._thread.ident is not None:
            self._thread.join(0.1)
        for each in (self.descriptor, self._writes):
            os.close(each)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._urgent or self._jobs or self._closing)
                if self._closing:
                    return
                job, self._busy = (self._urgent or self._jobs).popleft(), True
            try:
                job()
            except Exception:  # whatever it is: the thread goes on with other jobs
                logger.exception("a transfer of blocks failed")
