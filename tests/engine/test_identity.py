"""What engines compare before they exchange blocks or continue each other's answers."""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec
import pytest

from attar.checkpoints.fingerprints import content_hashes, fingerprints
from attar.engine.identity import bits_of, model_of, settings_of
from attar.engine.loader import LoadedModel, load_model
from attar.protocol.settings import Settings


def started(folder: Path, adapter: Path, **more: object) -> Settings:
    """The settings of a host with its model and its adapter in these folders."""
    plain = Settings(str(folder), "", adapters=(("tone", str(adapter)),), **more)
    return msgspec.structs.replace(plain, files=fingerprints(plain.folders), contents=content_hashes(plain.folders))


@pytest.fixture
def two(tmp_path: Path) -> tuple[Settings, Settings]:
    """Two hosts with copies of the same files."""
    hosts = tmp_path / "one", tmp_path / "other" / "place"
    for at, host in enumerate(hosts):
        for name, text in (("model", "{}"), ("adapter", "[]")):
            folder = host / f"{name}{at}"
            folder.mkdir(parents=True)
            (folder / "config.json").write_text(text)
    first, second = (started(host / f"model{at}", host / f"adapter{at}") for at, host in enumerate(hosts))
    return first, second


@pytest.fixture(scope="module")
def loaded(demo: Path) -> LoadedModel:
    return load_model(demo, verify=False)


def test_copies_in_other_folders_are_the_same_model(two: tuple[Settings, Settings], loaded: LoadedModel) -> None:
    one, other = two
    assert model_of(one) == model_of(other)
    assert settings_of(one) == settings_of(other)
    assert bits_of(one, loaded) == bits_of(other, loaded)


def test_other_contents_are_another_model(two: tuple[Settings, Settings], loaded: LoadedModel) -> None:
    one, other = two
    for folder in (other.model, other.adapters[0][1]):
        (Path(folder) / "config.json").write_text("{} ")
        changed = started(Path(other.model), Path(other.adapters[0][1]))
        assert model_of(one) != model_of(changed)
        assert bits_of(one, loaded) != bits_of(changed, loaded)


def test_other_settings_are_told_apart(two: tuple[Settings, Settings], loaded: LoadedModel) -> None:
    one, _ = two
    for change in ({"kv": "int8"}, {"activations": "float32"}, {"context": 64}, {"sparse_attention": "topk:32"}):
        changed = msgspec.structs.replace(one, **change)
        assert settings_of(one) != settings_of(changed)
        assert bits_of(one, loaded) != bits_of(changed, loaded)


def test_a_draft_model_changes_answers_and_no_blocks(
    two: tuple[Settings, Settings], loaded: LoadedModel, tmp_path: Path
) -> None:
    one, _ = two
    shutil.copytree(one.model, tmp_path / "draft")
    plain = msgspec.structs.replace(one, draft=str(tmp_path / "draft"))
    drafting = msgspec.structs.replace(plain, contents=content_hashes(plain.folders))
    assert model_of(one) == model_of(drafting)
    assert bits_of(one, loaded) != bits_of(drafting, loaded)
