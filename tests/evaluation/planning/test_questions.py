"""What a plan by goals reads: a header is enough, receipts count, and rates are kept."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import pytest

from attar import env
from attar.checkpoints.convert.run import convert
from attar.checkpoints.gguf.file import GgufFile
from attar.checkpoints.sources.opening import stored
from attar.evaluation.planning import machine_rates, questions
from attar.plan.rates import store
from attar.plan.rates.profile import MachineProfile
from tests.errors import user_error
from tests.pretend_rates import curve, profile


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(env, "get", lambda: env.Env(cache=tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def here(kept: Path) -> MachineProfile:
    now = datetime.now(UTC).replace(microsecond=0).isoformat().replace("+00:00", "Z")
    return profile(key=store.key(), measured=now)


def test_the_header_of_a_gguf_file_is_enough(tmp_path: Path, demo: Path) -> None:
    whole, part = tmp_path / "whole.gguf", tmp_path / "part.gguf"
    convert(demo, whole, to="gguf")
    header = GgufFile(whole).header
    part.write_bytes(whole.read_bytes()[: header.data])
    found = questions.subject(str(part))
    assert (found.config, found.storage) == stored(whole)
    with user_error("checkpoint_incomplete"):
        stored(part)
    part.write_bytes(whole.read_bytes()[: header.data // 2])
    with user_error("checkpoint_incomplete"):
        questions.subject(str(part))


def test_a_folder_with_weights_is_read_as_it_is_stored(tiny: Path) -> None:
    found = questions.subject(str(tiny))
    assert (found.config, found.storage) == stored(tiny)


def test_kept_rates_are_used_and_extended(here: MachineProfile, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = list[str]()

    def product_curve(name: str, seconds: float = 0.0) -> object:
        measured.append(name)
        return curve(0.4, 1e11)

    monkeypatch.setattr(machine_rates, "product_curve", product_curve)
    monkeypatch.setattr(machine_rates, "measure", lambda: here)
    told = list[str]()
    first = questions.rates(None, ["bf16", "w3g128"], told.append)
    assert measured == ["w3g128"]
    again = questions.rates(None, ["bf16", "w3g128"], told.append)
    assert measured == ["w3g128"], "what was measured once is kept"
    assert again.profile == first.profile
    assert again.here


def test_rates_of_another_machine_are_said(tmp_path: Path, here: MachineProfile) -> None:
    from attar.plan.rates import profile as profiles

    path = tmp_path / "other.json"
    path.write_bytes(profiles.encode(profile()))
    found = questions.rates(path, ["w3g128"], lambda _: None)
    assert not found.here
    assert found.notes
    assert questions.memory(None, found.here)[0] is None
    assert questions.memory(10**9, found.here)[0] == 10**9
    path.write_bytes(profiles.encode(here))
    assert questions.rates(path, [], lambda _: None).here


def test_a_receipt_states_its_divergence(tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from attar.checkpoints.receipts import receipt

    values = {"kl_mean": 0.011, "top1": 0.92, "intervals": {"kl_mean": [0.010, 0.012]}}

    monkeypatch.setattr(receipt, "read_receipt", lambda _: SimpleNamespace(value={"evaluation": values}))
    found = questions.of_receipt(tiny)
    assert found is not None
    assert (found.kl, found.low, found.high, found.top1, found.evidence) == (0.011, 0.010, 0.012, 0.92, "measured")
    (own,) = questions.outputs([str(tiny)], stored(tiny)[0])
    assert own.path == str(tiny)
    values["kl_mean"] = None
    assert questions.of_receipt(tiny) is None
    with user_error("receipt_invalid"):
        questions.outputs([str(tiny)], stored(tiny)[0])


def test_an_output_of_another_shape_is_refused(tiny: Path, tmp_path: Path) -> None:
    config = json.loads((tiny / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": 7}))
    other = questions.subject(str(tmp_path / "config.json")).config
    with user_error("checkpoint_mismatch"):
        questions.outputs([str(tiny)], other)
