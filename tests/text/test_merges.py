"""Merges that follow from pieces, against every cut looked up in a dictionary."""

from __future__ import annotations

import base64
import random
import time
from pathlib import Path

import pytest

from attar.text import merges as module
from attar.text.merges import merges
from tests.errors import user_error


def slowly(ranks: dict[str, float], ids: dict[str, int]) -> list[tuple[str, str]]:
    cuts = [(ranks[piece], piece[:at], piece[at:]) for piece in ranks for at in range(1, len(piece))]
    found = [(rank, ids[left], ids[right], left, right) for rank, left, right in cuts if {left, right} <= ranks.keys()]
    return [(left, right) for *_, left, right in sorted(found)]


def test_all_cuts_are_found_in_order() -> None:
    draw = random.Random(0)
    pieces = {"".join(draw.choices("ab\u2581\U0001f600", k=draw.randint(1, 7))) for _ in range(800)}
    ranks = {piece: float(draw.randint(0, 300)) for piece in sorted(pieces)}  # several of a rank
    ids = dict(zip(draw.sample(sorted(pieces), len(pieces)), range(3, 10**6, 7), strict=False))
    found = merges(ranks, ids)
    assert found == slowly(ranks, ids)
    assert len(found) > 500
    in_bytes = merges({p.encode(): rank for p, rank in ranks.items()}, {p.encode(): i for p, i in ids.items()})
    assert [(left.decode(), right.decode()) for left, right in in_bytes] == found


@pytest.mark.parametrize("ranks", [{}, {"a": 0.0}, {"": 0.0, "a": 1.0, "b": 2.0}, {"ab": 0.0, "a": 1.0}])
def test_few_pieces_have_no_merges(ranks: dict[str, float]) -> None:
    assert merges(ranks, {piece: i for i, piece in enumerate(ranks)}) == []


def test_pieces_of_one_hash_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a base of 1 a hash is the sum of the characters."""
    monkeypatch.setattr(module, "_BASE", 1)
    with user_error("tokenizer_malformed"):
        merges({"ac": 0.0, "bb": 1.0}, {"ac": 0, "bb": 1})


def test_what_only_has_the_hash_of_a_piece_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BASE", 1)
    assert merges({"acd": 0.0, "bb": 1.0, "d": 2.0}, {"acd": 0, "bb": 1, "d": 2}) == []


def test_a_vocabulary_whose_cuts_would_take_long_is_refused_at_once() -> None:
    """Each character is a cut: 20,000 pieces of 246 have five million."""
    ranks = {f"{i:06d}" + "x" * 240: float(i) for i in range(20_000)}
    began = time.process_time()
    with user_error("tokenizer_unsupported"):
        merges(ranks, dict.fromkeys(ranks, 0))
    assert time.process_time() - began < 0.2


def test_a_vocabulary_of_gemmas_size_is_not(shared: Path) -> None:
    """As long pieces as Llama 3's, twice as many: 256,000."""
    lines = (shared / "tokenizers" / "llama3" / "tokenizer.model").read_bytes().splitlines()
    pieces = [base64.b64decode(line.split()[0]) for line in lines]
    ranks = {piece: i for i, piece in enumerate([*pieces, *(piece[::-1] + b"\xff" for piece in pieces)])}
    assert len(ranks) > 255_000
    assert len(merges(ranks, ranks)) > 280_000


def test_merges_are_made_of_the_vocabularys_own_strings() -> None:
    """Slices would be copies: of a piece of n characters, n^2 of them."""
    pieces = {"a" * length: float(length) for length in range(1, 100)}
    own = {id(piece) for piece in pieces}
    found = merges(pieces, {piece: i for i, piece in enumerate(pieces)})
    assert len(found) == 99 * 98 // 2
    assert all(id(half) in own for merge in found for half in merge)
