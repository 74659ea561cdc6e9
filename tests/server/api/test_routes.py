"""What endpoints answer: shapes, streams that say what whole answers say, and usage."""

from __future__ import annotations

import base64
import datetime
import gc
import json
import math
from array import array
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from attar.protocol.messages import Delta, Submit
from attar.protocol.request import TokenLogprob
from attar.server.api import openai
from attar.server.api.dialects.extras import Extras
from attar.server.api.logprobs import LEAST
from attar.server.api.openai import Choice
from attar.server.api.schemas import Sampling
from attar.server.options import ServerOptions
from attar.text.tokenizer import Tokenizer
from tests.server.bad_requests import USER
from tests.server.conftest import Reply, Running
from tests.server.fake_engine import embedding

COMPLETIONS, CHAT, MESSAGES = "/v1/completions", "/v1/chat/completions", "/v1/messages"
SEEDED: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": 12, "seed": 3}


def chunks(reply: Reply) -> list[Any]:
    """A stream's objects; that it is well-formed is checked."""
    assert reply.status == 200
    assert reply.headers["content-type"].startswith("text/event-stream")
    assert reply.events[-1] == "[DONE]"
    assert reply.events.count("[DONE]") == 1
    found = reply.events[:-1]
    assert len({(chunk["id"], chunk["created"], chunk["model"], chunk["object"]) for chunk in found}) == 1
    return found


def of_choice(found: list[Any], number: int) -> list[Any]:
    return [choice for chunk in found for choice in chunk["choices"] if choice["index"] == number]


def test_a_completion(server: Running, tokenizer: Tokenizer) -> None:
    reply = server.post(COMPLETIONS, SEEDED)
    answer = reply.json
    assert answer["id"] == "cmpl-" + reply.headers["x-request-id"]
    assert (answer["object"], answer["model"]) == ("text_completion", "fake")
    [choice] = answer["choices"]
    assert (choice["index"], choice["finish_reason"], choice["logprobs"]) == (0, "length", None)
    length = len(tokenizer.encode("Once upon a time"))
    usage = {"prompt_tokens": length, "completion_tokens": 12, "total_tokens": length + 12}
    assert answer["usage"] | usage == answer["usage"]
    assert server.post(COMPLETIONS, SEEDED | {"prompt": tokenizer.encode("Once upon a time")}).json["choices"] == [
        choice
    ]
    assert server.post(COMPLETIONS, SEEDED | {"seed": 4}).json["choices"] != [choice]


@pytest.mark.parametrize(
    "more", [{}, {"logprobs": 2}, {"echo": True}, {"echo": True, "logprobs": 1}, {"stop": ["e", "zz"]}]
)
def test_a_stream_says_what_the_whole_answer_says(server: Running, more: dict[str, Any]) -> None:
    body = SEEDED | {"prompt": ["Once upon", "a time"], "n": 3} | more
    whole = server.post(COMPLETIONS, body).json["choices"]
    found = chunks(server.post(COMPLETIONS, body | {"stream": True}))
    assert [choice["index"] for choice in whole] == list(range(6))
    for choice in whole:
        pieces = of_choice(found, choice["index"])
        assert "".join(piece["text"] for piece in pieces) == choice["text"]
        assert [piece["finish_reason"] for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
        assert pieces[-1]["finish_reason"] == choice["finish_reason"]
        if "logprobs" in more:
            for name, values in choice["logprobs"].items():
                joined = [value for piece in pieces for value in (piece["logprobs"] or {name: []})[name]]
                assert joined == values, name


def test_usage_comes_last_and_only_when_asked_for(server: Running) -> None:
    plain = chunks(server.post(COMPLETIONS, SEEDED | {"stream": True}))
    assert not any("usage" in chunk for chunk in plain)
    with_usage = chunks(server.post(COMPLETIONS, SEEDED | {"stream": True, "stream_options": {"include_usage": True}}))
    assert [chunk["usage"] for chunk in with_usage[:-1]] == [None] * (len(with_usage) - 1)
    assert with_usage[-1]["choices"] == []
    usage = server.post(COMPLETIONS, SEEDED).json["usage"]
    assert with_usage[-1]["usage"] == usage
    assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"] - 1


def test_usage_comes_with_every_chunk_where_it_is_asked_for(server: Running) -> None:
    """As guidellm does of every stream."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    for body in (SEEDED | {"n": 2}, SEEDED | {"echo": True, "logprobs": 1}):
        found = chunks(server.post(COMPLETIONS, body | {"stream": True, "stream_options": options}))
        final = server.post(COMPLETIONS, body).json["usage"]
        counts = [chunk["usage"]["completion_tokens"] for chunk in found]
        assert counts == sorted(counts)
        assert counts[-1] == counts[-2] == final["completion_tokens"]
        assert len(set(counts)) > 6  # they grow with the answer
        for chunk in found[:-1]:
            usage = chunk["usage"]
            assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
            assert "prompt_tokens_details" not in usage  # the engine tells it at the end
        assert found[-1]["usage"] == final
    alone = SEEDED | {"stream": True, "stream_options": {"continuous_usage_stats": True}}
    assert not any("usage" in chunk for chunk in chunks(server.post(COMPLETIONS, alone)))  # as in vLLM


def test_chat(server: Running, tokenizer: Tokenizer) -> None:
    body = {"messages": USER, "seed": 1, "max_tokens": 9, "n": 2, "logprobs": True, "top_logprobs": 3}
    answer = server.post(CHAT, body).json
    assert (answer["object"], answer["id"][:9]) == ("chat.completion", "chatcmpl-")
    found = chunks(server.post(CHAT, body | {"stream": True}))
    assert found[0]["object"] == "chat.completion.chunk"
    for choice in answer["choices"]:
        pieces = of_choice(found, choice["index"])
        assert pieces[0]["delta"] == {"role": "assistant", "content": ""}
        assert pieces[-1]["delta"] == {}
        assert "".join(piece["delta"].get("content", "") for piece in pieces) == choice["message"]["content"]
        content = [each for piece in pieces for each in (piece["logprobs"] or {"content": []})["content"]]
        assert content == choice["logprobs"]["content"]
        assert len(content) == 9
        for each in content:
            assert len(each["top_logprobs"]) == 3
            assert each["logprob"] == each["top_logprobs"][0]["logprob"] == -0.5
        spelt = bytes(byte for each in content for byte in each["bytes"])
        assert spelt.decode("utf-8", "replace") == choice["message"]["content"]
    length = len(tokenizer.encode_chat("<|endoftext|>hello\n\n"))
    assert answer["usage"]["prompt_tokens"] == length


def test_named_tokens_take_the_place_of_the_likely_ones(server: Running, tokenizer: Tokenizer) -> None:
    named = tokenizer.encode("Once upon")[:2]
    body = {"messages": USER, "seed": 1, "max_tokens": 3, "logprobs": True, "logprob_token_ids": named}
    [choice] = server.post(CHAT, body).json["choices"]
    names = [tokenizer.decode([token]) for token in named]
    for each in choice["logprobs"]["content"]:  # with the drawn one
        own = [] if each["token"] in names else [each["token"]]
        assert [top["token"] for top in each["top_logprobs"]] == [*names, *own]
    streamed = of_choice(chunks(server.post(CHAT, body | {"stream": True, "top_logprobs": 5})), 0)
    assert [each for piece in streamed for each in (piece["logprobs"] or {"content": []})["content"]] == (
        choice["logprobs"]["content"]
    )
    body = {"prompt": "Once", "seed": 1, "max_tokens": 3, "logprobs": 2, "logprob_token_ids": named}
    [choice] = server.post(COMPLETIONS, body).json["choices"]
    tables = zip(choice["logprobs"]["tokens"], choice["logprobs"]["top_logprobs"], strict=True)
    assert all(set(top) == {*names, token} for token, top in tables)
    for more, code in (
        ({"logprob_token_ids": [4096]}, "out_of_range"),
        ({"max_tokens": 0, "echo": True}, "out_of_range"),
    ):
        assert server.post(COMPLETIONS, body | more).code == code


def test_parts_of_text_and_developers(server: Running) -> None:
    plain = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    other = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": parts, "name": "ann"}]
    tokens = [server.post("/tokenize", {"messages": messages}).json["tokens"] for messages in (plain, other)]
    assert tokens[0] == tokens[1]


def test_an_answer_can_be_sent_back_as_a_message(server: Running) -> None:
    message = server.post(CHAT, {"messages": USER, "max_tokens": 3}).json["choices"][0]["message"]
    extra = {"audio": None, "function_call": None, "tool_calls": None, "annotations": []}
    messages = [*USER, message | extra, {"role": "assistant", "content": None}, *USER]
    assert server.post(CHAT, {"messages": messages, "max_tokens": 3}).status == 200


def test_anthropics_messages(server: Running) -> None:
    system = [{"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}]
    body: dict[str, Any] = {"messages": USER, "max_tokens": 8, "system": system, "temperature": 0}
    server.post(MESSAGES, body)
    answer = server.post(MESSAGES, body).json
    assert (answer["type"], answer["role"], answer["stop_reason"]) == ("message", "assistant", "max_tokens")
    reply = server.post(MESSAGES, body | {"stream": True})
    kinds = [event["type"] for event in reply.events]
    middle = kinds.count("content_block_delta")
    assert kinds == [
        "message_start", "content_block_start", *["content_block_delta"] * middle, "content_block_stop",
        "message_delta", "message_stop",
    ]  # fmt: skip
    assert [line[7:] for line in reply.body.decode().split("\n") if line.startswith("event: ")] == kinds
    text = "".join(event["delta"]["text"] for event in reply.events if event["type"] == "content_block_delta")
    assert text == answer["content"][0]["text"]
    end = reply.events[-2]
    assert (end["delta"]["stop_reason"], end["usage"]) == ("max_tokens", answer["usage"])
    asked = answer["usage"]["input_tokens"] + answer["usage"]["cache_read_input_tokens"]
    assert asked == reply.events[0]["message"]["usage"]["input_tokens"]
    assert answer["usage"]["output_tokens"] == 8


def test_messages_as_lm_eval_sends_them(server: Running) -> None:
    body = {"model": "fake", "max_tokens": 3, "temperature": 0, "stop": ["\n\n"], "seed": 1234}
    typed = [message | {"type": "text"} for message in USER]
    answers = [server.post(CHAT, body | {"messages": messages}).json["choices"] for messages in (USER, typed)]
    assert answers[0] == answers[1]


def test_stop_strings_are_told_apart(server: Running) -> None:
    text = server.post(MESSAGES, {"messages": USER, "max_tokens": 20, "temperature": 0}).json["content"][0]["text"]
    stop = text[8:11]
    body = {"messages": USER, "max_tokens": 20, "temperature": 0, "stop_sequences": [stop]}
    answer = server.post(MESSAGES, body).json
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", stop)
    assert answer["content"][0]["text"] == text[: text.index(stop)]
    chat = server.post(CHAT, {"messages": USER, "max_tokens": 20, "temperature": 0, "stop": stop}).json["choices"][0]
    assert (chat["finish_reason"], chat["message"]["content"]) == ("stop", text[: text.index(stop)])


def test_a_token_that_ends_the_text(server: Running, tokenizer: Tokenizer) -> None:
    body = SEEDED | {"logit_bias": {str(tokenizer.eos_id): 100}}
    assert server.post(COMPLETIONS, body).json["choices"][0]["finish_reason"] == "stop"
    body = SEEDED | {"logit_bias": {"70": 100}, "stop_token_ids": [70]}
    assert server.post(COMPLETIONS, body).json["choices"][0] | {"text": "", "finish_reason": "stop"} == \
        server.post(COMPLETIONS, body).json["choices"][0]  # fmt: skip


@pytest.mark.parametrize("limit", [0, 1])
def test_echo_with_logprobs_scores_a_text(server: Running, tokenizer: Tokenizer, limit: int) -> None:
    text = "Once upon a time 😀"
    body = {"prompt": text, "echo": True, "max_tokens": limit, "logprobs": 1, "temperature": 0}
    answer = server.post(COMPLETIONS, body).json
    [choice] = answer["choices"]
    ids = tokenizer.encode(text)
    assert choice["text"].startswith(text)
    table = choice["logprobs"]
    assert {len(column) for column in table.values()} == {len(ids) + limit}
    assert table["token_logprobs"][0] is table["top_logprobs"][0] is None
    assert table["token_logprobs"][1:] == [-0.5] * (len(ids) - 1 + limit)
    assert all(max(top.values()) == -0.5 for top in table["top_logprobs"][1:])
    assert table["text_offset"][:2] == [0, len(table["tokens"][0])]
    assert "bytes:\\xf0" in table["tokens"]
    assert answer["usage"]["completion_tokens"] == limit
    assert choice["finish_reason"] == "length"


def test_several_prompts_of_tokens_are_scored_at_once(server: Running, tokenizer: Tokenizer) -> None:
    """As lm-eval's local-completions asks."""
    prompts = [tokenizer.encode(text) for text in ("Once upon", "a time there was", "a")]
    body = {
        "model": "fake",
        "prompt": prompts,
        "max_tokens": 1,
        "logprobs": 1,
        "echo": True,
        "temperature": 0,
        "seed": 1,
    }
    answer = server.post(COMPLETIONS, body).json
    for prompt, choice in zip(prompts, answer["choices"], strict=True):
        assert len(choice["logprobs"]["token_logprobs"]) == len(prompt) + 1
        assert choice["text"].startswith(tokenizer.decode(prompt))
    assert answer["usage"]["prompt_tokens"] == sum(map(len, prompts))


def test_the_chosen_token_is_among_the_likely_ones(tokenizer: Tokenizer) -> None:
    form = openai.CompletionFormat(tokenizer, True, 1, [(1,)], None, Extras(Sampling(), tokenizer, [(1,)]))
    token, other = tokenizer.encode("Once upon")[:2]
    event = Delta("a", 0, (token,), "", (TokenLogprob(token, -math.inf, ((other, -1.0),)),))
    made = json.loads(b"".join(form.deltas(0, event)[0]))
    names = [tokenizer.decode([each]) for each in (other, token)]
    assert made["logprobs"]["top_logprobs"] == [{names[0]: -1.0, names[1]: LEAST}]
    assert made["logprobs"]["token_logprobs"] == [LEAST]


def test_embeddings(server: Running) -> None:
    body = {"input": ["one", "two", "three"]}
    answer = server.post("/v1/embeddings", body).json
    packed = server.post("/v1/embeddings", body | {"encoding_format": "base64"}).json
    assert [each["index"] for each in answer["data"]] == [0, 1, 2]
    for plain, coded in zip(answer["data"], packed["data"], strict=True):
        assert plain["embedding"] == array("f", base64.b64decode(coded["embedding"])).tolist()
    assert (
        server.post("/v1/embeddings", {"input": "two"}).json["data"][0]["embedding"] == answer["data"][1]["embedding"]
    )


def test_embeddings_are_of_unit_length(server: Running, tokenizer: Tokenizer) -> None:
    """As OpenAI's are: clients take dot products of them."""
    ids = tokenizer.encode("one")
    [found] = server.post("/v1/embeddings", {"input": [ids]}).json["data"]
    vector = np.array(found["embedding"], np.float32)
    assert vector.tolist() == found["embedding"]
    assert np.linalg.norm(vector.astype(np.float64)) == pytest.approx(1, abs=1e-6)
    engines = np.array(embedding(ids), np.float32).astype(np.float64)
    assert np.linalg.norm(engines) > 1.1  # or there was nothing to do
    assert np.array_equal(vector, (engines / np.linalg.norm(engines)).astype(np.float32))
    assert "unit length" in server.get("/openapi.json").json["components"]["schemas"]["Vector"]["description"]


@pytest.mark.parametrize("scale", [1e-45, 1e-30, 1, 1e37])
def test_no_length_is_too_small_or_too_large_to_divide_by(scale: float) -> None:
    numbers = np.array([3, -4, 0, 0], np.float32) * np.float32(scale)
    answer = json.loads(b"".join(openai._vectors([numbers.tobytes(), bytes(16)], "m", 1, False)))
    first, zero = (each["embedding"] for each in answer["data"])
    assert first == [float(np.float32(0.6)), -float(np.float32(0.8)), 0, 0]
    assert zero == [0] * 4


def test_dimensions_are_the_first_numbers_at_unit_length(server: Running) -> None:
    [full] = server.post("/v1/embeddings", {"input": "one"}).json["data"]
    own = len(full["embedding"])
    assert server.post("/v1/embeddings", {"input": "one", "dimensions": own}).json["data"] == [full]
    for few in (1, own - 1):
        [cut] = server.post("/v1/embeddings", {"input": "one", "dimensions": few}).json["data"]
        first = np.array(full["embedding"][:few])
        np.testing.assert_allclose(cut["embedding"], first / np.linalg.norm(first), rtol=1e-5)
    refused = server.post("/v1/embeddings", {"input": "one", "dimensions": own + 1})
    assert (refused.code, refused.json["error"]["param"]) == ("out_of_range", "dimensions")


def test_a_conversation_is_tokenized_without_the_assistants_turn(server: Running, tokenizer: Tokenizer) -> None:
    templates = server.server.prompts.tokenizer.chat_templates
    known = templates["default"]
    templates["default"] = "{{ messages[0].content }}{% if add_generation_prompt %} answer:{% endif %}"
    try:
        opened = server.post("/tokenize", {"messages": USER}).json
        body = {"messages": USER, "add_generation_prompt": False, "return_token_strs": True}
        closed = server.post("/tokenize", body).json
    finally:
        templates["default"] = known
    texts = [server.post("/detokenize", {"tokens": found["tokens"]}).json["prompt"] for found in (opened, closed)]
    assert texts == ["hello answer:", "hello"]
    assert "token_strs" not in opened
    assert closed["token_strs"] == [tokenizer.id_to_token(token) for token in closed["tokens"]]
    text = server.post("/tokenize", {"prompt": " a time", "return_token_strs": True, "add_special_tokens": None}).json
    assert len(text["token_strs"]) == text["count"]


def test_a_template_prints_todays_date_or_the_servers(start: Callable[..., Running], server: Running) -> None:
    fixed = start(ServerOptions(port=0, template_date=datetime.date(2026, 1, 2)))
    templates = server.server.prompts.tokenizer.chat_templates  # of one tokenizer, which both servers have
    known = templates["default"]
    templates["default"] = "{{ strftime_now('%d %b %Y') }}"
    try:
        ids = [each.post("/tokenize", {"messages": USER}).json["tokens"] for each in (server, fixed)]
    finally:
        templates["default"] = known
    texts = [server.post("/detokenize", {"tokens": tokens}).json["prompt"] for tokens in ids]
    assert texts == [datetime.date.today().strftime("%d %b %Y"), "02 Jan 2026"]


def test_the_fewest_tokens_reach_the_engine(server: Running) -> None:
    server.post(COMPLETIONS, SEEDED | {"min_tokens": 7})
    asked = server.engine.commands[-1]
    assert isinstance(asked, Submit)
    assert asked.params.min_tokens == 7


def test_tokens_there_and_back(server: Running) -> None:
    for text in ("Once upon a time", "😀 <|endoftext|>", "a\nb"):
        answer = server.post("/tokenize", {"prompt": text}).json
        assert answer["count"] == len(answer["tokens"])
        assert server.post("/detokenize", {"tokens": answer["tokens"]}).json == {"prompt": text, "content": text}
    assert server.post("/detokenize", {"tokens": []}).json == {"prompt": "", "content": ""}


def test_models(server: Running) -> None:
    [model] = server.get("/v1/models").json["data"]
    assert (model["id"], model["max_model_len"]) == ("fake", 512)
    assert server.get("/v1/models/fake").json == model
    assert server.get("/v1/models/a/b").code == "model_not_found"


def test_adapters_are_models(start: Callable[..., Running]) -> None:
    made = start(adapters=("tone", "style"))
    base, *adapters = made.get("/v1/models").json["data"]
    assert [each["id"] for each in (base, *adapters)] == ["fake", "tone", "style"]
    assert "parent" not in base
    assert {each["parent"] for each in adapters} == {"fake"}
    assert made.get("/v1/models/style").json == adapters[1]
    body: dict[str, Any] = {"max_tokens": 1, "prompt": "a"}
    chat: dict[str, Any] = {"max_tokens": 1, "messages": [{"role": "user", "content": "a"}]}
    answered = [
        made.post(path, asked).json["model"]
        for path, asked in (
            (COMPLETIONS, body), (COMPLETIONS, {**body, "model": "tone"}), ("/v1/messages", {**chat, "model": "style"}),
            ("/v1/chat/completions", {**chat, "model": "fake"}), ("/v1/embeddings", {"input": "a", "model": "tone"}),
        )
    ]  # fmt: skip
    assert answered == ["fake", "tone", "style", "fake", "tone"]
    assert [command.adapter for command in made.engine.commands] == ["", "tone", "style", "", "tone"]
    assert made.post(COMPLETIONS, {**body, "model": "ton"}).code == "model_not_found"
    for name in ("CompletionBody", "ChatBody", "AnthropicBody", "EmbeddingBody", "TokenizeBody", "DetokenizeBody"):
        described = made.get("/openapi.json").json["components"]["schemas"][name]
        assert described["properties"]["model"] == {"enum": [None, "fake", "tone", "style"]}


def test_the_engines_state(server: Running) -> None:
    server.post(COMPLETIONS, SEEDED)
    state = server.get("/v1/engine").json
    assert (state["ready"]["context"], state["ready"]["table"]) == (512, [["weights", 10], ["cache", 20]])
    assert state["stats"]["generated_tokens"] > 0


def test_the_best_of_several_is_the_likeliest_by_token(server: Running) -> None:
    body = SEEDED | {"prompt": ["Once upon", "a time"], "max_tokens": 5}
    every = server.post(COMPLETIONS, body | {"n": 4}).json["choices"]
    reply = server.post(COMPLETIONS, body | {"n": 2, "best_of": 4}).json
    texts = [choice["text"] for choice in reply["choices"]]
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2, 3]
    assert all(choice["logprobs"] is None for choice in reply["choices"])
    assert texts == [every[at]["text"] for at in (0, 1, 4, 5)]  # all are equally likely here: the first
    assert reply["usage"]["completion_tokens"] == 40
    same = body | {"n": 4, "best_of": 4}
    assert server.post(COMPLETIONS, same).json["choices"] == every
    pieces = chunks(server.post(COMPLETIONS, same | {"stream": True}))
    assert "".join(piece["text"] for piece in of_choice(pieces, 7)) == every[7]["text"]
    fewer = server.post(COMPLETIONS, body | {"n": 2, "best_of": 1})
    assert (fewer.status, fewer.json["error"]["param"]) == (400, "best_of")
    echoed = server.post(COMPLETIONS, body | {"best_of": 3, "echo": True, "logprobs": 1}).json["choices"]
    assert [choice["text"][:5] for choice in echoed] == ["Once ", "a tim"]
    likely = [choice_of(-1.0, -3.0), choice_of(-1.5), choice_of(-1.0, -1.0, -1.0, -2.0), choice_of()]
    assert [likely.index(each) for each in openai.best(likely[:3], 3, 2)] == [2, 1]
    assert openai.best(likely, 2, 1) == [likely[1], likely[3]]
    assert openai.best(likely, 4, 4) == likely


def choice_of(*logprobs: float) -> Choice:
    return Choice(0, logprob=sum(logprobs), scored=len(logprobs))


def test_the_loop_is_not_held_up_by_large_bodies_and_long_texts(server: Running) -> None:
    bodies: list[tuple[str, Any]] = [
        (COMPLETIONS, {"prompt": [1] * 1_000_000}),
        (COMPLETIONS, {"prompt": "word " * 400_000}),
        (CHAT, {"messages": [{"role": "user", "content": "x " * 500_000}]}),
        ("/v1/embeddings", {"input": [[1] * 100] * 2048}),
    ]
    encoded = [(path, json.dumps(body, separators=(",", ":")).encode()) for path, body in bodies]
    gc.freeze()  # as a served process does at its start: no collection walks through what other tests left behind
    try:
        server.server.context.metrics._worst = 0.0
        codes = [server.post(path, body).json.get("error", {}).get("code") for path, body in encoded]
    finally:
        gc.unfreeze()
    assert codes == ["context_length_exceeded"] * 3 + [None]
    assert server.server.context.metrics._worst < 1  # with a lock kept by the tokenizer: over two


def test_what_is_at_its_limit_is_taken(server: Running) -> None:
    """Those beyond it are among the bad requests. What is too long for the context has passed all other limits."""
    turn, biases = {"role": "user", "content": "a"}, {str(token): 1 for token in range(1024)}
    longest = 4 * 2**20 - len(json.dumps({"prompt": ""}))
    for path, body, code in (
        (COMPLETIONS, {"prompt": "a", "max_tokens": 1, "stop": ["x" * 256] * 16}, None),
        (COMPLETIONS, {"prompt": "a", "max_tokens": 1, "logit_bias": biases}, None),
        (CHAT, {"messages": [turn] * 2048, "max_tokens": 1}, "context_length_exceeded"),
        (COMPLETIONS, {"prompt": "x" * longest}, "context_length_exceeded"),
    ):
        reply = server.post(path, json.dumps(body).encode())
        assert reply.json.get("error", {}).get("code") == code, reply.json
    assert server.post(COMPLETIONS, json.dumps({"prompt": "x" * (longest + 1)}).encode()).status == 413


def test_the_document_is_of_the_same_types(server: Running) -> None:
    made = server.get("/openapi.json").json
    schemas = made["components"]["schemas"]
    assert schemas["ChatBody"]["properties"]["n"]["anyOf"][0] | {"title": ""} == {
        "type": "integer", "minimum": 1, "maximum": 16, "title": ""
    }  # fmt: skip
    assert schemas["ChatBody"]["properties"]["functions"] == {"enum": [None, []]}
    assert schemas["ChatBody"]["additionalProperties"] is False
    assert made["paths"][CHAT]["post"]["requestBody"]["content"]["application/json"]["schema"] == {
        "$ref": "#/components/schemas/ChatBody"
    }
    responses = made["paths"][CHAT]["post"]["responses"]
    assert {"application/json", "text/event-stream"} == responses["200"]["content"].keys()
    assert "429" in responses
    assert "text/plain" in made["paths"]["/metrics"]["get"]["responses"]["200"]["content"]
    assert "422" not in json.dumps(made["paths"])
