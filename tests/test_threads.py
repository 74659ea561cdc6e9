"""How threads wait is said before torch is there, and only where nobody has said it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from attar.threads import SPINS, spin_briefly


@pytest.mark.parametrize("said", [{"OMP_WAIT_POLICY": "active"}, {"GOMP_SPINCOUNT": "7"}])
def test_who_has_said_how_threads_wait_has_the_last_word(said: dict[str, str]) -> None:
    environ = dict(said)
    spin_briefly(environ)
    assert environ == said


@pytest.mark.parametrize("first", ["attar", "attar.execution.parallel.worker", "attar.cli.main"])
def test_threads_are_told_before_torch_is_imported(first: str) -> None:
    """OpenMP's runtime, which torch loads, prints what it goes by."""
    clean = {name: value for name, value in os.environ.items() if name not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    done = subprocess.run(
        [sys.executable, "-c", f"import {first}, torch"], env=clean | {"OMP_DISPLAY_ENV": "verbose"},
        stderr=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    if "GOMP_SPINCOUNT" not in done.stderr:
        pytest.skip("torch has another OpenMP than GNU's here")
    assert f"GOMP_SPINCOUNT = '{SPINS}'" in done.stderr
