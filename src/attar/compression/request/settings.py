"""What holds for an output, and for each recipe and each choice of bits that is tried on the way to it."""

from __future__ import annotations

from dataclasses import dataclass

from attar.compression.calibration.texts import Amount
from attar.compression.runs.block_pass import Progress


@dataclass(frozen=True)
class Settings:
    amount: Amount  # of calibration text
    calib_memory: int  # bytes of calibration activations that are held in memory, at most
    max_shard_bytes: int
    overwrite: bool
    resume: bool
    report: Progress
    began: float  # when, by the monotonic clock
