"""Predicted beside measured times of decode steps and prompts, for models that are on this machine.

    python bench/planning.py MODEL ... [--kv bfloat16 int8] [--batch 1 4 8 16] [--context 512 4096] [--rounds 5]
                             [--out FILE]

The machine's rates are measured anew before and after each round of the model's times, so that both see the same
machine, and the prediction of a round is the mean by both. A round whose bandwidth moved by more than 10 % between them
is repeated, at most ten times a model. Fewer than five good rounds are said to be too few.

A prompt of the longest context is computed once for each KV format, and timed at its first 512 and 2,048 tokens too.
Other sequences of a batch hold copies of its blocks, in memory of their own: a step takes as long whatever it reads.
`--out FILE` keeps rates and times of each finished round; the same command goes on there. The last line is one JSON
object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch

from attar.checkpoints.sources import hub
from attar.checkpoints.sources.opening import load, stored
from attar.evaluation.planning import machine_rates, questions
from attar.execution import kv_cache
from attar.execution.recorded_step import Decoding
from attar.kernels import dispatch, ops
from attar.kv.schemes import KvScheme, scheme
from attar.model.cache import ForwardBatch, KVCache
from attar.model.decoder import Decoder
from attar.plan.rates.profile import MachineProfile
from attar.plan.rates.step_time import PREFILL_ROWS, StepModel

MOVED, REPEATED, ENOUGH = 0.10, 10, 5
PROMPTS = (512, 2048)  # tokens of prompts whose times are shown
STEPS = 16  # decode steps, and one that records

Place = tuple[str, str, int, int]
"""What is timed, KV format, batch, and context or prompt tokens."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--kv", nargs="+", default=["bfloat16"])
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 4])
    parser.add_argument("--context", nargs="+", type=int, default=[512])
    parser.add_argument("--rounds", type=int, default=ENOUGH)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    kept: dict[str, Rounds] = {}
    if given.out is not None and given.out.exists():
        kept = msgspec.json.decode(given.out.read_bytes(), type=dict[str, Rounds])
    rows: list[dict[str, Any]] = []
    for name in given.models:
        path = hub.resolve(name)
        for done in measured(path, given, kept.get(name, Rounds([], 0))):
            kept[name] = done
            if given.out is not None:
                given.out.write_bytes(msgspec.json.encode(kept))
        rows += compared(path, kept[name])
    print(to_text(rows))
    print(json.dumps({"rows": rows, **summary(rows)}))
    return 0


@dataclass(frozen=True)
class Round:
    """Rates before and after, and the seconds of everything that was timed between."""

    before: MachineProfile
    after: MachineProfile
    times: list[tuple[Place, float]]


@dataclass(frozen=True)
class Rounds:
    """The good rounds of a model, and how many were repeated."""

    rounds: list[Round]
    repeated: int


def measured(path: Path, given: argparse.Namespace, known: Rounds) -> Iterator[Rounds]:
    """Measure the rounds of a model that are missing, and yield all that are known after each."""
    found, repeated = known.rounds, known.repeated
    if len(found) >= given.rounds:
        return
    config, storage = stored(path)
    names = questions.curve_names(config, [storage])
    store = dispatch.store()
    assert store is not None, "there are no kernels"
    decoder = load(path, torch.float32, None, store)
    before = machine_rates.measure(names, usual=False)
    while len(found) < given.rounds:
        times = [each for kv in given.kv for each in timed(decoder, scheme(kv), given)]
        after = machine_rates.measure(names, usual=False)
        moved = abs(after.bandwidth.value / before.bandwidth.value - 1)
        done, before = Round(before, after, times), after
        if moved > MOVED and repeated < REPEATED:
            repeated += 1
            print(f"bandwidth moved by {moved:.0%}: the round is repeated", file=sys.stderr)
        else:
            found = [*found, done]
            print(f"{path.name}: round {len(found)} of {given.rounds}", file=sys.stderr)
        yield Rounds(found, repeated)


def compared(path: Path, rounds: Rounds) -> list[dict[str, Any]]:
    """Return a row for each KV format, batch and context of a model, and for each prompt."""
    config, storage = stored(path)
    found: dict[Place, list[tuple[float, float]]] = defaultdict(list)
    for each in rounds.rounds:
        for place, seconds in each.times:
            models = [StepModel(config, storage, scheme(place[1]), profile) for profile in (each.before, each.after)]
            found[place].append((seconds, statistics.mean(predicted(model, place) for model in models)))
    return [row(path.name, place, values, rounds.repeated) for place, values in found.items()]


def predicted(model: StepModel, place: Place) -> float:
    """Return the seconds that a model of steps gives for what is timed."""
    what, _, batch, tokens = place
    return model.decode(batch, tokens + STEPS // 2).total if what == "decode" else model.prefill(tokens)


@torch.inference_mode()
def timed(decoder: Decoder, used: KvScheme, given: argparse.Namespace) -> Iterable[tuple[Place, float]]:
    """Yield the seconds of prompts and, as a median, of decode steps."""
    longest = max(given.context)
    horizon = longest + STEPS + 1
    one = decoder.cache(horizon, 1, used, kv_cache.bases(decoder, used))
    tokens = torch.randint(0, decoder.config.vocab_size, (longest,))
    since = time.perf_counter()
    for at in range(0, longest, PREFILL_ROWS):
        piece = tokens[at : at + PREFILL_ROWS]
        decoder.forward(piece, ForwardBatch((len(piece),), horizon, one), torch.tensor([len(piece) - 1]))
        if (done := at + len(piece)) in PROMPTS:
            yield ("prefill", used.name, 1, done), time.perf_counter() - since
    for batch in given.batch:
        for context in given.context:
            cache = copied(decoder, one, batch, horizon)
            cache.filled = [context] * batch
            decoding = Decoding(decoder, cache, horizon)
            following, seconds = [1] * batch, list[float]()
            for step in range(STEPS + 1):
                begun = time.perf_counter()
                following = ops.argmax(decoding.step(following)).tolist()
                if step:  # the first is recorded
                    seconds.append(time.perf_counter() - begun)
            yield ("decode", used.name, batch, context), statistics.median(seconds)


def copied(decoder: Decoder, one: KVCache, batch: int, horizon: int) -> KVCache:
    """Return a cache of `batch` sequences, each with its own copy of the blocks of the one sequence of `one`."""
    made = decoder.cache(horizon, batch, one.scheme, kv_cache.bases(decoder, one.scheme))
    for own, pages in zip(made.layers, one.layers, strict=True):
        for part, other in zip(own.parts(), pages.parts(), strict=True):
            part.unflatten(0, (batch, -1)).copy_(other)
    return made


def row(name: str, place: Place, values: Sequence[tuple[float, float]], repeated: int) -> dict[str, Any]:
    """Return medians of the rounds, in milliseconds, and the median of each round's own error."""
    what, kv, batch, tokens = place
    seconds, predicted = (1e3 * statistics.median(each) for each in zip(*values, strict=True))
    return {
        "model": name, "what": what, "kv": kv, "batch": batch, "tokens": tokens, "rounds": len(values),
        "repeated": repeated, "enough": len(values) >= ENOUGH, "ms": seconds, "predicted": predicted,
        "error": statistics.median(each[1] / each[0] - 1 for each in values),
    }  # fmt: skip


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return the median and the largest absolute error of decode steps and of prompts."""
    found = {}
    for what in ("decode", "prefill"):
        errors = [abs(each["error"]) for each in rows if each["what"] == what]
        if errors:
            found[what] = {"median_error": statistics.median(errors), "most": max(errors)}
    return found


def to_text(rows: Sequence[dict[str, Any]]) -> str:
    """Return a line for each row: measured and predicted milliseconds, and the error of the prediction."""
    return "\n".join(
        f"{each['model'][:32]:<34}{each['kv']:<10}{each['what']:<8}{each['tokens']:>5} tokens, batch "
        f"{each['batch']:<3}{each['ms']:>9.1f} ms, predicted {each['predicted']:.1f} ({each['error']:+.0%}); "
        + (f"{each['rounds']} rounds" if each["enough"] else f"not measured: {each['rounds']} rounds of {ENOUGH}")
        for each in rows
    )


if __name__ == "__main__":
    sys.exit(main())
