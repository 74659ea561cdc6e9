"""Is the GPU backend right on this card, and how near is it to what the card can do?

    python bench/gpu_check.py OUT [--minutes 7] [--only PART ..] [--skip-checks] [--resume]
    python bench/gpu_check.py OUT --tune [KIND ..]

First every kernel is compared with the reference (`gpu/checks.py`), and the engine's steps with themselves: replayed
from CUDA graphs and launched one by one, on the card and on the CPU (`gpu/engine.py`), in several processes at once,
since compiling is what takes their time (`gpu/slices.py`). Then they are timed (`gpu/figures.py`) beside two roofs of
the same run: the bandwidth of a copy and torch's best dense product. Everything is a ratio to one of them, or to what
`attar plan` makes of them. Model weights are random, made on the card; nothing is downloaded. At the end the worst of
each kind stands beside its target (`gpu/targets.py`). The exit status is 1 where a check failed, whatever the ratios
are.

Time on a card is short (`gpu/budget.py`): after so many minutes no further check or figure is begun, and a minute and
a quarter later whatever still runs is cut off. Checks get `CHECKS` of it at most, one of each sort first. Results go to
OUT/gpu_check.json as they come; what there was no time for is listed under `left_out`. Where a part breaks its
process's hold of the card, another goes on behind it (`gpu/report.py`), and so does `--resume`.

`--tune` measures nothing but how products are best cut into programs (`gpu/tune.py`), for the shapes of Llama-3.1-8B,
and writes OUT/tuned.json, where the next such run goes on.

With TRITON_INTERPRET=1 everything runs on tiny shapes and the figures mean nothing: a rehearsal without a card.

| ratio | of | over |
|---|---|---|
| `read` | bytes of weights, or of keys and values, over the time | bandwidth of a copy |
| `peak` | multiplications and additions over the time | rate of torch's best product of that dtype |
| `of_roof` | the time of a step that `plan/` computes from both | the time it took |
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import get_args

import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
from gpu import slices, targets, timing, tune
from gpu.budget import Budget, OutOfTime
from gpu.checks import Check
from gpu.figures import MODEL, PARTS
from gpu.report import Broken, Report, Row
from gpu.timing import DEVICE

from attar.kernels.triton import backend, tuning

WAYS = "ways"  # of --tune: from how many rows on other ways are faster, which every search ends with
CHECKS = 0.3  # of the minutes: checks come first and must not eat the figures


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="folder for gpu_check.json")
    parser.add_argument("--minutes", type=float, default=7.0, help="after which nothing further is begun (default 7)")
    parser.add_argument(
        "--tune",
        nargs="*",
        metavar="KIND",
        help="only search for the best cuts, of all kinds, of these, or `ways` alone",
    )
    parser.add_argument("--only", nargs="*", metavar="PART", help="measure these parts alone")
    parser.add_argument("--skip-checks", action="store_true", help="only measure")
    parser.add_argument("--resume", action="store_true", help="go on where the run stopped that wrote to OUT")
    args = parser.parse_args(arguments)
    names, kinds = [part.__name__ for part in PARTS], list(get_args(tuning.Kind))
    for given, known in ((args.only, names), (args.tune, [*kinds, WAYS])):
        if unknown := sorted(set(given or ()) - set(known)):
            parser.error(f"unknown: {', '.join(unknown)}; known are {', '.join(known)}")
    backend.require(DEVICE)
    args.out.mkdir(parents=True, exist_ok=True)
    budget = Budget(args.minutes)
    about = {
        "device": torch.cuda.get_device_name() if DEVICE == "cuda" else "interpreter", "torch": torch.__version__,
        "cuda": torch.version.cuda, "triton": triton.__version__, "python": platform.python_version(),
    }  # fmt: skip
    report = Report(args.out, about, args.resume)
    found, earlier = report.found, report.found["seconds"]
    try:
        with budget.cut():
            if args.tune is None and not args.skip_checks and "checks" not in found["done"]:
                check(report, budget)
            find_roofs(report)
            roofs = {name: found["roofs"].get(name, float("nan")) for name in timing.ROOFS}
            parts: list[tuple[str, Callable[[], Iterator[Row]]]] = [
                (part.__name__, partial(part, roofs))
                for part in PARTS
                if args.only is None or part.__name__ in args.only
            ]
            if args.tune is not None:
                tuned, wanted = args.out / "tuned.json", [kind for kind in args.tune or kinds if kind != WAYS]
                parts = [("tune", lambda: tune.search(MODEL, wanted, budget, tuned, roofs["copy"]))]
            for name, part in parts:
                if name not in found["done"]:
                    measure(report, name, part, budget)
    except OutOfTime:
        found["left_out"].append(f"{found['now']}: cut off")
    except Broken as broken:
        found["seconds"] = earlier + budget.spent
        report.write()
        if not budget.over():
            begin_again(args, budget)
        found["left_out"].append(f"what comes behind {broken}")
    found["now"], found["seconds"] = "", earlier + budget.spent
    if args.tune is None:
        found["targets"] = targets.held_against(found["measured"])
        print("\n".join(map(targets.line, found["targets"])))
    report.write()
    print(json.dumps({key: found[key] for key in ("device", "roofs", "errors", "left_out", "seconds")}))
    return 1 if found["errors"] or not all(row["ok"] for row in found["checks"]) else 0


def begin_again(args: argparse.Namespace, budget: Budget) -> None:
    """Another process in the place of this one, which the card answers no more, with what is left of its time."""
    left = f"{(budget.seconds - budget.spent) / 60:.3f}"
    command = [sys.executable, str(Path(__file__).resolve()), str(args.out), "--resume", "--minutes", left]
    for name, given in (("--only", args.only), ("--tune", args.tune)):
        command += [] if given is None else [name, *given]
    print("  the card answers this process no more: another one goes on", flush=True)
    os.execv(command[0], command + ["--skip-checks"] * args.skip_checks)


def check(report: Report, budget: Budget) -> None:
    """Every check, or as many as there is time for, first one of each sort."""
    if backend.interpreted():
        left = slices.in_order()
        while left and not budget.over(CHECKS):
            name, run = left.pop(0)
            report.attempt(name, partial(checked, report, name, run))
        names = [name for name, _ in left]
    else:
        rows, failed, names = slices.run(report.path.parent, CHECKS * budget.seconds - budget.spent)
        report.found["checks"] += rows
        for row in failed:
            report.failed(row["name"], row["error"])
            print(f"  ERROR in {row['name']}: {row['error']}", flush=True)
    report.found["left_out"] += [f"check {name}" for name in names]
    report.found["done"].append("checks")
    report.write()
    bad, done = [row for row in report.found["checks"] if not row["ok"]], len(report.found["checks"])
    print(f"{done} checks, {len(bad)} failed, {len(names)} left out, {budget.spent:.0f} s", flush=True)
    for row in bad:
        print(f"  FAILED {row['name']}: error {row['error']:.2e}, at most {row['most']:.2e}", flush=True)


def checked(report: Report, name: str, run: Check) -> None:
    report.add("checks", {"name": name} | slices.judged(*run()))


def find_roofs(report: Report) -> None:
    """One that cannot be measured costs the ratios to it, and nothing else."""
    roofs = report.found["roofs"]
    for name, rate in timing.ROOFS.items():
        if f"roof {name}" not in report.found["done"]:
            report.attempt(f"roof {name}", lambda name=name, rate=rate: roofs.__setitem__(name, rate()))  # type: ignore[misc]
    print("  ".join(f"{name} {rate / 1e12:.3g} T/s" for name, rate in roofs.items()), flush=True)


def measure(report: Report, name: str, part: Callable[[], Iterator[Row]], budget: Budget) -> None:
    """The figures of a part, as far as there is time."""
    if budget.over():
        report.found["left_out"].append(name)
        return

    def run() -> None:
        for row in part():
            report.add("measured", row)
            print(shown(row), flush=True)
            if budget.over():
                report.found["left_out"].append(f"{name}, after {row['work']}")
                return

    report.attempt(name, run)
    if DEVICE == "cuda":
        torch.cuda.empty_cache()


def shown(row: Row) -> str:
    ratios = "  ".join(f"{key} {row[key]:.2f}" for key in ("read", "peak", "of_roof") if key in row)
    figures = ("tok_s", "torch_us", "triton_us", "rule", "host_us", "record_s", "written_s", "made_s", "model_minutes")
    rest = "  ".join(f"{key} {row[key]:.1f}" for key in figures if key in row)
    rest += "".join(f"  {stage} {ended:.2f} s" for stage, ended in row.get("stages", {}).items())
    rest += "".join(f"  {part} {size:.2f} GB" for part, size in row.get("gb", {}).items())
    return f"{row['work']:48} {row['us']:10.1f} us  {ratios}  {rest}"


if __name__ == "__main__":
    sys.exit(main())
