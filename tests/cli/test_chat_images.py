"""`attar chat --image`: files are looked at before a model is loaded."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from attar.cli import generation
from attar.cli.main import app
from attar.images.decoding import MAX_FILE
from attar.protocol.image_limits import MAX_IMAGES


def refusal(monkeypatch: pytest.MonkeyPatch, *files: Path) -> str:
    """Return the error code of a chat that shows these files."""
    monkeypatch.setattr(generation, "_load", lambda *_: pytest.fail("a model was loaded"))
    shown = [argument for file in files for argument in ("--image", str(file))]
    result = CliRunner().invoke(app, ["chat", "demo", "--json", *shown], input="hello\n")
    assert result.exit_code == 2, result.output
    return str(json.loads(result.stdout)["code"])


def test_files_that_cannot_be_shown_are_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fifo, large, small = tmp_path / "fifo", tmp_path / "large.png", tmp_path / "small.png"
    os.mkfifo(fifo)
    with large.open("wb") as file:
        file.truncate(MAX_FILE + 1)
    small.write_bytes(b"x")
    assert refusal(monkeypatch, tmp_path / "none.png") == "file_not_found"
    for each in (fifo, tmp_path, Path("/dev/zero")):
        assert refusal(monkeypatch, each) == "file_wrong_kind"
    assert refusal(monkeypatch, large) == "image_too_large"
    assert refusal(monkeypatch, *[small] * (MAX_IMAGES + 1)) == "image_too_large"
