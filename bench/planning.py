"""Predicted beside measured times of decode steps and prompts, for models that are on this machine.

    python bench/planning.py MODEL ... [--kv bfloat16 int8] [--batch 1 4 8] [--context 512] [--rounds 5]

Each round measures the machine's rates anew, then the model, so that both see the same machine. A round whose bandwidth
moved by more than 10 % between its beginning and its end is repeated, at most ten times in all. Fewer than five good
rounds are said to be too few. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from attar.checkpoints.sources import hub
from attar.checkpoints.sources.opening import load, stored
from attar.evaluation.decode_speed import _generate
from attar.evaluation.planning import machine_rates, questions
from attar.execution import kv_cache
from attar.kernels import dispatch
from attar.kernels.native import limits
from attar.kv.schemes import scheme
from attar.plan.rates.step_time import StepModel

MOVED, REPEATED, ENOUGH = 0.10, 10, 5
GEN = 32


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--kv", nargs="+", default=["bfloat16"])
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 4])
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=ENOUGH)
    given = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name in given.models:
        rows += measured(hub.resolve(name), given)
    for row in rows:
        print(
            f"{row['model'][:32]:<34}{row['kv']:<10}batch {row['batch']:<3} decode {row['decode_ms']:.1f} ms, "
            f"predicted {row['decode_predicted']:.1f} ({row['decode_error']:+.0%}); prefill {row['prefill_ms']:.0f}, "
            f"predicted {row['prefill_predicted']:.0f} ({row['prefill_error']:+.0%}); {row['rounds']} rounds"
        )
    errors = [abs(row["decode_error"]) for row in rows]
    print(json.dumps({"rows": rows, "median_decode_error": statistics.median(errors), "most": max(errors)}))
    return 0


def measured(path: Path, given: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row for each KV format and batch of a model."""
    config, storage = stored(path)
    names = questions.curve_names(config, [storage])
    store = dispatch.store()
    assert store is not None, "there are no kernels"
    decoder = load(path, torch.float32, None, store)
    found: dict[tuple[str, int], list[tuple[float, float, float, float]]] = {
        (kv, batch): [] for kv in given.kv for batch in given.batch
    }
    repeated = good = 0
    while good < given.rounds:
        before = limits.measure().read_gb_s
        profile = machine_rates.measure(names, usual=False)
        step: dict[tuple[str, int], tuple[float, float, float, float]] = {}
        for kv, batch in found:
            numbers = torch.randint(0, config.vocab_size, (batch, given.context))
            used = scheme(kv)
            prefill, steps, _, _ = _generate(decoder, numbers, GEN, used, kv_cache.bases(decoder, used))
            model = StepModel(config, storage, used, profile)
            predicted = model.decode(batch, given.context + GEN // 2).total
            step[kv, batch] = statistics.median(steps), predicted, prefill, batch * model.prefill(given.context)
        after = limits.measure().read_gb_s
        if abs(after / before - 1) > MOVED and repeated < REPEATED:
            repeated += 1
            print(f"bandwidth moved from {before:.1f} to {after:.1f} GB/s: the round is repeated", file=sys.stderr)
            continue
        good += 1
        for at, values in step.items():
            found[at].append(values)
    return [row(path.name, kv, batch, values, repeated) for (kv, batch), values in found.items()]


def row(name: str, kv: str, batch: int, values: Sequence[tuple[float, ...]], repeated: int) -> dict[str, Any]:
    """Return medians of the rounds, in milliseconds, and the median of each round's own error."""
    decode, predicted, prefill, in_prompts = (1e3 * statistics.median(each) for each in zip(*values, strict=True))
    return {
        "model": name, "kv": kv, "batch": batch, "rounds": len(values), "repeated": repeated,
        "enough": len(values) >= ENOUGH, "decode_ms": decode, "decode_predicted": predicted,
        "decode_error": statistics.median(each[1] / each[0] - 1 for each in values), "prefill_ms": prefill,
        "prefill_predicted": in_prompts,
        "prefill_error": statistics.median(each[3] / each[2] - 1 for each in values),
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
