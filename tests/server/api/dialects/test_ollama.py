"""Ollama's API: what its clients send, and what they read."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from attar.protocol.messages import Submit
from attar.server.api.dialects import answers as types
from attar.server.api.dialects import ollama
from attar.server.api.dialects.ollama_routes import MANAGED
from attar.server.options import ServerOptions
from attar.text.tokenizer import Tokenizer
from tests.server.bad_requests import USER
from tests.server.conftest import Reply, Running
from tests.server.fake_engine import embedding

OPTIONS = {"num_predict": 5, "seed": 3}
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/api/chat", {"model": "fake", "messages": USER, "options": OPTIONS}),
    ("/api/generate", {"model": "fake", "prompt": "hello", "options": OPTIONS}),
    ("/api/generate", {"model": "fake", "prompt": "hello", "raw": True, "options": OPTIONS}),
]


def said(line: types.OllamaText) -> str:
    return line.message.content if isinstance(line.message, types.OllamaSaid) else str(line.response)


def lines(reply: Reply) -> list[types.OllamaText]:
    assert reply.status == 200, reply.body
    assert reply.headers["content-type"].startswith("application/x-ndjson")
    return [msgspec.json.decode(line, type=types.OllamaText) for line in reply.body.splitlines()]


def asked(server: Running) -> Submit:
    command = server.engine.commands[-1]
    assert isinstance(command, Submit)
    return command


@pytest.mark.parametrize("path, body", BODIES)
def test_a_stream_says_what_the_whole_answer_says(server: Running, path: str, body: dict[str, Any]) -> None:
    whole = msgspec.json.decode(server.post(path, body | {"stream": False}).body, type=types.OllamaText)
    *pieces, end = lines(server.post(path, body))  # the default
    assert [piece.done for piece in pieces] == [False] * len(pieces)
    assert "".join(map(said, pieces)) == said(whole) != ""
    assert said(end) == ""
    for each in (whole, end):
        assert (each.done, each.done_reason, each.eval_count, each.model) == (True, "length", 5, "fake")
        assert (each.prompt_eval_duration, each.eval_duration) == (2_000_000, 3_000_000)
        assert each.prompt_eval_count == len(asked(server).prompt)
        assert isinstance(each.total_duration, int)
        assert each.total_duration > 0


def test_prompts_are_turns_unless_they_are_raw(server: Running, tokenizer: Tokenizer) -> None:
    for path, body in BODIES:
        server.post(path, body | {"stream": False})
        raw = "raw" in body
        wanted = tokenizer.encode("hello") if raw else tokenizer.encode_chat("<|endoftext|>hello\n\n")
        assert asked(server).prompt == tuple(wanted)
    server.post("/api/generate", {"prompt": "hello", "system": "Be brief.", "stream": False})
    assert asked(server).prompt == tuple(tokenizer.encode_chat("<|endoftext|>Be brief.\n\nhello\n\n"))
    continued = [*USER, {"role": "assistant", "content": "Once"}]
    assert server.post("/api/chat", {"messages": continued, "stream": False}).status == 200


def test_options_are_sampling_parameters(server: Running) -> None:
    options = {
        "num_predict": 4, "temperature": 0.3, "top_k": 7, "top_p": 0.9, "min_p": 0.1, "repeat_penalty": 1.1,
        "presence_penalty": 0.5, "frequency_penalty": -0.5, "seed": 9, "stop": ["x"],
        "num_ctx": 8192, "num_gpu": 99, "num_thread": 8, "repeat_last_n": 64, "mirostat": 0, "typical_p": 1.0,
    }  # fmt: skip
    server.post("/api/chat", {"messages": USER, "options": options, "stream": False, "keep_alive": "5m"})
    params = asked(server).params
    assert (params.max_tokens, params.temperature, params.top_k, params.top_p, params.min_p) == (4, 0.3, 7, 0.9, 0.1)
    assert (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (1.1, 0.5, -0.5)
    assert (params.seed, params.stop) == (9, ("x",))
    for fills in (-1, -2, 0):
        server.post("/api/generate", {"prompt": "a", "raw": True, "options": {"num_predict": fills, "stop": "e"}})
        assert asked(server).params.max_tokens == 512 - len(asked(server).prompt)
    for option, value in (("mirostat", 1), ("temperature", 3), ("nonsense", 1), ("stop", ["x" * 300])):
        refused = server.post("/api/chat", {"messages": USER, "options": {option: value}})
        assert refused.status == 400
        assert "options." + option in refused.json["error"]


def test_a_format_is_a_constraint(server: Running) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}}
    for shape in ("json", schema):
        server.post("/api/chat", {"messages": USER, "format": shape, "options": OPTIONS})
        grammar = asked(server).grammar
        assert grammar is not None
    server.post("/api/chat", {"messages": USER, "format": "", "options": OPTIONS})
    assert asked(server).grammar is None
    assert server.post("/api/chat", {"messages": USER, "format": "xml"}).status == 400


def test_a_request_for_nothing_but_the_model(server: Running) -> None:
    before = len(server.engine.commands)
    chat = server.post("/api/chat", {"model": "fake", "messages": []}).json
    generate = server.post("/api/generate", {"model": "fake", "keep_alive": 0}).json
    assert (chat["done_reason"], chat["message"]["content"]) == ("load", "")
    assert (generate["done_reason"], generate["response"]) == ("load", "")
    assert len(server.engine.commands) == before


def test_embeddings(server: Running, tokenizer: Tokenizer) -> None:
    answer = server.post("/api/embed", {"model": "fake", "input": ["one", "two"], "truncate": True})
    told = msgspec.json.decode(answer.body, type=types.OllamaVectors)
    own = server.post("/v1/embeddings", {"input": ["one", "two"]}).json["data"]
    assert told.embeddings == [each["embedding"] for each in own]
    assert told.prompt_eval_count == sum(len(tokenizer.encode(text)) for text in ("one", "two"))
    one = server.post("/api/embed", {"input": "one", "dimensions": 3}).json["embeddings"]
    assert [len(vector) for vector in one] == [3]
    older = server.post("/api/embeddings", {"prompt": "one"}).json["embedding"]
    assert older == told.embeddings[0]
    assert len(embedding(tokenizer.encode("one"))) == len(older)
    assert server.post("/api/embed", {"input": "one", "dimensions": 99}).status == 400
    assert "context" in server.post("/api/embed", {"input": "word " * 1000}).json["error"]


def test_what_there_is(start: Callable[..., Running]) -> None:
    server = start(ServerOptions(port=0, aliases=("llama3.2", "qwen*")), adapters=("tone",))
    tags = msgspec.json.decode(server.get("/api/tags").body, type=types.OllamaModels)
    assert [model.name for model in tags.models] == ["fake", "llama3.2", "tone"]
    assert len({model.digest for model in tags.models}) == 3
    assert tags.models[2].details.parent_model == "fake"
    for name in ("fake", "fake:latest", "llama3.2:latest", "qwen3:8b", "tone:latest"):
        shown = server.post("/api/show", {"model": name})
        told = msgspec.json.decode(shown.body, type=types.OllamaShown)
        architecture = told.model_info["general.architecture"]
        assert told.model_info[f"{architecture}.context_length"] == 512
        assert "completion" in told.capabilities
        body = {"model": name, "messages": USER, "options": OPTIONS, "stream": False}
        assert server.post("/api/chat", body).json["model"] == name  # as Ollama repeats it
    running = msgspec.json.decode(server.get("/api/ps").body, type=types.OllamaModels)
    assert [model.context_length for model in running.models] == [512]
    assert server.get("/api/version").json == {"version": ollama.VERSION}
    for path in ("/", "/api/tags", "/api/version"):
        assert server.request("HEAD", path).status == 200
    missing = server.post("/api/chat", {"model": "mistral", "messages": USER})
    assert missing.status == 404
    assert "mistral" in missing.json["error"]


@pytest.mark.parametrize("method, path", MANAGED)
def test_models_are_not_managed(server: Running, method: str, path: str) -> None:
    refused = server.request(method, path.replace("{digest}", "sha256:0"), {"model": "x"} if method != "HEAD" else None)
    assert refused.status == 501
    assert refused.headers["x-should-retry"] == "false"
    if method != "HEAD":
        assert refused.json["error"].startswith(path.split("/")[2] + ": ")


def test_errors_are_texts(server: Running) -> None:
    for path, body in (
        ("/api/chat", {"messages": 1}),
        ("/api/nothing", {}),
        ("/api/chat", {"messages": USER, "what": 1}),
    ):
        assert isinstance(server.post(path, body).json["error"], str)


def test_a_stream_that_fails_ends_with_an_error(start: Callable[..., Running]) -> None:
    server = start()
    server.engine.fail = ("bad_logits", 2)
    found = [json.loads(line) for line in server.post("/api/chat", BODIES[0][1]).body.splitlines()]
    assert "no valid numbers" in found[-1]["error"]
    assert server.post("/api/chat", BODIES[0][1] | {"stream": False}).status == 500
