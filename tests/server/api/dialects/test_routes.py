"""Filling in the middle and reranking over HTTP, with a tokenizer that has the tokens for both."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from tokenizers import Tokenizer as Backend

from attar.protocol.messages import Submit
from attar.server.api.dialects import answers as types
from attar.server.api.dialects.llamacpp import answers as native
from attar.text.forms.rerank import score
from attar.text.tokenizer import Tokenizer
from tests.server.conftest import Running, starting

MARKS = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
GAP = {"input_prefix": "def f(", "input_suffix": "return 1", "n_predict": 4, "seed": 7}


@pytest.fixture(scope="module")
def able(tokenizer: Tokenizer) -> Tokenizer:
    backend = Backend.from_str(tokenizer._backend.to_str())
    backend.add_special_tokens([*MARKS, "<|im_start|>", "<|im_end|>"])
    backend.add_tokens(["<think>", "</think>", "yes", "no"])
    return Tokenizer(backend, tokenizer.bos_token, tokenizer.eos_token, tokenizer.chat_templates)


@pytest.fixture(scope="module")
def served(able: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with starting(able, tmp_path_factory) as make:
        yield make()


def asked(server: Running) -> Submit:
    command = server.engine.commands[-1]
    assert isinstance(command, Submit)
    return command


def test_a_completion_with_a_suffix(served: Running, able: Tokenizer) -> None:
    body = {"prompt": ["def f(", "def g("], "suffix": "return 1", "max_tokens": 4, "logprobs": 1, "stop_token_ids": [3]}
    reply = served.post("/v1/completions", body)
    assert [choice["finish_reason"] for choice in reply.json["choices"]] == ["length"] * 2
    shown = able.decode(asked(served).prompt, skip_special_tokens=False)
    assert shown == "<|fim_prefix|>def g(<|fim_suffix|>return 1<|fim_middle|>"
    assert asked(served).params.stop_token_ids == (3, able.token_to_id("<|endoftext|>"))
    assert served.post("/v1/completions", body | {"suffix": ""}).status == 200
    assert asked(served).prompt == tuple(able.encode("def g("))
    assert served.post("/v1/completions", body | {"echo": True}).json["error"]["param"] == "suffix"
    long = served.post("/v1/completions", body | {"suffix": "word " * 1000})
    assert (long.code, long.json["error"]["param"]) == ("context_length_exceeded", "suffix")


def test_infill(served: Running, able: Tokenizer) -> None:
    reply = served.post("/infill", GAP)
    answer = msgspec.json.decode(reply.body, type=native.NativeCompletion)
    assert (answer.stop, answer.stop_type, answer.tokens_predicted, answer.truncated) == (True, "limit", 4, False)
    assert able.decode(answer.tokens) == answer.content
    params = asked(served).params
    assert (params.temperature, params.top_k, params.top_p, params.min_p, params.seed) == (0.8, 40, 0.95, 0.05, 7)
    events = served.post("/infill", GAP | {"stream": True}).events
    pieces = [msgspec.convert(event, native.NativeCompletion) for event in events]
    assert [piece.stop for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert "".join(piece.content for piece in pieces) == answer.content
    assert pieces[-1].tokens_predicted == 4


def test_infill_as_editors_send_it(served: Running, able: Tokenizer) -> None:
    """llama.vim's request, and the one by which it fills the cache."""
    body: dict[str, Any] = GAP | {
        "id_slot": 0, "input_extra": [{"text": "one", "time": [1, 2], "filename": "x.py"}], "prompt": "a",
        "n_predict": 8, "n_indent": 0, "stop": [], "top_k": 40, "top_p": 0.9, "samplers": ["top_k", "top_p", "infill"],
        "cache_prompt": True, "t_max_prompt_ms": 500, "t_max_predict_ms": 1, "stream": False,
        "response_fields": ["content", "timings/prompt_n", "truncated", "nothing/here"],
    }  # fmt: skip
    told = served.post("/infill", body).json
    assert told.keys() == {"content", "timings/prompt_n", "truncated"}
    assert able.decode(asked(served).prompt, skip_special_tokens=False).endswith(
        "def f(a<|fim_suffix|>return 1<|fim_middle|>"
    )
    assert served.post("/infill", body | {"n_predict": 0, "response_fields": [""]}).status == 200
    assert asked(served).params.max_tokens == 0
    for field, value, code in (("n_probs", 1, "unsupported_field"), ("lora", [{}], "unsupported_field"),
                               ("stop", ["x" * 300], "invalid_length"), ("what", 1, "unknown_field")):  # fmt: skip
        assert served.post("/infill", body | {field: value}).code == code


def test_a_stop_string_ends_a_middle(served: Running) -> None:
    text = served.post("/infill", GAP | {"n_predict": 12}).json["content"]
    answer = served.post("/infill", GAP | {"n_predict": 12, "stop": [text[2:4]]}).json
    assert (answer["stop_type"], answer["stopping_word"], answer["content"]) == ("word", text[2:4], text[:2])


def test_documents_are_read_up_to_a_length(served: Running, able: Tokenizer) -> None:
    documents = ["the dog barks at the car", "a cat", "né né né né"]
    body: dict[str, Any] = {"query": "a pet", "documents": documents}

    def read(more: dict[str, Any]) -> list[str]:
        served.engine.commands.clear()
        assert served.post("/v1/rerank", body | more).status == 200
        said = [able.decode(command.prompt, skip_special_tokens=False) for command in served.engine.commands]
        return [text.partition("<Document>: ")[2].partition("<|im_end|>")[0] for text in said]

    assert read({}) == read({"max_tokens_per_doc": 0}) == documents
    for most in (1, 2, 4):
        for short, text in zip(read({"max_tokens_per_doc": most}), documents, strict=True):
            assert text.startswith(short)
            assert len(able.encode(short)) <= most
    long = {"documents": ["word " * 2000]}
    assert served.post("/v1/rerank", body | long).code == "context_length_exceeded"
    assert served.post("/v1/rerank", body | long | {"max_tokens_per_doc": 8}).status == 200
    wrong = served.post("/v1/rerank", body | {"max_tokens_per_doc": -1}).json["error"]
    assert wrong["param"] == "max_tokens_per_doc"


def test_rerank(served: Running, able: Tokenizer) -> None:
    body = {"query": "a pet", "documents": ["a cat", {"text": "a car"}, "the dog barks", "a cat"]}
    reply = served.post("/v1/rerank", body)
    answer = msgspec.json.decode(reply.body, type=types.Ranking)
    assert sorted(result.index for result in answer.results) == [0, 1, 2, 3]
    found = [result.relevance_score for result in answer.results]
    assert found == sorted(found, reverse=True)
    by_index = {result.index: result for result in answer.results}
    assert by_index[0].relevance_score == by_index[3].relevance_score
    commands = [command for command in list(served.engine.commands)[-4:] if isinstance(command, Submit)]
    no, yes = able.token_to_id("no"), able.token_to_id("yes")
    for at, command in enumerate(commands):
        assert (command.params.max_tokens, command.params.logprob_token_ids) == (1, (no, yes))
        told = [-1.0 - (sum(command.prompt) * word) % 11 for word in (no, yes)]  # type: ignore[operator]
        assert by_index[at].relevance_score == score(*told)
    assert answer.usage.total_tokens == sum(len(command.prompt) for command in commands)
    few = served.post("/rerank", body | {"top_n": 2, "return_documents": False}).json["results"]
    assert few == [{"index": r.index, "relevance_score": r.relevance_score} for r in answer.results[:2]]
    served.post("/v2/rerank", body | {"instruction": "Find cats"})
    assert "<Instruct>: Find cats\n" in able.decode(asked(served).prompt)
    assert served.post("/v1/rerank", body | {"documents": []}).code == "invalid_length"
    assert served.post("/v1/rerank", {"query": "word " * 1000, "documents": ["a"]}).code == "context_length_exceeded"


def test_a_model_for_neither_says_so(server: Running) -> None:
    for path, body, field in (
        ("/v1/completions", {"prompt": "a", "suffix": "b"}, "suffix"),
        ("/infill", GAP, "input_prefix"),
        ("/v1/rerank", {"query": "a", "documents": ["b"]}, "model"),
    ):
        refused = server.post(path, body)
        assert (refused.status, refused.code, refused.json["error"]["param"]) == (400, "unsupported_field", field)


def test_the_document_has_what_the_model_can(server: Running, served: Running) -> None:
    can, cannot = (each.get("/openapi.json").json for each in (served, server))
    assert {"/infill", "/v1/rerank"} <= can["paths"].keys()
    assert not {"/infill", "/v1/rerank"} & cannot["paths"].keys()
    suffix = [each["components"]["schemas"]["CompletionBody"]["properties"]["suffix"] for each in (can, cannot)]
    assert suffix[1] == {"enum": [None, ""]}
    assert suffix[0] != suffix[1]
