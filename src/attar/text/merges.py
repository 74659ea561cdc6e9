"""The merges of a byte-pair encoding whose file has only pieces and their preference: every cut of a piece into two.

Gemma's 262,144 pieces have 1.7 million cuts, of which 514,847 are merges. Looking each half up in a dictionary takes
most of the time of loading the tokenizer, so all halves are hashed and searched for at once. Equal hashes are compared
in the end, so the result does not depend on them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from attar.errors import UserError

Piece = TypeVar("Piece", str, bytes)
Indices = npt.NDArray[np.int64]
Hashes = npt.NDArray[np.uint64]

MAX_MERGES = 1 << 21  # 2^19 for Gemma's quarter of a million pieces
MAX_CUT = 1 << 22  # characters of all pieces, which may be cut at each: half as many for Gemma
_BASE = 0x9E3779B97F4A7C15  # odd, so that it has an inverse modulo 2^64
_SIEVE = 24  # bits


def merges(ranks: Mapping[Piece, float], ids: Mapping[Piece, int]) -> list[tuple[Piece, Piece]]:
    """Return every cut of a piece into two, ordered by the rank (low is early) of the whole, then by the ids of the
    halves.

    Llama 2 gives all its runs of spaces one score: there the order of the halves alone decides. The halves are the
    pieces themselves, not copies. Raises ValueError beyond MAX_MERGES, because there may be as many merges as
    characters, and beyond MAX_CUT.
    """
    pieces = list(ranks)
    if (characters := sum(map(len, pieces))) > MAX_CUT:
        raise UserError(
            "tokenizer_unsupported",
            f"the vocabulary's pieces are too long to find their merges: they have {characters} characters, and attar "
            f"looks at {MAX_CUT}",
        )
    whole, left, right = _cuts(pieces)
    if len(whole) > MAX_MERGES:
        raise UserError("tokenizer_unsupported", f"the vocabulary's pieces are joined by more than {MAX_MERGES} merges")
    count = len(pieces)
    rank = np.unique(np.fromiter(ranks.values(), np.float64, count), return_inverse=True)[1]
    place = np.argsort(np.argsort(np.fromiter((ids[piece] for piece in pieces), np.int64, count)))
    order = np.argsort((rank[whole] * count + place[left]) * count + place[right])
    found = zip(*(each[order].tolist() for each in (whole, left, right)), strict=True)
    return [(pieces[i], pieces[j]) for at, i, j in found if pieces[i] + pieces[j] == pieces[at]]


def _cuts(pieces: Sequence[Piece]) -> tuple[Indices, Indices, Indices]:
    """Return (whole, left, right), as indices of `pieces`, of every cut of one whose halves have hashes of pieces.

    A hash is a polynomial modulo 2^64 of the characters. Raises ValueError where two pieces share one.
    """
    codes, lengths = _characters(pieces), np.fromiter(map(len, pieces), np.int64, len(pieces))
    ends = np.cumsum(lengths)
    starts = ends - lengths
    power = np.cumprod(np.full(len(codes) + 1, _BASE, np.uint64))
    inverse = np.cumprod(np.full(len(codes) + 1, pow(_BASE, -1, 1 << 64), np.uint64))
    sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum((codes + np.uint64(1)) * power[:-1])])
    own: Hashes = (sums[ends] - sums[starts]) * inverse[starts]
    order = np.argsort(own)
    table = own[order]
    if (table[1:] == table[:-1]).any():
        raise UserError("tokenizer_malformed", "two pieces of the vocabulary have one hash: they were made to have it")
    known = np.zeros(1 << _SIEVE, bool)  # sorts most others out without a search
    known[_short(table)] = True
    inside = np.ones(len(codes), bool)
    inside[starts[lengths > 0]] = False
    at, whole = np.flatnonzero(inside), np.repeat(np.arange(len(pieces)), np.maximum(lengths - 1, 0))
    left: Hashes = (sums[at] - sums[starts[whole]]) * inverse[starts[whole]]
    kept = known[_short(left)]
    at, whole, left = at[kept], whole[kept], left[kept]
    right: Hashes = (sums[ends[whole]] - sums[at]) * inverse[at]
    kept = known[_short(right)]
    whole, left, right = whole[kept], left[kept], right[kept]
    first, second = (np.minimum(np.searchsorted(table, each), len(table) - 1) for each in (left, right))
    kept = (table[first] == left) & (table[second] == right)
    return whole[kept], order[first[kept]], order[second[kept]]


def _characters(pieces: Sequence[Piece]) -> Hashes:
    """Return the characters or bytes of all pieces, one after another."""
    if pieces and isinstance(pieces[0], str):
        return np.frombuffer("".join(pieces).encode("utf-32-le"), "<u4").astype(np.uint64)
    return np.frombuffer(b"".join(pieces), np.uint8).astype(np.uint64)  # type: ignore[arg-type]


def _short(hashes: Hashes) -> Indices:
    return (hashes >> np.uint64(64 - _SIEVE)).astype(np.int64)
