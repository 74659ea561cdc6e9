"""Seconds by stage."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from attar.compression.runs.pipeline import compress
from attar.compression.stages import Stages


def test_a_stage_counts_without_those_within_it(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks: Iterator[float] = iter((0.0, 1.0, 4.0, 4.5, 5.5, 10.0, 20.0, 22.0))
    monkeypatch.setattr(time, "monotonic", lambda: next(ticks))
    stages = Stages()
    with stages.timed("solve"):
        for _ in range(2):
            with stages.timed("inputs"):
                pass
    with stages.timed("write"):
        pass
    assert stages.seconds == {"inputs": 4.0, "solve": 6.0, "write": 2.0}


def test_a_compression_tells_the_seconds_of_a_block(tiny: Path, calibration: list[list[int]], tmp_path: Path) -> None:
    done = compress(tiny, tmp_path / "out", recipe="gptq-w4g32", calibration=calibration)
    found = done.to_dict()["block_seconds"]
    assert set(found) == {"read", "inputs", "solve", "write", "outputs", "probes"}
    assert 0 < sum(found.values()) < done.seconds
