"""What is said of a text's tokens by its bytes alone is true, and is not said where a tokenizer loses some of it."""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from attar.checkpoints.sources import hub
from attar.server.lengths import Lengths
from attar.text.tokenizer import Tokenizer
from tests.server.conftest import Running
from tests.text.test_tokenizer import byte_level, sentencepiece_like

SECONDS = 10.0  # for a text whose tokens nobody counts: they take several times as long


def embedded() -> Backend:
    return copy.deepcopy(Tokenizer.load(hub.resolve("demo"))._backend)


def composing() -> Backend:
    backend = embedded()
    backend.normalizer = normalizers.NFC()
    return backend


KINDS = {"embedded": embedded, "byte level": byte_level, "NFC": composing, "sentencepiece": sentencepiece_like}
LOSSY: dict[str, Callable[[Backend], object]] = {
    "letters": lambda backend: setattr(backend, "normalizer", normalizers.Lowercase()),
    "blanks": lambda backend: setattr(backend, "normalizer", normalizers.Strip()),
    "runs": lambda backend: setattr(backend, "normalizer", normalizers.Replace(Regex(" +"), " ")),
    "accents": lambda backend: setattr(
        backend, "normalizer", normalizers.Sequence([normalizers.NFC(), normalizers.StripAccents()])
    ),
    "signs": lambda backend: setattr(
        backend,
        "pre_tokenizer",
        pre_tokenizers.Sequence([pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel(use_regex=False)]),
    ),
    "words": lambda backend: setattr(
        backend,
        "pre_tokenizer",
        pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.ByteLevel(use_regex=False)]),
    ),
    "around special tokens": lambda backend: backend.add_special_tokens([AddedToken("<wide>", rstrip=True)]),
}


@pytest.mark.parametrize("kind", KINDS)
def test_no_text_has_fewer_tokens(kind: str) -> None:
    tokenizer = Tokenizer(KINDS[kind]())
    lengths = Lengths(tokenizer)
    assert lengths.longest is not None
    words = ["e\u0301", "\u212a", "<s>", "▁", " ", "日本", "😀", "the ", "\ufdd0", "\u0344", "  \n"]

    @settings(max_examples=200, deadline=None)
    @given(st.text(max_size=60) | st.lists(st.sampled_from(words), max_size=60).map("".join))
    def check(text: str) -> None:
        assert lengths.at_least(text) <= len(tokenizer.encode(text))

    check()
    longest = max(range(tokenizer.vocab_size), key=lambda token: len(tokenizer.id_to_bytes(token)))
    text = tokenizer.id_to_bytes(longest).decode("utf-8", "replace")
    assert lengths.at_least(text * 100) <= len(tokenizer.encode(text * 100))
    assert lengths.at_least("\u00e9" * 10_000) >= 20_000 // lengths.longest


@pytest.mark.parametrize("lost", LOSSY)
def test_nothing_is_said_where_some_of_a_text_is_lost(lost: str) -> None:
    backend = embedded()
    LOSSY[lost](backend)
    lengths = Lengths(Tokenizer(backend))
    assert (lengths.longest, lengths.at_least("a" * 10**6)) == (None, 0)


def test_nothing_is_said_where_a_word_stands_for_all_that_is_unknown() -> None:
    state = json.loads(sentencepiece_like().to_str())
    state["model"]["byte_fallback"] = False
    assert Lengths(Tokenizer(Backend.from_str(json.dumps(state)))).longest is None
    state = json.loads(embedded().to_str())
    state["model"]["vocab"] = {name: at for name, at in state["model"]["vocab"].items() if name != "Ā"}
    state["model"]["merges"] = [each for each in state["model"]["merges"] if "Ā" not in "".join(each)]
    assert Lengths(Tokenizer(Backend.from_str(json.dumps(state)))).longest is None


def test_a_text_that_is_not_composed_is_counted() -> None:
    lengths = Lengths(Tokenizer(composing()))
    assert lengths.at_least("e\u0301" * 1000) == 0
    assert lengths.at_least("e" * 1000) > 0


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
    least = -(-len(text) // Lengths(tokenizer).longest)  # type: ignore[operator]
    assert message.startswith(f"{field}: at least {least}"[: len(field) + 15])
    assert "this model's context of 512" in message
    monkeypatch.undo()
    if path != "/v1/messages":
        assert reply.code == "context_length_exceeded"


def test_who_asks_how_long_a_text_is_gets_to_know(server: Running, demo: Path) -> None:
    text = "word " * 20_000
    reply = server.post("/tokenize", {"prompt": text})
    assert reply.json["count"] == len(Tokenizer.load(demo).encode(text)) > 512
    reply = server.post("/tokenize", {"messages": [{"role": "user", "content": text}]})
    assert reply.json["count"] > 512
