"""Settings: what the engine's process is told, and that it serves the model that they were made for."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from attar.checkpoints.fingerprints import fingerprints
from attar.engine import startup
from attar.protocol import settings
from attar.protocol.settings import CHANGED, Settings
from tests.errors import user_error


@pytest.fixture
def model(tiny: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny, tmp_path / "model"))


def made(model: Path) -> Settings:
    plain = Settings(str(model), "", verify=False, context=64, max_running=2)
    return msgspec.structs.replace(plain, files=fingerprints(plain.folders))


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
    engine, ready = startup.start_engine(asked)
    assert ready.model == "model"
    del engine
    install = startup._install

    def replaced(*given: object) -> None:
        os.utime(folder / "model.safetensors")
        install(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(startup, "_install", replaced)
    with user_error("checkpoint_changed"):
        startup.start_engine(asked)


def test_no_memory_is_not_all_of_it(demo: Path) -> None:
    with user_error("memory_insufficient"):
        startup.start_engine(Settings(str(demo), "", memory=0))


def test_what_settings_say_reaches_the_process() -> None:
    given = Settings("model", "socket", name="acme/tiny", files={"model/config.json": "2 1 ab"})
    assert settings.Settings.of(given.line()) == given
    foreign = msgspec.structs.replace(given, model="mod\udce8le")  # no UTF-8, as some names are in other locales
    assert settings.Settings.of(foreign.line()) == foreign
    with pytest.raises(ValueError):
        settings.Settings.of(b'{"model": 5}')
