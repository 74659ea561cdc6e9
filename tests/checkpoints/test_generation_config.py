"""The sampling parameters that models recommend."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from attar.checkpoints import generation_config
from attar.checkpoints.generation_config import sampling
from tests.errors import user_error


def folder(path: Path, **given: Any) -> Path:
    (path / "generation_config.json").write_text(json.dumps(given))
    return path


def test_what_a_folder_recommends(tmp_path: Path) -> None:
    model = folder(tmp_path, do_sample=True, temperature=0.6, top_k=20, top_p=0.95, min_p=None, eos_token_id=1)
    assert sampling(model) == {"temperature": 0.6, "top_k": 20, "top_p": 0.95}
    assert sampling(folder(tmp_path, do_sample=False, temperature=0.6)) == {"temperature": 0}  # as transformers has it
    assert sampling(folder(tmp_path, repetition_penalty=1.1)) == {"repetition_penalty": 1.1}


def test_what_a_gguf_file_recommends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class File:
        metadata = {"general.sampling.temp": 0.5, "general.sampling.top_k": 40, "general.name": "x"}  # noqa: RUF012

    file = tmp_path / "model.gguf"
    file.touch()
    monkeypatch.setattr(generation_config, "GgufFile", lambda path: File)
    assert sampling(file) == {"temperature": 0.5, "top_k": 40}


def test_what_is_not_supported_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        sampling(folder(tmp_path, top_k=5, num_beams=1, typical_p=1.0, bad_words_ids=[]))
        assert not caplog.messages
        assert sampling(folder(tmp_path, top_k=5, num_beams=4, no_repeat_ngram_size=3)) == {"top_k": 5}
    assert "num_beams, no_repeat_ngram_size" in caplog.messages[0]


def test_nothing_and_nonsense_are_refused(tmp_path: Path) -> None:
    with user_error("config_invalid", "--generation-config"):
        sampling(tmp_path)
    with user_error("option_out_of_range", "top_p", tmp_path.name):
        sampling(folder(tmp_path, top_p=1.5))
