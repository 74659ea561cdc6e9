"""Gemma 3 from its file: tokens of sentencepiece, windows in most layers, and a model that knows English."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from attar.checkpoints import vocabulary
from attar.checkpoints.gguf.file import GgufFile
from attar.checkpoints.sources import opening
from attar.kernels import dispatch
from attar.metrics.measure import measure
from attar.text.tokenizer import Tokenizer

pytestmark = pytest.mark.real

TOKENS = 256
PERPLEXITY = (30.0, 100.0)
"""Bounds for so little text. Measured: 60.2."""

TEXTS = ("wikitext2_test.txt", "c4.txt", "code.txt", "tinystories.txt")
AWKWARD = "naïve café — 東京タワー 🤖👩‍💻  tabs\t\tand\r\nlines\n\n\n 3.14159 12345678 ̈a \u200b\x00 don't <b>x</b>"


@pytest.fixture(scope="module")
def path(real_model: Callable[[str], Path]) -> Path:
    return real_model("gemma3-270m")


@pytest.fixture(scope="module")
def tokenizer(path: Path) -> Tokenizer:
    return vocabulary.tokenizer(path)


@pytest.fixture(scope="module")
def pieces(path: Path) -> list[tuple[str, float, int]]:
    metadata = GgufFile(path).metadata
    return list(zip(*(metadata[f"tokenizer.ggml.{key}"] for key in ("tokens", "scores", "token_type")), strict=True))


@pytest.mark.parametrize("text", TEXTS)
def test_texts_come_back(tokenizer: Tokenizer, text: str, shared: Path) -> None:
    content = (shared / "data" / "text" / text).read_text()[:100_000] + AWKWARD
    ids = tokenizer.encode(content)
    assert ids[0] == tokenizer.bos_id == 2
    assert tokenizer.decode(ids[1:], skip_special_tokens=False) == content  # WikiText spells <unk>, which is one
    assert len(ids) < len(content) / 2


def merged(text: str, scores: Mapping[str, float]) -> list[str]:
    """The pieces of sentencepiece's BPE: the neighbours whose whole has the best score are joined, the first of equal
    ones, until none is a piece."""
    found = list(text.replace(" ", "▁"))
    while True:
        joined = [(scores.get(a + b, -float("inf")), -i) for i, (a, b) in enumerate(pairwise(found))]
        best, place = max(joined, default=(-float("inf"), 0))
        if best == -float("inf"):
            return found
        found[-place : -place + 2] = ["".join(found[-place : -place + 2])]


def test_tokens_are_those_of_sentencepiece(
    tokenizer: Tokenizer, pieces: list[tuple[str, float, int]], shared: Path
) -> None:
    """Of words apart: user-defined tokens, which are found whole before, are runs of spaces and tags."""
    scores = {piece: score for piece, score, kind in pieces if kind == 1}
    words = [word for name in TEXTS for word in (shared / "data" / "text" / name).read_text()[:6000].split()]
    lines = [" ".join(words[at : at + 8]) for at in range(0, len(words), 8)]
    lines = [line for line in lines if "<" not in line and all(letter in scores for letter in line.replace(" ", "▁"))]
    assert len(lines) > 300
    for line in lines:
        assert [pieces[i][0] for i in tokenizer.encode(line, add_special_tokens=False)] == merged(line, scores), line


def test_user_defined_tokens_are_whole_and_shown_and_control_tokens_are_neither_shown(tokenizer: Tokenizer) -> None:
    for text, special in (("\n\n\n", False), ("     ", False), ("<table>", False), ("<start_of_turn>", True)):
        (index,) = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode([index]) == ("" if special else text)
        assert (index in tokenizer.special_ids) is special
    assert tokenizer.token_to_id("<end_of_turn>") in tokenizer.eos_ids


def test_perplexity_is_that_of_a_trained_model(path: Path, tokenizer: Tokenizer, wikitext: str) -> None:
    ids = tokenizer.encode(wikitext[: 8 * TOKENS], add_special_tokens=False)[: TOKENS + 1]
    decoder = opening.load(path, torch.float32, None, dispatch.store())
    report = measure(decoder, ids, context=TOKENS, bos=tokenizer.added_bos)
    low, high = PERPLEXITY
    assert low < report.figures["ppl"].value < high
