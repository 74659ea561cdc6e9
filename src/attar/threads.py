"""How threads wait for each other: briefly awake, then asleep.

A product is cut between threads, which meet at its end. By default OpenMP's runtime (GNU's, which torch brings for
Linux) has a thread that is early spin for milliseconds. That is quick where each has a core of its own. Where another
program runs, a spinning thread may keep the one it waits for from the core, and then every product takes a turn of the
scheduler: on two cores shared with two other programs, decoding the embedded model took up to a hundred times as long
as with `SPINS`. On cores that nothing else used a model of 0.5 B was as quick either way; the embedded one, whose steps
are short and pause often, made a tenth fewer tokens in batches (docs/log/2026-11.md, 2026-11-25).

Torch reads this from the environment when it is first imported, so it has to be there before: importing attar sees to
that. A program that imports torch first waits as it was told.
"""

from __future__ import annotations

from collections.abc import MutableMapping

SPINS = 5000  # turns, of 10 to 50 ns each: longer than threads are apart within a step, far shorter than a time slice
CHOSEN = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")  # by whoever set one of them


def spin_briefly(environ: MutableMapping[str, str]) -> None:
    """Have threads of OpenMP sleep after `SPINS` turns, unless the environment says how they wait."""
    if not any(name in environ for name in CHOSEN):
        environ["GOMP_SPINCOUNT"] = str(SPINS)
