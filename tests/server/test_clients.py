"""The packages that people use: `openai` and `anthropic`, which live in a virtual environment of their own."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.server.conftest import Running

HERE = Path(__file__).parent
PYTHON = HERE.parents[1] / ".venv-clients" / "bin" / "python"


@pytest.fixture(scope="module")
def seen(server: Running) -> dict[str, Any]:
    """What the clients saw."""
    found = PYTHON.exists() and subprocess.run([PYTHON, "-c", "import openai, anthropic"], capture_output=True)
    if not found or found.returncode:
        pytest.skip(f"no openai and anthropic packages in {PYTHON.parents[1].name}")
    program = [PYTHON, str(HERE / "client_program.py"), f"http://127.0.0.1:{server.port}"]
    done = subprocess.run(program, capture_output=True, text=True, timeout=60)
    assert not done.returncode, done.stderr[-2000:]
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def test_completions(seen: dict[str, Any]) -> None:
    found = seen["completions"]
    assert found["texts"][0] == "Once" + found["streamed"]
    assert len(set(found["texts"])) == 2
    assert (found["usage"], found["reason"]) == (12, "length")
    assert found["tokens"] > 6


def test_chat(seen: dict[str, Any]) -> None:
    found = seen["chat"]
    assert found["text"] == found["streamed"]
    assert (found["choices"], found["usage"], found["logprobs"]) == (2, 7, [3] * 7)
    assert found["cut"][0] == found["cut"][2]
    assert found["cut"][1] == "stop"
    assert found["again"] == "chat.completion"


def test_errors(seen: dict[str, Any]) -> None:
    assert seen["errors"] == [
        ["BadRequestError", "out_of_range", "n", True],
        ["BadRequestError", "unsupported_field", "tools", True],
        ["NotFoundError", "model_not_found", "model", True],
    ]


def test_models_and_embeddings(seen: dict[str, Any]) -> None:
    assert seen["others"] == {"models": ["fake"], "retrieved": "fake", "embeddings": [8, 8]}


def test_messages(seen: dict[str, Any]) -> None:
    found = seen["messages"]
    assert found["text"] == found["streamed"]
    assert found["reasons"] == ["max_tokens", "max_tokens", "stop_sequence"]
    assert found["sequence"]
    assert found["usage"] == 8
    assert "tools" in found["refused"]
