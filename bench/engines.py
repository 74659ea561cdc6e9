"""attar's speed on a CPU beside llama.cpp's and OpenVINO GenAI's: the same shapes and threads, in turn, in one run.

    make bench-peers
    python bench/engines.py [--llamacpp PYTHON] [--openvino PYTHON] [--shapes NAME ...] [--jobs NAME ...] [--rounds N]

Models have random weights in the shapes of published ones: speed does not depend on the values, and nothing is
downloaded. The peers' files are made once, in `build/engines`. Every measurement is a process of its own that prints
one JSON object (`engines/contract.py`). In each round every engine runs once, in an order that rotates, and ratios are
taken within a round, ours over theirs: what else the machine was doing weighs on both sides. Shown are the medians over
rounds. A ratio with OpenVINO is to the best of its settings in that round.

A first round, not counted, tries every engine on a few tokens. It warms the page cache, and says of each engine its
version and the instruction sets it uses. An engine that fails is reported with the end of what it wrote, and the status
is then 1. A missed target does not change the status.

Run it on a machine that does nothing else. OpenMP's threads, which attar and llama.cpp use, wait for each other by
spinning, and lose tenfold where another program takes a core; OpenVINO's do not, so rounds do not cancel that. The load
before the run is printed and stands in the JSON.

Bytes per token are those of the weights that a decode step reads, as each file stores them. They differ: attar's
w4g128 has 4.125 bits a weight and 8.125 in an int8 head; llama.cpp's Q4_0 has 4.5 and, in the head, 6.56 (Q6_K) or,
where a row is no multiple of 256, 8.5 (Q8_0); OpenVINO's int4 has 4.125 and 8. For the Llama shape that comes to the
same within 1 %; for Qwen's, llama.cpp's file is 7 % larger. GB/s in the table is bytes times steps a second.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
CHILDREN = ROOT / "bench" / "engines"
CACHE = ROOT / "build" / "engines"
SHAPES = ("llama-3.2-1b", "qwen2.5-0.5b")
BUSY = 0.5  # load average above which the figures are doubtful

Run = dict[str, Any]  # what one process printed


@dataclass(frozen=True)
class Job:
    """One kind of measurement: its options, which engines take part, and which of its figures are compared."""

    options: Mapping[str, int]
    engines: tuple[str, ...]
    figures: tuple[str, ...]


@dataclass(frozen=True)
class Engine:
    """How to make an engine's model and how to measure it; `{shape}`, `{cache}` and `{threads}` are filled in."""

    python: Path
    run: tuple[str, ...]
    trial: tuple[str, ...] = ()  # options of the uncounted round only
    make: tuple[str, ...] = ()
    model: str = ""  # file or folder in the cache that `make` writes


FOUR_BIT = ("attar", "llama.cpp", "openvino", "openvino g128", "openvino f32 g128")
JOBS = {
    "1": Job({"prompt": 512, "gen": 128, "batch": 1}, FOUR_BIT, ("prefill_tok_s", "decode_tok_s")),
    "16": Job({"prompt": 128, "gen": 64, "batch": 16}, FOUR_BIT, ("decode_tok_s",)),
    "bf16": Job({"prompt": 512, "gen": 64, "batch": 1}, ("attar bf16", "llama.cpp bf16"), ("decode_tok_s",)),
}
# Least ratios of attar to a peer: (job, figure, peer).
TARGETS = {
    ("1", "prefill_tok_s", "llama.cpp"): 2.3,
    ("1", "prefill_tok_s", "openvino"): 1.05,
    ("1", "decode_tok_s", "llama.cpp"): 1.6,
    ("1", "decode_tok_s", "openvino"): 2.0,
    ("16", "decode_tok_s", "llama.cpp"): 3.2,
    ("16", "decode_tok_s", "openvino"): 1.4,
    ("bf16", "decode_tok_s", "llama.cpp"): 1.2,
}
NAMES = {"prefill_tok_s": "prefill", "decode_tok_s": "decode"}


def engines(args: argparse.Namespace) -> dict[str, Engine]:
    ours = ("-m", "attar", "bench", "--shape", "{shape}", "--json", "--scheme")
    theirs = ("--shape", "{shape}", "--threads", "{threads}", "--cache", "{cache}")
    table = {
        "attar": Engine(Path(sys.executable), (*ours, args.scheme, "--head", args.head)),
        "attar bf16": Engine(Path(sys.executable), (*ours, "bf16")),
    }
    for name, kind in (("llama.cpp", "q4_0"), ("llama.cpp bf16", "bf16")):
        table[name] = Engine(
            args.llamacpp,
            (str(CHILDREN / "run_llamacpp.py"), *theirs, "--format", kind),
            make=(str(CHILDREN / "make_gguf.py"), "--shape", "{shape}", "--format", kind),
            model=f"{{shape}}-{kind}.gguf",
        )
    settings = {
        "openvino": (),
        "openvino g128": ("--group", "128"),
        "openvino f32 g128": ("--group", "128", "--precision", "f32"),
    }
    for name, setting in settings.items():
        table[name] = Engine(
            args.openvino,
            (str(CHILDREN / "run_openvino.py"), *theirs, *setting),
            trial=("--kernels",),
            make=(str(CHILDREN / "make_openvino.py"), "--shape", "{shape}"),
            model="{shape}-int4",
        )
    return table


def environment(threads: int) -> dict[str, str]:
    """What every engine is started with: not what importing attar has told OpenMP, which each says for itself."""
    mine = {name: value for name, value in os.environ.items() if name != "GOMP_SPINCOUNT"}
    return mine | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(threads)}


def call(engine: Engine, command: Sequence[str], shape: str, threads: int) -> str:
    """What a process of the engine prints; `RuntimeError` with the end of it if it fails."""
    words = [word.format(shape=shape, cache=CACHE, threads=threads) for word in command]
    try:
        done = subprocess.run([engine.python, *words], capture_output=True, text=True, env=environment(threads))
    except OSError as error:
        raise RuntimeError(f"{error}; `make bench-peers` sets the peers up") from None
    if done.returncode:
        end = "\n".join((done.stdout + done.stderr).splitlines()[-15:])
        raise RuntimeError(f"status {done.returncode} of {' '.join(words)}\n{end}")
    return done.stdout


def prepare(engine: Engine, shape: str, threads: int) -> None:
    out = CACHE / engine.model.format(shape=shape)
    if engine.make and not out.exists():
        print(f"making {out.relative_to(ROOT)}", file=sys.stderr, flush=True)
        call(engine, (*engine.make, "--out", str(out)), shape, threads)


def measure(engine: Engine, job: Mapping[str, int], shape: str, threads: int, extra: Sequence[str] = ()) -> Run:
    options = [word for name, value in job.items() for word in (f"--{name}", str(value))]
    printed = call(engine, (*engine.run, *options, *extra), shape, threads)
    run: Run = json.loads(printed.strip().rpartition("\n")[2])
    return run


def trial(name: str, engine: Engine, shape: str, threads: int) -> Run | None:
    """A few tokens, to fail early; what cannot run is said on the way."""
    try:
        prepare(engine, shape, threads)
        return measure(engine, {"prompt": 64, "gen": 2, "batch": 1}, shape, threads, engine.trial)
    except (RuntimeError, json.JSONDecodeError) as error:
        print(f"{name} does not run: {error}\n", flush=True)
        return None


def rounds(job: Job, table: Mapping[str, Engine], shape: str, args: argparse.Namespace) -> dict[str, list[Run]]:
    """By engine, what it printed in each round. One that fails is left out from then on."""
    runs: dict[str, list[Run]] = {name: [] for name in job.engines if name in table}
    for i in range(args.rounds):
        names = list(runs)
        turn = i % max(len(names), 1)
        for name in names[turn:] + names[:turn]:
            print(f"  {shape} {name} {i + 1}/{args.rounds}", file=sys.stderr, flush=True)
            try:
                runs[name].append(measure(table[name], job.options, shape, args.threads))
            except (RuntimeError, json.JSONDecodeError) as error:
                print(f"{name} fails in round {i + 1}: {error}\n", flush=True)
                del runs[name]
    return runs


def ratios(runs: Mapping[str, Sequence[Run]], figure: str) -> dict[str, list[float]]:
    """By peer, attar's figure over the peer's, round by round; over its best setting where it has several."""
    ours = next((those for name, those in runs.items() if name.startswith("attar")), None)
    found: dict[str, list[float]] = {}
    for peer in ("llama.cpp", "openvino"):
        theirs = [those for name, those in runs.items() if name.startswith(peer)]
        if ours and theirs:
            best = [max(run[figure] for run in together) for together in zip(*theirs, strict=True)]
            found[peer] = [run[figure] / rival for run, rival in zip(ours, best, strict=True)]
    return found


def show(shape: str, label: str, runs: Mapping[str, Sequence[Run]], threads: int) -> dict[str, Any]:
    """Print the table of one job; what goes into the JSON."""
    job = JOBS[label]
    options = job.options
    said = ", ".join(f"{name} {value}" for name, value in options.items())
    print(f"{shape}: {said}, {threads} threads; tokens/s, medians of the rounds")
    print(f"{'':<20}{'prefill':>9}{'decode':>9}{'MB/token':>10}{'GB/s':>8}{'load s':>8}{'first s':>9}{'peak MB':>9}")
    medians = {}
    for name, those in runs.items():
        numbers = {key for key, value in those[0].items() if isinstance(value, (int, float))}
        middle = {key: statistics.median(run[key] for run in those) for key in sorted(numbers)}
        medians[name] = middle
        bandwidth = middle["bytes_per_token"] * middle["decode_tok_s"] / options["batch"] / 1e9
        print(
            f"{name:<20}{middle['prefill_tok_s']:>9.1f}{middle['decode_tok_s']:>9.1f}"
            f"{middle['bytes_per_token'] / 1e6:>10.0f}{bandwidth:>8.1f}"
            f"{middle['load_s']:>8.2f}{middle['first_token_s']:>9.2f}{middle['peak_rss_mb']:>9.0f}"
        )
        limits = {"prefill_tok_s": "compute_fraction", "decode_tok_s": "read_fraction"}
        reached = [f"{NAMES[f]} {middle[limits[f]]:.0%}" for f in job.figures if middle.get(limits[f])]
        if reached and options["batch"] == 1:
            print(f"  of the machine's limit: {', '.join(reached)}")
    compared: dict[str, Any] = {}
    for figure in job.figures:
        for peer, values in ratios(runs, figure).items():
            target = TARGETS.get((label, figure, peer))
            ratio = statistics.median(values)
            met = target is None or ratio >= target
            compared[f"{NAMES[figure]} over {peer}"] = {"ratio": ratio, "rounds": values, "target": target, "met": met}
            print(
                f"  {NAMES[figure]} over {peer}: {ratio:.2f} [{min(values):.2f}, {max(values):.2f}]"
                + (f", target {target}: {'met' if met else 'missed'}" if target else "")
            )
    print(flush=True)
    return {"options": dict(options), "medians": medians, "ratios": compared, "runs": runs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("llamacpp", "openvino"):
        place = ROOT / f".venv-{name}" / "bin" / "python"
        parser.add_argument(f"--{name}", type=Path, default=place, metavar="PYTHON", help="of its environment")
    parser.add_argument("--shapes", nargs="+", default=SHAPES, metavar="NAME", help=", ".join(SHAPES))
    parser.add_argument("--jobs", nargs="+", choices=JOBS, default=tuple(JOBS), help="batch 1, batch 16, bf16 weights")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--scheme", default="w4g128", help="attar's, of the linears")
    parser.add_argument("--head", default="int8", help="attar's, of the head and the embedding")
    args = parser.parse_args()
    every = engines(args)
    load = os.getloadavg()[0]
    print(f"load before the run: {load:.1f}" + (": something else is running\n" if load > BUSY else "\n"))
    wanted = {name: every[name] for label in args.jobs for name in JOBS[label].engines}
    result: dict[str, Any] = {"ok": True, "threads": args.threads, "rounds": args.rounds, "load_before": load}
    result |= {"engines": {}, "shapes": {}}
    for shape in args.shapes:
        tried = {name: trial(name, engine, shape, args.threads) for name, engine in wanted.items()}
        for name, run in tried.items():
            said = {key: run.get(key) for key in ("version", "isa")} if run else None
            result["ok"] &= run is not None
            result["engines"][name] = said
            if said:
                print(f"{name:<20}{said['version'] or ''}  {said['isa'] or ''}")
        print(flush=True)
        table = {name: wanted[name] for name, run in tried.items() if run}
        result["shapes"][shape] = {}
        for label in args.jobs:
            runs = rounds(JOBS[label], table, shape, args)
            result["ok"] &= len(runs) == len(JOBS[label].engines)
            result["shapes"][shape][label] = show(shape, label, runs, args.threads)
    print(json.dumps(result))
    raise SystemExit(0 if result["ok"] else 1)


if __name__ == "__main__":
    main()
