"""What the probe that is replayed at load costs, on random weights in the Llama-3.2-1B shape.

    python bench/load_probe.py [--recipe rtn-w4g128] [--layers 16] [--rounds 3] [--dtype float32] [--model COMPRESSED]

Each round loads the model once without the probe and once with it, in turns whose order alternates, and then lets both
make the first token of a prompt as long as a probe: with the files in the page cache, and with the files evicted from
it, as after a restart.

Two shares of the load time come of it. `at load` is how much longer loading takes with the probe. A part of that is
work that whoever generates does anyway: the reference kernels dequantize a weight when it is first used, and memory is
touched for the first time once. What the probe pays there, the first token need not pay again. So `in all` is how much
later the first token comes, over the same load time: what the probe itself costs. Its bar is 5 %.

On a machine with other work, `--cpu` counts the CPU seconds of this process instead: with OMP_NUM_THREADS=1, or threads
that wait for each other are counted too. Waiting for the disk is then no part of the load time.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from compress_memory import write_model

import attar
from attar.checkpoints.receipts.probes import LENGTH
from attar.model.cache import ForwardBatch

BAR = 0.05

Clock = Callable[[], float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="rtn-w4g128")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--model", type=Path, help="measure this compressed folder instead of making one")
    parser.add_argument("--cpu", action="store_true", help="count CPU seconds of this process")
    args = parser.parse_args()
    clock = time.process_time if args.cpu else time.perf_counter
    with tempfile.TemporaryDirectory() as place:
        folder = args.model or made(Path(place), args.recipe, args.layers)
        os.sync()  # only pages that are on disk can be evicted
        measure(folder, args.dtype, True, clock)  # brings the files into the page cache
        heads = (("", -12), ("load", 10), ("first token", 14), ("with probe: load", 20), ("first token", 14))
        print("".join(f"{h:>{w}}" if w > 0 else f"{h:<{-w}}" for h, w in (*heads, ("at load", 10), ("in all", 9))))
        cases = {
            name: case(folder, args.dtype, args.rounds, clock, name, evicted)
            for name, evicted in (("cached", False), ("from disk", True))
        }
    about = {
        "recipe": args.recipe,
        "layers": args.layers,
        "dtype": args.dtype,
        "threads": torch.get_num_threads(),
        "cpu": args.cpu,
    }
    print(json.dumps(about | {"bar": BAR, "cases": cases}))


def case(folder: Path, dtype: str, rounds: int, clock: Clock, name: str, evicted: bool) -> dict[str, Any]:
    """Medians of both ways of loading; prints their row."""
    seen: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    for number in range(rounds):
        for verify in (False, True) if number % 2 == 0 else (True, False):
            if evicted:
                evict(folder)
            seen[verify].append(measure(folder, dtype, verify, clock))
    medians = {verify: [statistics.median(times) for times in zip(*runs, strict=True)] for verify, runs in seen.items()}
    (load, first), (load_probed, first_probed) = medians[False], medians[True]
    at_load = (load_probed - load) / load
    in_all = (load_probed + first_probed - load - first) / load
    print(
        f"{name:<12}{load:>8.3f} s{first:>12.3f} s{load_probed:>18.3f} s{first_probed:>12.3f} s"
        f"{at_load:>10.1%}{in_all:>9.1%}",
        flush=True,
    )
    return {
        "load_s": round(load, 4), "first_token_s": round(first, 4), "load_with_probe_s": round(load_probed, 4),
        "first_token_after_probe_s": round(first_probed, 4), "share_at_load": round(at_load, 4),
        "share_in_all": round(in_all, 4), "runs": {"without": seen[False], "with": seen[True]},
    }  # fmt: skip


def evict(folder: Path) -> None:
    """Ask the kernel to forget the files, which are on disk already: no root needed."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def made(place: Path, recipe: str, layers: int) -> Path:
    """Random weights, compressed; the original is removed again."""
    write_model(place / "model", layers)
    attar.compress(place / "model", place / "out", recipe=recipe)
    for file in (place / "model").iterdir():
        file.unlink()
    return place / "out"


def measure(folder: Path, dtype: str, verify: bool, clock: Clock) -> tuple[float, float]:
    """Seconds of loading, and from there to the logits behind a prompt of a probe's length."""
    gc.collect()
    ids = torch.arange(1, LENGTH + 1)
    began = clock()
    llm = attar.LLM(folder, dtype=dtype, verify=verify)
    loaded = clock()
    llm.decoder.forward(ids, ForwardBatch((LENGTH,), LENGTH), torch.tensor([LENGTH - 1]))
    return loaded - began, clock() - loaded


if __name__ == "__main__":
    main()
