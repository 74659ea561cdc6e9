"""Kill a GPTQ run at twenty random moments, resume it each time, and compare what comes out.

    python bench/kill_resume.py [--kills 20] [--seed 0] [--recipe gptq-w4g128] [--samples 64] [--length 256]

The embedded model is compressed once without interruption, which gives the bytes to expect and the seconds a run takes.
Then runs are killed (SIGKILL, so that nothing can be tidied up) at moments drawn uniformly over that time, from the
first line of `compress` to its last, and started again with the same arguments; half of them are killed again, over the
time that is left. For each kill the table shows the blocks that the state on disk vouched for, the block with which the
next run began, and the seconds of work since the last finished block, which are all that is done twice.

What must hold, and is checked: the output folder is absent until it is complete, a run begins where the state on disk
says, and all finished folders have one SHA-256 over the names and bytes of all their files.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

BLOCKS = 6  # of the embedded model
KILLED_AGAIN = 1 / 2

CHILD = """
import json, sys, torch, attar
settings = json.loads(sys.argv[1])
g = torch.Generator().manual_seed(settings["seed"])
ids = torch.randint(0, 4096, (settings["samples"], settings["length"]), generator=g).tolist()
from attar.compression.runs import pipeline
asked = attar.CompressionRequest("demo", settings["out"], recipe=settings["recipe"], calibration=ids,
                                 max_shard_bytes=1_000_000)
print("ready", flush=True)
attar.compress_request(asked, lambda stage, done, total: stage == "blocks" and print(done, flush=True))
"""


@dataclass
class Kill:
    """One SIGKILL: its moment in the run, what the disk held, and where the next run went on."""

    run: int
    moment: float  # seconds after the run began
    blocks: int  # done, as the state on disk says
    lost: float  # seconds since the last block was finished, or since the run began
    resumed_at: int | None = None  # None until a later run has read the state


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--recipe", default="gptq-w4g128")
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--length", type=int, default=256)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), {"recipe": args.recipe, "samples": args.samples, "length": args.length, "seed": 0})
        began = time.monotonic()
        seconds = bench.whole()
        expected = digest(Path(folder) / "whole")
        print(f"an uninterrupted run: {seconds:.1f} s, {BLOCKS} blocks, SHA-256 {expected[:16]}\n")
        print(f"{'run':>4}{'killed after':>14}{'blocks done':>13}{'resumed at':>12}{'work repeated':>15}")
        rng = random.Random(args.seed)
        digests = [expected]
        while len(bench.kills) < args.kills:
            digests.append(bench.killed_run(len(digests), seconds, rng, args.kills))
        took = time.monotonic() - began
    kills = bench.kills
    result = {
        "recipe": args.recipe,
        "kills": len(kills),
        "runs": len(digests),
        "blocks_at_kill": [kill.blocks for kill in kills],
        "moments": [round(kill.moment, 2) for kill in kills],
        "whole_seconds": round(seconds, 2),
        "most_repeated_seconds": round(max(kill.lost for kill in kills), 2),
        "finished_blocks_redone": max(kill.blocks - (kill.resumed_at or 0) for kill in kills),
        "sha256": sorted(set(digests)),
    }
    print(f"\n{len(digests)} finished folders, {len(set(digests))} SHA-256, {took:.0f} s in all")
    print(json.dumps(result))
    if len(set(digests)) != 1:
        raise SystemExit("the folders differ")


class Bench:
    def __init__(self, folder: Path, settings: dict[str, object]) -> None:
        self.folder, self.settings = folder, settings
        self.kills: list[Kill] = []

    def whole(self) -> float:
        """Seconds of an uninterrupted run."""
        child, log = self._start(self.folder / "whole")
        began = time.monotonic()
        if child.wait():
            raise SystemExit("the uninterrupted run failed")
        assert log.read_text().split()[-1] == str(BLOCKS)
        return time.monotonic() - began

    def killed_run(self, run: int, seconds: float, rng: random.Random, most: int) -> str:
        """Start a run, kill it once or more, and let it finish; the SHA-256 of what came out."""
        out = self.folder / f"out-{run}"
        state = self.folder / f".{out.name}.attar-partial" / "state" / "state.json"
        earlier: list[Kill] = []
        kill_next = True
        while True:
            found = json.loads(state.read_bytes())["blocks_done"] if state.exists() else 0
            child, log = self._start(out)
            began = time.time()
            moment = rng.uniform(0, seconds * (BLOCKS - found) / BLOCKS)
            try:
                if child.wait(moment if kill_next else None):
                    raise SystemExit(f"run {run} failed with status {child.returncode}")
                finished = True
            except subprocess.TimeoutExpired:
                finished = out.exists()  # complete, though the process has not ended
                child.send_signal(signal.SIGKILL)
                child.wait()
            reports = [int(word) for word in log.read_text().split()[1:]]
            for kill in earlier if reports else []:
                kill.resumed_at = reports[0]
            if reports and reports[0] != found:
                raise SystemExit(f"run {run} began with {reports[0]} blocks where the state on disk says {found}")
            if reports:
                earlier = self._show(earlier)
            if finished:
                return digest(out)
            if out.exists():
                raise SystemExit(f"{out.name} appeared before it was complete")
            blocks = json.loads(state.read_bytes())["blocks_done"] if state.exists() else 0
            since = max(began, state.stat().st_mtime) if blocks > found else began
            earlier.append(Kill(run, moment, blocks, max(0.0, began + moment - since)))
            self.kills.append(earlier[-1])
            kill_next = len(self.kills) < most and rng.random() < KILLED_AGAIN

    def _show(self, kills: list[Kill]) -> list[Kill]:
        for kill in kills:
            print(f"{kill.run:>4}{kill.moment:>12.2f} s{kill.blocks:>13}{kill.resumed_at:>12}{kill.lost:>13.2f} s")
        return []

    def _start(self, out: Path) -> tuple[subprocess.Popen[bytes], Path]:
        """A child that is about to enter `compress`, and the file that it reports to."""
        log = self.folder / "log.txt"
        with log.open("wb") as file:
            command = [sys.executable, "-c", CHILD, json.dumps(self.settings | {"out": str(out)})]
            child = subprocess.Popen(command, stdout=file)
        while not log.read_text().startswith("ready"):
            if child.poll() is not None:
                raise SystemExit(f"the child failed with status {child.returncode}")
            time.sleep(0.01)
        return child, log


def digest(folder: Path) -> str:
    """SHA-256 over the names and bytes of all files."""
    total = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            content = hashlib.sha256(path.read_bytes()).hexdigest()
            total.update(f"{path.relative_to(folder)} {content}\n".encode())
    return total.hexdigest()


if __name__ == "__main__":
    main()
