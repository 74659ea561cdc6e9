"""How long a run may take: time on a card is lent by the minute.

Nothing is begun after its end, and what is still running `GRACE` seconds behind it is cut off, wherever it is: a part
that compiles for longer than anybody thought does not cost the results that are there. What hangs in the driver never
comes back to be cut off: `LAST` seconds later the process ends.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType

GRACE = 75.0  # seconds: for one figure, which may need a whole model
LAST = 15.0  # seconds
HUNG = 3  # exit status


class OutOfTime(BaseException):
    """What runs is to end. No failure of it, so whoever survives failures does not catch it."""


class Budget:
    """So many minutes from now."""

    def __init__(self, minutes: float) -> None:
        self.seconds = 60 * minutes
        self._began = time.monotonic()

    @property
    def spent(self) -> float:
        """Seconds."""
        return time.monotonic() - self._began

    def over(self, share: float = 1.0) -> bool:
        """Whether so much of it is spent that nothing further is to begin."""
        return self.spent >= share * self.seconds

    @contextlib.contextmanager
    def cut(self) -> Iterator[None]:
        """Raises OutOfTime in what runs when the grace is over. For the main thread."""

        def end(number: int, frame: FrameType | None) -> None:
            raise OutOfTime

        before, left = signal.signal(signal.SIGALRM, end), max(0.001, self.seconds + GRACE - self.spent)
        last = threading.Timer(left + LAST, os._exit, (HUNG,))
        last.daemon = True
        last.start()
        try:
            signal.setitimer(signal.ITIMER_REAL, left)
            yield
        finally:
            last.cancel()
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
