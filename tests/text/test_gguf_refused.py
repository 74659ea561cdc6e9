"""Metadata of GGUF files that no tokenizer can be made of: each is refused with a sentence that names the fault."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from attar.text.gguf import MAX_PIECE, MAX_TOKEN, tokenizer_from_gguf
from attar.text.template import MAX_TEMPLATE
from tests.text.gguf_metadata import NORMAL, K, small_gpt2, small_llama


def _with(metadata: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return metadata | {K + key: value for key, value in changes.items()}


def _put(metadata: dict[str, Any], key: str, index: int, value: Any) -> dict[str, Any]:
    changed = list(metadata[K + key])
    changed[index] = value
    return metadata | {K + key: changed}


def _without(metadata: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in metadata.items() if name != K + key}


def _longer(metadata: dict[str, Any], count: int) -> dict[str, Any]:
    """With as many pieces more, of 246 characters each."""
    more = {"tokens": [f"{i:06}" + "x" * 240 for i in range(count)], "scores": [0.0] * count}
    more["token_type"] = [NORMAL] * count
    return metadata | {K + key: [*metadata[K + key], *values] for key, values in more.items()}


Change = Callable[[dict[str, Any], dict[str, Any]], dict[str, Any]]

REFUSED: list[tuple[Change, str]] = [
    (lambda g, s: {}, r"no tokenizer\.ggml\.model"),
    *((lambda g, s, m=m: _with(g, model=m), f"'{m}'.*llama.*gpt2") for m in ("bert", "t5", "rwkv", "plamo2", "no")),
    (lambda g, s: _with(g, model=7), "of type int, not str"),
    (lambda g, s: _with(g, model="\ud800"), "lone surrogate"),
    (lambda g, s: _with(g, pre="gpt-5"), r"unknown tokenizer\.ggml\.pre 'gpt-5'; known are .*llama-bpe.*qwen2"),
    (lambda g, s: _with(g, pre="x" * 10**6), r"'x{60}\.\.\.'; known are"),
    (lambda g, s: _without(g, "pre"), r"no tokenizer\.ggml\.pre.*Convert the model again"),
    (lambda g, s: _without(g, "merges"), r"no tokenizer\.ggml\.merges"),
    (lambda g, s: _without(g, "tokens"), r"no tokenizer\.ggml\.tokens"),
    (lambda g, s: _without(s, "scores"), r"no tokenizer\.ggml\.scores"),
    (lambda g, s: _without(s, "token_type"), r"no tokenizer\.ggml\.token_type"),
    (lambda g, s: _with(g, tokens="abc"), "of type str, not list"),
    (lambda g, s: _with(g, tokens=[]), "tokens is empty"),
    (lambda g, s: _put(g, "tokens", 3, b"a"), r"tokens\[3\] is of type bytes"),
    (lambda g, s: _put(g, "tokens", 3, ["a"]), r"tokens\[3\] is of type list"),
    (lambda g, s: _put(g, "tokens", 3, "\udcff"), "lone surrogate"),
    (lambda g, s: _put(g, "tokens", 3, g[K + "tokens"][2]), r"tokens\[3\] is .* as is tokens\[2\]"),
    (lambda g, s: _put(g, "tokens", 3, "x" * 10_000_000), r"tokens\[3\] has 10000000 characters"),
    (lambda g, s: _put(g, "tokens", 3, "x" * (MAX_TOKEN + 1)), r"tokens\[3\] has 1025 characters, more than 1024"),
    (lambda g, s: _put(s, "tokens", -1, "x" * (MAX_PIECE + 1)), "has 257 characters, more than 256"),
    (
        lambda g, s: _longer(s, 20_000),
        "too long to find their merges: they have 492[0-9]{4} characters",
    ),
    (lambda g, s: _put(s, "tokens", 3, "<0x-1>"), r"tokens\[3\] is a byte, but '<0x-1>'"),
    (lambda g, s: _put(s, "tokens", 3, "<0xZZ>"), r"tokens\[3\] is a byte, but '<0xZZ>'"),
    (lambda g, s: _put(s, "tokens", 13, "<0x0a>"), r"tokens\[13\] is a byte, but '<0x0a>'"),
    (lambda g, s: _put(s, "token_type", 13, NORMAL), "255 byte tokens"),
    (lambda g, s: _with(g, token_type=g[K + "token_type"][1:]), r"token_type has \d+ entries, .*tokens has"),
    (lambda g, s: _with(s, scores=[*s[K + "scores"], 0.0]), r"scores has \d+ entries, .*tokens has"),
    (lambda g, s: _with(s, scores=[0] * len(s[K + "scores"])), r"scores\[0\] is of type int, not float"),
    (lambda g, s: _with(g, scores=[1.0]), "scores has 1 entries"),
    (lambda g, s: _put(s, "scores", 9, float("nan")), r"scores\[9\] is nan"),
    (lambda g, s: _put(s, "scores", 9, float("-inf")), r"scores\[9\] is -inf"),
    (lambda g, s: _put(g, "token_type", 9, 0), r"token_type\[9\] is 0"),
    (lambda g, s: _put(g, "token_type", 9, 7), r"token_type\[9\] is 7"),
    (lambda g, s: _put(g, "token_type", 9, True), r"token_type\[9\] is of type bool"),
    (lambda g, s: _put(g, "token_type", 9, 1.0), r"token_type\[9\] is of type float"),
    (lambda g, s: _put(g, "merges", 9, "ab"), r"merges\[9\] is 'ab': not two tokens"),
    (lambda g, s: _put(g, "merges", 9, "a b c"), r"merges\[9\] is 'a b c'"),
    (lambda g, s: _put(g, "merges", 9, " b"), r"merges\[9\] is ' b'"),
    (lambda g, s: _put(g, "merges", 9, "a "), r"merges\[9\] is 'a '"),
    (lambda g, s: _put(g, "merges", 9, "qqq z"), r"merges\[9\] needs the token 'qqq'"),
    (lambda g, s: _put(g, "merges", 9, "q zq"), r"merges\[9\] needs the token"),
    (lambda g, s: _put(g, "merges", 9, 5), r"merges\[9\] is of type int"),
    (lambda g, s: _with(s, padding_token_id=1.5), "padding_token_id.* of type float"),
    (lambda g, s: _with(s, eot_token_id=True), "eot_token_id.* of type bool"),
    (lambda g, s: _with(s, add_space_prefix=1), "add_space_prefix.* of type int, not bool"),
    (lambda g, s: g | {"tokenizer.chat_template": 5}, "chat_template.* of type int"),
    (lambda g, s: g | {"tokenizer.chat_template": "x" * (16 << 20)}, "chat_template' is larger than 1 MiB"),
    (lambda g, s: g | {"tokenizer.chat_template.rag": "é" * (MAX_TEMPLATE - 9)}, "rag' is larger than 1 MiB"),
]
"""What to make of the metadata of a `gpt2` and of a `llama` file, and what is said of it."""


@pytest.mark.parametrize(("change", "words"), REFUSED)
def test_refuses(change: Change, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        tokenizer_from_gguf(change(small_gpt2(), small_llama()))


def test_limits_hold_exactly() -> None:
    for metadata, length in ((small_llama(), MAX_PIECE), (small_gpt2(), MAX_TOKEN)):
        longest = tokenizer_from_gguf(_put(metadata, "tokens", -1, "x" * length))
        assert longest.id_to_bytes(longest.vocab_size - 1) == b"x" * length
    full = {"tokenizer.chat_template": "x" * MAX_TEMPLATE}
    assert len(tokenizer_from_gguf(small_gpt2() | full).chat_template()) == MAX_TEMPLATE
    empty = tokenizer_from_gguf(_put(_put(small_llama(), "tokens", -1, ""), "tokens", -3, ""))
    assert empty.decode(empty.encode("the ab")) == "the ab"
