"""Twenty thousand hostile model files, opened by processes that are watched: none may crash, hang, or cost much.

    python bench/hostile.py [--count 20000] [--seed 0] [--workers 2] [--log FILE] [--only I]

`tests/checkpoints/hostile_files.py` makes the files, hundreds of kinds by name and the rest by chance from the seed,
and says what must hold of each; a share of them runs in the tests. Here each is opened by a worker under a watch: one
that dies, or that takes longer than `HANG` seconds, is a failure of its file, and another takes its place. Besides it
must take no more than 200 ms and 32 MiB and four times its header to open one. Time is the processor's, for the machine
may be busy; memory is the high-water mark of the worker's resident memory.

`--log` keeps every outcome in a file, a line each, from which a run that was stopped goes on. `--only` runs one case
here and shows it. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import resource
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where the tests are

from tests.checkpoints.hostile_files import FILE, Case, Corpus, Outcome, examine

SECONDS, BYTES = 0.2, 32 << 20
HANG = 60.0  # seconds without an answer
ROOM = 4 << 30  # of address space that a case may take: beyond, memory ends before the machine does
SHOWN = 40

Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--log", type=Path, help="outcomes, a line each; a run goes on where it ended")
    parser.add_argument("--only", type=int, help="one case, here and now")
    args = parser.parse_args()
    torch.set_num_threads(1)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    with tempfile.TemporaryDirectory(prefix="hostile-", dir=_memory()) as name:
        folder = Path(name)
        corpus = Corpus.make(folder / "sound")
        _warm_up(corpus, folder)
        if args.only is not None:
            case = corpus.case(args.seed, args.only)
            print(case.family, "|", case.kind, "|", examine(case.write(folder / "one")))
            return
        print(f"{len(corpus.named)} kinds by name, {len(corpus.sound)} sound models to damage")
        rows = [*_earlier(args.log, args.seed)]
        done = {row["i"] for row in rows}
        began = time.monotonic()
        with args.log.open("a") if args.log else contextlib.nullcontext() as log:
            left = [i for i in range(args.count) if i not in done]
            for row in _outcomes(corpus, args.seed, left, args.workers, folder):
                rows.append(row)
                if log is not None:
                    log.write(json.dumps(row | {"seed": args.seed}) + "\n")
                    log.flush()
                if len(rows) % 1000 == 0:
                    print(f"{len(rows)} of {args.count}, {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    result = summary(rows) | {"seed": args.seed, "named": len(corpus.named), "sound": len(corpus.sound)}
    print(json.dumps(result))
    if result["wrong"]:
        raise SystemExit("what must hold does not")


def _memory() -> str | None:
    """A file system in memory, where there is one: twenty thousand models need not wear out a disk."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def _warm_up(corpus: Corpus, folder: Path) -> None:
    """What is imported and built once is no case's cost. Sound models must be sound."""
    for i, (name, files) in enumerate(corpus.sound.items()):
        outcome = examine(Case("sound", name, files, FILE if FILE in files else "").write(folder / f"warm-{i}"))
        if outcome.refused is not None or outcome.wrong:
            raise SystemExit(f"{name} is not sound: {outcome}")


def _earlier(log: Path | None, seed: int) -> Iterator[Row]:
    if log is not None and log.exists():
        for line in log.read_text().splitlines():
            row = json.loads(line)
            if row.pop("seed") == seed:
                yield row


@dataclass
class Worker:
    """A process at work on case `i` since then."""

    process: BaseProcess
    pipe: Connection
    i: int = -1
    since: float = 0.0

    def give(self, i: int) -> None:
        self.i, self.since = i, time.monotonic()
        self.pipe.send(i)

    def outcome(self, answered: bool) -> Outcome | None:
        """What came of its case; None while it is at work."""
        if answered:
            try:
                found: Outcome = self.pipe.recv()
                return found
            except EOFError:
                self.process.join()
                return Outcome(wrong=[f"the process died: {_death(self.process.exitcode)}"])
        if time.monotonic() - self.since < HANG:
            return None
        self.process.kill()
        self.process.join()
        return Outcome(wrong=[f"no answer for {HANG:g} s"])


def _outcomes(corpus: Corpus, seed: int, left: list[int], workers: int, folder: Path) -> Iterator[Row]:
    """One row a case, as they are done."""
    context = multiprocessing.get_context("fork")

    def start(number: int) -> Worker:
        ours, theirs = context.Pipe()
        process = context.Process(target=_work, args=(theirs, corpus, seed, folder / f"worker-{number}"), daemon=True)
        process.start()
        theirs.close()
        return Worker(process, ours)

    todo = iter(left)
    crew = {number: start(number) for number in range(min(workers, len(left)))}
    for worker in crew.values():
        worker.give(next(todo))
    while crew:
        ready = wait([worker.pipe for worker in crew.values()], timeout=1.0)
        for number, worker in list(crew.items()):
            outcome = worker.outcome(worker.pipe in ready)
            if outcome is None:
                continue
            case = corpus.case(seed, worker.i)
            if outcome.seconds > SECONDS:
                outcome.wrong.append(f"took {1000 * outcome.seconds:.0f} ms")
            if outcome.bytes > BYTES + outcome.allowance:
                outcome.wrong.append(f"took {outcome.bytes >> 20} MiB beside {outcome.allowance >> 20}")
            yield {"i": worker.i, "family": case.family, "kind": case.kind, **asdict(outcome)}
            following = next(todo, None)
            if following is None:
                del crew[number]
                if worker.process.is_alive():
                    worker.pipe.send(None)
                    worker.process.join()
                continue
            if not worker.process.is_alive():
                crew[number] = start(number)
            crew[number].give(following)


def _death(code: int | None) -> str:
    return signal.Signals(-code).name if code is not None and code < 0 else f"status {code}"


def _work(pipe: Connection, corpus: Corpus, seed: int, folder: Path) -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM, resource.RLIM_INFINITY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    while (i := pipe.recv()) is not None:
        pipe.send(examine(corpus.case(seed, i).write(folder)))


def summary(rows: list[Row]) -> dict[str, Any]:
    """Print the table; what of it goes into the JSON."""
    print(f"{'family':<28}{'files':>7}{'refused':>9}{'read':>7}{'wrong':>7}{'most ms':>9}{'MiB':>7}")
    families = sorted({row["family"] for row in rows})
    for family in [*families, None]:
        some = [row for row in rows if family in (None, row["family"])]
        refused, wrong = sum(row["refused"] is not None for row in some), sum(bool(row["wrong"]) for row in some)
        most = max((row["seconds"] for row in some), default=0.0)
        memory = max((row["bytes"] for row in some), default=0)
        print(
            f"{family or 'all':<28}{len(some):>7}{refused:>9}{len(some) - refused:>7}{wrong:>7}{1000 * most:>9.1f}"
            f"{memory / (1 << 20):>7.1f}"
        )
    failed = [row for row in rows if row["wrong"]]
    for row in failed[:SHOWN]:
        print(f"case {row['i']}: {row['kind']}: {'; '.join(row['wrong'])}")
    times = sorted(row["seconds"] for row in rows)
    return {
        "files": len(rows),
        "refused": sum(row["refused"] is not None for row in rows),
        "families": dict(Counter(row["family"] for row in rows)),
        "wrong": len(failed),
        "ms_most": round(1000 * times[-1], 1),
        "ms_99.9": round(1000 * times[int(len(times) * 0.999)], 1),
        "mib_most": round(max(row["bytes"] for row in rows) / (1 << 20), 1),
        "mib_over_allowance_most": round(max(row["bytes"] - row["allowance"] for row in rows) / (1 << 20), 1),
    }


if __name__ == "__main__":
    main()
