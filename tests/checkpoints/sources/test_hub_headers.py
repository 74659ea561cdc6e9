"""Headers of a model on the Hub, from a loopback server that speaks its API: few bytes, and the same plan."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from huggingface_hub import constants

from attar.checkpoints.convert.run import convert
from attar.checkpoints.sources import hub_headers
from attar.checkpoints.sources.hub import HubName
from attar.checkpoints.sources.hub_headers import MOST_GGUF, MOST_SAFETENSORS
from attar.checkpoints.sources.opening import stored
from attar.evaluation.planning import questions
from tests.checkpoints.sources.loopback_hub import Hub, files
from tests.engine.images import models
from tests.errors import user_error

HOLE = 3_000_000_000  # bytes of a file that the server pretends to have


def test_a_plan_needs_the_headers_alone(hub: Hub, demo: Path) -> None:
    hub.repos["org/demo"] = files(demo)
    found = questions.subject("org/demo")
    assert (found.config, found.storage) == stored(demo)
    assert hub.sent < MOST_SAFETENSORS
    assert hub.sent < sum(map(len, hub.repos["org/demo"].values())) / 10


def test_several_files_have_an_index_of_their_headers(hub: Hub, demo: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(demo / "model.safetensors")
    names = sorted(tensors)
    for number, part in ((1, names[::2]), (2, names[1::2])):
        save_file({name: tensors[name] for name in part}, tmp_path / f"model-{number:05}-of-00002.safetensors")
    (tmp_path / "config.json").write_bytes((demo / "config.json").read_bytes())
    hub.repos["org/two"] = files(tmp_path)
    found = questions.subject("org/two@main")
    assert (found.config, found.storage) == stored(demo)


def test_a_file_of_any_size_costs_its_header(hub: Hub, tmp_path: Path) -> None:
    """A weight file of 3 GB is a hole here: neither network nor disk has its data."""
    header = json.dumps({"a": {"dtype": "BF16", "shape": [HOLE // 2], "data_offsets": [0, HOLE]}}).encode()
    hub.padding = HOLE
    hub.repos["org/large"] = {
        "config.json": b"{}", "model.safetensors": len(header).to_bytes(8, "little") + header,
    }  # fmt: skip
    (tmp_path / "place").mkdir()
    hub_headers.fetch(HubName("org/large"), tmp_path / "place")
    made = (tmp_path / "place/model.safetensors").stat()
    assert made.st_size == 8 + len(header) + HOLE
    assert made.st_blocks * 512 < 100_000
    assert hub.sent < 1000


def test_a_gguf_file_by_its_name(hub: Hub, demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    convert(demo, tmp_path / "demo.gguf", to="gguf")
    hub.repos["org/file"] = {"q/demo.gguf": (tmp_path / "demo.gguf").read_bytes()}
    monkeypatch.setattr(hub_headers, "FIRST_GGUF", 1000)
    for name in ("org/file/q/demo.gguf", "org/file"):
        hub.sent = 0
        found = questions.subject(name)
        assert (found.config, found.storage) == stored(tmp_path / "demo.gguf")
        assert hub.sent < MOST_GGUF
        assert hub.sent < len(hub.repos["org/file"]["q/demo.gguf"])


def test_a_model_in_parts_is_planned_by_the_headers_of_all(
    hub: Hub, demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = convert(demo, tmp_path / "demo.gguf", to="gguf", max_shard_bytes=2_000_000)
    hub.repos["org/parts"] = {f"q/{name}": text for name, text in files(tmp_path).items()}
    assert len(hub.repos["org/parts"]) > 2
    monkeypatch.setattr(hub_headers, "FIRST_GGUF", 1000)
    monkeypatch.setattr(hub_headers, "FIRST_PART", 100)
    for name in (f"org/parts/q/{made.path.name}", "org/parts"):
        hub.sent = 0
        found = questions.subject(name)
        assert (found.config, found.storage) == stored(made.path)
        assert hub.sent < sum(map(len, hub.repos["org/parts"].values())) / 2
    last = sorted(hub.repos["org/parts"])[-1]
    del hub.repos["org/parts"][last]
    with user_error("file_not_found", last):
        questions.subject("org/parts")


def test_a_vision_tower_is_counted_by_headers(hub: Hub, tmp_path: Path) -> None:
    """Of a folder with the settings of images, and of a GGUF file with its mmproj file."""
    path = tmp_path / "vision"
    models.save("smolvlm", path)
    convert(path, tmp_path / "a.gguf", to="gguf")
    hub.repos["org/vision"] = files(path)
    ggufs = {each.name: each.read_bytes() for each in tmp_path.glob("*.gguf")}
    assert set(ggufs) == {"a.gguf", "mmproj-a.gguf"}
    hub.repos["org/pair"] = {f"q/{name}": data for name, data in ggufs.items()}
    for name, local in (("org/vision", path), ("org/pair", tmp_path / "a.gguf"), ("org/pair/q/a.gguf", path)):
        found, whole = questions.subject(name), questions.subject(str(local))
        assert found.tower is not None
        assert whole.tower is not None
        assert found.tower.bytes(False) == whole.tower.bytes(False)
        assert found.images is not None
    assert questions.subject("org/vision") == replace(questions.subject(str(path)), name="org/vision")


def test_headers_past_the_limit_are_refused(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    length = MOST_SAFETENSORS - 100
    hub.repos["org/much"] = {"config.json": b"{}" + b" " * 200, "model.safetensors": length.to_bytes(8, "little")}
    hub.padding = HOLE
    with user_error("file_too_large"):
        questions.subject("org/much")
    monkeypatch.setattr(hub_headers, "FIRST_GGUF", 100)
    monkeypatch.setattr(hub_headers, "MOST_GGUF", 1000)
    strings = b"GGUF" + (3).to_bytes(4, "little") + (1).to_bytes(8, "little") + (1).to_bytes(8, "little")
    key = (1).to_bytes(8, "little") + b"k" + (8).to_bytes(4, "little") + (5000).to_bytes(8, "little")
    hub.repos["org/long"] = {"a.gguf": strings + key + b"x" * 20_000}
    with user_error("file_too_large"):
        questions.subject("org/long")
    assert hub.sent < MOST_SAFETENSORS


@pytest.mark.parametrize(
    ("first", "code"),
    [
        (b"", "checkpoint_malformed"),
        (b"\xff" * 8, "checkpoint_malformed"),
        ((10).to_bytes(8, "little") + b"[1, 2, 3, ", "file_wrong_kind"),
        ((10).to_bytes(8, "little") + b'{"a": 1}  ', "checkpoint_malformed"),
    ],
)
def test_a_malformed_header_is_named(hub: Hub, first: bytes, code: str) -> None:
    hub.repos["org/bad"] = {"config.json": b"{}", "model.safetensors": first}
    hub.padding = 100
    with user_error(code, "org/bad", "model.safetensors"):
        questions.subject("org/bad")


def test_a_server_without_ranges_is_named(hub: Hub, demo: Path) -> None:
    hub.repos["org/demo"], hub.ranges = files(demo), False
    with user_error("download_failed"):
        questions.subject("org/demo")


def test_what_the_hub_does_not_have_is_named(hub: Hub, tmp_path: Path) -> None:
    with user_error("file_not_found"):
        questions.subject("org/none")
    hub.repos["org/some"] = {"a.gguf": b"", "b.gguf": b""}
    with user_error("file_not_found"):
        questions.subject("org/some/c.gguf")
    (tmp_path / "org" / "some").mkdir(parents=True)
    sent = hub.sent
    with user_error("file_not_found", "no such file"):
        questions.subject("org/some/c.gguf")
    assert hub.sent == sent, "a file of a folder that is here is no model of the Hub"
    (tmp_path / "org" / "some").rmdir()
    with user_error("checkpoint_incomplete") as named:
        questions.subject("org/some")
    assert "org/some/a.gguf" in str(named.value)
    hub.status = 500
    with user_error("download_failed"):
        questions.subject("org/some")


def test_offline_is_an_error_that_says_so(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with user_error("download_failed") as named:
        questions.subject("org/demo")
    assert "HF_HUB_OFFLINE" in str(named.value)
    assert hub.sent == 0


def test_a_hub_that_cannot_be_reached_is_named(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    with user_error("download_failed"):
        questions.subject("org/demo")


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("org/name", ("org/name", None, None)), ("org/name@v1", ("org/name", None, "v1")),
        ("org/name/a/b.gguf@v1", ("org/name", "a/b.gguf", "v1")), ("demo", None), ("./org/name", None),
        ("org/../x.gguf", None), ("org/name.gguf@v1", ("org/name.gguf", None, "v1")),
        ("org/name.gguf/b.gguf", ("org/name.gguf", "b.gguf", None)), ("org/name//tmp/x.gguf", None),
        ("org/name/./x.gguf", None), ("org/name/a/../x.gguf", None), ("/a/b", None), ("org/name/x.safetensors", None),
    ],
)  # fmt: skip
def test_names(name: str, parts: tuple[str | None, ...] | None) -> None:
    found = HubName.parse(name)
    assert (None if found is None else (found.repo, found.file, found.revision)) == parts
