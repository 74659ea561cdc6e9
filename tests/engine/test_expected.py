"""Expected time of steps: the model of a plan, where rates of this machine are kept that describe the engine."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from msgspec.structs import replace as with_settings

from attar import env
from attar.engine.expected import step_model
from attar.kv.schemes import SCHEMES
from attar.model.shapes import shape
from attar.model.split import Share
from attar.plan.costs import Storage
from attar.plan.fit import Deployment
from attar.plan.rates import store
from attar.plan.rates.step_time import StepModel
from attar.protocol.settings import Settings
from tests.pretend_rates import profile

SETTINGS = Settings("", "")
HELD = Deployment(shape("llama-3.2-1b"), Storage.named("w4g128"), SCHEMES["int8"])
THREADS = 3


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of kept rates that has this machine's, of three threads."""
    at = tmp_path / "cache"
    monkeypatch.setattr(env, "get", lambda: env.Env(cache=at))
    now = datetime.now(UTC).replace(microsecond=0).isoformat().replace("+00:00", "Z")
    assert store.RatesStore(at).keep(profile(key=replace(store.key(), threads=THREADS), measured=now))
    return at


def test_kept_rates_give_the_model_of_a_plan(folder: Path) -> None:
    found = step_model(SETTINGS, HELD, THREADS)
    assert found is not None
    chunks = [(100, 1, 1), (7, 40, 0)]
    assert found.of(chunks) == StepModel(HELD.config, HELD.storage, HELD.kv, profile()).of(chunks)


def test_rates_of_other_threads_do_not_count(folder: Path) -> None:
    assert step_model(SETTINGS, HELD, THREADS + 1) is None


@pytest.mark.parametrize(
    "changes", [{"activations": "exact"}, {"sparse_attention": "topk:1/4"}, {"sparse_prefill": "skip:0.01"}]
)
def test_what_the_rates_do_not_describe_has_no_model(folder: Path, changes: dict[str, str]) -> None:
    assert step_model(with_settings(SETTINGS, **changes), HELD, THREADS) is None  # type: ignore[arg-type]


def test_several_processes_have_no_model(folder: Path) -> None:
    assert step_model(SETTINGS, replace(HELD, share=Share(0, 2)), THREADS) is None


def test_a_damaged_file_is_reported(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (file,) = folder.glob("rates-*.json")
    file.write_bytes(b"{")
    assert step_model(SETTINGS, HELD, THREADS) is None
    assert "expected_seconds" in caplog.text
