"""GGUF files by their names on the Hub: a download has the parts and the mmproj file, and a plan their headers."""

from __future__ import annotations

import logging
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from huggingface_hub import constants

from attar.checkpoints.convert.run import convert
from attar.checkpoints.receipts.place import receipt_path
from attar.checkpoints.sources import hub as names
from attar.checkpoints.sources import hub_headers
from attar.checkpoints.sources.vision import image_settings, load_vision
from attar.checkpoints.vocabulary import tokenizer
from attar.evaluation.planning import questions
from tests.checkpoints.sources.loopback_hub import Hub, files
from tests.engine.images import models
from tests.errors import user_error


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's file with its mmproj file beside it."""
    place = tmp_path_factory.mktemp("pair")
    models.save("smolvlm", place / "source")
    convert(place / "source", place / "pair" / "model.gguf", to="gguf")
    return place / "pair" / "model.gguf"


def test_a_file_brings_its_mmproj_file_alone(pair: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    ours = {f"q/{name}": text for name, text in files(pair.parent).items()}
    assert set(ours) == {"q/model.gguf", "q/mmproj-model.gguf"}
    ours["q/model.gguf.receipt.json"] = b"{}"
    more = {"q/mmproj-other.gguf": b"x", "mmproj-model.gguf": b"x", "q/other.gguf": b"x", "README.md": b"x"}
    hub.repos["org/see"] = ours | more
    found = names.resolve("org/see/q/model.gguf")
    assert found.name == "model.gguf"
    assert sorted(hub.whole) == sorted(ours)
    assert receipt_path(found).is_file()
    assert found.is_symlink(), "the cache has links to blobs"
    assert image_settings(found) == image_settings(pair)
    assert load_vision(found, torch.float32) is not None
    assert tokenizer(found).vocab_size == tokenizer(pair).vocab_size
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert names.resolve("org/see/q/model.gguf") == found
    assert names.resolve("org/see/q/model.gguf@main", offline=True) == found
    receipt_path(found).unlink()
    assert names.resolve("org/see/q/model.gguf") == found, "nothing but `attar verify` needs it"


def test_a_name_that_does_not_match_is_not_taken_and_named(
    pair: Path, hub: Hub, caplog: pytest.LogCaptureFixture
) -> None:
    hub.repos["org/see"] = {
        "model.gguf": pair.read_bytes(), "mmproj-a.gguf": b"x", "mmproj-b\x1b[2J.gguf": b"x",
        **{f"mmproj-{each}.gguf": b"x" for each in "cdef"},
    }  # fmt: skip
    with caplog.at_level(logging.WARNING):
        found = names.resolve("org/see/model.gguf")
    assert hub.whole == ["model.gguf"]
    for word in ("mmproj-a.gguf", "mmproj-b?[2J.gguf", "mmproj-c.gguf and 3 more", "mmproj-model.gguf"):
        assert word in caplog.text
    assert "mmproj-d.gguf" not in caplog.text
    with user_error("feature_unsupported", "mmproj-model.gguf"):
        image_settings(found)


def test_a_text_model_is_downloaded_without_a_word(pair: Path, hub: Hub, caplog: pytest.LogCaptureFixture) -> None:
    hub.repos["org/text"] = {"model.gguf": pair.read_bytes()}
    with caplog.at_level(logging.WARNING):
        names.resolve("org/text/model.gguf")
    assert not caplog.records


def test_parts_are_downloaded_together(demo: Path, hub: Hub, tmp_path: Path) -> None:
    done = convert(demo, tmp_path / "parts" / "demo.gguf", to="gguf", max_shard_bytes=4_000_000)
    hub.repos["org/parts"] = files(tmp_path / "parts")
    assert len(hub.repos["org/parts"]) > 1
    found = names.resolve(f"org/parts/{done.path.name}")
    assert tokenizer(found).vocab_size == tokenizer(demo).vocab_size
    assert sorted(hub.whole) == sorted(hub.repos["org/parts"])
    missing = sorted(hub.repos["org/parts"])[-1]
    hub.repos["org/less"] = {name: text for name, text in hub.repos["org/parts"].items() if name != missing}
    with user_error("file_not_found", missing):
        names.resolve(f"org/less/{done.path.name}")


def test_what_is_not_there_is_named(pair: Path, hub: Hub, tmp_path: Path) -> None:
    hub.repos["org/see"] = {"model.gguf": pair.read_bytes()}
    with user_error("file_not_found", "other.gguf"):
        names.resolve("org/see/other.gguf")
    with user_error("checkpoint_incomplete", "org/see/FILE.gguf"):
        names.resolve("org/see")
    with user_error("file_not_found"):
        names.resolve("org/see/model.gguf", offline=True)
    (tmp_path / "org" / "see").mkdir(parents=True)
    sent = hub.sent
    with user_error("file_not_found", "no such file"):
        names.resolve("org/see/model.gguf")
    assert hub.sent == sent, "a file of a folder that is here is no model of the Hub"


def test_a_plan_counts_the_tower_by_headers_alone(pair: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repos["org/see"] = files(pair.parent)
    monkeypatch.setattr(hub_headers, "FIRST_GGUF", 1000)
    found, local = questions.subject("org/see/model.gguf"), questions.subject(str(pair))
    assert found.tower is not None
    assert found.tower.bytes(False) > 0
    assert replace(found, name=local.name) == local
    assert not hub.whole
    assert hub.sent < sum(map(len, hub.repos["org/see"].values())) / 2
    names.resolve("org/see/model.gguf")
    sent = hub.sent
    again = questions.subject("org/see/model.gguf")
    assert replace(again, name=local.name) == local
    assert hub.sent == sent, "what the cache has is asked of no server"


@pytest.mark.parametrize("listed", [True, False])
def test_a_plan_of_a_file_that_is_cached_without_its_mmproj_file(
    listed: bool, pair: Path, hub: Hub, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repos["org/see"] = files(pair.parent)
    found = names.resolve("org/see/model.gguf")
    (found.parent / "mmproj-model.gguf").unlink()  # as `hf download org/see model.gguf` leaves it
    if not listed:
        shutil.rmtree(found.parents[2] / "trees", ignore_errors=True)
    hub.sent = 0
    assert questions.subject("org/see/model.gguf").tower is not None
    assert hub.sent > 0
    sent = hub.sent
    with monkeypatch.context() as offline, caplog.at_level(logging.WARNING):
        offline.setattr(constants, "HF_HUB_OFFLINE", True)
        assert questions.subject("org/see/model.gguf").tower is None
        if listed:
            with user_error("file_not_found", "`hf download org/see mmproj-model.gguf`"):
                names.resolve("org/see/model.gguf")
    assert hub.sent == sent
    assert "without images" in caplog.text
    shutil.rmtree(found.parents[2] / "trees", ignore_errors=True)
    del hub.repos["org/see"]["mmproj-model.gguf"]
    assert questions.subject("org/see/model.gguf").tower is None
    assert not [name for name in hub.whole if name.startswith("mmproj")][1:], "only `resolve` fetched it"


def test_a_plan_of_a_damaged_file_in_the_cache_says_so(pair: Path, hub: Hub) -> None:
    hub.repos["org/see"] = files(pair.parent)
    found = names.resolve("org/see/model.gguf")
    found.unlink()
    found.write_bytes(b"GGML" + pair.read_bytes()[4:])
    sent = hub.sent
    with user_error("file_wrong_kind", "model.gguf"):
        questions.subject("org/see/model.gguf")
    assert hub.sent == sent
