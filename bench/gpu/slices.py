"""Checks, in several processes at once.

Most of a check's time is the compiler's, which is one core's work, and a machine with a card has many. So of `JOBS`
processes each takes every so many-th check, and writes a line before it and one with what came of it. One that breaks
its hold of the card begins itself anew behind that check, and the others never notice. What they have compiled the
figures find compiled.

    python -m gpu.slices FILE INDEX COUNT UNTIL FIRST      is one of them: it begins no check after UNTIL (`time.time`)
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from gpu import checks, engine
from gpu.report import Row, alive

from attar.kernels.triton import backend

JOBS = 6
LATE = 30.0  # seconds that a check may run on behind the end
STRIDE = 7  # one in so many checks of kernels comes before the others, and is the only one in a rehearsal

Named = tuple[str, checks.Check]


def in_order() -> list[Named]:
    """Every check, first some of each sort."""
    every = list(checks.every())
    first = every[::STRIDE] + list(engine.checks())
    return first if backend.interpreted() else first + [one for i in range(1, STRIDE) for one in every[i::STRIDE]]


def run(out: Path, seconds: float) -> tuple[list[Row], list[Row], list[str]]:
    """Checks that came to an end, those that did not, and the names of those that there was no time for."""
    until = time.time() + seconds
    files = [out / f"checks-{i}.jsonl" for i in range(JOBS)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "2"}
    processes = []
    try:
        for i, file in enumerate(files):
            file.unlink(missing_ok=True)
            processes.append(subprocess.Popen(_command(file, i, JOBS, until, 0), env=environment))
        for process in processes:
            try:
                process.wait(max(0.0, until + LATE - time.time()))
            except subprocess.TimeoutExpired:
                print("  a process of checks hangs, and is ended", flush=True)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
    found = merged([name for name, _ in in_order()], files)
    for file in files:
        file.unlink(missing_ok=True)
    return found


def merged(names: Sequence[str], files: Sequence[Path]) -> tuple[list[Row], list[Row], list[str]]:
    """What these files say of checks of these names, as `run`."""
    rows: dict[str, Row] = {}
    for file in files:
        for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else ():
            try:
                row: Row = json.loads(line)
            except json.JSONDecodeError:  # its process was ended
                continue
            rows[row["name"]] = row
    told = [rows[name] for name in names if name in rows]
    failed = [{"name": row["name"], "error": row.get("failed", "its process ended or hung")} for row in told
              if "ok" not in row]  # fmt: skip
    return [row for row in told if "ok" in row], failed, [name for name in names if name not in rows]


def _command(file: Path, index: int, count: int, until: float, first: int) -> list[str]:
    return [sys.executable, "-m", "gpu.slices", str(file), str(index), str(count), repr(until), str(first)]


def work(file: Path, index: int, count: int, until: float, first: int) -> None:
    """One process's checks, from its `first` on."""
    mine = in_order()[index::count]
    with file.open("a", encoding="utf-8") as told:

        def say(row: Row) -> None:
            told.write(json.dumps(row) + "\n")
            told.flush()

        for at, (name, check) in enumerate(mine[first:], first):
            if time.time() >= until:
                return
            say({"name": name})
            say({"name": name} | _outcome(check))
            if not alive():
                command = _command(file, index, count, until, at + 1)
                os.execv(command[0], command)


def _outcome(check: Callable[[], tuple[float, float]]) -> Row:
    try:
        return judged(*check())
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {error}"[:2000]}


def judged(error: float, most: float) -> Row:
    return {"error": error, "most": most, "ok": error <= most}


if __name__ == "__main__":
    work(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]), int(sys.argv[5]))
