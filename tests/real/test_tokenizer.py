"""Tokenizers read from real files: texts come back to the byte, and tokens are those of the file's vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from attar.checkpoints import vocabulary
from attar.checkpoints.gguf.file import GgufFile
from attar.text.convert import bytes_to_chars
from attar.text.tokenizer import Tokenizer

pytestmark = pytest.mark.real

LENGTH = 100_000  # characters of each text
TEXTS = ("wikitext2_test.txt", "c4.txt", "code.txt", "tinystories.txt")
AWKWARD = "naïve café — 東京タワー 🤖👩‍💻  tabs\t\tand\r\nlines\n\n\n 3.14159 12345678 ̈a \u200b\x00 don't I'LL"


@pytest.fixture(scope="module")
def tokenizer(path: Path) -> Tokenizer:
    return vocabulary.tokenizer(path)


@pytest.mark.parametrize("text", TEXTS)
def test_texts_come_back_and_their_tokens_are_the_files_pieces(
    path: Path, tokenizer: Tokenizer, text: str, shared: Path
) -> None:
    content = (shared / "data" / "text" / text).read_text()[:LENGTH] + AWKWARD
    pieces = list(GgufFile(path).metadata["tokenizer.ggml.tokens"])
    ids = tokenizer.encode(content, add_special_tokens=False)
    assert tokenizer.decode(ids, skip_special_tokens=False) == content
    letters = bytes_to_chars()
    assert "".join(pieces[index] for index in ids) == "".join(letters[byte] for byte in content.encode())
    assert len(ids) < len(content) / 2  # merged, not spelled out


def test_qwen_splits_texts_as_the_published_vocabulary_does(real_model: Callable[[str], Path], shared: Path) -> None:
    """The file's merges and its rule for splitting are those of Qwen2.5's own tokenizer."""
    ours = vocabulary.tokenizer(real_model("qwen2.5-coder-0.5b"))
    published = Tokenizer.load(shared / "tokenizers" / "qwen2.5")
    for text in TEXTS:
        content = (shared / "data" / "text" / text).read_text()[:LENGTH]
        assert ours.encode(content) == published.encode(content), text


def test_special_tokens_of_the_template_are_one_token_each(tokenizer: Tokenizer) -> None:
    for special in ("<|im_start|>", "<|im_end|>"):
        (index,) = tokenizer.encode(special, add_special_tokens=False)
        assert index in tokenizer.special_ids
        assert tokenizer.decode([index]) == ""
        assert tokenizer.decode([index], skip_special_tokens=False) == special
    assert tokenizer.token_to_id("<|im_end|>") in tokenizer.eos_ids
