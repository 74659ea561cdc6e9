"""OpenMP wait policy: threads spin briefly, then sleep.

A matrix product is split between threads, which meet at its end. By default OpenMP's runtime (GNU's, which torch brings
for Linux) lets an early thread spin for milliseconds. That is fast where each thread has a core of its own. Where
another program runs, a spinning thread may keep the core from the thread that it waits for. Every product then takes a
turn of the scheduler. On two cores shared with two other programs, decoding the embedded model took up to a hundred
times as long as with `SPINS`. On idle cores, a model of 0.5 B parameters was as fast either way. The embedded model,
whose steps are short and pause often, made a tenth fewer tokens in batches (docs/log/2026-11.md, 2026-11-25).

Torch reads the setting from the environment when it is first imported, so importing attar sets it before. A program
that imports torch first keeps its own wait policy.
"""

from __future__ import annotations

from collections.abc import MutableMapping

SPINS = 5000  # turns, of 10 to 50 ns each: longer than threads are apart within a step, far shorter than a time slice
CHOSEN = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")  # the user's own choice


def spin_briefly(environ: MutableMapping[str, str]) -> None:
    """Set OpenMP threads to sleep after `SPINS` turns, unless the environment sets a wait policy."""
    if not any(name in environ for name in CHOSEN):
        environ["GOMP_SPINCOUNT"] = str(SPINS)
