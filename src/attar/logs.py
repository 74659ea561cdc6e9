"""A log that nobody waits for: a reader who has stopped reading must not stop who writes.

A terminal on hold, or a full pipe whose reader hangs, blocks whoever writes to it, and a server's loop writes its log
between two events. So lines are written by a thread of their own, from a queue with an end: what comes when it is full
is dropped, and counted in the log once there is room.
"""

from __future__ import annotations

import logging
import os
import queue
import threading

WAITING = 1000  # lines, at most
CLOSE_SECONDS = 0.5  # that the end of a process waits for room, and again for the last of them


class Log(logging.Handler):
    """Writes to a descriptor; never waits in `emit`, and at most twice `CLOSE_SECONDS` in `close`."""

    def __init__(self, descriptor: int = 2) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._lines: queue.Queue[str | None] = queue.Queue(WAITING)
        self._dropped = 0
        self._thread = threading.Thread(target=self._write, name="log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            if self._dropped:
                self._lines.put_nowait(f"{self._dropped} lines of this log were dropped: nobody read it")
                self._dropped = 0
            self._lines.put_nowait(self.format(record))
        except queue.Full:
            self._dropped += 1
        except Exception:
            self.handleError(record)

    def close(self) -> None:
        super().close()
        if self._thread.is_alive():
            try:
                self._lines.put(None, timeout=CLOSE_SECONDS)
            except queue.Full:
                return
            self._thread.join(CLOSE_SECONDS)

    def _write(self) -> None:
        while (line := self._lines.get()) is not None:
            rest = line.encode("utf-8", "backslashreplace") + b"\n"
            try:
                while rest:
                    rest = rest[os.write(self._descriptor, rest) :]
            except OSError:  # nobody can read it any more
                return


def begin(form: str = "%(message)s") -> None:
    """Log from INFO on to standard error, a line each."""
    if not logging.getLogger().handlers:  # else somebody has seen to it
        logging.basicConfig(level=logging.INFO, format=form, handlers=[Log()])
