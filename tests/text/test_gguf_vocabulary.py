"""Tokenizers written as GGUF metadata: read back, they encode and decode as the original."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from attar.text import convert
from attar.text.gguf import tokenizer_from_gguf
from attar.text.gguf_vocabulary import lost, vocabulary
from attar.text.tokenizer import Tokenizer
from tests.errors import user_error
from tests.text.gguf_metadata import TEXTS, random_texts

PRE = {"gpt2": "gpt-2", "qwen2.5": "qwen2", "llama3": "llama-bpe", "llama2": "default"}
ROWS_MORE = 7


def same(original: Tokenizer, again: Tokenizer, texts: list[str]) -> None:
    for text in texts:
        ids = original.encode(text)
        assert again.encode(text) == ids, text
        assert again.decode(ids) == original.decode(ids)


@pytest.mark.parametrize("name", PRE)
def test_published_tokenizers_read_back_the_same(name: str, shared: Path) -> None:
    original = Tokenizer.load(shared / "tokenizers" / name)
    found = vocabulary(original, original.vocab_size + ROWS_MORE)
    assert found["tokenizer.ggml.pre"] == PRE[name]
    assert len(found["tokenizer.ggml.tokens"]) == original.vocab_size + ROWS_MORE
    again = tokenizer_from_gguf(found)
    same(original, again, [*TEXTS, *random_texts(300)])
    assert again.bos_id == original.bos_id
    assert again.added_bos == original.added_bos
    assert again.eos_id == original.eos_id
    assert again.chat_templates == original.chat_templates


def test_the_embedded_and_a_small_sentencepiece_model_read_back_the_same(demo: Path, stories: Path) -> None:
    for folder in (demo, stories):
        original = Tokenizer.load(folder)
        again = tokenizer_from_gguf(vocabulary(original, original.vocab_size))
        same(original, again, [*TEXTS, *random_texts(300)])
        assert again.chat_templates == original.chat_templates


def test_a_further_token_that_ends_a_text_is_said(demo: Path) -> None:
    original = Tokenizer.load(demo)
    again = tokenizer_from_gguf(vocabulary(original, original.vocab_size, (0, 5)))
    assert again.eos_ids == {0, 5}


def bpe(pre: pre_tokenizers.PreTokenizer) -> Tokenizer:
    alphabet = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Backend(models.BPE(alphabet, []))
    backend.pre_tokenizer, backend.decoder = pre, decoders.ByteLevel()
    return Tokenizer(backend)


def test_what_a_file_has_no_words_for_is_refused() -> None:
    with user_error("gguf_inexpressible"):
        vocabulary(bpe(pre_tokenizers.Sequence([pre_tokenizers.Punctuation(), pre_tokenizers.ByteLevel()])), 256)
    with user_error("gguf_inexpressible"):
        vocabulary(bpe(pre_tokenizers.ByteLevel(add_prefix_space=True)), 256)
    plain = bpe(pre_tokenizers.ByteLevel(add_prefix_space=False))
    assert vocabulary(plain, 256)["tokenizer.ggml.pre"] == "gpt-2"
    with user_error("tokenizer_mismatch"):
        vocabulary(plain, 200)
    words = Backend(models.WordLevel({"a": 0}, unk_token="a"))
    words.decoder = decoders.ByteLevel()
    with user_error("gguf_inexpressible"):
        vocabulary(Tokenizer(words), 1)


def test_a_tokenizer_that_reads_back_otherwise_is_refused() -> None:
    """Of plain text, whatever flags are to blame."""
    tokenizer = bpe(pre_tokenizers.ByteLevel(add_prefix_space=False))
    tokenizer._backend.add_special_tokens([AddedToken("1234567", lstrip=True)])
    with user_error("gguf_inexpressible"):
        vocabulary(tokenizer, 300)


@pytest.mark.parametrize("flag", ["lstrip", "rstrip", "single_word", "normalized"])
def test_what_tokens_do_to_their_neighbours_is_lost_and_said(flag: str) -> None:
    tokenizer = bpe(convert.byte_level(models.BPE({}, []), [convert.QWEN2_SPLIT], None).pre_tokenizer)
    tokenizer._backend.normalizer = normalizers.NFC()
    flags = {"normalized": False, flag: True}
    tokenizer._backend.add_tokens([AddedToken("<plain>", normalized=False), AddedToken("<\u00e9>", **flags)])
    words = vocabulary(tokenizer, 300)
    said = lost(tokenizer, words)
    assert said is not None
    assert f"otherwise than by the source's tokenizer: '<\u00e9>' ({flag})." in said
    again = tokenizer_from_gguf(words)
    assert again.encode("<plain> a<plain>") == tokenizer.encode("<plain> a<plain>")


def test_flags_that_change_nothing_are_not_named() -> None:
    """As most tokenizers have them: `normalized` where nothing is."""
    tokenizer = bpe(pre_tokenizers.ByteLevel(add_prefix_space=False))
    tokenizer._backend.add_tokens([AddedToken("<a>", normalized=True)])
    assert lost(tokenizer, vocabulary(tokenizer, 300)) is None
