"""Lookahead drafts (Fu et al., arXiv 2402.02057) as a chain: the target's own guesses behind wrong drafts, and n-grams.

A step samples a token behind every draft, the wrong ones too. Those behind the first wrong one are guesses of later
tokens: the next iterate of Jacobi decoding. Where an iterate's token is drafted at its place, the token sampled behind
it makes an n-gram with the token that led to it, and the neighbours in the chain make others. N-grams go to a pool by
their first token, the last `KEPT` of each. If the pool knows the last token of a text, its newest n-gram is drafted,
and what follows that; otherwise the iterate is.

The paper runs window and n-grams as two branches of one step, under an attention mask of their own. A chain needs none,
but has one of the two at a time, so W = 2, N = 3 and G = 2 here. No model and no training is needed. Tokens of the
prompt are no source: the suffix drafter copies those.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from attar.sampling.drafters.drafter import Draft, DraftRequest, text_only
from attar.scheduling.sequence import Sequence as Tokens

WINDOW = 2  # W: tokens of an iterate
KEPT = 2  # G: n-grams of a first token
POOL = 1 << 14  # first tokens of a sequence's pool, the last used: some 4 MB
GUESSED, POOLED = 1, 4  # evidence of an iterate's token, and of a pool's n-gram

Pair = tuple[int, int]  # the last two tokens of an n-gram, N = 3


@dataclass(eq=False, slots=True)
class _Trail:
    """What is kept of a sequence: its pool, and the iterate, each token with the token that it was sampled behind."""

    pool: OrderedDict[int, list[Pair]] = field(default_factory=OrderedDict)
    iterate: list[Pair] = field(default_factory=list)  # (token, the one before)
    drafted: list[Pair] = field(default_factory=list)  # the iterate's tokens at the front of the present drafts

    def learn(self, first: int, pair: Pair) -> None:
        known = self.pool.setdefault(first, [])
        if pair in known:
            known.remove(pair)
        known.append(pair)
        del known[:-KEPT]
        self.pool.move_to_end(first)
        if len(self.pool) > POOL:
            self.pool.popitem(last=False)


class LookaheadDrafter:
    """The drafter of this module."""

    name, costly = "lookahead", False

    def __init__(self) -> None:
        self._trails: dict[Tokens, _Trail] = {}

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        return [self._draft(request.sequence, request.limit) for request in requests]

    def _draft(self, sequence: Tokens, limit: int) -> Draft:
        trail = self._trails.setdefault(sequence, _Trail())
        last, chain = sequence.tokens[-1], list[int]()
        while len(chain) < limit and (known := trail.pool.get(last)):
            chain += known[-1]
            last = chain[-1]
        if chain:
            trail.drafted = []
            return Draft(text_only(chain[:limit]), POOLED)
        newest = text_only(sequence.tokens[: -1 - WINDOW : -1])  # the last token first
        filled = [*trail.iterate, *((token, -1) for token in newest)]
        trail.drafted = filled[: min(WINDOW, limit)]
        return Draft(tuple(token for token, _ in trail.drafted), GUESSED)

    def tried(self, sequence: Tokens, drafts: Sequence[int], sampled: Sequence[int]) -> None:
        trail = self._trails.setdefault(sequence, _Trail())
        row = [*sequence.tokens[-2:], *drafts]  # the token before the last, and the inputs of the rows
        inputs = row[-len(drafts) - 1 :]
        for place, (token, behind) in enumerate(zip(inputs, sampled, strict=False)):
            if (at := len(row) - len(inputs) + place) > 0:
                trail.learn(row[at - 1], (token, behind))
            if 0 < place <= len(trail.drafted) and trail.drafted[place - 1] != (token, -1):
                guess, before = trail.drafted[place - 1]
                if guess == token:
                    trail.learn(before, (token, behind))
        right = 0
        while right < len(drafts) and right < len(sampled) and sampled[right] == drafts[right]:
            right += 1
        trail.iterate = [(sampled[i], inputs[i]) for i in range(right + 1, len(sampled))][:WINDOW]
        trail.drafted = []

    def forget(self, sequence: Tokens) -> None:
        self._trails.pop(sequence, None)

    def reset(self) -> None:
        self._trails.clear()
