"""What a plan by goals reads: a header is enough, receipts count, and rates are kept."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import pytest

from attar import env
from attar.checkpoints.convert.run import convert
from attar.checkpoints.gguf import mmproj
from attar.checkpoints.gguf.file import GgufFile
from attar.checkpoints.sources.opening import stored
from attar.engine import deployment
from attar.evaluation.planning import machine_rates, questions
from attar.images.settings import ImageSettings
from attar.plan.rates import store
from attar.plan.rates.profile import MachineProfile, Rate
from attar.plan.vision import AMX
from attar.protocol.settings import Settings
from tests.engine.images import models
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


def test_settings_of_images_beside_a_config(tmp_path: Path) -> None:
    """A config.json has those of the files beside it; by itself, and under another name, it has none."""
    models.save("smolvlm", tmp_path / "whole")
    for name in ("config.json", "preprocessor_config.json"):
        (tmp_path / name).write_bytes((tmp_path / "whole" / name).read_bytes())
    found = questions.subject(str(tmp_path / "config.json"))
    assert found.images == questions.subject(str(tmp_path / "whole")).images
    assert isinstance(found.images, ImageSettings)
    (tmp_path / "other.json").write_bytes((tmp_path / "config.json").read_bytes())
    assert questions.subject(str(tmp_path / "other.json")).images is None
    given = json.loads((tmp_path / "preprocessor_config.json").read_text())
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({**given, "do_resize": False}))
    wrong = questions.subject(str(tmp_path))
    assert isinstance(wrong.images, str)
    with user_error("feature_unsupported", "do_resize"):
        deployment.image_load(Settings("m", "m"), wrong, 1, (64, 64))


def test_why_a_checkpoint_takes_no_images_is_said(tmp_path: Path) -> None:
    """The server takes none either: from a folder without settings of images, and beside a damaged mmproj file."""
    models.save("smolvlm", tmp_path / "whole")
    convert(tmp_path / "whole", tmp_path / "out.gguf", to="gguf")
    (tmp_path / "whole" / "preprocessor_config.json").unlink()
    file = mmproj.path_of(tmp_path / "out.gguf")
    file.write_bytes(b"XXXX" + file.read_bytes()[4:])
    for name, word in (("whole", "preprocessor_config.json"), ("out.gguf", file.name)):
        found = questions.subject(str(tmp_path / name))
        assert isinstance(found.images, str)
        with user_error("feature_unsupported", word):
            deployment.image_load(Settings("m", "m"), found, 1, (64, 64))
    text = replace(found, images=None)
    with user_error("feature_unsupported", "no vision tower"):
        deployment.image_load(Settings("m", "m"), text, 1, (64, 64))


def test_the_rate_of_tiles_is_measured_once_where_it_is_needed(
    here: MachineProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = list[Rate | None]()

    def measured() -> Rate:
        made.append(Rate(1e12))
        return Rate(1e12)

    monkeypatch.setattr(machine_rates, "bf16_tiles", measured)
    monkeypatch.setattr(machine_rates, "measure", lambda: replace(here, isa=AMX))
    assert questions.rates(None, ["bf16"], lambda _: None).profile.bf16_tiles is None
    told = list[str]()
    monkeypatch.setattr(deployment, "has_amx", lambda: False)
    assert questions.rates(None, ["bf16"], told.append, amx=True).profile.bf16_tiles is None
    assert not made, "towers are computed without AMX here"
    monkeypatch.setattr(deployment, "has_amx", lambda: True)
    for _ in range(2):
        assert questions.rates(None, ["bf16"], told.append, amx=True).profile.bf16_tiles == Rate(1e12)
    assert len(made) == len(told) == 1
    assert "bfloat16" in told[0]


def test_other_processors_have_no_rate_of_tiles(here: MachineProfile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_rates, "bf16_tiles", lambda: pytest.fail("measured"))
    monkeypatch.setattr(machine_rates, "measure", lambda: here)
    for _ in range(2):
        assert questions.rates(None, ["bf16"], lambda _: None, amx=True).profile.bf16_tiles is None
