"""What is said of a text's tokens by its bytes alone is true, and is not said where a tokenizer loses some of it."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from attar.checkpoints.sources import hub
from attar.text.token_bounds import TokenBounds
from attar.text.tokenizer import Tokenizer
from tests.text.test_tokenizer import byte_level, sentencepiece_like


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
    lengths = TokenBounds(tokenizer)
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
    lengths = TokenBounds(Tokenizer(backend))
    assert (lengths.longest, lengths.at_least("a" * 10**6)) == (None, 0)


def test_nothing_is_said_where_a_word_stands_for_all_that_is_unknown() -> None:
    state = json.loads(sentencepiece_like().to_str())
    state["model"]["byte_fallback"] = False
    assert TokenBounds(Tokenizer(Backend.from_str(json.dumps(state)))).longest is None
    state = json.loads(embedded().to_str())
    state["model"]["vocab"] = {name: at for name, at in state["model"]["vocab"].items() if name != "Ā"}
    state["model"]["merges"] = [each for each in state["model"]["merges"] if "Ā" not in "".join(each)]
    assert TokenBounds(Tokenizer(Backend.from_str(json.dumps(state)))).longest is None


def test_a_text_that_is_not_composed_is_counted() -> None:
    lengths = TokenBounds(Tokenizer(composing()))
    assert lengths.at_least("e\u0301" * 1000) == 0
    assert lengths.at_least("e" * 1000) > 0
