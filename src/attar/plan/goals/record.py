"""Plan as a receipt keeps it: what was predicted of the chosen configuration, beside what experiments measured.

    goals       [{"name", "bound", "limit"}], in seconds, bytes and shares
    workload    {"users", "prompt", "answer_tokens", "traced"}
    machine     {"processor", "threads", "isa", "bandwidth"}: what the predicted times rest on
    kv, technique, rows
                the settings that go with the weights; technique is null without one
    quantities  {label: {"predicted", "low", "high", "evidence", "measured"}}; measured is null without experiments

Torch-free.
"""

from __future__ import annotations

import math
from typing import Any

from attar.plan.goals.cells import Cell
from attar.plan.goals.halving import Outcome
from attar.plan.goals.search import Answer, Configuration


def recorded(answer: Answer, outcome: Outcome | None) -> dict[str, Any]:
    """Return the plan of the chosen configuration. `outcome`: the experiments, None without any."""
    best = answer.best
    assert best is not None, "a plan without an answer writes nothing"
    question, before, after = answer.question, best, None
    for predicted, measured in () if outcome is None else outcome.pairs:
        if _same(measured, best):
            before, after = predicted, measured
    work, profile = question.workload, question.profile
    return {
        "goals": [{"name": goal.label, "bound": goal.bound, "limit": goal.limit} for goal in question.goals],
        "workload": {
            "users": work.users, "prompt": work.prompt, "answer_tokens": work.answer, "traced": len(work.trace),
        },
        "machine": {
            "processor": profile.key.machine, "threads": profile.key.threads, "isa": profile.isa,
            "bandwidth": profile.bandwidth.value,
        },
        "kv": best.kv.name, "technique": None if best.technique is None else best.technique.name, "rows": best.rows,
        "quantities": {
            name: _quantity(cell, None if after is None else after.cells.get(name))
            for name, cell in before.cells.items()
        },
    }  # fmt: skip


def _same(one: Configuration, other: Configuration) -> bool:
    return (one.name, one.rows) == (other.name, other.rows)


def _quantity(before: Cell, after: Cell | None) -> dict[str, Any]:
    measured = after is not None and after.evidence == "measured" and after is not before
    return {
        "predicted": _number(before.value), "low": _number(before.low), "high": _number(before.high),
        "evidence": before.evidence, "measured": _number(after.value) if measured and after is not None else None,
    }  # fmt: skip


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None
