"""What experiments found, as text and as JSON: each prediction beside its measurement, and what did not fit."""

from __future__ import annotations

import math
from typing import Any

from attar.plan.goals.halving import Outcome, Unmeasured
from attar.plan.goals.history import QUANTITIES
from attar.plan.goals.parse import shown


def to_text(outcome: Outcome) -> list[str]:
    """Return lines: a table of what was predicted and measured, then what keeps its prediction."""
    rows: list[tuple[str, ...]] = [("measured", "rows", *QUANTITIES)]
    for before, after in outcome.pairs:
        cells = []
        for name in QUANTITIES:
            kind = name.removesuffix("_p95")
            cells.append(f"{shown(kind, before.cells[name].value)} -> {shown(kind, after.cells[name].value)}")
        rows.append((after.name, str(after.rows), *cells))
    lines = []
    if outcome.pairs:
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(f"{c:<{w}}" for c, w in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines += [f"not measured: {each.of.name}, {each.of.rows} rows a step: {_why(each)}" for each in outcome.left]
    return [*lines, f"experiments took {outcome.seconds:.0f} s; the same command with more time goes on"]


def _why(each: Unmeasured) -> str:
    if each.failed is not None:
        return each.failed
    return "the time ended" if each.needed is None else f"needs {each.needed:.0f} s"


def to_dict(outcome: Outcome) -> dict[str, Any]:
    """Return the same as JSON-compatible values."""
    return {
        "measured": [
            {"weights": after.weights.label, "kv": after.kv.name, "rows": after.rows} | {
                name: {
                    "predicted": _number(before.cells[name].value), "measured": _number(after.cells[name].value),
                    "within": before.cells[name].low <= after.cells[name].value <= before.cells[name].high,
                }
                for name in QUANTITIES
            }
            for before, after in outcome.pairs
        ],
        "not_measured": [
            {"weights": each.of.weights.label, "kv": each.of.kv.name, "rows": each.of.rows, "seconds": each.needed,
             "reason": _why(each)}
            for each in outcome.left
        ],
        "experiment_seconds": round(outcome.seconds, 1),
    }  # fmt: skip


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None
