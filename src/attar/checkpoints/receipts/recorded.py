"""Results that are recorded in a receipt after its output was written: figures of tasks and of images, and the plan
that chose it.

Each raises CheckpointError where the output has no receipt, or a damaged one.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attar.checkpoints.receipts.receipt import amend, read_receipt


def record_tasks(output: Path, figures: Mapping[str, Mapping[str, Any]]) -> None:
    """Add figures of tasks, by name, to an output's receipt; a task that is there is replaced."""
    found = read_receipt(output)
    before = {} if found is None else found.value.get("tasks")
    tasks = {**(before if isinstance(before, dict) else {}), **{name: dict(each) for name, each in figures.items()}}
    amend(output, {"tasks": tasks})


def record_images(output: Path, figures: Mapping[str, Any]) -> None:
    """Put figures on texts behind images into an output's receipt, in place of earlier ones."""
    amend(output, {"images": dict(figures)})


def record_plan(output: Path, plan: Mapping[str, Any]) -> None:
    """Put a plan, as `plan.goals.record.recorded` makes it, into an output's receipt in place of an earlier one."""
    amend(output, {"plan": dict(plan)})
