"""Where prompts are looked at: millions of token ids beside the event loop."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest

from attar.server import prompts
from attar.server.admission import request_limits
from attar.server.api import schemas
from tests.server.conftest import Running

MANY = 100_000


@pytest.mark.parametrize(
    "path, field, status",
    [("/v1/completions", "prompt", 400), ("/v1/embeddings", "input", 400), ("/detokenize", "tokens", 200)],
)
def test_many_token_ids_are_looked_at_beside_the_loop(
    server: Running, monkeypatch: pytest.MonkeyPatch, path: str, field: str, status: int
) -> None:
    looked: list[threading.Thread] = []
    kinds, known = schemas._check_prompts, request_limits.in_vocabulary

    def check(given: str | Sequence[object], name: str, most: int, noun: str) -> None:
        looked.append(threading.current_thread())
        kinds(given, name, most, noun)

    def in_vocabulary(tokens: Sequence[int], vocab: int, name: str) -> None:
        looked.append(threading.current_thread())
        known(tokens, vocab, name)

    monkeypatch.setattr(schemas, "_check_prompts", check)
    monkeypatch.setattr(prompts, "in_vocabulary", in_vocabulary)
    reply = server.post(path, {field: [1] * MANY})
    assert reply.status == status
    if status == 400:
        assert reply.code == "context_length_exceeded"
        new = 1 if field == "prompt" else 0
        says = f"{field}: {MANY} tokens, which with {new} to come are more than this model's context of 512"
        assert reply.json["error"]["message"] == says
    assert looked
    assert server._thread not in looked
    looked.clear()
    few = server.post(path, {field: [[1, 10**9]] * 40} if status == 400 else {field: [1] * MANY + [10**9]})
    assert few.code == "out_of_range"
    assert looked
