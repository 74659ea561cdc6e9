"""Retry-After of requests that are refused because the server is full.

One number for all would bring every client back at once, at the same rate however many there are, and refusing them
takes processor time from running requests. So each is told when there should be room: once half of the waiting requests
have been served at the recent rate, plus two turns for each client told before. The other half is for clients that do
not come back, or late. Of two turns one is for clients that never left, such as those that ask again once they are
answered: at the full rate of service, as many would be refused as are served. Where little is known about that rate,
the answer is the shortest time.
"""

from __future__ import annotations

import heapq
import math
from collections import deque

SHORTEST, LONGEST = 1.0, 60.0  # seconds
KEPT = 0.5  # of the requests that wait
PLACES = 2  # turns that pass for each client that was told
WINDOW = 10.0  # seconds of the past that count
COUNTED, LEAST = 256, 8  # requests served in the window: at most, and at least for an estimate


class RetryAfter:
    """Estimates Retry-After. Times are seconds of any monotonic clock."""

    def __init__(self) -> None:
        self._served: deque[float] = deque(maxlen=COUNTED)
        self._turns: list[float] = []  # to come, a heap; none beyond those that are served within `LONGEST`

    def served(self, now: float) -> None:
        """Count a request that was served to its end."""
        self._served.append(now)

    def retry_after(self, now: float, waiting: float) -> int:
        """Return the whole seconds for one more refused client while `waiting` requests wait."""
        while self._served and self._served[0] < now - WINDOW:
            self._served.popleft()
        while self._turns and self._turns[0] <= now:
            heapq.heappop(self._turns)
        if len(self._served) < LEAST:
            return math.ceil(SHORTEST)
        rate = len(self._served) / max(now - self._served[0], 1e-3)
        wait = max((KEPT * waiting + PLACES * len(self._turns)) / rate, SHORTEST)
        if wait >= LONGEST:
            return math.ceil(LONGEST)
        heapq.heappush(self._turns, now + wait)
        return math.ceil(wait)
