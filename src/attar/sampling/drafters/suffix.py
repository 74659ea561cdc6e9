"""Drafts copied from the sequence itself, or from past texts: what followed when its present end occurred before.

The longest suffix of the sequence that occurs in it earlier is found by a suffix automaton (`automaton.py`). Prompt
lookup (Saxena, 2023) and n-gram drafts are the special cases of a bounded suffix; suffix decoding (Oliaro et al., arXiv
2411.04975) is the model for the rest. Where texts of earlier requests of the same salt have a longer one
(`past_texts.py`), what followed there is taken. The evidence is the length of the match. Where a passage is copied with
changes, it goes on behind each at its place (`copying.py`); such drafts have evidence of a source of their own.

It costs some microseconds a token and no model. Text that repeats itself or its prompt is drafted well: edits of code,
summaries, JSON, answers that quote. Of other text there is no match, or a short one that the pace learns to ignore.

Requests of another salt are never looked at, so no client learns what another was answered.
"""

from __future__ import annotations

from collections.abc import Sequence

from attar.sampling.drafters.automaton import SuffixAutomaton
from attar.sampling.drafters.copying import Copy
from attar.sampling.drafters.drafter import NO_DRAFT, Draft, DraftRequest, text_only
from attar.sampling.drafters.past_texts import PastTexts
from attar.sampling.pace import SOURCE
from attar.scheduling.sequence import Sequence as Tokens

RESUMED = 3 * SOURCE  # where evidences of such drafts begin
INDEXED = 1 << 15  # tokens of a sequence, the last ones: some 3 MB


class SuffixDrafter:
    """The drafter of this module. It indexes the last `INDEXED` tokens of each sequence."""

    name, costly = "suffix", False

    def __init__(self) -> None:
        self._known: dict[Tokens, tuple[SuffixAutomaton, int, Copy]] = {}
        self._past = PastTexts()

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        return [self._draft(request) for request in requests]

    def _draft(self, request: DraftRequest) -> Draft:
        tokens = request.sequence.tokens
        known = self._known.get(request.sequence)
        if known is None or len(known[0]) >= INDEXED:  # indexed anew, from later on
            known = SuffixAutomaton(), max(0, len(tokens) - INDEXED // 2), Copy()
        self._known[request.sequence] = automaton, first, copy = known
        for token in tokens[first + len(automaton) :]:
            automaton.push(token)
            copy.follow(automaton.text, token, automaton.match, automaton.behind)
        if copy.resumed:
            guess = automaton.text[copy.at : copy.at + request.limit]
            return Draft(text_only(guess), RESUMED + 1 + copy.since)
        past, length = self._past.find(request.sequence, request.limit)
        if length > automaton.match:
            return Draft(text_only(past), length)
        if not automaton.match:
            return NO_DRAFT
        guess = automaton.text[automaton.behind : automaton.behind + request.limit]
        while len(guess) < request.limit:  # the occurrence runs into the end of the text: it repeats itself
            guess.extend(guess[: request.limit - len(guess)])
        return Draft(text_only(guess), automaton.match)

    def forget(self, sequence: Tokens) -> None:
        if self._known.pop(sequence, None) is not None:
            self._past.end(sequence)

    def reset(self) -> None:
        self._known.clear()
        self._past.reset()
