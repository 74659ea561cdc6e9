"""OpenMP wait policy: threads spin briefly, then sleep.

Torch's operations are split between OpenMP's threads, which meet at the end. The native kernels have threads of their
own (csrc/pool.h). By default OpenMP's runtime (GNU's, which torch brings for Linux) lets an early thread spin for
milliseconds. That is fast where each thread has a core of its own. Where another program runs, a spinning thread may
keep the core from the thread that it waits for. Every operation then takes a turn of the scheduler. While the kernels
still ran on OpenMP, decoding beside two other programs took up to a hundred times as long as with `SPINS`
(docs/log/2026-11.md, 2026-11-25).

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
