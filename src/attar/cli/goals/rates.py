"""`attar bench --rates`: measure this machine, keep its profile, and write it to a file."""

from __future__ import annotations

from pathlib import Path

from attar.cli.terminal import emit, tell


def measure_rates(output: Path | None, as_json: bool) -> None:
    """Measure the rates, print them, keep them, and write them to `output`. Raises UserError where no kernels load."""
    import msgspec

    from attar import machine
    from attar.evaluation.planning import machine_rates
    from attar.plan.rates import profile, store

    made = machine_rates.measure(tell=lambda what: tell(f"measuring {what}"))
    print(machine_rates.to_text(made))
    kept = store.RatesStore(store.folder())
    if not kept.keep(made) and kept.problem is not None:
        tell(kept.problem)
    if output is not None:
        machine.write_whole(output, profile.encode(made))
    emit(as_json, msgspec.to_builtins(made))
