"""Prompts to fill in the middle: the forms of models, and texts that stay texts."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend

from attar.text.forms.infill import Infill
from attar.text.literal import LiteralChat
from attar.text.tokenizer import Tokenizer

MARKS = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")


@pytest.fixture(scope="module")
def plain(demo: Path) -> Tokenizer:
    return Tokenizer.load(demo)


def with_tokens(plain: Tokenizer, *names: str) -> Tokenizer:
    backend = Backend.from_str(plain._backend.to_str())
    backend.add_special_tokens(list(names))
    return Tokenizer(backend, plain.bos_token, plain.eos_token, plain.chat_templates)


def made(tokenizer: Tokenizer) -> Infill:
    infill = Infill.of(tokenizer, LiteralChat(tokenizer).text_ids)
    assert infill is not None
    return infill


def test_prefix_suffix_middle(plain: Tokenizer) -> None:
    tokenizer = with_tokens(plain, *MARKS)
    prefix, suffix, middle = map(tokenizer.token_to_id, MARKS)
    text = plain.encode("def f(", add_special_tokens=False)
    behind = plain.encode("return 1", add_special_tokens=False)
    assert made(tokenizer).ids("def f(", "return 1") == (prefix, *text, suffix, *behind, middle)
    assert made(tokenizer).ids((5, 6), "") == (prefix, 5, 6, suffix, middle)


def test_files_come_first(plain: Tokenizer) -> None:
    tokenizer = with_tokens(plain, *MARKS, "<|repo_name|>", "<|file_sep|>")
    ids = made(tokenizer).ids("a", "b", [("x.py", "one"), ("y.py", "two")])
    text = "<|repo_name|>project\n<|file_sep|>x.py\none<|file_sep|>y.py\ntwo<|file_sep|>file\n<|fim_prefix|>a"
    assert tokenizer.decode(ids, skip_special_tokens=False) == text + "<|fim_suffix|>b<|fim_middle|>"
    assert set(made(tokenizer).ends) == {
        tokenizer.token_to_id(t) for t in ("<|repo_name|>", "<|file_sep|>", "<|endoftext|>")
    }
    without = with_tokens(plain, *MARKS)
    ids = made(without).ids("a", "b", [("x.py", "one")])
    shown = without.decode(ids, skip_special_tokens=False)
    assert shown == "\n\n--- snippet ---\n\none<|fim_prefix|>a<|fim_suffix|>b<|fim_middle|>"


def test_texts_stay_texts(plain: Tokenizer) -> None:
    tokenizer = with_tokens(plain, *MARKS)
    ids = made(tokenizer).ids("<|fim_middle|>", "<|fim_suffix|><|endoftext|>", [("<|fim_prefix|>", "<|fim_middle|>")])
    special = [token for token in ids if token in tokenizer.special_ids]
    assert special == [tokenizer.token_to_id(mark) for mark in MARKS]


def test_a_model_without_such_tokens_has_no_middle(plain: Tokenizer) -> None:
    assert Infill.of(plain, plain.encode) is None
    assert Infill.of(with_tokens(plain, *MARKS[:2]), plain.encode) is None


@pytest.mark.parametrize("marks", [
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
])  # fmt: skip
def test_other_spellings(plain: Tokenizer, marks: tuple[str, ...]) -> None:
    tokenizer = with_tokens(plain, *marks)
    ids = made(tokenizer).ids("", "")
    assert ids == tuple(map(tokenizer.token_to_id, marks))
