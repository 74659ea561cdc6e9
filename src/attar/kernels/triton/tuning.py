"""Cuts of products into programs: the fastest measured on a device, and rules where nothing was measured.

`tuned.json` holds what `bench/gpu_check.py --tune` found, by device name: data, made by a script, never by hand. The
rules are the start of every search and the answer for every other device. On an H200 the rule for few rows gives the
fastest of 20 cuts for each 4-bit product of a block of Llama-3.1-8B. The others are arithmetic for a GPU that reads 4
TB/s with 132 multiprocessors, and unmeasured.

    {device: {"cuts": {"w4a16 4096x14336": [{"most": rows, "config": {..}}, ..], ..}, "from": {"widened": rows, ..}}}

Torch-free and Triton-free: integers in, integers out.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Kind = Literal["w4a16", "w4a8", "p4a8", "w8a16", "w8a8", "b8a16", "b8a8"]
"""Kinds of products. The last two are 8 bits with scales of blocks."""

Way = Literal["widened", "scaled_mm", "scaled_mm_blocks"]
"""Alternatives to these kernels.

They are 4-bit weights widened once and left to torch, and torch's own products of float8, with a scale for each row and
output, and with scales of blocks.
"""

NEVER = 1 << 30  # rows
FROM: Mapping[Way, int] = {"widened": 1024, "scaled_mm": 64, "scaled_mm_blocks": NEVER}
"""Rows from which on a way is taken where nothing was measured."""

STEP = 128  # columns that a step of a program multiplies
FEW = 16  # rows: one tile of the smallest size
WAVES = 7  # programs for each multiprocessor, so that some load while others wait for their sums
LEAST = 8  # fewest steps of `STEP` columns that each split of a product gets


@dataclass(frozen=True, slots=True)
class Config:
    """A cut of a product: a program makes `outputs` x `rows` numbers, `splits` programs share their columns."""

    outputs: int
    rows: int
    splits: int = 1
    warps: int = 4
    stages: int = 4


def config(kind: Kind, rows: int, outputs: int, columns: int, processors: int, device: str = "") -> Config:
    """Return the cut for `rows` rows times a weight [outputs, columns] on a device of so many multiprocessors."""
    for entry in tables().get(device, {}).get("cuts", {}).get(f"{kind} {outputs}x{columns}", ()):
        if rows <= entry["most"]:
            return Config(**entry["config"])
    return rule(kind, rows, outputs, columns, processors)


def rows_from(way: Way, device: str = "") -> int:
    """Return the rows from which on a product takes a way."""
    rows: int = tables().get(device, {}).get("from", {}).get(way, FROM[way])
    return rows


def rule(kind: Kind, rows: int, outputs: int, columns: int, processors: int) -> Config:
    """Return the cut that arithmetic suggests."""
    if rows > 64:
        # Sums of blocks are held twice, and a larger tile of them spills.
        narrow = kind in ("b8a16", "b8a8") or (kind in ("w4a16", "w4a8", "p4a8") and rows <= 256)
        return Config(128, 64 if narrow else 128, 1, 8, 3)
    steps, splits = -(-columns // STEP), 1
    while -(-outputs // 64) * splits * 2 <= processors * WAVES and steps >= 2 * LEAST * splits:
        splits *= 2  # a power of two, so that few kernels are compiled
    if rows <= FEW:
        return Config(64, FEW, splits, 4, 3)
    return Config(64, 32 if rows <= 32 else 64, splits, 4, 4)


@functools.cache
def tables() -> Mapping[str, Mapping[str, Any]]:
    """Return what was measured, by device, as drawn above; entries are by rows."""
    found: Mapping[str, Mapping[str, Any]] = json.loads(Path(__file__).with_name("tuned.json").read_bytes())
    return found
