"""The search for how products are best cut into programs, and from how many rows on another way is faster.

For each kind of product, each of a block's shapes and some numbers of rows every sensible cut is timed; the fastest is
kept, with the rule's own time beside it. Then, for each way around the kernels, the smallest number of rows from which
on it is faster over all shapes together. What is found goes to `tuned.json` as soon as a case is complete, in the form
that `attar/kernels/triton/tuned.json` has, so a run that is cut short leaves what it had, and the next goes on there:
all kinds together take longer than one run has.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
from gpu import models
from gpu.budget import Budget
from gpu.timing import DEVICE, HALF, seconds

from attar.kernels.operands import Linear
from attar.kernels.triton import backend, language, linear, tuning, w8, weights

Row = dict[str, Any]

SCHEMES: dict[tuning.Kind, str] = {
    "w4a16": "w4g128",
    "w4a8": "w4a8g128",
    "p4a8": "qserve-g128",
    "w8a16": "w8",
    "w8a8": "w8a8",  # float8 shares the kind: few rows are bound by the same bytes, and many are torch's
    "b8a16": "fp8-block-weight",
    "b8a8": "fp8-block",
}
ROWS = (1,) if backend.interpreted() else (1, 4, 16, 64, 256)
WAYS: dict[tuning.Way, tuple[str, tuple[int, ...]]] = {
    "widened": ("w4g128", (128, 256, 512, 1024, 2048)),
    "scaled_mm": ("fp8", (16, 32, 64, 128, 256, 512)),
    "scaled_mm_blocks": ("fp8-block", (64, 128, 256, 512, 1024, 2048)),
}
"""The scheme that a way is tried with, and numbers of rows."""


def cuts(rows: int) -> Iterator[tuning.Config]:
    """Those worth trying. Few rows are one tile of 16, and shared out; many fill the card as they are."""
    if backend.interpreted():
        yield from (tuning.Config(64, 16, splits, 4, 3) for splits in (1, 2))
        return
    few = rows <= tuning.FEW
    for outputs in (64, 128):
        for tile in (16,) if few else (32, 64) if rows <= 64 else (64, 128):
            for splits in (1, 2, 4, 8) if few else (1, 2) if rows <= 64 else (1,):
                for warps in (4, 8):
                    for stages in (3, 5, 7) if few else (3, 4):
                        yield tuning.Config(outputs, tile, splits, warps, stages)


def search(name: str, kinds: list[tuning.Kind], budget: Budget, out: Path, copy: float) -> Iterator[Row]:
    """Every case of these kinds that `out` has no answer for, as far as the budget goes; `copy` is the bandwidth of a
    copy, in bytes a second."""
    every = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {}
    found = every.setdefault(language.device_name(torch.device(DEVICE)), {"cuts": {}, "from": {}})
    for kind in kinds:
        for label, size in models.products(name).items():
            entries = found["cuts"].setdefault(f"{kind} {size[0]}x{size[1]}", [])
            missing = [rows for rows in ROWS if rows not in [entry["most"] for entry in entries]]
            laid = models.prepared(SCHEMES[kind], size) if missing else []
            for rows in missing:
                times = timed(kind, laid, rows, size, budget)
                if times is None:
                    return
                if not times:  # no cut fits this card
                    continue
                best = min(times, key=lambda cut: times[cut])
                entries.append({"most": rows, "config": asdict(best)})
                entries.sort(key=lambda entry: entry["most"])
                write(out, every)
                rule = tuning.rule(kind, rows, *size, language.processors(torch.device(DEVICE)))
                read = laid[0].weight.read_bytes / times[best] / copy  # type: ignore[union-attr]
                by_rule = {"rule": times[rule] * 1e6} if rule in times else {}  # which may not fit either
                yield {
                    "work": f"tuned {SCHEMES[kind]} {label}, {rows} rows", "us": times[best] * 1e6, "read": read,
                    **by_rule, "cut": asdict(best),
                }  # fmt: skip
            del laid
    if backend.interpreted():  # torch's products tell nothing there
        return
    for way in (way for way in get_args(tuning.Way) if way not in found["from"]):
        first = turn(name, way, budget)
        if first is None:
            return
        found["from"][way] = first
        write(out, every)
        yield {"work": f"tuned: {way} from {first} rows on", "us": 0.0, "rows": first}


def timed(
    kind: tuning.Kind, laid: list[Linear], rows: int, size: tuple[int, int], budget: Budget
) -> dict[tuning.Config, float] | None:
    """Seconds of a product with each cut, the rule's first; None where time ran out."""
    x = torch.randn(rows, size[1], device=DEVICE).to(HALF)
    rule = tuning.rule(kind, rows, *size, language.processors(x.device))
    times: dict[tuning.Config, float] = {}
    for cut in (rule, *cuts(rows)):
        if budget.over():
            return None
        with forced("config", cut), forced("rows_from", tuning.NEVER), contextlib.suppress(triton.OutOfResources):
            times[cut] = seconds([partial(linear.linear, x, (one,)) for one in laid])
    return times


def turn(name: str, way: tuning.Way, budget: Budget) -> int | None:
    """The smallest number of rows from which on a way was faster, all products of a block together; `tuning.NEVER`
    where it was not for the most, or is not there; None where time ran out."""
    scheme, numbers = WAYS[way]
    if way == "scaled_mm_blocks" and against_blocks(name):
        return tuning.NEVER
    ours, theirs = (dict.fromkeys(numbers, 0.0) for _ in range(2))
    for size in models.products(name).values():
        laid = models.prepared(scheme, size)
        for rows in numbers:
            if budget.over():
                return None
            x = torch.randn(rows, size[1], device=DEVICE).to(HALF)
            for times, first in ((ours, tuning.NEVER), (theirs, 0)):
                with forced("rows_from", first):
                    times[rows] += seconds([partial(linear.linear, x, (one,)) for one in laid])
        del laid
    best = tuning.NEVER
    for rows in reversed(numbers):
        if theirs[rows] > ours[rows]:
            break
        best = rows
    return best


def against_blocks(name: str) -> str | None:
    """Why torch's product of float8 in blocks does not take those of a shape here, or None where it does."""
    there = torch.device(DEVICE)
    reasons = (w8.scaled_mm_against_blocks(there, HALF, size) for size in models.products(name).values())
    return next(filter(None, reasons), None)


@contextlib.contextmanager
def forced(function: str, answer: object) -> Iterator[None]:
    """`tuning` gives this answer, whatever it is asked."""
    real = getattr(tuning, function)
    setattr(tuning, function, lambda *given: answer)
    try:
        yield
    finally:
        setattr(tuning, function, real)


def alone(x: torch.Tensor, one: Linear) -> float:
    """Seconds of a float8 product by Triton, where torch's is used."""
    assert isinstance(one.weight, weights.TritonWeight)
    with forced("rows_from", sys.maxsize):
        return seconds([lambda: linear.linear(x, (one,))])


def write(out: Path, found: object) -> None:
    out.write_text(json.dumps(found, indent=1), encoding="utf-8")
