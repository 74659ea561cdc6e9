"""Additions of vLLM's and llama.cpp's APIs to OpenAI's answers."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from attar.protocol.messages import Report
from attar.server.api.dialects import extras
from attar.server.api.response_types import openai as openai_types
from attar.text.tokenizer import Tokenizer
from tests.server.bad_requests import USER
from tests.server.conftest import Running

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def streamed(server: Running, path: str, body: dict[str, Any]) -> list[Any]:
    reply = server.post(path, body | {"stream": True})
    assert reply.status == 200, reply.body
    kind = openai_types.ChatChunk if path == CHAT else openai_types.CompletionChunk
    for event in reply.events[:-1]:
        msgspec.convert(event, kind)
    return reply.events[:-1]


def test_token_ids_of_a_completion(server: Running, tokenizer: Tokenizer) -> None:
    body = {"prompt": ["Once upon", "a time"], "n": 2, "max_tokens": 5, "seed": 1, "return_token_ids": True}
    whole = server.post(COMPLETIONS, body)
    msgspec.json.decode(whole.body, type=openai_types.Completion)
    chunks = [choice for event in streamed(server, COMPLETIONS, body) for choice in event["choices"]]
    for choice in whole.json["choices"]:
        prompt = body["prompt"][choice["index"] // 2]  # type: ignore[index]
        assert choice["prompt_token_ids"] == tokenizer.encode(prompt)
        assert tokenizer.decode(choice["token_ids"]) == choice["text"]
        own = [chunk for chunk in chunks if chunk["index"] == choice["index"]]
        assert own[0]["prompt_token_ids"] == choice["prompt_token_ids"]
        assert [token for chunk in own for token in chunk.get("token_ids", ())] == choice["token_ids"]
    plain = server.post(COMPLETIONS, {**body, "return_token_ids": False}).json["choices"][0]
    assert (plain["prompt_token_ids"], plain["token_ids"], plain["prompt_logprobs"]) == (None, None, None)


def test_token_ids_of_a_chat(server: Running, tokenizer: Tokenizer) -> None:
    body = {"messages": USER, "max_tokens": 5, "seed": 1, "return_token_ids": True}
    whole = server.post(CHAT, body)
    msgspec.json.decode(whole.body, type=openai_types.ChatCompletion)
    assert whole.json["prompt_token_ids"] == tokenizer.encode_chat("<|endoftext|>hello\n\n")
    [choice] = whole.json["choices"]
    assert tokenizer.decode(choice["token_ids"]) == choice["message"]["content"]
    first, *others = streamed(server, CHAT, body)
    assert first["prompt_token_ids"] == whole.json["prompt_token_ids"]
    tokens = [token for event in others for each in event["choices"] for token in each.get("token_ids", ())]
    assert tokens == choice["token_ids"]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_log_probabilities_of_the_prompt(server: Running, tokenizer: Tokenizer, path: str) -> None:
    said = {"prompt": "Once upon"} if path == COMPLETIONS else {"messages": USER}
    ids = tokenizer.encode("Once upon") if path == COMPLETIONS else tokenizer.encode_chat("<|endoftext|>hello\n\n")
    for count in (0, 2):
        reply = server.post(path, {**said, "max_tokens": 1, "prompt_logprobs": count})
        msgspec.json.decode(
            reply.body, type=openai_types.Completion if path == COMPLETIONS else openai_types.ChatCompletion
        )
        found = (reply.json["choices"][0] if path == COMPLETIONS else reply.json)["prompt_logprobs"]
        assert found[0] is None
        assert len(found) == len(ids)
        for token, each in zip(ids[1:], found[1:], strict=True):
            assert len(each) == max(1, count)
            rank = 1 if count else None
            assert each[str(token)]["logprob"] == -0.5
            assert each[str(token)]["rank"] == rank
            assert each[str(token)]["decoded_token"] == tokenizer.decode([token])
    chunks = streamed(server, path, {**said, "max_tokens": 1, "prompt_logprobs": 2})
    first = chunks[0]["choices"][0] if path == COMPLETIONS else chunks[0]
    assert first["prompt_logprobs"] == found
    assert json.dumps(chunks).count("prompt_logprobs") == 1


def test_log_probabilities_of_the_prompt_are_told_once(server: Running) -> None:
    body = {"prompt": "Once upon", "echo": True, "prompt_logprobs": 1}
    assert server.post(COMPLETIONS, body).status == 200
    assert server.post(COMPLETIONS, body | {"logprobs": 1}).json["error"]["param"] == "prompt_logprobs"


def test_they_are_bounded_in_bytes(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "MAX_PROMPT_BYTES", 100)
    refused = server.post(COMPLETIONS, {"prompt": "Once upon a time", "prompt_logprobs": 20})
    assert (refused.status, refused.code) == (400, "out_of_range")
    server.wait(lambda: server.engine.open == 0)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_timings(server: Running, path: str) -> None:
    said = {"prompt": "Once upon"} if path == COMPLETIONS else {"messages": USER}
    body = {**said, "max_tokens": 5, "timings_per_token": True}
    whole = server.post(path, body).json["timings"]
    assert whole["predicted_n"] == 5
    assert whole["predicted_ms"] == 3.0
    assert whole["prompt_n"] + whole["cache_n"] == server.post(path, body).json["usage"]["prompt_tokens"]
    chunks = streamed(server, path, body)
    assert [chunk for chunk in chunks if "timings" in chunk] == chunks[-1:]
    assert chunks[-1]["timings"]["predicted_n"] == 5
    assert "timings" not in server.post(path, {**body, "timings_per_token": False}).json


def test_timings_are_speeds() -> None:
    report = Report(prefill=0.5, decode=2.0, prompt_tokens=12, reused_tokens=2, drafted_tokens=4, accepted_tokens=3)
    found = extras.timings([report, None], 8)
    assert (found["cache_n"], found["prompt_n"], found["prompt_ms"], found["prompt_per_second"]) == (2, 10, 500, 20)
    assert (found["predicted_per_token_ms"], found["predicted_per_second"]) == (
        2000 / 7,
        3.5,
    )  # 7 steps
    assert (found["draft_n"], found["draft_n_accepted"]) == (4, 3)
    assert extras.timings([], 0)["prompt_per_second"] == 0
