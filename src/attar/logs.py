"""A log that nobody waits for: a reader who has stopped reading must not stop who writes.

A terminal on hold, or a full pipe whose reader hangs, blocks whoever writes to it, and a server's loop writes its log
between two events. So lines are written by a thread of their own, from a queue with an end, tens of thousands of lines
away: what comes when it is full, or while a disk is, is dropped, and counted in the log once there is room.
"""

from __future__ import annotations

import logging
import os
import queue
import select
import sys
import threading

WAITING = 8 << 20  # characters of lines, at most
LINE = 64  # that each is counted with besides its own: what Python keeps of it
CLOSE_SECONDS = 1.0  # that the end of a process waits for the last of them


class Log(logging.Handler):
    """Writes to a descriptor; never waits in `emit`, and at most `CLOSE_SECONDS` in `close`."""

    def __init__(self, descriptor: int = 2) -> None:
        super().__init__()
        self._descriptor = descriptor
        # Not `Queue`: while that holds its lock a collection may run, and what is collected may log.
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._waiting = self._dropped = 0  # characters, lines
        self._counting = threading.RLock()  # of its own: whoever ends the log holds the handler's, and waits
        self._torn = False  # whether a line broke off where the disk was full
        self._thread = threading.Thread(target=self._write, name="log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self.say(self.format(record))
        except Exception:
            self.handleError(record)

    def say(self, text: str) -> None:
        """Put a text as it stands into the log."""
        with self._counting:
            if fits := self._waiting + len(text) + LINE <= WAITING:
                self._waiting += len(text) + LINE
        if fits:
            self._lines.put(text)
        else:
            self._drop(1)

    def close(self) -> None:
        super().close()
        self._lines.put(None)
        self._thread.join(CLOSE_SECONDS)

    def _drop(self, count: int) -> None:
        with self._counting:
            self._dropped += count

    def _write(self) -> None:
        try:
            while (line := self._lines.get()) is not None:
                with self._counting:
                    self._waiting -= len(line) + LINE
                if not self._put(line):
                    self._drop(1)
                if self._lines.empty():
                    self._tell_dropped()
            self._tell_dropped()
        except BrokenPipeError:  # nobody can read it any more
            return

    def _tell_dropped(self) -> None:
        if count := self._dropped:
            sentence = "%d lines of this log were dropped: they could not be written as fast as they came"
            if self._put(self.format(logging.LogRecord(__name__, logging.WARNING, "", 0, sentence, (count,), None))):
                self._drop(-count)

    def _put(self, line: str) -> bool:
        """Whether it could be written. Raises BrokenPipeError where nothing ever will be again."""
        rest = b"\n" * self._torn + line.encode("utf-8", "backslashreplace") + b"\n"
        whole = len(rest)
        while rest:
            try:
                rest = rest[os.write(self._descriptor, rest) :]
            except BlockingIOError:  # of who shares the descriptor one has made it so
                poll = select.poll()
                poll.register(self._descriptor, select.POLLOUT)
                poll.poll()
            except BrokenPipeError:
                raise
            except OSError:  # a full disk, which may have room again
                self._torn = self._torn or len(rest) < whole
                return False
        self._torn = False
        return True


def begin(form: str = "%(message)s") -> None:
    """Log from INFO on to standard error, a line each."""
    if not logging.getLogger().handlers:  # else somebody has seen to it
        logging.basicConfig(level=logging.INFO, format=form, handlers=[_handler()])


def _handler() -> logging.Handler:
    if sys.stderr is None:  # closed by who started this: the descriptor may be of anything by now
        return logging.NullHandler()
    try:
        return Log(sys.stderr.fileno())
    except OSError:  # no file stands behind it
        return logging.StreamHandler()


def say(text: str) -> None:
    """A text of one line or more as it stands, on standard error; where the log is written by a thread, by that."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, Log):
            handler.say(text)
            return
    if sys.stderr is not None:  # else `print` would take stdout
        print(text, file=sys.stderr, flush=True)
