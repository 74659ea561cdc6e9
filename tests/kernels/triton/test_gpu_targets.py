"""What figures of a GPU are held against, and how long measuring them may take. Needs neither a GPU nor Triton."""

from __future__ import annotations

import re
import time

import pytest
from gpu.budget import Budget, OutOfTime
from gpu.targets import TARGETS, held_against, line


def test_a_target_shows_the_worst_of_its_figures() -> None:
    names = ("qkv", "output", "gate and up", "down")
    rows = [
        {"work": f"w4g128 {name}, {rows} rows", "read": 0.5 + rows / 100 + len(name) / 1000}
        for name in names
        for rows in (1, 4, 16)
    ]
    other = [{"work": "w4g128 qkv, 4096 rows", "read": 0.1}, {"work": "w4g32-asym qkv, 1 rows", "read": 0.1}]
    table = {row["work"]: row for row in held_against([*rows, *other])}
    found = table["W4A16 linear, 1 to 16 rows"]
    assert (found["found"], found["of"], found["cases"]) == (0.513, "w4g128 qkv, 1 rows", "12 of 12")
    assert "worst: w4g128 qkv, 1 rows" in line(found)
    missing = table["FP8 linear, 4096 rows"]
    assert (missing["found"], missing["cases"]) == (None, "0 of 4")
    assert "not measured" in line(missing)


def test_of_times_the_longest_is_the_worst() -> None:
    rows = [{"work": "first token, empty Triton cache, w4g128", "seconds": seconds} for seconds in (3.0, 8.0)]
    found = next(row for row in held_against(rows) if row["work"] == "first token, empty Triton cache")
    assert found["found"] == 8.0


def test_four_bits_are_held_against_their_bytes() -> None:
    rows = [
        {"work": "decode bf16, batch 1, context 1024", "us": 4000.0, "read_bytes": 16.0},
        {"work": "decode w4g128, batch 1, context 1024", "us": 1250.0, "read_bytes": 4.0},
    ]
    assert held_against(rows)[-1]["found"] == pytest.approx(0.8)
    assert held_against(rows[:1])[-1]["found"] is None


def test_no_figure_belongs_to_two_targets_of_one_ratio() -> None:
    names = ["fp8 qkv, 4096 rows", "fp8-block qkv, 4096 rows", "w8a8 qkv, 4096 rows", "w4g128 qkv, 16 rows",
             "w4g128 qkv, 4096 rows", "decode w4g128, batch 1, context 1024", "decode fp8, batch 128, context 1024",
             "decode attention, 32 x 8192, int4", "prefill fp8 of 8192"]  # fmt: skip
    for name in names:
        assert len([target for target in TARGETS if re.match(target.figures, name)]) <= 1, name


def test_what_runs_too_long_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where failures are survived; and not before its time."""
    monkeypatch.setattr("gpu.budget.GRACE", 0.05)
    budget = Budget(0.0)
    assert budget.over()

    def endless() -> None:
        while True:
            try:
                time.sleep(0.01)
            except Exception:
                continue

    with pytest.raises(OutOfTime), budget.cut():
        endless()
    with Budget(1.0).cut():
        assert not Budget(1.0).over()
        assert not Budget(1.0).over(0.5)
