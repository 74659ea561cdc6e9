"""What the figures are held against: of all that belong to a target, the worst.

A target says how many figures it wants. Where there was time for fewer, or one failed, that is shown beside it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Target:
    """Of figures whose name matches `figures`, the worst `ratio` is to reach `target`; a time is to stay below it."""

    work: str
    figures: str
    ratio: str
    target: float
    stretch: float
    cases: int = 1


TARGETS = (
    Target("decode w4g128, batch 1", "decode w4g128, batch 1,", "read", 0.75, 0.85),
    Target("decode bf16, batch 1", "decode bf16, batch 1,", "read", 0.75, 0.85),
    Target("W4A16 linear, 1 to 16 rows", "w4g128 [a-z ]+, (1|4|16) rows", "read", 0.80, 0.90, 12),
    Target("FP8 linear, 4096 rows", "fp8 [a-z ]+, 4096 rows", "peak", 0.70, 0.85, 4),
    Target("FP8 linear of blocks, 4096 rows", "fp8-block [a-z ]+, 4096 rows", "peak", 0.70, 0.85, 4),
    Target("int8 linear, 4096 rows", "w8a8 [a-z ]+, 4096 rows", "peak", 0.70, 0.85, 4),
    Target("decode attention, 32 x 8k", "decode attention, 32 x 8192, ", "read", 0.80, 0.90, 4),
    Target("prefill 8k, bf16", "prefill bf16 of 8192", "peak", 0.55, 0.70),
    Target("prefill 8k, fp8", "prefill fp8 of 8192", "peak", 0.55, 0.70),
    Target("decode fp8, batch 128", "decode fp8, batch 128,", "of_roof", 0.60, 0.75),
    Target("served fp8, batch 128", "served fp8, batch 128,", "of_roof", 0.60, 0.75, 2),
    Target("first token, empty Triton cache", "first token, empty", "seconds", 10.0, 5.0),
    Target("first token, filled Triton cache", "first token, filled", "seconds", 6.0, 3.0),
)


def held_against(measured: Sequence[Row]) -> list[Row]:
    """Each target with the worst that was found, and which figure that is; `found` is None where nothing was measured,
    `cases` how many figures there are of those wanted."""
    table = [_held(target, measured) for target in TARGETS]
    table.append(_faster(measured))
    return table


def _held(target: Target, measured: Sequence[Row]) -> Row:
    rows = [row for row in measured if re.match(target.figures, row["work"]) and target.ratio in row]
    worst = max if target.ratio == "seconds" else min
    row = worst(rows, key=lambda row: row[target.ratio], default=None)
    return {
        "work": target.work, "ratio": target.ratio, "found": None if row is None else row[target.ratio],
        "of": None if row is None else row["work"], "cases": f"{len(rows)} of {target.cases}",
        "target": target.target, "stretch": target.stretch,
    }  # fmt: skip


def _faster(measured: Sequence[Row]) -> Row:
    """How much faster 4 bits decode than 16, over how many fewer bytes they are."""
    rows = [
        next((row for row in measured if row["work"].startswith(f"decode {scheme}, batch 1,")), None)
        for scheme in ("bf16", "w4g128")
    ]
    found, (bf16, w4) = None, rows
    if bf16 is not None and w4 is not None:
        found = bf16["us"] / w4["us"] / (bf16["read_bytes"] / w4["read_bytes"])
    return {
        "work": "w4g128 faster than bf16", "ratio": "of its bytes", "found": found, "of": None,
        "cases": f"{sum(row is not None for row in rows)} of 2", "target": 0.9, "stretch": 1.0,
    }  # fmt: skip


def line(row: Row) -> str:
    """One of the table's rows for people."""
    shown = "not measured" if row["found"] is None else f"{row['found']:.2f}"
    which = "" if row["of"] is None or row["cases"].endswith(" 1") else f", worst: {row['of']}"
    wanted = f"target {row['target']}, stretch {row['stretch']}, {row['cases']} measured{which}"
    return f"{row['work']:34} {row['ratio']:12} {shown:>12}, {wanted}"
