"""attar's server beside llama.cpp's and OpenVINO GenAI's continuous batching: the same traces, machine and run.

    make bench-serving
    python bench/serving.py [--workload NAME ...] [--only ENGINE ...] [--rounds N] [--requests N] [--json FILE]

Models have random weights in the Llama-3.2-1B shape with 4 bits in the blocks and 6.6 to 8.1 in the head; all are made
once, in `build/engines`. Speed does not depend on the values, and every answer has the length that the trace says.

Every run is a server of its own on a free port of 127.0.0.1, warmed up by a few requests, driven by `attar.load` with
token ids over HTTP, and stopped by its process id. The client takes part of the two cores, the same of every engine's.
llama.cpp's is its own server. OpenVINO GenAI has none, so `engines/serve_openvino.py` puts the smallest possible in
front of its pipeline, without any tokenizer; how much of the time lay outside OpenVINO's steps is in the JSON.

Workloads:

    sharegpt  ShareGPT conversations, due at the times of the trace, ten a second: more than any of the engines does, so
              what is measured is the plateau. Requests longer than 4096 tokens are left out.
    burst     Mooncake's conversations, lengths divided by 16, all due at once: the plateau in requests a second.
    mooncake  the same at a rate: the trace's times, stretched to `--rate`, or to 0.8 of the better peer's plateau as
              the runs of `burst` have it.

`attar static` is attar with requests batched in order of arrival, as many as otherwise run together, and no new ones
until all have ended. In each round every engine runs once, in an order that rotates; ratios are taken within a round,
medians over rounds. "Better" is the better of the two peers in that round, by the figure that is compared.

Finished runs are appended to a file (`--runs`), and a run that stands there with the same settings is not made again:
give the same command to go on after an interruption. An answer that is missing or of another length than asked for
makes the run worthless: it is shown, left out, and the status is 1. A missed target does not change the status.

Run it on a machine that does nothing else, for the reason that `engines.py` gives.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engines import BUSY, CACHE, ROOT
from servers import PATIENCE, PEERS, Engine, end_of, engines, prepare, serving, settings

from attar.load import drive, measures, schedule, traces
from attar.load.client import fetch

LONGEST = 4096  # tokens of a request of ShareGPT's
DIVISOR = 16  # of Mooncake's lengths: a block of 512 tokens becomes one of 32
SHARE = 0.8  # of the better peer's plateau
WORKLOADS = ("sharegpt", "burst", "mooncake")

Run = dict[str, Any]  # what is appended to the file of runs


@dataclass(frozen=True)
class Target:
    """A least ratio of attar, or with `most` a largest, in a figure of a workload."""

    workload: str
    engine: str
    over: str
    figure: str
    ratio: float
    most: bool = False


FIGURES = ("output_tok_s", "total_tok_s", "requests_s", "ttft_p50", "ttft_p95")
TARGETS = (
    Target("sharegpt", "attar", "better", "output_tok_s", 1.3),
    Target("sharegpt", "attar", "better", "ttft_p95", 1.0, most=True),
    Target("mooncake", "attar", "llama.cpp", "total_tok_s", 3.0),
    Target("sharegpt", "attar", "attar static", "output_tok_s", 2.0),
    Target("mooncake", "attar", "attar static", "output_tok_s", 2.0),
)


def load_of(workload: str, args: argparse.Namespace, rate: float | None) -> schedule.Load:
    if workload == "sharegpt":
        asks = traces.within(traces.read(args.sharegpt, args.requests, args.shrink), LONGEST)
        return schedule.as_recorded(asks)
    asks = traces.read(args.mooncake, min(args.requests, 200), DIVISOR * args.shrink)
    if workload == "burst":
        return schedule.as_recorded([replace(ask, at=0.0) for ask in asks])
    assert rate is not None
    return schedule.as_recorded(asks, rate) if args.arrivals == "trace" else schedule.poisson(asks, rate, args.seed)


def measure(name: str, engine: Engine, load: schedule.Load, args: argparse.Namespace) -> Run:
    """Start the server, warm it up, send the load, stop it. `RuntimeError` where an answer is not as asked for."""
    began = time.monotonic()
    warm_up = schedule.closed(traces.synthetic(traces.Synthetic(128, 4), 8, seed=99), 4)
    with serving(name, engine, args.threads) as (server, log):
        loaded = time.monotonic() - began

        async def go() -> tuple[dict[str, Any], Any]:
            model = await drive.first_model(server)
            target = drive.Target(server, model, timeout=PATIENCE, extra=engine.extra)
            check(await drive.run(warm_up, target), log)
            before = await stats()
            run = await drive.run(load, target, progress=progress)
            after = await stats()
            check(run, log)
            return measures.measure(run), {key: after[key] - before[key] for key in after}

        async def stats() -> dict[str, float]:
            return {} if engine.stats is None else dict(await fetch(server, engine.stats))

        def progress(label: str, done: int, total: int) -> None:
            print(f"\r    {done}/{total}  {time.monotonic() - began:.0f} s ", end="", file=sys.stderr, flush=True)

        try:
            measured, said = asyncio.run(go())
        except ValueError as error:
            raise RuntimeError(f"{error}\n{end_of(log)}") from None
        finally:
            print(file=sys.stderr)
    flat = {key: measured[key] for key in ("output_tok_s", "total_tok_s", "requests_s", "seconds")}
    flat |= {f"ttft_{q}": measured["ttft"][q] for q in ("p50", "p95")}
    return flat | {"load_s": loaded, "stats": said, "measured": measured}


def check(run: drive.Run, log: Path) -> None:
    """Every answer came, with as many tokens as were asked for."""
    for each in run.sent:
        answer = each.answer
        if answer.error is not None:
            raise RuntimeError(f"{answer.error}: {answer.detail}\n{end_of(log)}")
        if answer.completion_tokens != each.ask.output:
            raise RuntimeError(f"an answer has {answer.completion_tokens} tokens where {each.ask.output} were wanted")


class Runs:
    """The file of finished runs, and which of them belong to this command."""

    def __init__(self, path: Path) -> None:
        self.path = path
        lines = path.read_text().splitlines() if path.exists() else []
        self._known: list[Run] = [json.loads(line) for line in lines if line.strip()]

    def find(self, key: Mapping[str, Any]) -> Run | None:
        found = (run for run in self._known if all(run.get(name) == value for name, value in key.items()))
        return next(found, None)

    def rates(self, engine: str, about: Mapping[str, int], settings: Sequence[str]) -> list[float]:
        """Requests a second in the runs of `burst` of the same requests."""
        wanted = {"workload": "burst", "engine": engine, "settings": list(settings), **about}
        found = [run for run in self._known if all(run.get(name) == value for name, value in wanted.items())]
        return [float(run["requests_s"]) for run in found]

    def add(self, run: Run) -> None:
        self._known.append(run)
        with self.path.open("a") as file:
            file.write(json.dumps(run) + "\n")
            file.flush()
            os.fsync(file.fileno())


def rounds(workload: str, table: Mapping[str, Engine], runs: Runs, args: argparse.Namespace, rate: float | None,
           failures: list[str]) -> dict[str, list[Run]]:  # fmt: skip
    """By engine, its runs in order. One that fails is left out from then on."""
    load = load_of(workload, args, rate)
    wanted = sum(ask.output for ask in load.asks)
    about = about_of(load, args)
    print(f"{workload}: {about['requests']} requests, {about['prompt']} tokens in, {wanted} out", flush=True)
    done: dict[str, list[Run]] = {name: [] for name in table}
    for i in range(args.rounds):
        names = list(done)
        turn = i % max(len(names), 1)
        for name in names[turn:] + names[:turn]:
            key: Run = {"workload": workload, "engine": name, "round": i, "rate": rate, **about}
            key |= {"arrivals": args.arrivals, "settings": settings(table[name])}
            run = runs.find(key)
            if run is None:
                print(f"  {workload} {name} {i + 1}/{args.rounds}", file=sys.stderr, flush=True)
                try:
                    load_before = os.getloadavg()[0]
                    run = key | {"load_before": load_before} | measure(name, table[name], load, args)
                except RuntimeError as error:
                    print(f"{name} fails in round {i + 1} of {workload}: {error}\n", flush=True)
                    failures.append(f"{workload} {name}")
                    del done[name]
                    continue
                runs.add(run)
            done[name].append(run)
    return {name: those for name, those in done.items() if those}


def ratios(done: Mapping[str, Sequence[Run]], name: str, over: str, figure: str) -> list[float]:
    """Round by round, a figure of one engine over another's, or over the better peer's where all have run."""
    lower = figure.startswith("ttft")
    rivals = [done[peer] for peer in (PEERS if over == "better" else (over,)) if peer in done]
    if name not in done or len(rivals) < (len(PEERS) if over == "better" else 1):
        return []
    best = [(min if lower else max)(run[figure] for run in together) for together in zip(*rivals, strict=False)]
    return [run[figure] / rival for run, rival in zip(done[name], best, strict=False)]


def show(workload: str, done: Mapping[str, Sequence[Run]]) -> dict[str, Any]:
    """Print the table of one workload; what goes into the JSON."""
    print(f"{'':<14}{'output/s':>10}{'total/s':>10}{'req/s':>8}{'TTFT p50':>10}{'p95':>9}{'seconds':>9}{'cached':>9}")
    medians = {}
    for name, those in done.items():
        middle = {key: statistics.median(run[key] for run in those) for key in (*FIGURES, "seconds")}
        medians[name] = middle
        cached = [run["measured"]["cached_tokens"] for run in those]
        shown = "-" if None in cached else f"{statistics.median(cached) / those[0]['prompt']:.1%}"
        print(
            f"{name:<14}{middle['output_tok_s']:>10.1f}{middle['total_tok_s']:>10.1f}{middle['requests_s']:>8.3f}"
            f"{middle['ttft_p50']:>10.2f}{middle['ttft_p95']:>9.2f}{middle['seconds']:>9.1f}{shown:>9}"
        )
    compared: dict[str, Any] = {}
    for figure in FIGURES:
        for over in ("better", *PEERS, "attar static"):
            values = ratios(done, "attar", over, figure)
            if not values:
                continue
            ratio = statistics.median(values)
            entry: dict[str, Any] = {"ratio": ratio, "rounds": values}
            said = ""
            for target in TARGETS:
                if (target.workload, target.over, target.figure) == (workload, over, figure):
                    met = ratio <= target.ratio if target.most else ratio >= target.ratio
                    entry |= {"target": target.ratio, "met": met}
                    bound = "at most" if target.most else "at least"
                    said = f", target {bound} {target.ratio}: {'met' if met else 'missed'}"
            compared[f"{figure} over {over}"] = entry
            print(f"  {figure} over {over}: {ratio:.2f} [{min(values):.2f}, {max(values):.2f}]{said}")
    print(flush=True)
    return {"medians": medians, "ratios": compared, "runs": done}


def about_of(load: schedule.Load, args: argparse.Namespace) -> dict[str, int]:
    """What makes two loads of a workload the same."""
    output, prompt = sum(ask.output for ask in load.asks), sum(len(ask.prompt) for ask in load.asks)
    return {"requests": len(load.asks), "output": output, "prompt": prompt, "threads": args.threads, "seed": args.seed}


def plateau(runs: Runs, args: argparse.Namespace) -> float:
    """A share of the requests a second that the better peer answers with all due at once, of all its runs."""
    about = about_of(load_of("burst", args, None), args)
    medians = [
        statistics.median(rates)
        for peer, engine in engines(args, "burst").items()
        if peer in PEERS and (rates := runs.rates(peer, about, settings(engine)))
    ]
    if not medians:
        raise SystemExit("mooncake needs a rate: give --rate, or let `burst` run with the peers first")
    return float(f"{SHARE * max(medians):.3g}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    shared = ROOT.parent / "shared" / "data" / "traces"
    peers = {name: ROOT / f".venv-{name}" / "bin" / "python" for name in ("llamacpp", "openvino")}
    add = parser.add_argument
    add("--workload", nargs="+", choices=WORKLOADS, default=WORKLOADS)
    add("--only", nargs="+", metavar="ENGINE", help="attar, 'attar static', llama.cpp, openvino")
    add("--rounds", type=int, default=3)
    add("--requests", type=int, default=300, help="of a trace, at most; of Mooncake's never more than 200")
    add("--shrink", type=int, default=1, help="divide all lengths by it, to try things out")
    add("--rate", type=float, help="of mooncake, in requests a second")
    add("--arrivals", choices=("trace", "poisson"), default="trace", help="of mooncake")
    add("--seed", type=int, default=0, help="of poisson arrivals")
    add("--running", type=int, default=32, help="sequences that attar and OpenVINO run together")
    add("--cache-tokens", type=int, default=131072, help="tokens in attar's cache")
    add("--threads", type=int, default=2)
    for name in ("attar", "llamacpp", "openvino"):
        add(f"--{name}", default="", metavar="WORDS", help="more options of its server, which win")
    add("--sharegpt", type=Path, default=shared / "sharegpt-llama-3.1-8b-300-sps10.jsonl", metavar="FILE")
    add("--mooncake", type=Path, default=shared / "mooncake_conversation.jsonl.xz", metavar="FILE")
    add("--llamacpp-server", type=Path, default=CACHE / "llama-server", metavar="PROGRAM")
    for name, place in peers.items():
        add(f"--{name}-python", type=Path, default=place, metavar="PYTHON", help="of its environment")
    add("--runs", type=Path, default=CACHE / "serving.jsonl", help="file of finished runs")
    add("--json", type=Path, metavar="FILE", help="where the result goes; else it is the last line")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # and no server stays behind
    table = engines(args, WORKLOADS[0])
    unknown = set(args.only or ()) - set(table)
    if unknown:
        parser.error(f"no engine is called {', '.join(sorted(unknown))}: {', '.join(table)} are")
    load = os.getloadavg()[0]
    print(f"load before the run: {load:.1f}" + (": something else is running\n" if load > BUSY else "\n"))
    CACHE.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {"threads": args.threads, "rounds": args.rounds, "load_before": load, "engines": {}}
    failures: list[str] = []
    wanted: list[str] = []
    for name in args.only or table:
        try:
            version = prepare(table[name], args.threads)
        except RuntimeError as error:
            print(f"{name} does not run: {error}\n", flush=True)
            failures.append(name)
            continue
        wanted.append(name)
        result["engines"][name] = {"version": version, "request": table[name].extra}
        print(f"{name:<14}{version}")
    print(flush=True)
    runs, results = Runs(args.runs), {}
    for workload in [name for name in WORKLOADS if name in args.workload]:
        rate = None if workload != "mooncake" else args.rate or plateau(runs, args)
        if rate is not None:
            print(f"arrival rate: {rate:.4g} requests/s")
        table = {name: engine for name, engine in engines(args, workload).items() if name in wanted}
        said = {name: " ".join(settings(engine)) for name, engine in table.items()}
        for name, words in said.items():
            print(f"  {name:<14}{words}")
        try:
            done = rounds(workload, table, runs, args, rate, failures)
        except ValueError as error:  # of the trace
            raise SystemExit(f"{workload}: {error}") from None
        results[workload] = {"rate": rate, "settings": said} | show(workload, done)
    result |= {"ok": not failures, "failures": failures, "workloads": results}
    if args.json is None:
        print(json.dumps(result))
    else:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    raise SystemExit(0 if result["ok"] else 1)


if __name__ == "__main__":
    main()
