"""Bodies: what they may hold, and that the OpenAPI document says the same."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attar.protocol.messages import Ready
from attar.protocol.request import SamplingParams
from attar.server.admission.rate_limits import Caller
from attar.server.api import sampling_params, validation
from attar.server.api.anthropic import AnthropicBody, AnthropicPrompt
from attar.server.api.app import NO_DEFAULTS, make_app
from attar.server.api.body import Body
from attar.server.api.dialects.llamacpp.completion import NativeCompletionBody
from attar.server.api.dialects.llamacpp.embedding import NativeEmbeddingBody
from attar.server.api.dialects.llamacpp.infill import InfillBody
from attar.server.api.dialects.llamacpp.template import TemplateBody
from attar.server.api.dialects.ollama import (
    OllamaChatBody,
    OllamaEmbedBody,
    OllamaEmbeddingsBody,
    OllamaGenerateBody,
    OllamaShowBody,
)
from attar.server.api.dialects.rerank import RerankBody
from attar.server.api.dialects.tokenizing import DetokenizeBody, TokenizeBody
from attar.server.api.openapi import document, rules
from attar.server.api.openapi.examples import EXAMPLES
from attar.server.api.responses.schemas import ResponsesBody
from attar.server.api.schemas import ChatBody, CompletionBody, EmbeddingBody
from attar.server.api.validation import read
from attar.server.errors import APIError
from attar.server.prompts import Turn

if TYPE_CHECKING:
    pass

LLAMACPP = (InfillBody, NativeCompletionBody, NativeEmbeddingBody, TemplateBody)
OLLAMA = (OllamaChatBody, OllamaEmbedBody, OllamaEmbeddingsBody, OllamaGenerateBody, OllamaShowBody)
MESSAGES = [{"role": "user", "content": "hello"}]
LEAST: dict[type[Body], dict[str, Any]] = {
    CompletionBody: {"prompt": "hello"},
    ChatBody: {"messages": MESSAGES},
    AnthropicPrompt: {"messages": MESSAGES},
    AnthropicBody: {"messages": MESSAGES, "max_tokens": 3},
    ResponsesBody: {"input": "hello"},
    EmbeddingBody: {"input": "hello"},
    TokenizeBody: {"prompt": "hello"},
}


def take(kind: type[Body], **fields: Any) -> Any:
    return read(kind, json.dumps(LEAST[kind] | fields).encode())


def ready(room: int) -> Ready:
    """An engine of ten tokens, in whose context a prompt of one leaves so much room."""
    return Ready("fake", room + 1, 10, 10, 16, 8, ())


def chat(body: ChatBody, room: int = 100, defaults: Mapping[str, Any] = NO_DEFAULTS) -> SamplingParams:
    return sampling_params.chat_params(body, (1,), ready(room), 16, Caller("a", 0.0, b""), defaults)


def completion(body: CompletionBody, room: int = 100, defaults: Mapping[str, Any] = NO_DEFAULTS) -> SamplingParams:
    return sampling_params.completion_params(body, [(1,)], ready(room), 16, Caller("a", 0.0, b""), defaults)


def test_null_is_the_default_of_every_optional_field() -> None:
    for kind in (CompletionBody, ChatBody, AnthropicBody, AnthropicPrompt):
        plain = take(kind)
        for name in set(kind.__struct_fields__) - set(LEAST[kind]):
            assert take(kind, **{name: None}) == plain


@pytest.mark.parametrize("kind", [ChatBody, TokenizeBody])
def test_a_message_may_say_that_it_is_text_and_nothing_else(kind: type[Body]) -> None:
    """As lm-eval's local-chat-completions does of every message."""

    def taken(message: dict[str, Any]) -> Any:
        return read(kind, json.dumps({"messages": [message]}).encode())

    plain = {"role": "user", "content": "hello"}
    assert taken(plain | {"type": "text"}) == taken(plain)
    for value in ("image", "TEXT", "", "message", None, 1, True, ["text"], {"type": "text"}):
        with pytest.raises(APIError) as error:
            taken(plain | {"type": value})
        assert error.value.param == "messages[0].type"
        assert error.value.code == ("invalid_value" if isinstance(value, str) else "invalid_type")
    with pytest.raises(APIError, match="unknown_field"):
        take(AnthropicBody, messages=[plain | {"type": "text"}])  # no API of theirs has it


def test_what_a_conversation_ends_with() -> None:
    """Anthropic's API goes on with a last message of the assistant's; OpenAI's begins a new turn unless told."""
    said = [*MESSAGES, {"role": "assistant", "content": "The answer is ("}]
    for kind in (AnthropicBody, AnthropicPrompt):
        assert take(kind, messages=said).turn is Turn.CONTINUED
        assert take(kind, messages=[*said, *MESSAGES]).turn is Turn.OPENED
    assert Turn.of(None, None) is Turn.of(True, False) is Turn.OPENED
    assert Turn.of(False, None) is Turn.ENDED
    assert Turn.of(False, True) is Turn.of(None, True) is Turn.CONTINUED
    both = {"messages": said, "add_generation_prompt": True, "continue_final_message": True}
    for body in (ChatBody, TokenizeBody):
        with pytest.raises(APIError, match="invalid_value"):
            read(body, json.dumps(both).encode())


def test_prompts_are_texts_or_tokens() -> None:
    assert take(CompletionBody, prompt=["a", "b"]).prompts() == ["a", "b"]
    assert take(CompletionBody, prompt=[1, 2]).prompts() == [[1, 2]]
    assert take(CompletionBody, prompt=[[1], [2, 3]]).prompts() == [[1], [2, 3]]
    with pytest.raises(APIError, match="invalid_type"):
        take(CompletionBody, prompt=["a", 1]).prompts()


def test_sampling_parameters_are_those_of_the_request() -> None:
    body = take(
        ChatBody, temperature=0, top_p=0.5, top_k=-1, min_p=0.1, repetition_penalty=1.5, presence_penalty=-2,
        frequency_penalty=2, stop="x", stop_token_ids=[3], ignore_eos=True, seed=7, logprobs=True, top_logprobs=2,
        max_completion_tokens=9,
    )  # fmt: skip
    made = chat(body)
    assert (made.temperature, made.top_p, made.top_k, made.min_p, made.seed, made.logprobs) == (0, 0.5, 0, 0.1, 7, 2)
    assert (made.repetition_penalty, made.presence_penalty, made.frequency_penalty) == (1.5, -2, 2)
    assert (made.stop, made.stop_token_ids, made.ignore_eos, made.max_tokens) == (("x",), (3,), True, 9)


def test_the_smallest_nucleus_is_one_token() -> None:
    for kind, made in (
        (ChatBody, chat(take(ChatBody, top_p=0, top_k=40))),
        (CompletionBody, completion(take(CompletionBody, top_p=0.0))),
        (AnthropicBody, sampling_params.anthropic_params(take(AnthropicBody, top_p=0, top_k=3), 100, {})),
    ):
        assert (made.top_k, made.top_p) == (1, 1.0), kind


def test_a_stop_string_is_as_long_as_its_bytes() -> None:
    for kind, field in ((CompletionBody, "stop"), (ChatBody, "stop"), (AnthropicBody, "stop_sequences")):
        for text in ("x" * 256, "é" * 128, "日" * 85, "😀" * 64, "x" * 254 + "é"):
            take(kind, **{field: [text]})
        for text in ("x" * 257, "é" * 129, "日" * 86, "😀" * 65, "x" * 255 + "é"):
            with pytest.raises(APIError) as error:
                take(kind, **{field: ["a", text]})
            assert error.value.code == "invalid_length"
            assert field in str(error.value.param)


@given(st.text(max_size=300))
def test_a_stop_string_that_fits_the_document_is_taken(text: str) -> None:
    if document_takes(text):
        assert take(CompletionBody, stop=text).stop == text


def document_takes(text: str) -> bool:
    kinds = rules.short()["anyOf"]
    return bool(text) and any(
        len(text) <= one["maxLength"] and re.search(one.get("pattern", ""), text) for one in kinds
    )


@pytest.mark.parametrize("width", [0x7F, 0x7FF, 0xFFFF, 0x10FFFF])
def test_the_document_knows_how_long_a_stop_string_may_be(width: int) -> None:
    most = 256 // len(chr(width).encode())
    for text, fits in ((chr(width) * most, True), (chr(width) * (most + 1), False)):
        assert document_takes(text) == fits
        if fits:
            take(CompletionBody, stop=text)
        else:
            with pytest.raises(APIError, match="invalid_length"):
                take(CompletionBody, stop=text)


def test_the_best_of_several_cannot_be_streamed_and_needs_log_probabilities() -> None:
    with pytest.raises(APIError) as error:
        take(CompletionBody, best_of=2, stream=True)
    assert (error.value.code, error.value.param) == ("invalid_value", "best_of")
    assert take(CompletionBody, n=3, best_of=3, stream=True).best_of == 3  # what it is where it is left out
    for given_, wanted in (({"best_of": 2}, 0), ({"n": 2, "best_of": 2}, None), ({"best_of": 2, "logprobs": 3}, 3)):
        assert completion(take(CompletionBody, **given_)).logprobs == wanted


def test_candidates_are_at_least_what_is_kept_of_them_as_the_document_says() -> None:
    rules = document.document(make_app(*[Mock()] * 4), document.Served())
    rules = rules["components"]["schemas"]["CompletionBody"]["not"]["not"]["allOf"]
    some: list[int | None] = [None, 1, 2, 3, 15, 16]
    for n, best_of, stream in itertools.product(some, some, (None, False, True)):
        fields = {"n": n, "best_of": best_of, "stream": stream}
        fits = best_of is None or (best_of == (n or 1) if stream else best_of >= (n or 1))
        for spelt in (fields, {name: value for name, value in fields.items() if value is not None}):
            assert all(obeys(spelt, rule) for rule in rules) == fits, spelt
            if fits:
                take(CompletionBody, **spelt)
                continue
            with pytest.raises(APIError, match="invalid_value") as error:
                take(CompletionBody, **spelt)
            assert error.value.param == "best_of"


def obeys(value: Any, schema: dict[str, Any]) -> bool:
    """As much of JSON Schema as rules between fields are made of."""
    if "anyOf" in schema and not any(obeys(value, one) for one in schema["anyOf"]):
        return False
    if isinstance(value, dict):
        fields = schema.get("properties", {})
        return value.keys() >= set(schema.get("required", ())) and all(
            obeys(value[name], fields[name]) for name in fields.keys() & value.keys()
        )
    number = isinstance(value, int) and not isinstance(value, bool)
    is_a = {"null": value is None, "integer": number, "array": False, "string": False}
    return (
        ("const" not in schema or schema["const"] is value or (number and schema["const"] == value))
        and ("enum" not in schema or value in schema["enum"])
        and ("type" not in schema or is_a[schema["type"]])
        and not (number and value < schema.get("minimum", value))
        and not (number and value > schema.get("maximum", value))
    )


def test_defaults_are_the_apis() -> None:
    assert chat(take(ChatBody)).max_tokens == 100  # what fits
    assert completion(take(CompletionBody)).max_tokens == 16
    assert completion(take(CompletionBody), 5).max_tokens == 5
    assert completion(take(CompletionBody)).temperature == 1
    assert completion(take(CompletionBody)).min_tokens == 0
    echo = completion(take(CompletionBody, echo=True, max_tokens=0, logprobs=1))
    assert (echo.max_tokens, echo.logprobs, echo.prompt_logprobs) == (0, 1, 1)


def test_a_limit_of_minus_one_is_as_many_as_fit() -> None:
    assert chat(take(ChatBody, max_tokens=-1)) == replace(chat(take(ChatBody)), seed=None)
    assert chat(take(ChatBody, max_completion_tokens=-1, max_tokens=7)).max_tokens == 7
    assert completion(take(CompletionBody, max_tokens=-1)).max_tokens == 100
    for kind, field in ((ChatBody, "max_tokens"), (ChatBody, "max_completion_tokens"), (CompletionBody, "max_tokens")):
        with pytest.raises(APIError, match="out_of_range"):
            take(kind, **{field: -2})


def test_what_is_not_named_is_the_servers_default() -> None:
    """As `--generation-config model` gives it."""
    defaults = {"temperature": 0.6, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.1}
    wanted = SamplingParams(max_tokens=100, **defaults)
    assert chat(take(ChatBody), defaults=defaults) == wanted
    assert chat(take(ChatBody, top_k=3, temperature=0), defaults=defaults) == replace(wanted, top_k=3, temperature=0)
    assert completion(take(CompletionBody, max_tokens=100), defaults=defaults) == wanted
    body = take(AnthropicBody, max_tokens=100, top_p=0.5)
    assert sampling_params.anthropic_params(body, 100, defaults) == replace(wanted, top_p=0.5)


def test_fewest_tokens_are_asked_for() -> None:
    assert chat(take(ChatBody, min_tokens=5, max_tokens=8)).min_tokens == 5
    assert completion(take(CompletionBody, min_tokens=5)).min_tokens == 5


def test_logit_bias_is_by_token() -> None:
    made = chat(take(ChatBody, logit_bias={"3": 5, "9": -100}))
    assert dict(made.logit_bias) == {3: 5, 9: -100}
    for key in ("10", "-1", "abc", "", "1.0", "²", "9" * 30):
        with pytest.raises(APIError) as error:
            chat(take(ChatBody, logit_bias={key: 1}))
        assert error.value.param == "logit_bias"


@pytest.mark.parametrize(
    "sentence, code, param",
    [
        ("Expected `int`, got `str` - at `$.n`", "invalid_type", "n"),
        ("Expected `int` <= 16 - at `$.n`", "out_of_range", "n"),
        ("Expected `float` > 0.0 - at `$.top_p`", "out_of_range", "top_p"),
        ("Expected `array` of length <= 0 - at `$.tool_calls`", "unsupported_field", "tool_calls"),
        ("Expected `null`, got `str` - at `$.audio`", "unsupported_field", "audio"),
        ("Expected `array` of length <= 16 - at `$.stop`", "invalid_length", "stop"),
        ("Invalid enum value 'x' - at `$.messages[0].role`", "invalid_value", "messages[0].role"),
        ("Object contains unknown field `zz` - at `$.messages[2]`", "unknown_field", "messages[2].zz"),
        ("Object contains unknown field `z`", "unknown_field", "z"),
        ("Object missing required field `prompt`", "missing_field", "prompt"),
    ],
)
def test_the_librarys_sentences_are_understood(sentence: str, code: str, param: str) -> None:
    refusal = validation._explained(sentence)
    assert (refusal.code, refusal.param) == (code, param)


@pytest.mark.parametrize(
    "kind, fields, says",
    [
        (ChatBody, {"n": 17}, "n: at most 16"),
        (ChatBody, {"n": "1"}, "n: a whole number or null, not a string"),
        (ChatBody, {"n": 1.5}, "n: a whole number or null, not a number"),
        (ChatBody, {"stream": 1}, "stream: true or false or null, not a whole number"),
        (ChatBody, {"stop": ["a"] * 17}, "stop: at most 16 entries"),
        (ChatBody, {"stop": ["a", ""]}, "stop[1]: at least 1 characters"),
        (ChatBody, {"max_tokens": 0}, "max_tokens: at least 1, or -1 for as many as fit"),
        (ChatBody, {"max_completion_tokens": 0}, "max_completion_tokens: at least 1, or -1 for as many as fit"),
        (ChatBody, {"messages": "hello"}, "messages: a list, not a string"),
        (ChatBody, {"messages": [{"role": "assistant", "content": None, "tool_calls": [{}]}]},
         "messages[0].tool_calls[0].id: is required"),
        (ChatBody, {"messages": [{"role": "assistant", "content": "x", "audio": {"id": "x"}}]},
         "messages[0].audio: not supported by this server"),
        (ChatBody, {"messages": [*MESSAGES, {"role": "function", "content": "x"}]},
         "messages[1].role: 'function' is not supported by this server: "
         "it takes 'system' or 'developer' or 'user' or 'assistant' or 'tool'"),
        (ChatBody, {"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]},
         "messages[0].content[0].type: 'input_audio' is not supported by this server: it takes 'text' or 'image_url'"),
        (AnthropicBody, {"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]},
         "messages[0].content[0].type: 'document' is not supported by this server: "
         "it takes 'text' or 'image' or 'thinking' or 'redacted_thinking' or 'tool_use' or 'tool_result'"),
        (EmbeddingBody, {"encoding_format": "int8"},
         "encoding_format: 'int8' is not supported by this server: it takes 'float' or 'base64'"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_in_words_of_json_and_with_what_is_right(
    kind: type[Body], fields: dict[str, Any], says: str
) -> None:
    with pytest.raises(APIError) as error:
        take(kind, **fields)
    assert error.value.message == says


def test_hints_that_change_no_token_are_taken() -> None:
    """As clients of both APIs send them, and what they repeat of other servers' answers."""
    cached = {"prompt_cache_options": {"mode": "explicit", "ttl": "30m"}, "prompt_cache_key": "a"}
    for retention in ("in_memory", "in-memory", "24h"):
        take(ChatBody, **cached, prompt_cache_retention=retention)
    for kind in (AnthropicBody, AnthropicPrompt):
        for hint in ({"type": "ephemeral"}, {"type": "ephemeral", "ttl": "1h"}):
            assert take(kind, cache_control=hint).messages == take(kind).messages
    again = [*MESSAGES, {"role": "assistant", "content": "hi", "reasoning_content": None}, *MESSAGES]
    assert take(ChatBody, messages=again).messages[1].content == "hi"


def test_whole_floats_are_integers_as_in_json_schema() -> None:
    body = take(CompletionBody, n=2.0, max_tokens=1e1, seed=-0.0, prompt=[1.0, 2], logit_bias={"3": 5})
    assert (body.n, body.max_tokens, body.seed, body.prompt) == (2, 10, 0, [1, 2])
    assert take(CompletionBody, min_tokens=2.0, temperature=1.0).min_tokens == 2
    for value in (1.5, 1e300, 1e-9):
        with pytest.raises(APIError, match="invalid_type"):
            take(CompletionBody, n=value)


def test_the_documents_examples_are_taken() -> None:
    kinds = {kind.__name__: kind for kind in (*LEAST, DetokenizeBody, RerankBody, *LLAMACPP, *OLLAMA)}
    assert EXAMPLES.keys() == kinds.keys()
    for name, examples in EXAMPLES.items():
        for example in examples:
            read(kinds[name], json.dumps(example).encode())


@given(st.integers(1, 300_000), st.data())
def test_the_documents_pattern_of_token_ids_is_exact(vocab: int, data: st.DataObject) -> None:
    pattern = re.compile("|".join(document._below(vocab)))
    near = st.sampled_from([vocab - 1, vocab, vocab + 1, vocab // 10, vocab * 10, 0])
    token = data.draw(st.integers(0, 10 * vocab) | near)
    assert bool(pattern.fullmatch(str(token))) == (token < vocab)
    assert not pattern.fullmatch("0" + str(token))


def test_the_document_names_what_is_served_and_asks_for_keys_where_they_are_needed() -> None:
    app = make_app(*[Mock()] * 4)
    before = document.document(app, document.Served())
    assert "security" not in before
    assert "401" not in before["paths"]["/tokenize"]["post"]["responses"]
    ready = Ready("a-model", 512, 1000, 1, 16, 256, (), dimensions=64)
    after = document.document(app, document.Served(keyed=True, ready=ready, shortest=1))
    body = after["components"]["schemas"]["CompletionBody"]["properties"]
    assert body["model"] == {"enum": [None, "a-model"]}
    assert body["prompt"]["anyOf"][0]["minLength"] == 1
    assert body["stop_token_ids"]["anyOf"][0]["items"]["maximum"] == 999
    for method in ("get", "head"):
        assert after["paths"]["/livez"][method]["security"] == []
    for path, methods in after["paths"].items():
        for operation in methods.values():
            assert ("401" in operation["responses"]) == (path not in ("/livez", "/health"))
            for status, response in operation["responses"].items():
                assert ("Retry-After" in response.get("headers", {})) == (status in ("429", "503"))
        for response in methods.get("head", {"responses": {}})["responses"].values():
            assert "content" not in response
    heads, gets = ({path for path, kinds in after["paths"].items() if kind in kinds} for kind in ("head", "get"))
    assert heads == gets
    assert after["components"]["schemas"]["EmbeddingBody"]["properties"]["dimensions"]["anyOf"][0]["maximum"] == 64


def test_a_stream_has_room_past_the_context() -> None:
    """Only where the request asks for it: a chat without a limit ends with the context's number of tokens."""
    offered = Ready("fake", 101, 10, 10, 16, 8, (), kv_evictions=(("sink:4+124", 5000), ("snapkv:128", 101)))

    def limit(prompt: int = 1, **fields: Any) -> int:
        body = take(CompletionBody, **{"max_tokens": 9999} | fields)
        caller = Caller("a", 0.0, b"")
        return sampling_params.completion_params(body, [(1,) * prompt], offered, 16, caller, NO_DEFAULTS).max_tokens

    assert limit() == limit(kv_eviction="sink:4+124") == 4999
    assert limit(kv_eviction="none") == limit(kv_eviction="snapkv:128") == 100
    assert limit(max_tokens=-1) == 101
    assert limit(prompt=4990, max_tokens=-1) == 10
    for wrong in ("snapkv:256", "sink", ""):
        with pytest.raises(APIError) as error:
            limit(kv_eviction=wrong)
        assert (error.value.code, error.value.param) == ("invalid_value", "kv_eviction")
