"""`attar bench --rates`: measure this machine, keep its profile, and write it to a file."""

from __future__ import annotations

import os
from pathlib import Path

from attar.cli.terminal import emit, tell


def measure_rates(output: Path | None, as_json: bool) -> None:
    """Measure the rates, print them, keep them, and write them to `output`. Raises UserError where no kernels load."""
    import msgspec

    from attar.evaluation.planning import machine_rates
    from attar.plan.rates import profile, store

    made = machine_rates.measure(tell=lambda what: tell(f"measuring {what}"))
    print(machine_rates.to_text(made))
    kept = store.RatesStore(store.folder())
    if not kept.keep(made) and kept.problem is not None:
        tell(kept.problem)
    if output is not None:
        _write(output, profile.encode(made))
    emit(as_json, msgspec.to_builtins(made))


def _write(path: Path, text: bytes) -> None:
    """Write a file whole or not at all."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(text)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
