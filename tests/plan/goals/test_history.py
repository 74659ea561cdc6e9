"""The record of predictions: what was measured widens the next plan's ranges, and a bad file costs a warning."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attar.plan.goals import search
from attar.plan.goals.cells import Cell, widened
from attar.plan.goals.history import ENOUGH, MAX_BYTES, MOST, History
from attar.plan.goals.search import Configuration, Workload
from tests.plan.goals.test_search import question
from tests.pretend_rates import PROFILE

KEY = PROFILE.key
WORK = Workload(1, 96, 32)
PLAIN = search.search(question("kl<=1")).all


def pairs(factor: float, count: int = ENOUGH) -> list[tuple[Configuration, Configuration]]:
    """Return configurations whose measurements were larger than predicted by a factor."""
    found = []
    for each in PLAIN[:count]:
        cells = {
            name: Cell(factor * c.value, factor * c.value, factor * c.value, "measured")
            for name, c in each.cells.items()
        }
        found.append((each, replace(each, cells=cells, tried=True)))
    return found


def history(folder: Path) -> History:
    found = History(folder / "attar", KEY)
    assert found.problem is None
    return found


def test_past_errors_are_kept_and_widen_ranges(tmp_path: Path) -> None:
    past = history(tmp_path)
    assert past.sentence() is None
    assert past.factors() == {}
    past.add("m", WORK, pairs(1.5))
    again = history(tmp_path)
    assert again.factors()["tpot_p95"] == pytest.approx(1.5)
    assert "tpot_p95 50% in 3" in str(again.sentence())
    wide = search.search(question("kl<=1", factors=again.factors())).all
    for a, b in zip(PLAIN, wide, strict=True):
        assert b.cells["tpot_p50"].high == pytest.approx(max(a.cells["tpot_p50"].high, 1.5 * a.cells["tpot_p50"].value))
        assert b.cells["memory"] == a.cells["memory"]
        assert b.cells["tpot_p95"].value == a.cells["tpot_p95"].value


def test_few_measurements_widen_nothing(tmp_path: Path) -> None:
    past = history(tmp_path)
    past.add("m", WORK, pairs(3.0, ENOUGH - 1))
    assert "tpot_p95" not in past.factors()
    assert past.sentence() is not None


def test_a_repeated_measurement_counts_once(tmp_path: Path) -> None:
    past = history(tmp_path)
    for factor in (3.0, 1.5):
        past.add("m", WORK, pairs(factor))
    assert len(past.errors("tpot_p95")) == ENOUGH
    assert past.factors()["tpot_p95"] == pytest.approx(1.5)


def test_times_are_of_their_machine_and_divergences_of_all(tmp_path: Path) -> None:
    history(tmp_path).add("m", WORK, pairs(1.5, 4))
    other = History(tmp_path / "attar", replace(KEY, threads=KEY.threads + 1))
    assert other.errors("tpot_p95") == []
    assert other.errors("kl")


def test_the_record_is_bounded(tmp_path: Path) -> None:
    past, found = history(tmp_path), pairs(1.1, 3)
    for number in range(MOST // 8):
        past.add(f"m{number}" + "x" * 500, WORK, found)
    saved = json.loads(past.path.read_bytes())
    assert len(saved["entries"]) == MOST
    assert saved["entries"][-1]["of"].startswith(f"m{MOST // 8 - 1}")
    assert history(tmp_path).problem is None, "what is written can be read"


@pytest.mark.parametrize(
    "text",
    [b"", b"{", b"[]", b'{"entries": 3, "format": 1}', b"[" * 100_000, b'{"entries": [], "format": 2}',
     b"x" * (MAX_BYTES + 1),
     b'{"format":1,"entries":[{"machine":"a","of":"b","quantity":"kl","predicted":0,"measured":1}]}',
     b'{"format":1,"entries":[{"machine":"a","of":"b","quantity":"kl","predicted":1e999,"measured":1}]}'],
)  # fmt: skip
def test_a_damaged_record_is_a_problem(tmp_path: Path, text: bytes) -> None:
    history(tmp_path).add("m", WORK, pairs(1.5))
    path = tmp_path / "attar/history.json"
    path.write_bytes(text)
    found = History(tmp_path / "attar", KEY)
    assert found.problem is not None
    assert found.factors() == {}
    found.add("m", WORK, pairs(1.5))
    assert path.read_bytes() == text, "a file that is not understood stays"


def test_a_folder_that_others_may_enter_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "attar").mkdir()
    (tmp_path / "attar").chmod(0o755)
    found = History(tmp_path / "attar", KEY)
    assert found.problem is not None
    os.symlink("/etc/passwd", tmp_path / "link")
    (tmp_path / "attar").chmod(0o700)
    os.symlink("/etc/passwd", tmp_path / "attar/history.json")
    assert History(tmp_path / "attar", KEY).problem is not None


@given(st.floats(1, 100), st.floats(0.001, 10), st.floats(1, 3))
def test_widened_ranges_hold_value_and_old_range(factor: float, value: float, near: float) -> None:
    cell = Cell(value, value / near, value * near, "fitted")
    found = widened({"ttft_p50": cell}, {"ttft_p95": factor})["ttft_p50"]
    assert found.low <= cell.low <= found.value <= cell.high <= found.high
    assert found.high >= value * factor * (1 - 1e-12)
