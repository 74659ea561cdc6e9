"""The table of bad requests: path, body, status, code. Integers and floats come from grids, for every field."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

VOCAB, CONTEXT = 4096, 512  # of the fake engine
COMPLETIONS, CHAT, MESSAGES, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses"
USER = [{"role": "user", "content": "hello"}]
LEAST: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "hello", "max_tokens": 2},
    CHAT: {"messages": USER, "max_tokens": 2},
    MESSAGES: {"messages": USER, "max_tokens": 2},
    RESPONSES: {"input": "hello", "max_output_tokens": 2},
    "/v1/embeddings": {"input": "hello"},
    "/tokenize": {"prompt": "hello"},
    "/detokenize": {"tokens": [1]},
}


class Case(NamedTuple):
    path: str
    body: bytes
    status: int
    code: str

    @property
    def name(self) -> str:
        return f"{self.path} {self.body[:60]!r} ({len(self.body)})"


INTEGERS = [  # path, field, least, most
    (COMPLETIONS, "max_tokens", -1, 2**31 - 1),
    (COMPLETIONS, "min_tokens", 0, 2**31 - 1),
    (COMPLETIONS, "n", 1, 16),
    (COMPLETIONS, "logprobs", 0, 20),
    (COMPLETIONS, "prompt_logprobs", 0, 20),
    (CHAT, "prompt_logprobs", 0, 20),
    (COMPLETIONS, "top_k", -1, 2**31 - 1),
    (COMPLETIONS, "best_of", 1, 16),
    (COMPLETIONS, "seed", -(2**63), 2**63 - 1),
    (COMPLETIONS, "priority", -100, 100),
    (CHAT, "max_tokens", -1, 2**31 - 1),
    (CHAT, "max_completion_tokens", -1, 2**31 - 1),
    (CHAT, "n", 1, 16),
    (CHAT, "top_logprobs", 0, 20),
    (CHAT, "top_k", -1, 2**31 - 1),
    (CHAT, "seed", -(2**63), 2**63 - 1),
    (CHAT, "priority", -100, 100),
    (MESSAGES, "max_tokens", 1, 2**31 - 1),
    (MESSAGES, "top_k", 0, 2**31 - 1),
    (RESPONSES, "max_output_tokens", 1, 2**31 - 1),
    (RESPONSES, "top_k", -1, 2**31 - 1),
    (RESPONSES, "seed", -(2**63), 2**63 - 1),
]
FLOATS = [  # path, field, below the least, above the most
    *[(path, "temperature", "-1e-9", "2.0000001") for path in (COMPLETIONS, CHAT)],
    *[(path, "top_p", "-1e-9", "1.0000001") for path in (COMPLETIONS, CHAT, MESSAGES)],
    *[(path, "min_p", "-0.1", "1.5") for path in (COMPLETIONS, CHAT)],
    *[(path, "repetition_penalty", "0.0099", "100.5") for path in (COMPLETIONS, CHAT)],
    *[(path, "presence_penalty", "-2.01", "2.01") for path in (COMPLETIONS, CHAT)],
    *[(path, "frequency_penalty", "-3", "3") for path in (COMPLETIONS, CHAT)],
    (MESSAGES, "temperature", "-1", "1.01"),
    (RESPONSES, "temperature", "-1e-9", "2.0000001"),
    (RESPONSES, "top_p", "-1e-9", "1.0000001"),
    (RESPONSES, "min_p", "-0.1", "1.5"),
]


def raw(path: str, field: str, text: str) -> bytes:
    """A body whose `field` is spelt `text`, which JSON in Python could not write."""
    rest = {name: value for name, value in LEAST[path].items() if name != field}
    if field == "top_logprobs":
        rest["logprobs"] = True
    return (json.dumps(rest)[:-1] + f', "{field}": {text}}}').encode()


def _grids() -> Iterator[Case]:
    for path, field, least, most in INTEGERS:
        for value in (-(2**63), least - 1, most + 1, 2**63 - 1):
            if -(2**63) <= value < least or most < value < 2**63:
                yield Case(path, raw(path, field, str(value)), 400, "out_of_range")
        for text in (str(-(2**63) - 1), str(2**63), str(2**64), "1" + "0" * 5000, "1e999", "NaN"):
            yield Case(path, raw(path, field, text), 400, "invalid_json")
        for text in ("1.5", "1e-3", '"1"', "true", "[1]", "{}"):
            yield Case(path, raw(path, field, text), 400, "invalid_type")
    for path, field, below, above in FLOATS:
        for text in (below, above, "-1e308", "1e308", str(2**53 + 1)):
            yield Case(path, raw(path, field, text), 400, "out_of_range")
        for text in ("NaN", "Infinity", "-Infinity", "1e400", "-1e400"):
            yield Case(path, raw(path, field, text), 400, "invalid_json")
        for text in ('"0.5"', "true", "[0.5]", "{}"):
            yield Case(path, raw(path, field, text), 400, "invalid_type")


def _fields() -> Iterator[tuple[str, str, Any, str]]:
    """Path, field, value, code."""
    for path in (COMPLETIONS, CHAT):
        yield from (
            (path, "stop", ["a", ""], "invalid_length"),
            (path, "stop", ["a"] * 17, "invalid_length"),
            (path, "stop", ["a"] * 10_000, "invalid_length"),
            (path, "stop", "x" * 257, "invalid_length"),
            (path, "stop", "é" * 129, "invalid_length"),
            (path, "stop", ["a", "😀" * 65], "invalid_length"),
            (path, "stop", "x" * 255 + "é", "invalid_length"),
            (path, "stop", "x" * 1_000_000, "invalid_length"),
            (path, "stop", [1], "invalid_type"),
            (path, "stop", {"a": 1}, "invalid_type"),
            (path, "stop_token_ids", [-1], "out_of_range"),
            (path, "stop_token_ids", [VOCAB], "out_of_range"),
            (path, "stop_token_ids", [True], "invalid_type"),
            (path, "stop_token_ids", [1] * 65, "invalid_length"),
            (path, "speculation", {"trust_forced": 1}, "invalid_type"),
            (path, "kv_eviction", "sink:4+124", "invalid_value"),  # which this server does not offer
            (path, "kv_eviction", "x" * 65, "invalid_length"),
            (path, "kv_eviction", 4, "invalid_type"),
            (path, "logprob_token_ids", [1], "invalid_value"),  # without logprobs
            (path, "logprob_token_ids", [-1], "out_of_range"),
            (path, "logprob_token_ids", [1] * 129, "invalid_length"),
            (path, "logit_bias", {str(token): 1 for token in range(1025)}, "invalid_length"),
            (path, "logit_bias", {str(token): 1 for token in range(VOCAB)}, "invalid_length"),
            (path, "logit_bias", {"1": 1e308}, "out_of_range"),
            (path, "logit_bias", {"1": -1e308}, "out_of_range"),
            (path, "logit_bias", {"1": "1"}, "invalid_type"),
            (path, "logit_bias", {"1": True}, "invalid_type"),
            (path, "logit_bias", {"abc": 1}, "invalid_value"),
            (path, "logit_bias", {"-1": 1}, "invalid_value"),
            (path, "logit_bias", {str(VOCAB): 1}, "invalid_value"),
            (path, "logit_bias", {"1": 1, "01": 2}, "invalid_value"),  # one token twice
            (path, "logit_bias", [[1, 2]], "invalid_type"),
            (path, "allowed_token_ids", [VOCAB], "out_of_range"),
            (path, "allowed_token_ids", [], "invalid_length"),
            (path, "allowed_token_ids", [1] * 1025, "invalid_length"),
            (path, "ignore_eos", 1, "invalid_type"),
            (path, "speculation", {"max_tokens": 17}, "out_of_range"),
            (path, "speculation", {"max_tokens": -1}, "out_of_range"),
            (path, "speculation", {"max_tokens": "auto"}, "invalid_type"),
            (path, "speculation", {"tokens": 1}, "unknown_field"),
            (path, "speculation", True, "invalid_type"),
            (path, "ignore_eos", "true", "invalid_type"),
            (path, "stream", 0, "invalid_type"),
            (path, "stream", "yes", "invalid_type"),
            (path, "stream_options", {"include_usage": True}, "invalid_value"),
            (path, "stream_options", True, "invalid_type"),
            (path, "model", 7, "invalid_type"),
            (path, "model", "x" * 257, "invalid_length"),
            (path, "n", 10**9, "out_of_range"),
            (path, "min_tokens", "1", "invalid_type"),
            (path, "typical_p", 0.9, "unsupported_field"),
            (path, "repeat_penalty", 1.1, "unsupported_field"),
            (path, "mirostat_mode", False, "unsupported_field"),
            (path, "stream_options", {"continuous_usage_stats": 1}, "invalid_type"),
            (path, "use_beam_search", True, "unsupported_field"),
            (path, "return_token_ids", 1, "invalid_type"),
            (path, "timings_per_token", "yes", "invalid_type"),
            (path, "guided_regex", "(a+", "invalid_value"),
            (path, "guided_regex", 1, "invalid_type"),
            (path, "guided_choice", [], "invalid_length"),
            (path, "guided_grammar", "root ::= missing", "invalid_value"),
            (path, "guided_json", {"uniqueItems": True}, "invalid_value"),
            (path, "structured_outputs", {"json": {}, "regex": "a"}, "invalid_value"),
            (path, "structured_outputs", {"structural_tag": "x"}, "unknown_field"),
            (path, "structured_outputs", {"json": {}, "whitespace_pattern": "[ ]*"}, "invalid_value"),
            (path, "response_format", {"type": "json"}, "invalid_value"),
            (path, "response_format", {"type": "json_schema", "json_schema": {}}, "missing_field"),
            (path, "grammar", "root ::= (", "invalid_value"),
            (path, "json_schema", "{}", "invalid_type"),
            (path, "prompt_embeds", "AAAA", "unknown_field"),
            (path, "logits_processors", ["os.system"], "unsupported_field"),
            (path, "trust_remote_code", True, "unknown_field"),
            (path, "nonsense", None, "unknown_field"),
            (path, "\u202e\u0000\x1b[31m", 1, "unknown_field"),
            (path, "x" * 10_000, 1, "unknown_field"),
        )
    yield from (
        (COMPLETIONS, "suffix", "x", "unsupported_field"),
        (COMPLETIONS, "max_tokens", 0, "out_of_range"),  # without echo
        (COMPLETIONS, "echo", 1, "invalid_type"),
        (COMPLETIONS, "logprobs", True, "invalid_type"),
        (COMPLETIONS, "messages", USER, "unknown_field"),
        (COMPLETIONS, "prompt", None, "invalid_type"),
        (COMPLETIONS, "prompt", 7, "invalid_type"),
        (COMPLETIONS, "prompt", {}, "invalid_type"),
        (COMPLETIONS, "prompt", "", "empty_prompt"),
        (COMPLETIONS, "prompt", [], "empty_prompt"),
        (COMPLETIONS, "prompt", [[]], "empty_prompt"),
        (COMPLETIONS, "prompt", ["a", ""], "empty_prompt"),
        (COMPLETIONS, "prompt", [-1], "out_of_range"),
        (COMPLETIONS, "prompt", [VOCAB], "out_of_range"),
        (COMPLETIONS, "prompt", [[1], [VOCAB]], "out_of_range"),
        (COMPLETIONS, "prompt", [2**31], "out_of_range"),
        (COMPLETIONS, "prompt", [True], "invalid_type"),
        (COMPLETIONS, "prompt", [1.5], "invalid_type"),
        (COMPLETIONS, "prompt", [None], "invalid_type"),
        (COMPLETIONS, "prompt", ["a", 1], "invalid_type"),
        (COMPLETIONS, "prompt", [[1], 1], "invalid_type"),
        (COMPLETIONS, "prompt", [["a"]], "invalid_type"),
        (COMPLETIONS, "prompt", [[[1]]], "invalid_type"),
        (COMPLETIONS, "prompt", ["a"] * 129, "invalid_length"),
        (COMPLETIONS, "prompt", [[1]] * 129, "invalid_length"),
        (COMPLETIONS, "prompt", [1] * CONTEXT, "context_length_exceeded"),
        (COMPLETIONS, "prompt", [1] * 200_000, "context_length_exceeded"),
        (COMPLETIONS, "prompt", "word " * 1000, "context_length_exceeded"),
        (COMPLETIONS, "prompt", "\u0301" * 10_000, "context_length_exceeded"),
        (COMPLETIONS, "prompt", [[1], [1] * CONTEXT], "context_length_exceeded"),
        (CHAT, "tools", [{"type": "function", "function": {"name": "(a+)+$"}}], "invalid_value"),
        (CHAT, "tool_choice", "required", "invalid_value"),
        (CHAT, "functions", [{"name": "f"}], "unsupported_field"),
        (CHAT, "function_call", {"name": "f"}, "unsupported_field"),
        (CHAT, "parallel_tool_calls", 1, "invalid_type"),
        (CHAT, "modalities", ["text", "audio"], "unsupported_field"),
        (CHAT, "audio", {"voice": "x"}, "unsupported_field"),
        (CHAT, "reasoning_effort", "much", "invalid_value"),
        (CHAT, "enable_thinking", 1, "invalid_type"),
        (CHAT, "thinking", {"type": "much"}, "invalid_value"),
        (CHAT, "reasoning", {"effort": "low", "tokens": 3}, "unknown_field"),
        (CHAT, "thinking_token_budget", -2, "out_of_range"),
        (CHAT, "reasoning_format", "none", "unsupported_field"),
        (CHAT, "web_search_options", {}, "unsupported_field"),
        (CHAT, "echo", 1, "invalid_type"),
        (CHAT, "truncation_side", "right", "invalid_value"),
        (CHAT, "kv_transfer_params", {"prompt_token_ids": []}, "invalid_length"),
        (CHAT, "kv_transfer_params", {"do_remote_decode": True}, "unknown_field"),
        (CHAT, "kv_transfer_params", {"prompt_token_ids": [VOCAB]}, "out_of_range"),
        (CHAT, "chat_template", "{{ 1 }}", "unsupported_field"),
        (CHAT, "chat_template_kwargs", {"messages": []}, "invalid_value"),
        (CHAT, "chat_template_kwargs", {"add_generation_prompt": False}, "invalid_value"),
        (CHAT, "chat_template_kwargs", {"a b": 1}, "invalid_value"),
        (CHAT, "chat_template_kwargs", {f"a{i}": i for i in range(65)}, "invalid_length"),
        (CHAT, "add_generation_prompt", 0, "invalid_type"),
        (CHAT, "continue_final_message", "yes", "invalid_type"),
        (CHAT, "documents", [{"text": "x"}], "unsupported_field"),
        (CHAT, "top_logprobs", 2, "invalid_value"),  # without logprobs
        (CHAT, "logprobs", 1, "invalid_type"),
        (CHAT, "max_tokens", 0, "out_of_range"),
        (CHAT, "max_completion_tokens", 0, "out_of_range"),
        (CHAT, "prompt", "hello", "unknown_field"),
        (MESSAGES, "tools", [{"name": "f", "input_schema": {"type": "array"}}], "invalid_value"),
        (MESSAGES, "tool_choice", {"type": "any"}, "invalid_value"),
        (MESSAGES, "thinking", {"type": "enabled", "budget_tokens": -1}, "out_of_range"),
        (MESSAGES, "mcp_servers", [{}], "unsupported_field"),
        (MESSAGES, "output_config", {"format": {"type": "json_schema", "schema": {"type": 7}}}, "invalid_value"),
        (MESSAGES, "output_config", {"effort": "much"}, "invalid_value"),
        (MESSAGES, "output_format", {"type": "json_object"}, "invalid_value"),
        (MESSAGES, "stop_sequences", ["a", ""], "invalid_length"),
        (MESSAGES, "stop_sequences", ["é" * 129], "invalid_length"),
        (MESSAGES, "stop_sequences", "x", "invalid_type"),
        (MESSAGES, "system", 7, "invalid_type"),
        (MESSAGES, "n", 2, "unknown_field"),
        (MESSAGES, "seed", 2, "unknown_field"),
        ("/v1/embeddings", "input", "", "empty_prompt"),
        ("/v1/embeddings", "input", [], "invalid_length"),
        ("/v1/embeddings", "input", [[]], "empty_prompt"),
        ("/v1/embeddings", "input", [VOCAB], "out_of_range"),
        ("/v1/embeddings", "input", [[1], 1], "invalid_type"),
        ("/v1/embeddings", "input", ["a", VOCAB], "out_of_range"),
        ("/v1/embeddings", "input", {}, "missing_field"),
        ("/v1/embeddings", "input", {"prompt_string": "a", "multimodal_data": ["b"]}, "unsupported_field"),
        ("/v1/embeddings", "input", ["a"] * 2049, "invalid_length"),
        ("/v1/embeddings", "input", None, "invalid_type"),
        ("/v1/embeddings", "input", [1] * (CONTEXT + 1), "context_length_exceeded"),
        ("/v1/embeddings", "encoding_format", "int8", "invalid_value"),
        ("/v1/embeddings", "dimensions", 100_000, "out_of_range"),
        ("/v1/embeddings", "dimensions", 0, "out_of_range"),
        ("/v1/embeddings", "pooling", "max", "invalid_value"),
        ("/tokenize", "prompt", None, "missing_field"),
        ("/tokenize", "messages", USER, "missing_field"),  # and a prompt
        ("/tokenize", "add_special_tokens", 1, "invalid_type"),
        ("/detokenize", "tokens", [VOCAB], "out_of_range"),
        ("/detokenize", "tokens", [-1], "out_of_range"),
        ("/detokenize", "tokens", [2**40], "out_of_range"),
        ("/detokenize", "tokens", "abc", "invalid_type"),
        ("/detokenize", "tokens", None, "invalid_type"),
        ("/detokenize", "tokens", ["1"], "invalid_type"),
    )
    for path in (CHAT, MESSAGES):
        for value, code in (
            ([], "invalid_length"),
            (None, "invalid_type"),
            ("hello", "invalid_type"),
            ([None], "invalid_type"),
            (["hello"], "invalid_type"),
            ([{}], "missing_field"),
            ([{"content": "x"}], "missing_field"),
            ([{"role": "root", "content": "x"}], "invalid_value"),
            ([{"role": "function", "content": "x"}], "invalid_value"),
            ([{"role": "User", "content": "x"}], "invalid_value"),
            ([{"role": ["user"], "content": "x"}], "invalid_type"),
            ([{"role": "user", "content": 7}], "invalid_type"),
            ([{"role": "user", "content": [7]}], "invalid_type"),
            ([{"role": "user", "content": [{"type": "text"}]}], "missing_field"),
            ([{"role": "user", "content": [{"text": "x"}]}], "missing_field"),
            ([{"role": "user", "content": [{"type": "text", "text": 1}]}], "invalid_type"),
            ([{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}], "invalid_value"),
            ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "missing_field"),
            ([{"role": "user", "content": [{"type": "image_url", "image_url": "http://a/b.png"}]}], "invalid_value"),
            (
                [{"role": "user", "content": [{"type": "image_url", "image_url": "data:image/png;base64,"}]}],
                "unsupported_field",
            ),
            ([{"role": "system", "content": [{"type": "image_url", "image_url": "data:"}]}], "invalid_value"),
            ([{"role": "user", "content": [{"type": "text", "text": "x", "more": 1}]}], "unknown_field"),
            ([{"role": "user", "content": [{"type": "text", "text": "x"}] * 10_000}], "invalid_length"),
            ([{"role": "user", "content": "x", "path": "/etc/passwd"}], "unknown_field"),
            (USER * 2049, "invalid_length"),
            ([{"role": "user", "content": "word " * 2000}], "context_length_exceeded"),
            ([{"role": "user", "content": "👨‍👩‍👧‍👦" * 2000}], "context_length_exceeded"),
        ):
            yield path, "messages", value, code
    for message, code in (
        ({"role": "user"}, "missing_field"),
        ({"role": "user", "content": None}, "missing_field"),
        ({"role": "system", "content": None}, "missing_field"),
        ({"role": "user", "content": "x", "name": "n" * 65}, "invalid_length"),
        ({"role": "assistant", "content": None, "tool_calls": [{}]}, "missing_field"),
        ({"role": "assistant", "content": None, "tool_calls": [{"id": "a", "function": {}}]}, "missing_field"),
        ({"role": "tool", "content": "x"}, "missing_field"),
        ({"role": "tool", "content": "x", "tool_call_id": "a"}, "invalid_value"),
        ({"role": "user", "content": "x", "tool_call_id": "a"}, "invalid_value"),
        ({"role": "assistant", "content": "x", "function_call": {}}, "unsupported_field"),
        ({"role": "assistant", "content": "x", "audio": {"id": "x"}}, "unsupported_field"),
        ({"role": "assistant", "content": "x", "reasoning_content": ["hm"]}, "invalid_type"),
        ({"role": "user", "content": "x", "type": "image"}, "invalid_value"),
        ({"role": "user", "content": "x", "type": None}, "invalid_type"),
    ):
        yield CHAT, "messages", [message], code


BODIES: list[tuple[bytes, str]] = [
    (b"", "invalid_json"),
    (b"null", "invalid_type"),
    (b"[]", "invalid_type"),
    (b'"x"', "invalid_type"),
    (b"7", "invalid_type"),
    (b"{}", "missing_field"),
    (b"\xef\xbb\xbf{}", "invalid_json"),
    ("{}".encode("utf-16"), "invalid_json"),
    (b'{"prompt": "\xff"}', "invalid_json"),
    (b'{"prompt": "\xc0\xaf"}', "invalid_json"),
    (b'{"prompt": "\xed\xa0\xbd\xed\xb8\x80"}', "invalid_json"),
    (b'{"prompt": "\\ud800"}', "invalid_json"),
    (b'{"prompt": "a", "prompt": "b"}', "invalid_json"),
    (b'{"prompt": "a"}x', "invalid_json"),
    (b'{"prompt": "a"}{"prompt": "b"}', "invalid_json"),
    (b'{"prompt": "a",}', "invalid_json"),
    (b"{'prompt': 'a'}", "invalid_json"),
    (b"[" * 100_000, "invalid_json"),
    (b'{"prompt":' + b"[" * 64 + b"]" * 64 + b"}", "invalid_json"),
    (b'{"prompt":' + b"[" * 63 + b"]" * 63 + b"}", "invalid_type"),
    (b"{" + b",".join(b'"%d":1' % i for i in range(90_000)) + b"}", "unknown_field"),
    (b"{" + b",".join(b'"%d":1' % i for i in range(200_000)) + b"}", "invalid_json"),
    (b'{"prompt":[' + b"[]," * 1_000_000 + b"0]}", "invalid_json"),
    (b"--x\r\nContent-Disposition: form-data; name=a\r\n\r\nb\r\n--x--", "invalid_json"),
    (b"prompt=hello&n=1", "invalid_json"),
    (b"\x1f\x8b\x08\x00\x00\x00\x00\x00", "invalid_json"),
]


def cases() -> list[Case]:
    """All of them."""
    found = list(_grids())
    for path, field, value, code in _fields():
        found.append(Case(path, json.dumps(LEAST[path] | {field: value}).encode(), 400, code))
    found += [Case(COMPLETIONS, body, 400, code) for body, code in BODIES]
    found += [
        Case(path, json.dumps(LEAST[path] | {"model": "other"}).encode(), 404, "model_not_found") for path in LEAST
    ]
    found += [Case(path, b"x" * ((4 << 20) + 1), 413, "body_too_large") for path in LEAST]
    return found
