"""Fingerprints: what tells that a model's files are others than they were, and what may change beside them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import msgspec
import pytest

from attar.checkpoints.fingerprints import PIECE, content_hashes, fingerprints, require_unchanged
from attar.protocol.settings import Settings
from tests.errors import user_error


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(bytes(range(251)) * 2000)
    return folder


def made(model: Path) -> Settings:
    plain = Settings(str(model), "", verify=False, context=64, max_running=2)
    return msgspec.structs.replace(plain, files=fingerprints(plain.folders))


def retrain(file: Path, at: int) -> None:
    """Change one byte, and nothing that the file system would tell of it."""
    before, data = file.stat(), bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_a_model_is_known_by_size_date_and_content(model: Path) -> None:
    weights = model / "model.safetensors"
    first = fingerprints([str(model)])
    assert list(first) == [str(model / "config.json"), str(weights)]
    size = weights.stat().st_size
    for at in (PIECE - 1, size // 2 + PIECE, 3 * (size // 4) + PIECE // 2):  # the quarters begin within these pieces
        retrain(weights, at)
    assert fingerprints([str(model)]) != first
    again = fingerprints([str(model)])
    os.utime(weights, ns=(0, 0))
    assert fingerprints([str(model)]) != again
    weights.write_bytes(weights.read_bytes() + b"\0")
    assert fingerprints([str(weights)]).keys() == {str(weights)}
    with pytest.raises(FileNotFoundError):
        fingerprints([str(model / "gone.gguf")])


def test_a_copy_in_another_folder_has_the_same_content(model: Path, tmp_path: Path) -> None:
    copy = tmp_path / "elsewhere" / "copy"
    shutil.copytree(model, copy, copy_function=shutil.copyfile)
    os.utime(copy / "model.safetensors", ns=(0, 0))
    (copy / "README.md").write_text("no engine reads this")
    first = content_hashes([str(model)])
    assert content_hashes([str(copy), str(model)]) == first * 2
    weights = copy / "model.safetensors"
    for at in range(0, weights.stat().st_size, PIECE // 3):  # the sampled pieces and all between
        retrain(weights, at)
        assert content_hashes([str(copy)]) != first
        retrain(weights, at)
    assert content_hashes([str(copy)]) == first
    (copy / "config.json").rename(copy / "other_config.json")
    assert content_hashes([str(copy)]) != first


def test_a_gguf_file_may_have_another_name(model: Path, tmp_path: Path) -> None:
    one, other = tmp_path / "one.gguf", tmp_path / "other.gguf"
    for each in (one, other):
        each.write_bytes((model / "model.safetensors").read_bytes())
    assert content_hashes([str(one)]) == content_hashes([str(other)])


def test_what_else_lies_beside_a_model_may_change(model: Path) -> None:
    asked = made(model)
    (model / "evaluation.json").write_text("{}")
    (model / "README.md").write_text("new")
    (model / "chat_template.jinja").write_text("the server's affair")
    require_unchanged(asked.files, asked.folders)
    (model / "tokenizer.json").write_text("{}")
    (model / "config.json").unlink()
    with user_error("checkpoint_changed", "config.json"):
        require_unchanged(asked.files, asked.folders)


def test_adapters_are_part_of_it(model: Path, tmp_path: Path) -> None:
    (tmp_path / "tone").mkdir()
    (tmp_path / "tone" / "adapter_config.json").write_text("{}")
    plain = Settings(str(model), "", adapters=(("tone", str(tmp_path / "tone")),))
    asked = msgspec.structs.replace(plain, files=fingerprints(plain.folders))
    (tmp_path / "tone" / "adapter_config.json").write_text("{ }")
    with user_error("checkpoint_changed"):
        require_unchanged(asked.files, asked.folders)


def test_the_vision_tower_beside_a_gguf_file_counts(tmp_path: Path) -> None:
    file, tower = tmp_path / "one.gguf", tmp_path / "mmproj-one.gguf"
    file.write_bytes(b"model")
    without, alone = content_hashes([str(file)]), fingerprints([str(file)])
    tower.write_bytes(b"tower")
    assert content_hashes([str(file)]) != without
    assert fingerprints([str(file)]).keys() == alone.keys() | {str(tower)}
    (tmp_path / "mmproj-two.gguf").write_bytes(b"another's")
    assert fingerprints([str(file)]).keys() == alone.keys() | {str(tower)}
