"""A log handler that never blocks: a reader that has stopped reading must not stop the program that writes.

A terminal on hold, or a full pipe whose reader hangs, blocks its writer, and a server's loop writes its log between two
events. So a thread writes the lines, from a bounded queue tens of thousands of lines long. Lines that arrive while the
queue or a disk is full are dropped. Their number is logged once there is room.
"""

from __future__ import annotations

import logging
import os
import queue
import select
import sys
import threading

WAITING = 8 << 20  # characters of queued lines, at most
LINE = 64  # characters added to each line's own: Python's overhead
CLOSE_SECONDS = 1.0  # the longest that the end of a process waits for the last lines


class Log(logging.Handler):
    """A handler that writes to a descriptor. It never waits in `emit`, and at most `CLOSE_SECONDS` in `close`."""

    def __init__(self, descriptor: int = 2) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._torn = False  # whether a line broke off where the disk was full
        self.begin()

    def begin(self) -> None:
        """Begin with an empty queue and a thread: in a forked process as well, which has none of the threads."""
        # Not `Queue`: a garbage collection may run while that holds its lock, and a collected object may log.
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._waiting = self._dropped = 0  # characters, lines
        self._counting = threading.RLock()  # of its own: the thread that closes the log holds the handler's, and waits
        self._thread = threading.Thread(target=self._write, name="log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self.say(self.format(record))
        except Exception:
            self.handleError(record)

    def say(self, text: str) -> None:
        """Put a text into the log as it stands."""
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
        except BrokenPipeError:  # no reader is left
            return

    def _tell_dropped(self) -> None:
        if count := self._dropped:
            sentence = "%d lines of this log were dropped: they could not be written as fast as they came"
            if self._put(self.format(logging.LogRecord(__name__, logging.WARNING, "", 0, sentence, (count,), None))):
                self._drop(-count)

    def _put(self, line: str) -> bool:
        """Return whether the line was written. Raises BrokenPipeError where no line can be written any more."""
        rest = b"\n" * self._torn + line.encode("utf-8", "backslashreplace") + b"\n"
        whole = len(rest)
        while rest:
            try:
                rest = rest[os.write(self._descriptor, rest) :]
            except BlockingIOError:  # another process that shares the descriptor has made it non-blocking
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
    """Log to standard error from level INFO on, one line a record, unless logging is configured already."""
    if not logging.getLogger().handlers:  # else logging is configured already
        logging.basicConfig(level=logging.INFO, format=form, handlers=[_handler()])
        logging.getLogger("httpx2").setLevel(logging.WARNING)  # else each look at a host of a fleet is a line


def go_on_in_fork() -> None:
    """Let a forked process log as the one that it was forked from."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, Log):
            handler.begin()


def _handler() -> logging.Handler:
    if sys.stderr is None:  # closed by the parent process: the descriptor may refer to anything by now
        return logging.NullHandler()
    try:
        return Log(sys.stderr.fileno())
    except OSError:  # there is no file behind it
        return logging.StreamHandler()


def say(text: str) -> None:
    """Write a text of one or more lines to standard error as it stands, through the log's thread where there is one."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, Log):
            handler.say(text)
            return
    if sys.stderr is not None:  # else `print` would take stdout
        print(text, file=sys.stderr, flush=True)
