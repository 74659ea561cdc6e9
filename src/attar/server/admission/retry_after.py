"""When those who are refused because the server is full may come back.

With one number for all, a crowd comes back all at once, at the same rate however many it is, and refusing it takes the
processor from those who are being served. So each is told when there should be room: once half of those who wait have
been served at the rate of late, and two for each who was told before. The other half is for whoever does not come back,
or late; of two places one is for those who never left, such as clients that ask again once they are answered: told to
come at the full rate of service, as many would be refused as are served. Where little is known about that rate, the
answer is the shortest.
"""

from __future__ import annotations

import heapq
import math
from collections import deque

SHORTEST, LONGEST = 1.0, 60.0  # seconds
KEPT = 0.5  # of those who wait
PLACES = 2  # that are given away for one of those who were told
WINDOW = 10.0  # seconds of the past that count
COUNTED, LEAST = 256, 8  # requests served in it: the last so many, and too few to tell


class Backoff:
    """Times are seconds on any clock that does not go back."""

    def __init__(self) -> None:
        self._served: deque[float] = deque(maxlen=COUNTED)
        self._turns: list[float] = []  # to come, a heap; none beyond those that are served within `LONGEST`

    def served(self, now: float) -> None:
        """A request was served to its end."""
        self._served.append(now)

    def retry_after(self, now: float, waiting: float) -> int:
        """Whole seconds for one more who is refused while so many requests wait."""
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
