"""What vLLM's server has beside OpenAI's API: prompts that are cut, tokens of another server, echoes, times, load."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attar.protocol.messages import Report
from attar.server.api.dialects import vllm
from attar.server.api.response_types import openai as openai_types
from attar.server.api.responses.types import ResponseObject
from attar.server.options import ServerOptions
from attar.text.tokenizer import Tokenizer
from tests.server.bad_requests import CHAT, COMPLETIONS, USER, VOCAB
from tests.server.conftest import Running
from tests.server.fake_engine import CONTEXT

EMBEDDINGS = "/v1/embeddings"
IDS = list(range(40, 48))
ANSWER = {"role": "assistant", "content": "An apple a day, keeps"}


def prompts(server: Running, path: str, body: dict[str, Any]) -> list[tuple[int, ...]]:
    """The prompts that the engine gets of a request."""
    server.engine.commands.clear()
    reply = server.post(path, body)
    assert reply.status == 200, reply.body
    return [each.prompt for each in server.engine.commands]


def refused(server: Running, path: str, body: dict[str, Any]) -> tuple[str, str]:
    error = server.post(path, body).json["error"]
    assert error["param"] in error["message"]
    return error["code"], error["param"]


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=12), st.integers(1, 14), st.sampled_from([None, "left", "right"])
)
def test_what_is_kept_is_one_end_of_the_prompt(ids: list[int], kept: int, side: str | None) -> None:
    cut = vllm.cut(kept, side, 100)
    assert cut is not None
    found = list(cut(tuple(ids)))
    assert len(found) == min(kept, len(ids))
    assert found == (ids[:kept] if side == "right" else ids[-kept:])
    fitting = vllm.cut(vllm.FITTING, side, kept)
    assert fitting is not None
    assert fitting(tuple(ids)) == cut(tuple(ids))


def test_a_completions_prompt_is_cut(server: Running, tokenizer: Tokenizer) -> None:
    body = {"prompt": IDS, "max_tokens": 1, "truncate_prompt_tokens": 4}
    assert prompts(server, COMPLETIONS, body) == [tuple(IDS[-4:])]
    assert prompts(server, COMPLETIONS, body | {"truncation_side": "right"}) == [tuple(IDS[:4])]
    assert prompts(server, COMPLETIONS, body | {"truncate_prompt_tokens": None}) == [tuple(IDS)]
    text = "Once upon a time " * 200
    cut = prompts(server, COMPLETIONS, {"prompt": ["Once", text], "max_tokens": 2, "truncate_prompt_tokens": -1})
    assert cut == [tuple(tokenizer.encode("Once")), tuple(tokenizer.encode(text)[-(CONTEXT - 2) :])]
    told = server.post(COMPLETIONS, body | {"return_token_ids": True}).json["choices"][0]
    assert told["prompt_token_ids"] == IDS[-4:]


def test_a_conversation_keeps_its_end(server: Running, tokenizer: Tokenizer) -> None:
    whole = tokenizer.encode_chat("<|endoftext|>hello\n\n")
    body = {"messages": USER, "max_tokens": 1, "truncate_prompt_tokens": 2}
    assert prompts(server, CHAT, body) == [tuple(whole[-2:])]
    long = {"messages": [{"role": "user", "content": "word " * 2000}], "truncate_prompt_tokens": -1, "max_tokens": 5}
    assert [len(each) for each in prompts(server, CHAT, long)] == [CONTEXT - 5]
    assert refused(server, CHAT, body | {"truncation_side": "right"}) == ("invalid_value", "truncation_side")


def test_inputs_of_embeddings_are_cut(server: Running) -> None:
    body = {"input": [IDS, IDS[:2]], "truncate_prompt_tokens": 3, "truncation_side": "right"}
    assert prompts(server, EMBEDDINGS, body) == [tuple(IDS[:3]), tuple(IDS[:2])]


def test_ollamas_inputs_are_cut_where_that_is_asked_for(server: Running, tokenizer: Tokenizer) -> None:
    text = "Once upon a time " * 200
    ids = tokenizer.encode(text)
    assert len(ids) > CONTEXT
    assert prompts(server, "/api/embed", {"input": text, "truncate": True}) == [tuple(ids[:CONTEXT])]
    assert server.post("/api/embed", {"input": text, "truncate": False}).status == 400
    assert server.post("/api/embed", {"input": text}).status == 400


@pytest.mark.parametrize(
    "path, said", [(COMPLETIONS, {"prompt": "a"}), (CHAT, {"messages": USER}), (EMBEDDINGS, {"input": "a"})]
)
def test_cuts_that_are_refused(server: Running, path: str, said: dict[str, Any]) -> None:
    for wrong in (0, -2):
        assert refused(server, path, said | {"truncate_prompt_tokens": wrong}) == (
            "out_of_range",
            "truncate_prompt_tokens",
        )
    assert refused(server, path, said | {"truncation_side": "middle"}) == ("invalid_value", "truncation_side")
    if path == COMPLETIONS:
        assert refused(server, path, said | {"truncate_prompt_tokens": 2, "echo": True}) == ("invalid_value", "echo")
    over = {**said, "truncate_prompt_tokens": CONTEXT + 1, next(iter(said)): [1] * 2000} if path != CHAT else None
    if over is not None:
        assert server.post(path, over).code == "context_length_exceeded"


def test_a_chat_echoes_the_message_that_it_goes_on_from(server: Running) -> None:
    body = {"messages": [*USER, ANSWER], "continue_final_message": True, "max_tokens": 4, "seed": 1}
    plain = server.post(CHAT, body).json["choices"][0]["message"]["content"]
    echoed = {**body, "echo": True}
    assert server.post(CHAT, echoed).json["choices"][0]["message"]["content"] == ANSWER["content"] + plain
    events = server.post(CHAT, {**echoed, "stream": True}).events[:-1]
    pieces = [choice["delta"].get("content", "") for event in events for choice in event["choices"]]
    assert pieces[0] == ANSWER["content"]
    assert "".join(pieces) == ANSWER["content"] + plain
    alone = server.post(CHAT, {"messages": USER, "max_tokens": 4, "seed": 1, "echo": True})
    assert not alone.json["choices"][0]["message"]["content"].startswith("hello")


def test_a_prompt_that_another_server_has_made(server: Running) -> None:
    body = {
        "messages": USER,
        "max_tokens": 1,
        "kv_transfer_params": {"prompt_token_ids": IDS},
        "return_token_ids": True,
    }
    assert prompts(server, CHAT, body) == [tuple(IDS)]
    assert server.post(CHAT, body).json["prompt_token_ids"] == IDS
    assert server.post(CHAT, body | {"stream": True}).events[0]["prompt_token_ids"] == IDS
    for wrong, code in (([VOCAB], "out_of_range"), ([], "invalid_length"), ([1] * 600, "context_length_exceeded")):
        found = refused(server, CHAT, body | {"kv_transfer_params": {"prompt_token_ids": wrong}})
        assert found == (code, "kv_transfer_params.prompt_token_ids")
    other = refused(server, CHAT, body | {"kv_transfer_params": {"remote_host": "example.org"}})
    assert other == ("unknown_field", "kv_transfer_params.remote_host")


def test_the_tokens_of_a_response(server: Running, tokenizer: Tokenizer) -> None:
    body = {"input": "hello", "max_output_tokens": 4, "seed": 1, "enable_response_messages": True}
    whole = msgspec.json.decode(server.post("/v1/responses", body).body, type=ResponseObject)
    [given], [made] = whole.input_messages, whole.output_messages  # type: ignore[misc]
    assert given.tokens == tokenizer.encode_chat("<|endoftext|>hello\n\n")
    assert given.message == "<|endoftext|>hello\n\n"
    assert whole.usage is not None
    assert len(made.tokens) == whole.usage.output_tokens == 4
    assert made.message == tokenizer.decode(made.tokens, skip_special_tokens=False)
    events = server.post("/v1/responses", body | {"stream": True}).events
    assert [event["type"] for event in events if "input_messages" in event.get("response", {})] == [events[-1]["type"]]
    assert events[-1]["response"]["output_messages"] == [{"type": "raw_message_tokens", **msgspec.to_builtins(made)}]
    assert b"_messages" not in server.post("/v1/responses", body | {"enable_response_messages": False}).body


@pytest.mark.parametrize("path, said", [(COMPLETIONS, {"prompt": "a"}), (CHAT, {"messages": USER})])
def test_answers_tell_their_times_where_the_server_is_told_to(
    start: Callable[..., Running], server: Running, path: str, said: dict[str, Any]
) -> None:
    telling = start(ServerOptions(port=0, request_metrics=True))
    body = said | {"max_tokens": 5}
    kind = openai_types.Completion if path == COMPLETIONS else openai_types.ChatCompletion
    metrics = msgspec.json.decode(telling.post(path, body).body, type=kind).metrics
    assert isinstance(metrics, openai_types.RequestMetrics)
    assert metrics.mean_itl_ms == metrics.generation_time_ms / 4
    *chunks, usage, _ = telling.post(path, body | {"stream": True, "stream_options": {"include_usage": True}}).events
    assert usage["metrics"].keys() == set(openai_types.RequestMetrics.__struct_fields__)
    assert not [chunk for chunk in chunks if "metrics" in chunk]
    assert b"metrics" not in server.post(path, body).body


def test_times_are_those_of_the_slowest_prompt() -> None:
    reports = [Report(queued=0.25, prefill=0.5, decode=2.0), None, Report(queued=1.0, prefill=0.25, decode=1.5)]
    told = vllm.times(reports, 10)
    assert told == {
        "time_to_first_token_ms": 500, "generation_time_ms": 2000, "queue_time_ms": 1000, "tokens_per_second": 4.0,
    }  # fmt: skip
    assert vllm.times(reports[:1], 5)["mean_itl_ms"] == 500
    assert "mean_itl_ms" not in vllm.times(reports[:1], 1)
    assert vllm.times([None], 0)["tokens_per_second"] == 0


def test_whole_answers_have_nulls_where_vllms_clients_read_fields(server: Running) -> None:
    chat = server.post(CHAT, {"messages": USER, "max_tokens": 1}).json
    text = server.post(COMPLETIONS, {"prompt": "a", "max_tokens": 1}).json
    assert (chat["prompt_logprobs"], chat["prompt_token_ids"], chat["choices"][0]["token_ids"]) == (None, None, None)
    names = ("prompt_logprobs", "prompt_token_ids", "token_ids")
    assert [text["choices"][0][name] for name in names] == [None] * 3
    chunks = server.post(CHAT, {"messages": USER, "max_tokens": 1, "stream": True}).body
    assert not [name for name in names if name.encode() in chunks]


def test_the_load_is_the_number_of_open_requests(server: Running) -> None:
    server.wait(lambda: bool(server.request("GET", "/load").json == {"server_load": 0}))
    server.engine.held = True
    asking = threading.Thread(target=server.post, args=(COMPLETIONS, {"prompt": ["a", "b"], "max_tokens": 2}))
    try:
        asking.start()
        server.wait(lambda: bool(server.request("GET", "/load").json == {"server_load": 1}))
    finally:
        server.engine.held = False
        asking.join()
    server.wait(lambda: bool(server.request("GET", "/load").json == {"server_load": 0}))
    assert server.request("HEAD", "/load").status == 200
    assert server.request("GET", "/ping").json == {"status": "ready"}


@pytest.mark.parametrize(
    "path, body",
    [
        (CHAT, {"messages": USER, "max_tokens": 2, "seed": 1}),
        (COMPLETIONS, {"prompt": "a", "max_tokens": 2, "seed": 1}),
        (EMBEDDINGS, {"input": ["a", "b"]}), (CHAT, {"messages": [], "max_tokens": 2}),
        ("/v1/rerank", {"query": "a", "documents": ["b"]}), (CHAT, {"messages": USER, "nonsense": 1}),
    ],
)  # fmt: skip
def test_one_route_takes_requests_of_all_kinds(server: Running, path: str, body: dict[str, Any]) -> None:
    own, through = server.post(path, body), server.post("/invocations", body)
    assert through.status == own.status
    assert {**through.json, "id": 0, "created": 0} == {**own.json, "id": 0, "created": 0}


def test_a_request_of_no_kind_is_refused(server: Running) -> None:
    for body, code in ((b"{}", "missing_field"), (b"[1]", "invalid_type"), (b"{", "invalid_json")):
        assert server.post("/invocations", body).code == code
    large = {"messages": [{"role": "user", "content": "a " * 20_000}]}  # read in a thread
    assert server.post("/invocations", large).code == "context_length_exceeded"
