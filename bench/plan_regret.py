"""What a plan's choice costs against the best of its configurations, all of which are measured.

    python bench/plan_regret.py MODEL OUTPUT ... --goal "kl<=0.1, memory<=2GB" --text FILE [--users 4] [--context 1024]
                                [--seconds 15] [--rounds 1] [--final 5] [--out FOLDER]

The goal limits quality, so the plan chooses the fastest. The configurations are those of `attar plan` with the model
and its outputs as they are, the KV formats of --kv, and 128 and 512 rows a step. The plan chooses one of them by its
predictions. Then each is measured: its divergence once, its load tests in turn, as `attar plan --measure` makes them.
The best of many noisy numbers is too good. So the chosen one and the fastest that meet the goals run --final more
times, in turn, and the regret is by the medians of these alone: how many more tokens a second the best of them has.
Predicted beside measured speed and latencies stand in the table.

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
FINALISTS = 4  # of the fastest that meet the goals
ROWS = (128, 512)  # of a step: each is tried with all weights
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
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--final", type=int, default=5)
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
    plain = [each for each in search(question).all if each.technique is None and lab.made(each.weights)]
    grid = [each for each in plain if each.kv.name in given.kv and each.rows in ROWS]
    loads = run("load", range(given.rounds), grid, lab, given.seconds)
    measured = [with_measured(each, loads[label(each)], cost(each, lab, given.tokens)) for each in grid]
    print(to_text(grid, measured, question))
    found = errors(grid, measured)
    chosen = judged(question, grid).best
    meeting = [each for each in measured if each.meets(question.goals)]
    meeting.sort(key=lambda each: -each.cells["tokens_per_second"].value)
    if chosen is None or not meeting:
        print(json.dumps(found | {"chosen": chosen and label(chosen), "met": bool(meeting)}))
        return 0
    names = {label(each) for each in (chosen, *meeting[:FINALISTS])}
    finalists = [each for each in grid if label(each) in names]
    last = run("final", range(given.final), finalists, lab, given.seconds)
    speeds = {name: statistics.median(each["tokens_per_second"] for each in loads) for name, loads in last.items()}
    best = max(speeds, key=lambda name: speeds[name])
    own = speeds[label(chosen)]
    met = label(chosen) in {label(each) for each in meeting}
    found |= {"chosen": label(chosen), "best": best, "finalists": speeds, "regret": speeds[best] / own - 1, "met": met}
    print(f"{label(chosen)} was chosen, {own:.1f} tokens/s; the best is {best}, {speeds[best]:.1f}")
    print(json.dumps(found))
    return 0


def run(
    kind: str, rounds: range, of: Sequence[Configuration], lab: Experiments, seconds: float
) -> dict[str, list[Mapping[str, float]]]:
    """Return the load tests of configurations, by label. Rounds take every one in turn."""
    found: dict[str, list[Mapping[str, float]]] = {label(each): [] for each in of}
    for at in rounds:
        for each in of:
            key = f"{kind}|{at}|{label(each)}"
            if lab.notes.get(key) is None:
                print(f"{kind} {at + 1} of {len(rounds)}: {label(each)}", file=sys.stderr)
                lab.notes.put(key, dict(lab.load(each, seconds, Clock(FOREVER))))
            found[label(each)].append(lab.notes.get(key))
    return found


def cost(of: Configuration, lab: Experiments, tokens: int) -> Sequence[float]:
    """Return a configuration's divergence: mean, low, high and top-1; () where it is exactly that of the model."""
    if of.cells["kl"].evidence == "exact":
        return ()
    if lab.notes.get(f"kl|{of.name}") is None:
        found = lab.divergence(of.weights, of.kv.name, tokens, Clock(FOREVER))
        lab.notes.put(f"kl|{of.name}", [found.kl, found.low, found.high, found.agreement])
    known: Sequence[float] = lab.notes.get(f"kl|{of.name}")
    return known


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


def errors(grid: Sequence[Configuration], measured: Sequence[Configuration]) -> dict[str, Any]:
    """Return the median and the largest relative error of each predicted quantity."""
    found = {
        name: [
            abs(before.cells[name].value / after.cells[name].value - 1) for before, after in pairs(grid, measured, name)
        ]
        for name in TIMES
    }
    return {
        "configurations": len(grid),
        "errors": {
            name: {"median": statistics.median(each), "most": max(each)} for name, each in found.items() if each
        },
    }


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
