"""llama.cpp's own routes over HTTP, before an engine that knows no model."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attar.protocol.messages import Embed, Submit
from attar.server.api.dialects.llamacpp import answers as types
from attar.server.api.dialects.llamacpp.inputs import check_inputs, inputs_of
from attar.server.errors import LLAMACPP, APIError
from attar.text.tokenizer import Tokenizer
from tests.server.conftest import Running

USER = [{"role": "user", "content": "hello"}]
ASKED = {"prompt": "Once upon", "n_predict": 4, "seed": 7}


def asked(server: Running) -> Submit:
    command = server.engine.commands[-1]
    assert isinstance(command, Submit)
    return command


def test_a_completion(server: Running, tokenizer: Tokenizer) -> None:
    reply = server.post("/completion", ASKED | {"return_tokens": True})
    answer = msgspec.json.decode(reply.body, type=types.NativeCompletion)
    assert (answer.stop, answer.stop_type, answer.tokens_predicted, answer.truncated) == (True, "limit", 4, False)
    assert tokenizer.decode(answer.tokens) == answer.content
    assert answer.prompt == "Once upon"
    assert answer.tokens_evaluated == len(tokenizer.encode("Once upon"))
    params = asked(server).params
    assert (params.temperature, params.top_k, params.top_p, params.min_p, params.seed) == (0.8, 40, 0.95, 0.05, 7)
    settings = answer.generation_settings
    assert isinstance(settings, dict)
    assert (settings["n_predict"], settings["seed"], settings["top_k"]) == (4, 7, 40)
    assert server.post("/completions", ASKED).json["tokens"] == []
    events = server.post("/completion", ASKED | {"stream": True}).events
    pieces = [msgspec.convert(event, types.NativeCompletion) for event in events]
    assert [piece.stop for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert "".join(piece.content for piece in pieces) == answer.content
    assert [token for piece in pieces for token in piece.tokens] == answer.tokens
    assert pieces[-1].tokens_predicted == 4


def test_several_prompts_in_all_forms(server: Running, tokenizer: Tokenizer) -> None:
    words = tokenizer.encode("Once upon")
    forms: list[Any] = ["Once upon", words, {"prompt_string": "Once upon"}, [*words[:1], tokenizer.decode(words[1:])]]
    reply = server.post("/completion", ASKED | {"prompt": forms}).json
    assert [each["index"] for each in reply] == [0, 1, 2, 3]
    assert {each["prompt"] for each in reply} == {"Once upon"}
    one = server.post("/completion", ASKED | {"prompt": [*words, "Once upon"], "n_cmpl": 2}).json
    assert [each["tokens_evaluated"] for each in one] == [2 * len(words)] * 2
    assert server.post("/completion", ASKED | {"prompt": [1, [2]]}).json["error"]["param"] == "prompt"
    for empty in ("", [], [""], [1, {"prompt_string": "a"}], {}, {"prompt_string": "a", "content": []}):
        assert server.post("/completion", ASKED | {"prompt": empty}).status == 400


def test_probabilities(server: Running, tokenizer: Tokenizer) -> None:
    body = ASKED | {"n_probs": 3, "return_tokens": True}
    answer = msgspec.json.decode(server.post("/completion", body).body, type=types.NativeCompletion)
    found = answer.completion_probabilities
    assert isinstance(found, list)
    assert [each.id for each in found] == answer.tokens
    assert all(len(each.top_logprobs) == 3 for each in found)  # type: ignore[arg-type]
    assert bytes(byte for each in found for byte in each.bytes) == tokenizer.decode(answer.tokens).encode()
    events = server.post("/completion", body | {"stream": True}).events
    told = [each["id"] for event in events for each in event.get("completion_probabilities", ())]
    assert told == answer.tokens


def test_biases_of_texts_and_tokens(server: Running, tokenizer: Tokenizer) -> None:
    text = tokenizer.encode(" the", add_special_tokens=False)
    for given_biases in ([[5, 2.5], [" the", False]], {"5": 2.5, " the": False}):
        assert server.post("/completion", ASKED | {"logit_bias": given_biases}).status == 200
        assert asked(server).params.logit_bias == {5: 2.5, **dict.fromkeys(text, -100.0)}
    for wrong, code in (([[5]], "invalid_length"), ([[5, True]], "invalid_value"), ({"99999": 1}, "out_of_range"),
                        ([[10**6, 1]], "out_of_range"), ([["", 1]], "invalid_length")):  # fmt: skip
        error = server.post("/completion", ASKED | {"logit_bias": wrong}).json["error"]
        assert (error["code"], error["type"]) == (400, "invalid_request_error"), (wrong, code, error)


@pytest.mark.parametrize(
    "more, status",
    [
        ({"repeat_penalty": 1, "repeat_last_n": 64, "dynatemp_range": 0, "dynatemp_exponent": 1, "typ_p": 1}, 200),
        ({"samplers": ["top_k"], "dry_multiplier": 0, "dry_base": 1.75, "xtc_probability": 0, "n_keep": 5}, 200),
        ({"repeat_penalty": 1.1, "repeat_last_n": -1}, 200),
        ({"repeat_penalty": 1.1}, 400),
        ({"repeat_penalty": 1.1, "repeat_last_n": -1, "repetition_penalty": 1.2}, 400),
        ({"mirostat": 2}, 400),
        ({"post_sampling_probs": True}, 400),
        ({"grammar": 'root ::= "a"', "json_schema": {}}, 400),
        ({"grammar": 'root ::= "a"', "ignore_eos": True}, 400),
        ({"n_predict": -1}, 200),
        ({"what": 1}, 400),
    ],
)
def test_samplers_are_taken_where_they_are_off(server: Running, more: dict[str, Any], status: int) -> None:
    reply = server.post("/completion", ASKED | {"n_predict": 2} | more)
    assert reply.status == status, reply.body


def test_max_tokens_is_another_name_of_n_predict(server: Running) -> None:
    body = {"prompt": "Once upon", "seed": 1}
    for limit in (0, 3, -1):
        named = server.post("/completion", body | {"max_tokens": limit})
        own = server.post("/completion", body | {"n_predict": limit})
        assert named.json["content"] == own.json["content"]
        assert named.json["generation_settings"] == own.json["generation_settings"]
    both = server.post("/completion", body | {"max_tokens": 2, "n_predict": 2})
    assert (both.status, both.json["error"]["param"]) == (400, "n_predict")


def test_a_penalty_of_all_tokens(server: Running) -> None:
    for last, penalty in ((-1, 1.5), (0, 1.0)):
        server.post("/completion", ASKED | {"repeat_penalty": 1.5, "repeat_last_n": last})
        assert asked(server).params.repetition_penalty == penalty


def test_a_constraint_is_the_engines(server: Running) -> None:
    assert server.post("/completion", ASKED | {"json_schema": {"const": "42"}}).status == 200
    assert asked(server).grammar is not None
    assert server.post("/completion", ASKED | {"grammar": ""}).status == 200
    assert asked(server).grammar is None


def test_errors_have_llamacpps_shape(server: Running) -> None:
    reply = server.post("/completion", {"prompt": "word " * 2000})
    error = msgspec.json.decode(reply.body, type=types.NativeError).error
    assert (error.code, error.type, error.n_ctx) == (400, "exceed_context_size_error", 512)
    assert isinstance(error.n_prompt_tokens, int)
    assert error.n_prompt_tokens > 512
    assert "exceeds the available context size" in error.message
    assert server.post("/props", {}).json["error"]["code"] == 405
    long = server.post("/chat/completions", {"messages": USER * 400})
    assert long.json["error"]["type"] == "exceed_context_size_error"
    paths = server.get("/openapi.json").json["paths"].keys()
    assert {path for path in LLAMACPP if path in paths} == {
        "/completion", "/apply-template", "/embedding", "/props", "/slots"
    }  # fmt: skip


def test_the_template_and_its_tokens(server: Running, tokenizer: Tokenizer) -> None:
    text = server.post("/apply-template", {"messages": USER}).json["prompt"]
    ids = server.post("/tokenize", {"messages": USER}).json["tokens"]
    assert tokenizer.encode_chat(text) == ids
    assert server.post("/apply-template", {"messages": []}).json["error"]["code"] == 400
    for path in ("/chat/completions/input_tokens", "/v1/chat/completions/input_tokens"):
        assert server.post(path, {"messages": USER}).json["input_tokens"] == len(ids)
    plain = server.post("/apply-template", {"messages": USER, "add_generation_prompt": False}).json["prompt"]
    assert text.startswith(plain)


def test_tokens_as_llamacpp_asks_for_them(server: Running, tokenizer: Tokenizer) -> None:
    text = "a 媽 🤗"
    tokens = server.post("/tokenize", {"content": text}).json["tokens"]
    assert tokens == tokenizer.encode(text, add_special_tokens=False)
    assert server.post("/tokenize", {"content": text, "add_special": True}).json["tokens"] == tokenizer.encode(text)
    pieces = server.post("/tokenize", {"content": text, "with_pieces": True}).json["tokens"]
    assert [each["id"] for each in pieces] == tokens
    raw = [each["piece"].encode() if isinstance(each["piece"], str) else bytes(each["piece"]) for each in pieces]
    assert b"".join(raw) == b"".join(map(tokenizer.id_to_bytes, tokens))
    assert server.post("/detokenize", {"tokens": tokens}).json["content"] == text
    assert server.post("/tokenize", {"content": text, "prompt": text}).code == "missing_field"


def test_embeddings_in_all_forms(server: Running) -> None:
    parts = {"content": [{"type": "text", "text": "hello "}, {"type": "text", "text": "world"}]}
    inputs: list[Any] = ["hello world", parts, {"prompt_string": "hello world"}, [1, "two"]]
    reply = server.post("/embedding", {"content": inputs})
    found = msgspec.json.decode(reply.body, type=list[types.NativeVector])
    assert [each.index for each in found] == [0, 1, 2, 3]
    assert found[0].embedding == found[1].embedding == found[2].embedding != found[3].embedding
    openai = server.post("/v1/embeddings", {"input": inputs}).json["data"]
    assert [[each["embedding"]] for each in openai] == [each.embedding for each in found]
    assert isinstance(server.engine.commands[-1], Embed)
    for wrong in ({"content": "a"}, {"content": [{"type": "image_url"}]}, [], [[]], {"prompt_string": 1}):
        assert server.post("/v1/embeddings", {"input": wrong}).status == 400
    assert server.post("/embedding", {"content": "a", "input": "b"}).status == 400
    assert server.post("/embeddings", {"input": "a", "embd_normalize": -1}).status == 400


def test_properties_and_slots(server: Running) -> None:
    told = msgspec.json.decode(server.get("/props").body, type=types.Properties)
    assert told.default_generation_settings.n_ctx == 512
    assert told.default_generation_settings.params["seed"] == -1
    assert told.total_slots == server.engine.batch
    found = msgspec.json.decode(server.get("/slots").body, type=list[types.Slot])
    assert [slot.is_processing for slot in found] == [False] * told.total_slots
    assert server.get("/models").json == server.get("/v1/models").json


def test_n_predict_is_max_tokens(server: Running) -> None:
    for path, said in (("/v1/completions", {"prompt": "a"}), ("/chat/completions", {"messages": USER})):
        assert server.post(path, {**said, "n_predict": 3}).status == 200
        assert asked(server).params.max_tokens == 3
        assert server.post(path, {**said, "n_predict": 3, "max_tokens": 3}).status == 400
        assert server.post(path, {**said, "n_predict": 0}).status == 400


texts = st.text(max_size=3)
pieces = st.lists(texts | st.integers(0, 9), min_size=1, max_size=4)


@given(st.lists(texts | st.integers(0, 9) | pieces, min_size=1, max_size=6))
def test_a_list_is_one_text_or_several(value: list[Any]) -> None:
    """A list with a token id is one text of its entries; others are a text for each."""
    numbers, lists = (any(isinstance(each, kind) for each in value) for kind in (int, list))
    if numbers and lists:
        with pytest.raises(APIError, match="invalid_type"):
            check_inputs(value, "prompt", 6)
        return
    check_inputs(value, "prompt", 6)
    assert inputs_of(value) == ([value] if numbers else value)
