"""A machine profile with plain numbers, for tests that need rates and measure nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from attar.plan.rates.profile import AttentionCost, MachineKey, MachineProfile, Overheads, ProductCurve, Rate

BANDWIDTH, INT8, FLOATS = 20e9, 400e9, 100e9
ROWS = (1, 2, 4, 8, 16, 64, 512)


def curve(size: float, rate: float) -> ProductCurve:
    """Return a curve of `size` bytes a weight at full bandwidth and rate."""
    return ProductCurve(size, ROWS, tuple(size / BANDWIDTH + 2 * rows / rate for rows in ROWS), 0.02)


PROFILE = MachineProfile(
    MachineKey("a machine", 2, 2, "highest", "0"), "avx512", "2026-11-27T12:00:00Z", Rate(BANDWIDTH, 0.02),
    Rate(INT8, 0.01), None, Rate(FLOATS, 0.01),
    {"bf16": curve(2.0, FLOATS), "w8a8": curve(1.0, INT8), "w4g128": curve(0.5156, INT8 / 2)},
    {
        name: AttentionCost.linear(size / BANDWIDTH, 4 / FLOATS, 2 / FLOATS, 0.02)
        for name, size in (("float32", 4.0), ("bfloat16", 2.0), ("int8", 1.0625))
    },
    Overheads(1e-4, 2e-6, 1e-9, 1e-10), 20.0,
)  # fmt: skip


def profile(**changes: Any) -> MachineProfile:
    """Return the profile with other fields."""
    return replace(PROFILE, **changes)
