"""Rates of the lab's page: those of a kept profile, where there is one, and none that nothing measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from attar.kv.schemes import SCHEMES
from attar.lab.gather import CONTEXT, kept_rates
from attar.model import shapes
from attar.plan.comparison import Subject
from attar.plan.costs import Storage
from attar.plan.rates import store
from attar.plan.rates.profile import MachineProfile
from attar.plan.rates.step_time import StepModel
from tests.pretend_rates import PROFILE

CONFIG = shapes.shape("llama-3.2-1b")


def keep(monkeypatch: pytest.MonkeyPatch, kept: MachineProfile | None) -> None:
    monkeypatch.setattr(store.RatesStore, "find", lambda self, of: kept)


def test_a_kept_profile_gives_rates_and_seconds_by_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    keep(monkeypatch, PROFILE)
    storage = Storage.named("w4g128")
    found = kept_rates(Subject("m", CONFIG, storage), "bfloat16")
    assert found is not None
    assert found.read == PROFILE.bandwidth.value
    model = StepModel(CONFIG, storage, SCHEMES["bfloat16"], PROFILE)
    assert found.rows
    for rows, seconds in found.rows:
        assert seconds == model.decode(rows, CONTEXT).total
    assert all(0 < each <= 1 for each in found.reached)


def test_a_scheme_that_was_not_measured_has_no_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    keep(monkeypatch, PROFILE)
    found = kept_rates(Subject("m", CONFIG, Storage.named("w3g64")), "bfloat16")
    assert found is not None
    assert found.rows == ()


def test_without_a_profile_there_are_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("ATTAR_CACHE", raising=False)
    assert store.RatesStore(tmp_path / "none").find(store.key()) is None
    keep(monkeypatch, None)
    assert kept_rates(Subject("m", CONFIG, Storage.named("w4g128")), "bfloat16") is None
