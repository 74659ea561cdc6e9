"""The packages that people use: `openai` and `anthropic`, which live in a virtual environment of their own.

They meet the fake engine, whose answers are known, and `attar serve` with the embedded model.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from soaks.served import Served

from attar.server.http import sse
from tests.server.conftest import Running

HERE = Path(__file__).parent
SECONDS = 600  # far more than it takes
PYTHON = HERE.parents[1] / ".venv-clients" / "bin" / "python"


def needs_clients() -> None:
    found = PYTHON.exists() and subprocess.run([PYTHON, "-c", "import openai, anthropic"], capture_output=True)
    if not found or found.returncode:
        pytest.skip(f"no openai and anthropic packages in {PYTHON.parents[1].name}")


@pytest.fixture(scope="module", params=["fake", "real"])
def seen(request: pytest.FixtureRequest, demo: Path) -> dict[str, Any]:
    """What the clients saw, the name of the model, and how long its vectors are."""
    needs_clients()
    if request.param == "fake":
        server: Running = request.getfixturevalue("server")
        port, model, width = server.port, "fake", 8
    else:
        served: Served = request.getfixturevalue("real")
        port, model, width = (
            served.address.port,
            demo.name,
            json.loads((demo / "config.json").read_text())["hidden_size"],
        )
    program = [PYTHON, str(HERE / "client_program.py"), f"http://127.0.0.1:{port}", model]
    done = subprocess.run(program, capture_output=True, text=True, timeout=SECONDS)
    assert not done.returncode, done.stderr[-2000:]
    return {**json.loads(done.stdout), "model": model, "width": width}


def test_completions(seen: dict[str, Any]) -> None:
    found = seen["completions"]
    assert found["texts"][0] == "Once" + found["streamed"]
    assert len(set(found["texts"])) == 2
    assert (found["usage"], found["reason"]) == (12, "length")
    assert found["tokens"] > 6
    assert found["best"] == [found["best"][1], found["best"][1], 24]


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
        ["BadRequestError", "invalid_value", "tools[0].function.parameters", True],
        ["NotFoundError", "model_not_found", "model", True],
    ]


RETRYING = """
import sys, openai, anthropic
url = sys.argv[1]
said = [{"role": "user", "content": "a"}]
ours = openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=2)
theirs = anthropic.Anthropic(base_url=url, api_key="none", max_retries=2)
for ask in (ours.chat.completions.create, theirs.messages.create):
    try:
        ask(model="fake", messages=said, max_tokens=5)
    except (openai.APIStatusError, anthropic.APIStatusError) as error:
        print(error.status_code)
"""


def test_what_took_too_long_is_not_asked_for_again(start: Callable[..., Running]) -> None:
    needs_clients()
    server = start()
    server.engine.fail = ("deadline", 0)
    program = [PYTHON, "-c", RETRYING, f"http://127.0.0.1:{server.port}"]
    done = subprocess.run(program, capture_output=True, text=True, timeout=SECONDS)
    assert done.stdout.split() == ["503", "503"], done.stderr[-2000:]
    assert len(server.engine.commands) == 2


def test_models_and_embeddings(seen: dict[str, Any]) -> None:
    model, width = seen["model"], seen["width"]
    lengths = pytest.approx([1, 1], abs=1e-6)
    assert seen["others"] == {"models": [model], "retrieved": model, "embeddings": [width] * 2, "lengths": lengths}


def test_messages(seen: dict[str, Any]) -> None:
    found = seen["messages"]
    assert found["text"] == found["streamed"]
    assert found["reasons"] == ["max_tokens", "max_tokens", "stop_sequence"]
    assert found["sequence"]
    assert found["usage"] == 8
    assert "tools" in found["refused"]
    assert found["counted"] == found["read"]
    assert all(len(name) == 32 for name in found["named"])


STREAMING = """
import sys, openai, anthropic
url = sys.argv[1]
said = [{"role": "user", "content": "a"}]
ours = openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0)
theirs = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
options = {"model": "fake", "messages": said, "max_tokens": 4}
chunks = list(ours.chat.completions.create(**options, temperature=0, stream=True))
print(repr("".join(chunk.choices[0].delta.content or "" for chunk in chunks)))
chunks = list(ours.completions.create(model="fake", prompt="a", max_tokens=4, temperature=0, stream=True))
print(repr("".join(chunk.choices[0].text for chunk in chunks)))
with theirs.messages.stream(**options, extra_body={"temperature": 0}) as stream:
    print(repr("".join(stream.text_stream)))
print([event.type for event in theirs.messages.create(**options, stream=True)][-1])
"""


def test_clients_cope_with_what_breaks_a_silence(
    start: Callable[..., Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    needs_clients()
    monkeypatch.setattr(sse, "SILENCE", 0.02)
    server = start(step=0.1)
    said: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4, "temperature": 0}
    assert server.post("/v1/chat/completions", said | {"stream": True}).body.count(sse.COMMENT) > 4
    expected = [
        server.post("/v1/chat/completions", said).json["choices"][0]["message"]["content"],
        server.post("/v1/completions", {"prompt": "a", "max_tokens": 4, "temperature": 0}).json["choices"][0]["text"],
        server.post("/v1/messages", said).json["content"][0]["text"],
    ]
    program = [PYTHON, "-c", STREAMING, f"http://127.0.0.1:{server.port}"]
    done = subprocess.run(program, capture_output=True, text=True, timeout=SECONDS)
    assert done.stdout.splitlines() == [*map(repr, expected), "message_stop"], done.stderr[-2000:]
