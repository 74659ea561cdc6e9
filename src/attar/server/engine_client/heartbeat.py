"""Whether the engine runs and gets on, as far as can be told from what it says, and when.

Its heart (`engine/main.py`) beats through any step. So one that is not heard for `SILENCE` does not run: it was
stopped, and may be continued. Of one that is heard but has been in one step for longer than a request may take
(`stuck`) nothing is expected, and nothing new is asked; it is `hung`, and may be ended, only after `HUNG`, for a step
that is merely long would be as long for the engine that follows. Long before that, a step that takes `FAR` times as
long as any before is `slow`: that refuses nothing, for the first long prompt may be such a step, but a balancer that
asks can send what is new elsewhere. On two cores 512 tokens of a prompt may well take 10 s after steps of 0.4 s: hence
`LEAST_SLOW`. Of a first step nothing is known but that it may have to read or compile what the others find there; it
has `FIRST_SLOW`.

Times of steps are by the engine's clock, which goes on while its process is stopped. The heart counts no such time, so
a step is taken for no longer than its beats said.
"""

from __future__ import annotations

from attar.protocol.messages import BEAT_SECONDS, Stats

SILENCE = 3 * BEAT_SECONDS
STUCK = 60.0  # seconds, at least, that a step may take before nothing more is expected of it
HUNG = 600.0  # the same before its engine is ended
FAR, LEAST_SLOW = 20, 30.0  # times the longest step before, and seconds at least, that a slow one takes
FIRST_SLOW = 120.0  # seconds that it takes where there was none before


class Heartbeat:
    """What is known of an engine's process. Nothing is expected of a step after `stuck` seconds."""

    def __init__(self, stuck: float = STUCK) -> None:
        self.stuck = stuck
        self.silent = 0.0
        """Seconds of looks at the connection since the engine was heard: while this process stands still, none pass."""
        self.busy = 0.0
        """Seconds for which the engine's step had lasted when it last told."""
        self.longest = 0.0
        """Seconds of the longest step that has ended, about."""
        self._most = 0.0  # that `busy` was since steps were last counted

    @property
    def trouble(self) -> str | None:
        """What is wrong with an engine that is there, in a sentence; None if nothing is."""
        if self.silent >= SILENCE:
            return f"the engine has not been heard for {SILENCE:g} s: its process does not run"
        if self.busy > self.stuck:
            return f"the engine has been in one step for more than {self.stuck:g} s"
        return None

    @property
    def hung(self) -> bool:
        """Whether its process runs but will not get on."""
        return self.silent < SILENCE and self.busy > max(self.stuck, HUNG)

    @property
    def slow(self) -> str | None:
        """That its step takes far longer than any before, or a first one far longer than such do, in a sentence; None
        if it does not."""
        most = max(LEAST_SLOW, FAR * self.longest) if self.longest else FIRST_SLOW
        if self.busy <= most:
            return None
        before = f"none before took {most / FAR:.3g} s" if self.longest else "it is the first"
        return f"the engine has been in one step for more than {most:.3g} s, and {before}"

    def begin(self) -> None:
        """A connection is new, and so may the engine be."""
        self.silent = self.busy = self.longest = self._most = 0.0

    def beat(self, busy: float) -> None:
        """The heart says for how long the present step has run."""
        self.busy = busy
        self._most = max(self._most, busy)

    def count(self, before: Stats | None, now: Stats) -> None:
        """Note the mean step between two words of one engine, which is the step itself where it was a long one. By so
        much of it as the beats told of: the last of them may have come up to two beats before its end."""
        steps = now.steps - (before.steps if before else 0)
        seconds = now.step_seconds - (before.step_seconds if before else 0.0)
        if steps > 0:
            self.longest = max(self.longest, min(seconds / steps, self._most + 2 * BEAT_SECONDS))
            self._most = self.busy
