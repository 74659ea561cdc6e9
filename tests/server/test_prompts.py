"""Where prompts are looked at: millions of token ids beside the event loop."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from attar.server import prompts
from attar.server.api import schemas
from attar.server.api.dialects.llamacpp import inputs
from attar.server.api.dialects.llamacpp.inputs import Inputs
from attar.text.token_bounds import TokenBounds
from attar.text.tokenizer import Tokenizer
from tests.server.conftest import Running

MANY = 100_000
SECONDS = 10.0  # for a text whose tokens nobody counts: they take several times as long


@pytest.mark.parametrize(
    "path, field, status",
    [("/v1/completions", "prompt", 400), ("/v1/embeddings", "input", 400), ("/detokenize", "tokens", 200)],
)
def test_many_token_ids_are_looked_at_beside_the_loop(
    server: Running, monkeypatch: pytest.MonkeyPatch, path: str, field: str, status: int
) -> None:
    looked: list[threading.Thread] = []
    kinds, known = schemas._check_prompts, prompts.in_vocabulary

    def check(given: str | Sequence[object], name: str, most: int, noun: str) -> None:
        looked.append(threading.current_thread())
        kinds(given, name, most, noun)

    def in_vocabulary(tokens: Sequence[int], vocab: int, name: str) -> None:
        looked.append(threading.current_thread())
        known(tokens, vocab, name)

    def check_inputs(given: Inputs, name: str, most: int) -> None:
        looked.append(threading.current_thread())
        inputs.check_inputs(given, name, most)

    monkeypatch.setattr(schemas, "_check_prompts", check)
    monkeypatch.setattr(schemas, "check_inputs", check_inputs)
    monkeypatch.setattr(prompts, "in_vocabulary", in_vocabulary)
    reply = server.post(path, {field: [1] * MANY})
    assert reply.status == status
    if status == 400:
        assert reply.code == "context_length_exceeded"
        message = reply.json["error"]["message"]
        assert message.startswith("This model's maximum context length is 512 tokens")  # as clients know it
        assert message.endswith(f"the prompt is too long: {MANY} tokens in {field}")
    assert looked
    assert server._thread not in looked
    looked.clear()
    few = server.post(path, {field: [[1, 10**9]] * 40} if status == 400 else {field: [1] * MANY + [10**9]})
    assert few.code == "out_of_range"
    assert looked


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/embeddings"])
def test_texts_far_too_long_are_refused_without_a_look_at_them(
    path: str, server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "word " * (600 << 10)  # 3 MB
    said = [{"role": "user", "content": text}]
    field = {"/v1/completions": "prompt", "/v1/embeddings": "input"}.get(path, "messages")
    body = {field: text if field != "messages" else said} | ({"max_tokens": 1} if path == "/v1/messages" else {})
    tokenizer, encode = server.server.prompts.tokenizer, server.server.prompts.tokenizer.encode

    def small(text: str, **options: bool) -> list[int]:
        assert len(text) < 1 << 20
        return encode(text, **options)

    monkeypatch.setattr(tokenizer, "encode", small)
    began = time.monotonic()
    reply = server.post(path, body)
    assert time.monotonic() - began < SECONDS
    assert reply.status == 400
    message = reply.json["error"]["message"]
    least = -(-len(text) // TokenBounds(tokenizer).longest)  # type: ignore[operator]
    assert "maximum context length is 512 tokens" in message
    assert "prompt is too long" in message  # Anthropic's words
    assert f"at least {least}"[:13] in message
    monkeypatch.undo()
    if path != "/v1/messages":
        assert reply.code == "context_length_exceeded"


def test_who_asks_how_long_a_text_is_gets_to_know(server: Running, demo: Path) -> None:
    text = "word " * 20_000
    reply = server.post("/tokenize", {"prompt": text})
    assert reply.json["count"] == len(Tokenizer.load(demo).encode(text)) > 512
    reply = server.post("/tokenize", {"messages": [{"role": "user", "content": text}]})
    assert reply.json["count"] > 512
