"""Health of the engine process: whether it runs and makes progress, judged by its messages and their times.

Its heartbeat thread (`engine/main.py`) beats through any step. An engine silent for `SILENCE` seconds does not run: it
was stopped, and may be continued. One that beats but has been in one step for longer than a request may take (`stuck`)
gets no new requests. It is `hung`, and may be ended, only after `HUNG`: a step that is merely long would be as long for
the next engine. Long before that, a step that takes `FAR` times as long as any before is `slow`. That refuses nothing,
for the first long prompt may be such a step, but a load balancer that asks can send new requests elsewhere. On two
cores 512 prompt tokens may well take 10 s after steps of 0.4 s: hence `LEAST_SLOW`. A first step has no step to compare
with, and may read or compile what later ones reuse; it has `FIRST_SLOW`.

Times of steps are by the engine's clock, which goes on while its process is stopped. The heartbeat counts no such time,
so a step counts for no longer than its beats said.
"""

from __future__ import annotations

from attar.protocol.messages import BEAT_SECONDS, Stats

SILENCE = 3 * BEAT_SECONDS
STUCK = 60.0  # seconds, at least, that a step may take before it counts as stuck
HUNG = 600.0  # seconds that a step may take before its engine is ended
FAR, LEAST_SLOW = 20, 30.0  # a slow step: times the longest one before, and seconds at least
FIRST_SLOW = 120.0  # seconds of a slow first step


class Heartbeat:
    """State of an engine process. A step that exceeds `stuck` seconds is taken for stuck."""

    def __init__(self, stuck: float = STUCK) -> None:
        self.stuck = stuck
        self.silent = 0.0
        """Seconds of watching since the engine was last heard; none pass while this process stands still."""
        self.busy = 0.0
        """Seconds that the engine's step had lasted at its last beat."""
        self.longest = 0.0
        """Approximate seconds of the longest step that has ended."""
        self._most = 0.0  # the maximum of `busy` since steps were last counted

    @property
    def trouble(self) -> str | None:
        """A sentence about what is wrong with a connected engine; None if nothing is."""
        if self.silent >= SILENCE:
            return f"the engine has not been heard for {SILENCE:g} s: its process does not run"
        if self.busy > self.stuck:
            return f"the engine has been in one step for more than {self.stuck:g} s"
        return None

    @property
    def hung(self) -> bool:
        """True where the process runs without progress."""
        return self.silent < SILENCE and self.busy > max(self.stuck, HUNG)

    @property
    def slow(self) -> str | None:
        """A sentence where the step takes far longer than any before, or a first one far longer than first ones do;
        else None."""
        most = max(LEAST_SLOW, FAR * self.longest) if self.longest else FIRST_SLOW
        if self.busy <= most:
            return None
        before = f"none before took {most / FAR:.3g} s" if self.longest else "it is the first"
        return f"the engine has been in one step for more than {most:.3g} s, and {before}"

    def begin(self) -> None:
        """Reset for a new connection, whose engine may be a new one."""
        self.silent = self.busy = self.longest = self._most = 0.0

    def beat(self, busy: float) -> None:
        """Note a beat: the present step has run for `busy` seconds."""
        self.busy = busy
        self._most = max(self._most, busy)

    def count(self, before: Stats | None, now: Stats) -> None:
        """Note the mean step between two reports of one engine; a long step is the only one in between. The beats limit
        it: the last may have come up to two beats before the step's end."""
        steps = now.steps - (before.steps if before else 0)
        seconds = now.step_seconds - (before.step_seconds if before else 0.0)
        if steps > 0:
            self.longest = max(self.longest, min(seconds / steps, self._most + 2 * BEAT_SECONDS))
            self._most = self.busy
