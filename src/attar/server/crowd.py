"""When those who are refused because the server is full may come back.

With one number for all, a crowd comes back all at once, at the same rate however many it is, and refusing it takes the
processor from those who are being served. So each is given a turn of its own, one after the other, at `RETURNS` times
the rate at which requests were served of late. A little more than that rate is enough that no room stays empty, and
each refusal beyond takes time from those who are being served. Where little is known about that rate, the answer is
the shortest.
"""

from __future__ import annotations

import math
from collections import deque

SHORTEST, LONGEST = 1.0, 60.0  # seconds
RETURNS = 1.25
WINDOW = 10.0  # seconds of the past that count
COUNTED, LEAST = 256, 8  # requests served in it: the last so many, and too few to tell


class Crowd:
    """Times are seconds on any clock that does not go back."""

    def __init__(self) -> None:
        self._served: deque[float] = deque(maxlen=COUNTED)
        self._turn = 0.0  # of whoever was refused last

    def served(self, now: float) -> None:
        """A request was served to its end."""
        self._served.append(now)

    def retry_after(self, now: float) -> int:
        """Whole seconds for one more who is refused."""
        while self._served and self._served[0] < now - WINDOW:
            self._served.popleft()
        count = len(self._served)
        between = (now - self._served[0]) / (count * RETURNS) if count >= LEAST else 0.0
        self._turn = min(max(self._turn + between, now + SHORTEST), now + LONGEST)
        return math.ceil(self._turn - now)
