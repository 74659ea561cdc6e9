"""What a plan's choice costs against the best of its configurations, all of which are measured.

    python bench/plan_regret.py MODEL OUTPUT ... --goal "kl<=0.1, memory<=2GB" --text FILE [--users 4] [--context 1024]
                                [--seconds 15] [--rounds 3] [--out FOLDER]

The configurations are those of `attar plan` with the model and its outputs as they are, the KV formats of --kv, and 128
and 512 rows a step. The plan chooses one of them by its predictions. Then each is measured: its
divergence once, its load tests in turn, as `attar plan --measure` makes them. Medians over rounds are judged by the
same goals. The regret is how much more the best measured one reaches of what the plan chooses by: tokens a second where
the goals limit quality, else divergence. Predicted beside measured speed and latencies stand in the table.

Finished experiments are kept in --out; the same command goes on there. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from attar.checkpoints.sources import hub
from attar.cli.goals.experiments import Experiments, Materials
from attar.cli.goals.planning import GoalOptions, ask
from attar.plan.goals import parse
from attar.plan.goals.cells import Cell
from attar.plan.goals.halving import Clock
from attar.plan.goals.search import Configuration, Question, judged, search
from attar.protocol.settings import Settings

TIMES = ("tokens_per_second", "ttft_p50", "ttft_p95", "tpot_p50", "tpot_p95")
FOREVER = 1e9  # seconds: experiments here have no limit


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("outputs", nargs="*")
    parser.add_argument("--goal", required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--users", type=int, default=4)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--kv", nargs="+", default=["bfloat16", "int8", "int4"])
    parser.add_argument("--tokens", type=int, default=4096, help="of a divergence")
    parser.add_argument("--seconds", type=float, default=15.0, help="of a load test")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("build/regret"))
    given = parser.parse_args()
    config = GoalOptions(
        goal=given.goal, scenario=None, name=given.model, shape=None, users=given.users, context=given.context,
        prompt=None, trace=None, rates=None, outputs=given.outputs, gpu=None, settings=Settings(given.model, ""),
        as_json=False, text=given.text,
    )  # fmt: skip
    question, _ = ask(config, parse.parse(given.goal))
    materials = Materials(
        model=given.model, path=hub.resolve(given.model), text=given.text, calib="self", samples=128
    )  # fmt: skip
    given.out.mkdir(parents=True, exist_ok=True)
    lab = Experiments(question, materials, given.out, lambda *_: None)
    plain = [each for each in search(question).all if each.technique is None and each.kv.name in given.kv]
    grid = [each for each in plain if lab.made(each.weights)]
    measured = [with_measured(each, *experiments(each, number, grid, lab, given)) for number, each in enumerate(grid)]
    print(to_text(grid, measured, question))
    print(json.dumps(outcome(grid, measured, question)))
    return 0


def experiments(
    of: Configuration, number: int, grid: Sequence[Configuration], lab: Experiments, given: argparse.Namespace
) -> tuple[Sequence[Mapping[str, float]], Sequence[float]]:
    """Return a configuration's load tests and its divergence (mean, low, high, top-1). The first call runs all of the
    grid: rounds take every configuration in turn."""
    if number == 0:
        for at in range(given.rounds):
            for each in grid:
                if lab.notes.get(f"load|{at}|{each.name}|{each.rows}") is None:
                    print(f"round {at + 1} of {given.rounds}: {each.name}, {each.rows} rows", file=sys.stderr)
                    found = dict(lab.load(each, given.seconds, Clock(FOREVER)))
                    lab.notes.put(f"load|{at}|{each.name}|{each.rows}", found)
    loads = [lab.notes.get(f"load|{at}|{of.name}|{of.rows}") for at in range(given.rounds)]
    if of.cells["kl"].evidence == "exact":
        return loads, ()
    if (known := lab.notes.get(f"kl|{of.name}")) is None:
        cost = lab.divergence(of.weights, of.kv.name, given.tokens, Clock(FOREVER))
        known = [cost.kl, cost.low, cost.high, cost.agreement]
        lab.notes.put(f"kl|{of.name}", known)
    return loads, known


def with_measured(of: Configuration, loads: Sequence[Mapping[str, float]], cost: Sequence[float]) -> Configuration:
    """Return a configuration with its quantities replaced by what was measured."""
    cells = dict(of.cells)
    for name in loads[0]:
        values = [each[name] for each in loads]
        cells[name] = Cell(statistics.median(values), min(values), max(values), "measured")
    if cost:
        kl, low, high, top1 = cost
        cells |= {"kl": Cell(kl, low, high, "measured"), "top1": Cell(top1, top1, top1, "measured")}
    return replace(of, cells=cells, tried=True)


def outcome(grid: Sequence[Configuration], measured: Sequence[Configuration], question: Question) -> dict[str, Any]:
    """Return the plan's choice, the best, the regret, whether the choice breaks a limit, and errors of predictions."""
    chosen, best = judged(question, grid).best, judged(question, measured).best
    by_speed = any(goal.name in ("kl", "top1") for goal in question.goals)
    errors = {
        name: [before.cells[name].value / after.cells[name].value - 1 for before, after in pairs(grid, measured, name)]
        for name in TIMES
    }
    found: dict[str, Any] = {
        "configurations": len(grid),
        "errors": {name: {"median": statistics.median(map(abs, each)), "most": max(map(abs, each))}
                   for name, each in errors.items() if each},
    }  # fmt: skip
    if chosen is None or best is None:
        return found | {name: each and label(each) for name, each in (("chosen", chosen), ("best", best))}
    really = measured[[label(each) for each in grid].index(label(chosen))]
    name = "tokens_per_second" if by_speed else "kl"
    reached, most = really.cells[name].value, best.cells[name].value
    regret = most / reached - 1 if by_speed else reached / max(most, 1e-12) - 1
    return found | {
        "chosen": label(chosen), "best": label(best), name: reached, f"best_{name}": most, "regret": max(0.0, regret),
        "meets": really.meets(question.goals),
    }  # fmt: skip


def pairs(
    grid: Sequence[Configuration], measured: Sequence[Configuration], name: str
) -> list[tuple[Configuration, Configuration]]:
    """Return each configuration as predicted and as measured, where both have a quantity."""
    both = zip(grid, measured, strict=True)
    return [(before, after) for before, after in both if name in before.cells and name in after.cells]


def label(of: Configuration) -> str:
    return f"{of.name}, {of.rows} rows"


def shown(name: str, of: Cell) -> str:
    """Return a quantity with its unit."""
    return parse.shown(name.removesuffix("_p50").removesuffix("_p95"), of.value)


def to_text(grid: Sequence[Configuration], measured: Sequence[Configuration], question: Question) -> str:
    """Return a line for each configuration, the fastest first: measured, and in brackets predicted."""
    lines = []
    for before, after in sorted(
        zip(grid, measured, strict=True), key=lambda pair: -pair[1].cells["tokens_per_second"].value
    ):
        cells = [
            f"{name} {shown(name, after.cells[name])} ({shown(name, before.cells[name])})"
            for name in ("kl", *TIMES) if name in before.cells and name in after.cells
        ]  # fmt: skip
        meets = "meets the goals" if after.meets(question.goals) else "misses"
        lines.append(f"{label(after)}: {'; '.join(cells)}; {meets}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
