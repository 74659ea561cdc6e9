"""Routers compared in virtual time: which share of prompt tokens they find cached, how evenly they load engines.

    python bench/routing.py [--engines N ...] [--load SHARE] [--requests N] [--blocks N] [--trace FILE]

Traces are 64 prefixes with 8 requests each, one prefix with 60 % of the requests, and with `--trace` Mooncake's
conversation trace (lengths over 16, its own times scaled to the load). The engines are those of
`tests/routing/simulation.py`: a prompt token takes 1 ms and a token of an output 10 ms. `load` is the share of the time
that engines would compute if nothing were cached. One engine with all blocks is the most that routing can find. The
last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import lzma
import random
import sys
import time
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.routing.simulation import (
    BLOCK,
    PREFILL,
    Arrival,
    ByCost,
    ConsistentHash,
    LeastLoaded,
    Outcome,
    Policy,
    RoundRobin,
    shared_prefixes,
    simulate,
    skewed,
)

SCALE = 16  # of the trace's lengths: its blocks of 512 tokens have 32


def mooncake(path: Path, count: int) -> list[Arrival]:
    """Return the first requests of Mooncake's trace; tokens of a block are a function of its id."""
    found = []
    with lzma.open(path, "rt") as lines:
        for line, _ in zip(lines, range(count), strict=False):
            each = json.loads(line)
            size = 512 // SCALE
            tokens = [id * size + at for id in each["hash_ids"] for at in range(size)]
            prompt = array("i", tokens[: max(1, each["input_length"] // SCALE)])
            found.append(Arrival(each["timestamp"] / 1000, prompt, max(1, each["output_length"] // SCALE)))
    return found


def at_load(trace: Sequence[Arrival], engines: int, load: float) -> list[Arrival]:
    """Return the trace with times scaled so that engines without caches would compute this share of the time."""
    work = sum(len(each.prompt) for each in trace) * PREFILL
    span = trace[-1].at - trace[0].at
    factor = work / (load * engines * span)
    return [Arrival((each.at - trace[0].at) * factor, each.prompt, each.output) for each in trace]


def told(outcome: Outcome, one: Outcome, seconds: float) -> dict[str, Any]:
    """Return the figures of a run, as JSON has them."""
    waits = sorted(outcome.waits)
    return {
        "hit_rate": round(outcome.hit_rate, 4), "of_one_engine": round(outcome.hit_rate / one.hit_rate, 4),
        "computed": outcome.computed, "max_over_mean": round(outcome.skew, 3),
        "wait_p50": round(waits[len(waits) // 2], 3), "wait_p90": round(outcome.p90, 3),
        "microseconds": round(seconds / len(waits) * 1e6),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, nargs="+", default=[4])
    parser.add_argument("--load", type=float, default=0.8)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--blocks", type=int, default=400, help="of each engine")
    parser.add_argument("--trace", type=Path)
    asked = parser.parse_args()
    found: dict[str, Any] = {}
    for engines in asked.engines:
        draw = random.Random(0)
        traces = {
            "64 prefixes": shared_prefixes(draw, 64, 8, 1.0),
            "one prefix with 60 %": skewed(draw, asked.requests, 0.6, 1.0),
        }
        if asked.trace is not None:
            traces["mooncake"] = mooncake(asked.trace, asked.requests)
        for name, trace in traces.items():
            timed = at_load(trace, engines, asked.load)
            one = simulate(timed, 1, engines * asked.blocks, RoundRobin(1))
            policies: dict[str, Policy] = {
                "cost": ByCost(engines, asked.blocks), "round robin": RoundRobin(engines),
                "least loaded": LeastLoaded(engines), "consistent hashing": ConsistentHash(engines),
            }  # fmt: skip
            for policy, made in policies.items():
                began = time.perf_counter()
                outcome = simulate(timed, engines, asked.blocks, made)
                figures = told(outcome, one, time.perf_counter() - began)
                found[f"{name}, {engines} engines, {policy}"] = figures
                figures["one_engine"] = round(one.hit_rate, 4)
                print(f"{name:<22} {engines:>5} engines  {policy:<13}", json.dumps(figures), flush=True)
    print(json.dumps({"block": BLOCK, "blocks": asked.blocks, "load": asked.load, "found": found}))


if __name__ == "__main__":
    main()
