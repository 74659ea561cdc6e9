"""How products are cut. Needs neither a GPU nor Triton."""

from __future__ import annotations

from typing import get_args

import pytest

from attar.kernels.triton import tuning

KINDS = get_args(tuning.Kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 16, 17, 33, 65, 257, 4096])
def test_the_rule_gives_every_program_work(kind: tuning.Kind, rows: int) -> None:
    for outputs in (64, 4096, 28672):
        for columns in (128, 4096, 14336):
            found = tuning.rule(kind, rows, outputs, columns, 132)
            assert found.splits & (found.splits - 1) == 0
            assert found.splits == 1 or columns // tuning.STEP >= tuning.LEAST * found.splits
            assert found.rows >= min(rows, tuning.FEW)


def test_few_outputs_are_shared_out_and_many_are_not() -> None:
    assert tuning.rule("w4a16", 1, 4096, 4096, 132).splits == 4
    assert tuning.rule("w4a16", 1, 28672, 4096, 132).splits == 2
    assert tuning.rule("w4a16", 1, 128256, 4096, 132).splits == 1
    assert tuning.rule("w4a16", 500, 4096, 4096, 132).splits == 1


def test_a_measured_device_has_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    best = {"outputs": 128, "rows": 16, "splits": 2, "warps": 8, "stages": 3}
    table = {"some card": {"cuts": {"w4a16 4096x4096": [{"most": 4, "config": best}]}, "from": {"widened": 300}}}
    monkeypatch.setattr(tuning, "tables", lambda: table)
    measured = tuning.config("w4a16", 4, 4096, 4096, 132, "some card")
    assert measured == tuning.Config(**best)
    for rows, device in ((5, "some card"), (4, "another")):
        assert tuning.config("w4a16", rows, 4096, 4096, 132, device) == tuning.rule("w4a16", rows, 4096, 4096, 132)
    assert tuning.rows_from("widened", "some card") == 300
    assert tuning.rows_from("widened", "another") == tuning.FROM["widened"]
    assert tuning.rows_from("scaled_mm", "some card") == tuning.FROM["scaled_mm"]


def test_what_is_measured_can_be_read() -> None:
    for device in tuning.tables().values():
        assert set(device) <= {"cuts", "from"}
        assert set(device.get("from", {})) <= set(tuning.FROM)
        for name, entries in device.get("cuts", {}).items():
            assert name.split()[0] in KINDS
            assert [entry["most"] for entry in entries] == sorted(entry["most"] for entry in entries)
            assert all(tuning.Config(**entry["config"]) for entry in entries)
