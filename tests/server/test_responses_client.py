"""The `openai` package's Responses API, as its models and its stream helper have it, against `attar serve`."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from soaks.served import Served

from attar.server.api.answering import AnswerReader
from attar.server.api.responses.routes import ResponsesRoutes
from attar.server.options import ServerOptions
from attar.text.answers.events import AnswerEvent, CallArguments, CallEnd, CallStart, Plain, ReasoningDelta, TextDelta
from tests.server.conftest import Running
from tests.server.test_clients import HERE, PYTHON, SECONDS, needs_clients


class Scripted(Plain):
    """A parser that hears reasoning, text and two calls in any answer."""

    def close(self) -> list[AnswerEvent]:
        found: list[AnswerEvent] = [TextDelta("I look.")]
        for index, name in enumerate(("look", "peek")):
            found += [
                CallStart(index, name),
                CallArguments(index, '{"at": '),
                CallArguments(index, "1}"),
                CallEnd(index),
            ]
        return [ReasoningDelta("Hm"), ReasoningDelta("."), *found]

    def feed(self, text: str) -> list[AnswerEvent]:
        return []


def test_calls_and_reasoning(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ResponsesRoutes, "_reader", lambda *given, **more: AnswerReader(Scripted))
    found = seen(server.port, "fake", "calls")["calls"]
    assert found["types"] == found["done"] == ["reasoning", "message", "function_call", "function_call"]
    assert found["arguments"] == found["snapshots"] == ['{"at": 1}'] * 2
    assert (found["ids"], found["again"]) == (2, "response")


def test_input_items(start: Callable[..., Running]) -> None:
    server = start(ServerOptions(port=0, response_store=1 << 20))
    found = seen(server.port, "fake", "listed")["listed"]
    assert found["types"] == ["message", "reasoning", "message", "function_call", "function_call_output"]
    assert found["newest"]


class CallingRun(Plain):
    """A parser that hears a call of a custom tool in any answer."""

    def close(self) -> list[AnswerEvent]:
        return [CallStart(0, "run"), CallArguments(0, '{"input": "aa'), CallArguments(0, 'a"}'), CallEnd(0)]

    def feed(self, text: str) -> list[AnswerEvent]:
        return []


def test_custom_tools(start: Callable[..., Running], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ResponsesRoutes, "_reader", lambda *given, **more: AnswerReader(CallingRun))
    server = start(ServerOptions(port=0, response_store=1 << 20))
    found = seen(server.port, "fake", "custom")["custom"]
    assert found == {"inputs": ["aaa"] * 2, "listed": ["custom_tool_call_output", "custom_tool_call"]}


def seen(port: int, model: str, *parts: str) -> dict[str, Any]:
    """What the client saw of the parts of the program."""
    needs_clients()
    program = [str(PYTHON), str(HERE / "responses_program.py"), f"http://127.0.0.1:{port}", model, *parts]
    done = subprocess.run(program, capture_output=True, text=True, timeout=SECONDS)
    assert not done.returncode, done.stderr[-2000:]
    return dict(json.loads(done.stdout))


@pytest.mark.parametrize("kind", ["fake", "real"])
def test_text(request: pytest.FixtureRequest, demo: Path, kind: str) -> None:
    if kind == "fake":
        server: Running = request.getfixturevalue("server")
        found = seen(server.port, "fake", "text", "refused")
    else:
        served: Served = request.getfixturevalue("real")
        found = seen(served.address.port, demo.name, "text", "parsed", "refused")
        parsed = found["parsed"]
        assert parsed == {"status": "completed", "same": True, "parsed": ["sure", "word"]}
    text = found["text"]
    assert text["text"] == text["streamed"] == text["helped"] != ""
    assert text["status"] == ["incomplete", "max_output_tokens", "response.incomplete"]
    assert text["logprobs"] == [3] * 6
    assert (text["usage"], text["metadata"], text["again"]) == ([6, 6], {"a": "b"}, "response")
    assert [param.partition("[")[0] for param in found["refused"]] == ["tools", "background", "conversation"]
