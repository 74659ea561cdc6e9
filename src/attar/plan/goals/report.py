"""A plan by goals, as text for a terminal and as a dict for JSON: the answer first, then what it rests on."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from typing import Any

from attar.plan.goals.advice import Advice
from attar.plan.goals.cells import Cell
from attar.plan.goals.parse import Goal, shown
from attar.plan.goals.search import Answer, Configuration, Question
from attar.plan.rates.step_time import Evidence

MARKS: dict[Evidence, str] = {
    "exact": "=",
    "measured": "m",
    "fitted": "f",
    "assumed": "a",
    "data sheet": "d",
    "unverified": "?",
}
COLUMNS = (
    ("memory", "memory"), ("size", "size"), ("ttft", "ttft_p95"), ("tpot", "tpot_p95"),
    ("tokens/s", "tokens_per_second"), ("KL", "kl"), ("top-1", "top1"),
)  # fmt: skip


def sentence(answer: Answer) -> str:
    """Return the answer in one sentence: the chosen configuration, or the nearest miss and by how much.

    Where the range of a fitted number reaches past its limit, the configuration is only expected to meet the goal.
    """
    if (best := answer.best) is not None:
        met = ", ".join(f"{goal.label} {_value(best, goal)}" for goal in answer.question.goals)
        return f"{best.name} {'is expected to meet' if open_goals(answer) else 'meets'} the goal: {met}"
    near = answer.nearest
    goal, excess = max(near.excess(answer.question.goals).items(), key=lambda item: item[1])
    times = f", {excess:.3g} times the limit" if math.isfinite(excess) else ""
    room = (
        "" if near.fits else f"; nothing fits into the memory of {shown('memory', float(answer.question.memory or 0))}"
    )
    missed = f"{goal.label} {_value(near, goal)}, not {goal}{times}{room}"
    return f"nothing meets the goal; the nearest is {near.name}: {missed}"


def _value(of: Configuration, goal: Goal) -> str:
    cell = of.cell(goal)
    return f"{shown(goal.name, cell.value)} ({_label(cell, goal.name)})"


def _label(cell: Cell, name: str) -> str:
    """Return a label, with the range of what was fitted."""
    if cell.evidence == "fitted" and math.isfinite(cell.high):
        return f"fitted, {shown(name, cell.low)} to {shown(name, cell.high)}"
    return cell.evidence


def commands(answer: Answer, model: str) -> list[str]:
    """Return the commands that realise a configuration: compression, where it needs one, and the server."""
    of = answer.nearest
    served, made = model, []
    if of.weights.path is not None:
        served = of.weights.path
    elif of.weights.recipe is not None:
        served = f"./{of.weights.recipe.replace('+', '-')}"
        calib = "" if of.weights.recipe.startswith("rtn-") else f" --calib {shlex.quote(answer.question.calib)}"
        made.append(f"attar compress {shlex.quote(model)} {served} --recipe {of.weights.recipe}{calib}")
    return [*made, serving(answer, served)]


def serving(answer: Answer, path: str) -> str:
    """Return the command that serves weights at a path with the chosen configuration's other settings."""
    return shlex.join(["attar", "serve", path, *settings(answer.nearest, answer.question)])


def settings(of: Configuration, question: Question) -> list[str]:
    """Return the options of `attar serve` that a configuration stands for."""
    together = min(question.workload.users, question.limits.sequences)
    words = ["--kv", of.kv.name, "--context", f"{question.workload.context}", "--max-running", f"{together}"]
    words += [] if of.technique is None else of.technique.words
    words += [] if of.rows == 512 else ["--scheduler", f"max-step-tokens={of.rows}"]
    if any(goal.name == "memory" for goal in question.goals):
        words += ["--memory", f"{math.ceil(of.cells['memory'].value / 1e6)}MB"]
    for name, count in (("--tp", question.share.tp), ("--pp", question.share.pp)):
        words += [name, f"{count}"] if count > 1 else []
    return words if question.gpu is None else [*words, "--device", "cuda"]


def open_goals(answer: Answer) -> list[Goal]:
    """Return the goals whose limit lies inside the chosen configuration's range: only a measurement decides them."""
    found = answer.nearest
    return [
        goal for goal in answer.question.goals
        if (cell := found.cell(goal)).evidence != "exact" and cell.low <= goal.limit <= cell.high != cell.low
    ]  # fmt: skip


def to_text(answer: Answer, model: str, advice: Sequence[Advice], notes: Sequence[str]) -> str:
    """Return the whole plan as text."""
    lines = [sentence(answer), ""]
    if still := open_goals(answer):
        names = ", ".join(f"{goal.label} ({_span(answer.nearest.cell(goal), goal)})" for goal in still)
        lines += [f"not decided without a measurement: {names}", ""]
    lines += [*_table(answer), "", _marks(answer), ""]
    lines += [_binding(answer)]
    for goal, wider in answer.relaxed.items():
        if wider is not None and (answer.best is None or wider.name != answer.best.name):
            lines.append(f"10 % more {goal.label}: {wider.name}, {_gain(wider)}")
    lines += ["", "to realise it:" if answer.met else "to realise the nearest:", *_indented(commands(answer, model))]
    lines += ["", "rejected:", *_indented(f"{each.technique}: {each.reason}" for each in answer.rejected)]
    lines += ["", "what each technique would bring:"]
    lines += _indented(advice)
    lines += ["", *notes]
    return "\n".join(lines)


def _indented(lines: Any) -> list[str]:
    return [f"  {line}" for line in lines]


def _span(cell: Cell, goal: Goal) -> str:
    return f"{shown(goal.name, cell.low)} to {shown(goal.name, cell.high)}"


def _gain(wider: Configuration) -> str:
    names = ("tokens_per_second", "kl", "memory")
    return ", ".join(f"{name} {shown(name, wider.cells[name].value)}" for name in names)


def _binding(answer: Answer) -> str:
    goal, excess = max(answer.nearest.excess(answer.question.goals).items(), key=lambda item: item[1])
    if answer.met:
        return f"what binds: {goal.label}, at {excess:.0%} of its limit"
    return f"what binds: {goal}"


def _table(answer: Answer) -> list[str]:
    shown_ones = list(answer.front)
    if answer.nearest not in shown_ones:
        shown_ones.insert(0, answer.nearest)
    head = ("", "weights", "KV", "beside", "rows", *(name for name, _ in COLUMNS))
    rows = [head, *(_cells(each, each is answer.nearest) for each in shown_ones)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _cells(of: Configuration, chosen: bool) -> tuple[str, ...]:
    values = (
        f"{shown(key.removesuffix('_p95'), of.cells[key].value)} {MARKS[of.cells[key].evidence]}" for _, key in COLUMNS
    )
    return (
        ">" if chosen else "",
        of.weights.label,
        of.kv.name,
        of.technique.name if of.technique else "",
        str(of.rows),
        *values,
    )


def _marks(answer: Answer) -> str:
    used = {cell.evidence for each in (*answer.front, answer.nearest) for cell in each.cells.values()}
    return ", ".join(f"{mark} {label}" for label, mark in MARKS.items() if label in used)


def to_dict(answer: Answer, model: str, advice: Sequence[Advice], notes: Sequence[str]) -> dict[str, Any]:
    """Return the plan as JSON-compatible values: seconds, bytes and shares; null for what is not known."""
    work = answer.question.workload
    return {
        "model": model, "met": answer.met, "answer": sentence(answer),
        "goals": [{"name": goal.label, "bound": goal.bound, "limit": goal.limit} for goal in answer.question.goals],
        "open": [goal.label for goal in open_goals(answer)],
        "tp": answer.question.share.tp, "pp": answer.question.share.pp,
        "users": work.users, "prompt": work.prompt, "answer_tokens": work.answer, "context": work.context,
        "images": None if work.encoding is None else work.encoding.to_dict(),
        "traced": len(work.trace), "chosen" if answer.met else "nearest": _row(answer.nearest),
        "pareto": [_row(each) for each in answer.front], "considered": len(answer.all),
        "rejected": [{"technique": each.technique, "reason": each.reason} for each in answer.rejected],
        "binding": max(answer.nearest.excess(answer.question.goals).items(), key=lambda item: item[1])[0].label,
        "relaxed": {
            goal.label: None if wider is None else wider.name for goal, wider in answer.relaxed.items()
        },
        "commands": commands(answer, model),
        "advice": [{"technique": a.technique, "pays": a.pays, "reason": a.reason, "how": a.how} for a in advice],
        "notes": list(notes),
    }  # fmt: skip


def _row(of: Configuration) -> dict[str, Any]:
    def number(value: float) -> float | None:
        return value if math.isfinite(value) else None

    cells = {
        name: {"value": number(c.value), "low": number(c.low), "high": number(c.high), "evidence": c.evidence}
        for name, c in of.cells.items()
    }
    return {
        "weights": of.weights.label, "recipe": of.weights.recipe, "path": of.weights.path, "kv": of.kv.name,
        "technique": None if of.technique is None else of.technique.name, "rows": of.rows,
        "fits": of.fits, "fitted": list(of.fitted), **cells,
    }  # fmt: skip
