"""Tables of measurements: rows and columns, the programs that fill cells, and a file of finished runs.

A measurement is a command. It fills some cells of a row with figures of the JSON object that it prints last. Those that
take time are run once in each round, all of a table in turn, in an order that rotates; others once. A finished run is
written to `runs.json` at once, by its command, so that a long table resumes and two tables share what both show. A cell
that was not run is printed empty.
"""

from __future__ import annotations

import fcntl
import json
import os
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engines import environment

from attar import machine
from attar.kernels.native import extension

ROOT = Path(__file__).resolve().parent.parent.parent
STATE = "runs.json"
SETS = ("amx", "vnni")
"""Instruction sets that decide about speed, as parts of the names that the extension has for them."""

Figures = dict[str, Any]  # what a measurement printed
Pick = str | Callable[[Figures], float | None]
"""A figure by its name, or made from several."""
Fills = Mapping[str, Pick]
"""Which figures go into which columns."""


@dataclass(frozen=True)
class Column:
    """A column's title, and how its numbers are written."""

    title: str
    form: str = ".1f"

    def show(self, value: float | None) -> str:
        return "" if value is None else format(value, self.form)


@dataclass(frozen=True)
class Measurement:
    """A command, and which figures of its object fill which columns. `timed`: it differs from run to run."""

    command: tuple[str, ...]
    fills: Fills
    timed: bool = False
    threads: int = 0  # those of the machine's entry
    ready: Path | None = None  # what must be there before it can run

    @property
    def key(self) -> str:
        """Name the measurement by the command that runs it from the root of the repository."""
        threads = f"OMP_NUM_THREADS={self.threads} " if self.threads else ""
        return f"{threads}PYTHONPATH=bench {shlex.join(self.command)}"


@dataclass(frozen=True)
class Row:
    """A row by the model that it is of and what is measured. `reason`: why cells of it cannot be filled."""

    model: str
    name: str
    measurements: tuple[Measurement, ...] = ()
    reason: str | None = None

    @property
    def label(self) -> str:
        return f"{self.model} {self.name}".strip()


@dataclass(frozen=True)
class Ratio:
    """One row over another, in the columns named, as the median over rounds."""

    row: Row
    over: Row
    columns: tuple[str, ...]


@dataclass(frozen=True)
class Table:
    """Rows that are shown together. `about` says what the figures mean."""

    name: str
    about: str
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    ratios: tuple[Ratio, ...] = ()


def this_machine(threads: int | None) -> Figures:
    """Tell what decides about the figures of a run: processor, instruction sets, cores, and threads of a program."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    found = extension.features()
    return {
        "processor": names[0] if names else "unknown",
        "level": extension.cpu_level() if extension.loaded() else "none",
        "sets": sorted(name for name, here in found.items() if here and any(part in name.lower() for part in SETS)),
        "cores": machine.cores(),
        "threads": threads or machine.cores(),
    }


@dataclass
class Runs:
    """Finished runs of one machine, in a file.

    Raises SystemExit where the file is of another machine: figures of two are not shown in one table.
    """

    path: Path
    machine: Figures
    runs: dict[str, list[Figures]] = field(default_factory=dict)

    @classmethod
    def open(cls, folder: Path, threads: int | None = None) -> Runs:
        """The runs in a folder, by programs of so many threads; by default as many as there are cores."""
        path, here = folder / STATE, this_machine(threads)
        if not path.exists():
            return cls(path, here)
        known = json.loads(path.read_text())
        if known["machine"] != here:
            raise SystemExit(f"{path} is of another machine, {known['machine']}: this is {here}; name another --out")
        return cls(path, here, known["runs"])

    def add(self, key: str, figures: Figures) -> None:
        """Keep a run. The file is replaced as a whole, so that it is never half written. Several programs may fill one
        file: what others have added since is kept."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if self.path.exists():
                self.runs = json.loads(self.path.read_text())["runs"]
            self.runs.setdefault(key, []).append(figures)
            draft = self.path.with_suffix(".tmp")
            draft.write_text(json.dumps({"machine": self.machine, "runs": self.runs}, indent=1) + "\n")
            draft.replace(self.path)

    def of(self, measurement: Measurement) -> list[Figures]:
        return self.runs.get(measurement.key, [])

    def values(self, row: Row, column: str) -> dict[str, float]:
        """A cell's value in each run, by the turn of the run; empty where nothing was run or fills the cell."""
        for measurement in row.measurements:
            if (pick := measurement.fills.get(column)) is not None:
                found = {run["turn"]: _picked(pick, run) for run in self.of(measurement)}
                return {turn: float(value) for turn, value in found.items() if value is not None}
        return {}

    def cell(self, row: Row, column: str) -> float | None:
        """The median over runs; None where there is none."""
        values = self.values(row, column).values()
        return statistics.median(values) if values else None

    def quotient(self, ratio: Ratio, column: str) -> float | None:
        """The median of one row over another, of the rounds that both have run in turn."""
        ours, theirs = self.values(ratio.row, column), self.values(ratio.over, column)
        quotients = [value / theirs[turn] for turn, value in ours.items() if theirs.get(turn)]
        return statistics.median(quotients) if quotients else None


def _picked(pick: Pick, run: Figures) -> float | None:
    return run.get(pick) if isinstance(pick, str) else pick(run)


def fill(table: Table, runs: Runs, rounds: int, tell: Callable[[str], None]) -> dict[str, str]:
    """Run what is missing, and return why measurements failed, by their keys.

    A measurement that fails is not tried again. Its cells stay empty. A run notes its turn, the time of this call and
    the round, for only runs of one round are set beside each other.
    """
    failed: dict[str, str] = {}
    begun = time.strftime("%Y-%m-%d %H:%M:%S")
    for number in range(rounds):
        due = list(_due(table, runs, number, failed))
        turn = number % max(1, len(due))
        for row, measurement in due[turn:] + due[:turn]:
            tell(f"{table.name}: {row.label}, round {number + 1} of {rounds if measurement.timed else 1}")
            try:
                figures = run(measurement, measurement.threads or runs.machine["threads"])
            except (RuntimeError, OSError, ValueError) as error:
                failed[measurement.key] = str(error)
                tell(f"{row.label} failed: {error}")
            else:
                runs.add(measurement.key, figures | {"turn": f"{begun}, round {number + 1}"})
    return failed


def _due(table: Table, runs: Runs, number: int, failed: Mapping[str, str]) -> Iterator[tuple[Row, Measurement]]:
    """Measurements that have not been run in this round, each once."""
    seen = set[str]()
    for row in table.rows:
        for each in row.measurements:
            wanted = number if each.timed else 0
            if (number and not each.timed) or each.key in seen or each.key in failed or len(runs.of(each)) > wanted:
                continue
            seen.add(each.key)
            yield row, each


def run(measurement: Measurement, threads: int) -> Figures:
    """Run a measurement once, and return the object that it printed last, with the commit and the load before it.

    Raises RuntimeError with the end of what it printed where it fails.
    """
    if measurement.ready is not None and not measurement.ready.exists():
        raise RuntimeError(f"there is no {measurement.ready}")
    load, since = os.getloadavg()[0], time.time()
    mine = environment(threads)
    mine["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT / "bench"), mine.get("PYTHONPATH"))))
    done = subprocess.run(measurement.command, capture_output=True, text=True, env=mine, cwd=ROOT)
    if done.returncode:
        end = "\n".join((done.stdout + done.stderr).strip().splitlines()[-8:])
        raise RuntimeError(f"status {done.returncode} of {measurement.key}\n{end}")
    printed: Figures = json.loads(done.stdout.strip().rpartition("\n")[2])
    return printed | {"commit": commit(), "load_before": load, "seconds_in_all": round(time.time() - since, 1)}


def commit() -> str:
    """The commit of the working tree, with a plus sign where it has been changed since."""
    asked = ["git", "-C", str(ROOT), "describe", "--always", "--dirty=+", "--exclude=*"]
    found = subprocess.run(asked, capture_output=True, text=True)
    return found.stdout.strip() or "unknown"


def shown(table: Table, runs: Runs, failed: Mapping[str, str]) -> str:
    """The table as text: machine, cells, ratios, why cells are empty, and the command of each row."""
    here = runs.machine
    sets = f" ({', '.join(here['sets'])})" if here["sets"] else ""
    lines = [
        f"{table.name}: {table.about}",
        f"{here['processor']}, {here['cores']} cores, threads {here['threads']}, "
        f"kernels {here['level']}{sets}; medians",
    ]
    body = [(row.label, [each.show(runs.cell(row, each.title)) for each in table.columns]) for row in table.rows]
    for ratio in table.ratios:
        found = [runs.quotient(ratio, each.title) if each.title in ratio.columns else None for each in table.columns]
        said = ["" if value is None else f"{value:.2f}x" for value in found]
        body.append((f"{ratio.row.label} over {ratio.over.name or ratio.over.label}", said))
    first = max(len(label) for label, _ in body) if body else 0
    widths = [
        max([len(each.title), *(len(cells[i]) for _, cells in body)]) for i, each in enumerate(table.columns)
    ]  # fmt: skip
    lines.append("".ljust(first) + "".join(f"  {c.title:>{w}}" for c, w in zip(table.columns, widths, strict=True)))
    for label, cells in body:
        lines.append((label.ljust(first) + "".join(f"  {c:>{w}}" for c, w in zip(cells, widths, strict=True))).rstrip())
    lines += _notes(table, runs, failed)
    return "\n".join(lines)


def _notes(table: Table, runs: Runs, failed: Mapping[str, str]) -> Iterator[str]:
    """Why cells are empty, then how often and by which commits the measurements were run, and their commands."""
    for reason in dict.fromkeys(row.reason for row in table.rows if row.reason):
        labels = [row.label for row in table.rows if row.reason == reason]
        yield f"empty, {reason}: {'; '.join(labels)}"
    yield from (f"failed: {why}" for why in failed.values())
    done = {each.key: runs.of(each) for row in table.rows for each in row.measurements}
    counts = sorted({len(each) for each in done.values() if each})
    if counts:
        commits = sorted({run["commit"] for each in done.values() for run in each})
        busiest = max(run["load_before"] for each in done.values() for run in each)
        span = f"{counts[0]}" if counts[0] == counts[-1] else f"{counts[0]} to {counts[-1]}"
        yield f"runs of a cell: {span}; commit {', '.join(commits)}; load before a run at most {busiest:.1f}"
    yield from (f"  {key}" for key, each in done.items() if each)


def as_json(table: Table, runs: Runs, failed: Mapping[str, str]) -> Figures:
    """The table for programs: None in cells that were not run."""
    return {
        "table": table.name,
        "machine": runs.machine,
        "rows": [
            {
                "model": row.model,
                "row": row.name,
                "cells": {each.title: runs.cell(row, each.title) for each in table.columns},
                "reason": next((failed[each.key] for each in row.measurements if each.key in failed), row.reason),
                "commands": [each.key for each in row.measurements],
            }
            for row in table.rows
        ],
        "ratios": [
            {"row": each.row.label, "over": each.over.label}
            | {column: runs.quotient(each, column) for column in each.columns}
            for each in table.ratios
        ],
    }


def progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def python(module: str, *arguments: object) -> tuple[str, ...]:
    """The command of one of this folder's programs."""
    return (sys.executable, "-m", module, *map(str, arguments))


def chosen(table: Table, models: Sequence[str], only: Sequence[str]) -> Table:
    """The table with the rows of some models and of some names, which may be parts of theirs."""
    rows = tuple(
        row
        for row in table.rows
        if (not models or row.model in models or not row.model)
        and (not only or any(part in row.label for part in only))
    )
    return _of_rows(table, rows)


def filled(table: Table, runs: Runs) -> Table:
    """The table without the rows of which nothing was run."""
    return _of_rows(table, tuple(row for row in table.rows if any(runs.of(each) for each in row.measurements)))


def _of_rows(table: Table, rows: tuple[Row, ...]) -> Table:
    kept = tuple(each for each in table.ratios if each.row in rows and each.over in rows)
    return Table(table.name, table.about, table.columns, rows, kept)
