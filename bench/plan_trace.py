"""Predicted beside measured latencies and throughput of a trace, at parts of what a server can do.

    python bench/plan_trace.py MODEL --trace FILE [--requests 60] [--divisor 8] [--shares 0.5 0.7 0.85] [--rounds 3]

The first requests of the trace, with lengths divided, are sent all at once first: that gives the requests a second of
the server's capacity. Then the trace's times are stretched so that they come at a share of it, and `attar plan`
predicts the run before it is made. Rounds take the shares in turn. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from plan_regret import FOREVER, TIMES, shown

from attar.checkpoints.sources import hub
from attar.cli.goals.experiments import Experiments, Materials
from attar.cli.goals.planning import GoalOptions, ask
from attar.load import traces
from attar.load.traces import Ask
from attar.plan.goals import parse
from attar.plan.goals.cells import Cell
from attar.plan.goals.halving import Clock
from attar.plan.goals.search import Configuration, search
from attar.protocol.settings import Settings

BEGIN = datetime(2023, 11, 16)
GOAL = "ttft<=60min"  # any that is met: nothing is chosen here


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--divisor", type=int, default=8)
    parser.add_argument("--shares", type=float, nargs="+", default=[0.5, 0.7, 0.85])
    parser.add_argument("--users", type=int, default=8, help="of the longest requests, that the cache holds")
    parser.add_argument("--kv", default="bfloat16")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    asks = traces.read(given.trace, given.requests, given.divisor)
    with tempfile.TemporaryDirectory() as folder:
        burst = one(asks, 0.0, Path(folder) / "burst.csv", given)
        capacity = statistics.median(burst.once()["tokens_per_second"] for _ in range(given.rounds))
        rate = capacity / statistics.mean(each.output for each in asks)
        runs = {share: one(asks, 1 / (share * rate), Path(folder) / f"{share}.csv", given) for share in given.shares}
        found: dict[float, list[Mapping[str, float]]] = {share: [] for share in given.shares}
        for number in range(given.rounds):
            for share, run in runs.items():
                print(f"round {number + 1} of {given.rounds}: {share:.0%} of {rate:.2f} requests/s", file=sys.stderr)
                found[share].append(run.once())
    rows = [row(share, runs[share].predicted, found[share]) for share in given.shares]
    for each in rows:
        print(f"{each['share']:.0%}: " + "; ".join(each["text"]))
    print(json.dumps({"capacity_tokens_per_second": capacity, "rows": rows}))
    return 0


class Run:
    """Load tests of one trace file, and what the plan predicts of them."""

    def __init__(self, predicted: Configuration, lab: Experiments) -> None:
        self.predicted, self._lab = predicted, lab

    def once(self) -> Mapping[str, float]:
        """Send the trace."""
        return self._lab.load(self.predicted, FOREVER, Clock(FOREVER))


def one(asks: Sequence[Ask], every: float, file: Path, given: argparse.Namespace) -> Run:
    """Write a trace of `asks` with one request every so many seconds on average, and plan for it."""
    length = max(each.at for each in asks)
    stretched = every * len(asks) / length if length else 0.0
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    for each in asks:
        at = BEGIN + timedelta(seconds=each.at * stretched)
        lines.append(f"{at:%Y-%m-%d %H:%M:%S.%f},{len(each.prompt)},{each.output}")
    file.write_text("\n".join(lines) + "\n")
    config = GoalOptions(
        goal=GOAL, scenario=None, name=given.model, shape=None, users=given.users, context=None, prompt=None,
        trace=file, rates=None, outputs=(), gpu=None, settings=Settings(given.model, "", kv=given.kv), as_json=False,
    )  # fmt: skip
    question, _ = ask(config, parse.parse(GOAL))
    path = hub.resolve(given.model)
    materials = Materials(model=given.model, path=path, text=None, calib="self", samples=128, trace=file)
    lab = Experiments(question, materials, file.parent, lambda *_: None)
    own = [each for each in search(question).all if each.weights.recipe is None and each.technique is None]
    return Run(next(each for each in own if each.rows == 512), lab)


def row(share: float, predicted: Configuration, runs: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Return the medians of a share's runs beside the predictions."""
    errors, text = {}, []
    for name in TIMES:
        values = [each[name] for each in runs if name in each]
        if not values or name not in predicted.cells:
            continue
        value, expected = statistics.median(values), predicted.cells[name].value
        errors[name] = expected / value - 1
        measured = Cell(value, min(values), max(values), "measured")
        text.append(
            f"{name} {shown(name, measured)}, predicted {shown(name, predicted.cells[name])} ({errors[name]:+.0%})"
        )
    return {"share": share, "errors": errors, "text": text}


if __name__ == "__main__":
    sys.exit(main())
