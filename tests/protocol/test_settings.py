"""What a model is called, and that an engine serves the one that its settings were made for."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from attar.engine import loader
from attar.protocol import settings
from attar.protocol.settings import CHANGED, PIECE, Settings, check_name, fingerprints, name_of


def test_a_folder_goes_by_its_own_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "small" / "inner").mkdir(parents=True)
    (tmp_path / "current").symlink_to("small")
    (tmp_path / "blob").touch()
    (tmp_path / "model.gguf").symlink_to("blob")  # as in the Hub's cache
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path / "small")
    for given in (".", "./", "../small", "inner/..", str(tmp_path / "small"), "~/small/"):
        assert name_of(given) == "small", given
    assert name_of("..") == tmp_path.name
    assert name_of("../current/") == "current"
    assert name_of("~/model.gguf") == "model.gguf"
    with pytest.raises(ValueError, match="/ has no name that requests could ask for: give it one with --name"):
        name_of("/")


def test_a_hub_id_is_a_name_unless_it_is_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for given in ("acme/tiny", "acme/tiny@v2", "demo"):
        assert name_of(given) == given
    (tmp_path / "acme" / "tiny").mkdir(parents=True)
    assert name_of("acme/tiny") == "tiny"


def test_names_that_requests_can_ask_for() -> None:
    for name in ("a", "acme/tiny@v1.2", "gpt-4o:mini", "x" * 256):
        assert check_name(name) == name
    for name in ("", " ", "a b", "/a", "-a", "a\n", "é", "x" * 257):
        with pytest.raises(ValueError, match="a model's name is of letters, digits and"):
            check_name(name)


@pytest.fixture
def model(tiny: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny, tmp_path / "model"))


def made(model: Path) -> Settings:
    plain = Settings(str(model), "", verify=False, context=64, max_running=2)
    return msgspec.structs.replace(plain, files=plain.fingerprints)


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


def test_what_else_lies_beside_a_model_may_change(model: Path) -> None:
    asked = made(model)
    (model / "evaluation.json").write_text("{}")
    (model / "README.md").write_text("new")
    (model / "chat_template.jinja").write_text("the server's affair")
    asked.require_unchanged()
    (model / "tokenizer.json").write_text("{}")
    (model / "config.json").unlink()
    with pytest.raises(ValueError, match=r"config\.json and 1 more changed on disk since .* start the server again"):
        asked.require_unchanged()


def test_adapters_are_part_of_it(model: Path, tmp_path: Path) -> None:
    (tmp_path / "tone").mkdir()
    (tmp_path / "tone" / "adapter_config.json").write_text("{}")
    plain = Settings(str(model), "", adapters=(("tone", str(tmp_path / "tone")),))
    asked = msgspec.structs.replace(plain, files=plain.fingerprints)
    (tmp_path / "tone" / "adapter_config.json").write_text("{ }")
    with pytest.raises(ValueError, match=re.escape("tone/adapter_config.json changed on disk")):
        asked.require_unchanged()


def test_a_name_that_is_given_goes_first(model: Path) -> None:
    asked = made(model)
    assert asked.served_as == "model"
    assert msgspec.structs.replace(asked, name="acme/tiny").served_as == "acme/tiny"


def test_an_engine_that_is_started_again_serves_no_other_model(demo: Path, tmp_path: Path) -> None:
    """Its own process, as the server starts it, ends with a sentence and a status of its own."""
    folder = Path(shutil.copytree(demo, tmp_path / "model"))
    asked = msgspec.structs.replace(made(folder), socket=str(tmp_path / "engine"))
    os.utime(folder / "model.safetensors")
    command = [sys.executable, "-m", "attar.engine.main"]
    given = msgspec.json.encode(asked) + b"\n"
    done = subprocess.run(command, input=given, capture_output=True, timeout=300, check=False)
    assert done.returncode == CHANGED, done.stderr
    assert b"model.safetensors changed on disk since the server was started" in done.stderr
    assert b"Traceback" not in done.stderr


def test_a_model_that_is_replaced_while_it_is_loaded_is_not_served(
    demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(shutil.copytree(demo, tmp_path / "model"))
    asked = made(folder)
    engine, ready = loader.engine(asked)
    assert ready.model == "model"
    del engine
    install = loader._install

    def replaced(*given: object) -> tuple[str, ...]:
        os.utime(folder / "model.safetensors")
        return install(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(loader, "_install", replaced)
    with pytest.raises(ValueError, match="changed on disk"):
        loader.engine(asked)


def test_no_memory_is_not_all_of_it(demo: Path) -> None:
    with pytest.raises(ValueError, match=r"there are 0 bytes \(--memory\)"):
        loader.engine(Settings(str(demo), "", memory=0))


def test_what_settings_say_reaches_the_process() -> None:
    given = Settings("model", "socket", name="acme/tiny", files={"model/config.json": "2 1 ab"})
    assert msgspec.json.decode(msgspec.json.encode(given), type=settings.Settings) == given
