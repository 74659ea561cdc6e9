"""Loading of models: a file's tokenizer is read beside its weights."""

from __future__ import annotations

import gc
import threading
from pathlib import Path

import pytest

from attar.checkpoints import vocabulary
from attar.checkpoints.sources import hub
from attar.compression.request.request import CompressionRequest
from attar.compression.runs.pipeline import compress_request
from attar.engine.loader import load_model
from attar.errors import UserError
from attar.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("file") / "model.gguf"
    return compress_request(CompressionRequest(hub.resolve("demo"), out, recipe="q8_0")).path


def test_a_tokenizer_is_read_once_beside_the_weights(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads, read = list[threading.Thread](), vocabulary.tokenizer

    def counted(path: Path) -> Tokenizer:
        threads.append(threading.current_thread())
        return read(path)

    monkeypatch.setattr(vocabulary, "tokenizer", counted)
    model = load_model(file)
    assert model.tokenizer.encode("Once upon a time") == read(file).encode("Once upon a time")
    assert model.eos_ids >= model.tokenizer.eos_ids
    assert len(threads) == 1
    assert threads[0] is not threading.current_thread()
    assert gc.isenabled()


def test_a_wrong_tokenizer_is_an_error_where_it_is_asked_for(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> Tokenizer:
        raise UserError("tokenizer_malformed", "wrong")

    monkeypatch.setattr(vocabulary, "tokenizer", refuse)
    model = load_model(file)
    for _ in range(2):
        with pytest.raises(UserError) as error:
            _ = model.tokenizer
        assert error.value.code == "tokenizer_malformed"
