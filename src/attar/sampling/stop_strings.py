"""Stop strings over text that arrives in pieces.

A stop string may begin in one token and end in another, so text that could still become one is held back until the next
characters decide. The cut is where the first match *completes* (the longest of several that complete together). It
depends on the text alone, never on its pieces.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopChecker:
    """A filter that passes text through up to the first stop string.

    `push` and `flush` return text that is safe to show. Once `stopped`, the rest of the text is dropped.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        assert not isinstance(stops, str)
        assert all(stops)
        self._stops, self._held = tuple(stops), ""
        self.stopped: str | None = None  # the stop string that was found

    @property
    def done(self) -> bool:
        """Return whether a stop string was found."""
        return self.stopped is not None

    def push(self, text: str) -> str:
        """Add text; return the part that is certainly before any stop string."""
        assert self.stopped is None, "the text has ended"
        text = self._held + text
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            _, at, self.stopped = min(found)
            self._held = ""
            return text[:at]
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """End the text without a stop string: return the held text."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` that `stop` begins with, short of all of it."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
