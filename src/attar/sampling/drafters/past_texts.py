"""Texts of requests that have ended, indexed for those that follow: answers repeat each other, of agents above all.

Suffix decoding (Oliaro et al., arXiv 2411.04975) keeps two indexes, of a request's own text and of all past outputs.
This is the second. Past texts of one cache salt stand in suffix automata of their own, so that nobody learns what
another's requests were answered, as with the prefix cache. Each salt has two automata: texts are added to the young
one, and when it is full it takes the old one's place. So a text is forgotten after a while, and nothing is indexed
twice. Where all salts together have too much, those that were used the longest ago are forgotten.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from dataclasses import dataclass, field

from attar.sampling.drafters.automaton import SuffixAutomaton
from attar.scheduling.sequence import Sequence as Tokens

PER_SALT = 1 << 14  # tokens of an automaton: some 1.5 MB
TOTAL = 1 << 17  # tokens of all automata: some 12 MB
KEPT = 2048  # tokens of a text, the last ones
BEFORE = 16  # tokens of its prompt before them, by which its beginning is found
MATCHED = 32  # tokens of a sequence that are looked up when it is first seen: longer matches are worth no more
END = -2  # stands behind each text; no token


@dataclass(eq=False, slots=True)
class _Index:
    """An automaton. Its number is never another's."""

    number: int
    automaton: SuffixAutomaton = field(default_factory=SuffixAutomaton)


@dataclass(eq=False, slots=True)
class _Place:
    """A sequence's longest suffix that an index has: its state and length, behind so many tokens of the sequence."""

    state: int = 0
    length: int = 0
    known: int = 0


class PastTexts:
    """Past texts by salt, and where the ends of present sequences occur in them."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._salts: OrderedDict[bytes, list[_Index]] = OrderedDict()  # old and young, or a young one alone
        self._places: dict[Tokens, dict[int, _Place]] = {}

    def __len__(self) -> int:
        return sum(len(index.automaton) for indexes in self._salts.values() for index in indexes)

    def find(self, sequence: Tokens, count: int) -> tuple[list[int], int]:
        """Return up to `count` tokens that followed the longest suffix of the sequence that a past text of its salt
        has, and the length of that suffix."""
        indexes = self._salts.get(sequence.cache_salt, ())
        before = self._places.get(sequence, {})
        places = {index.number: before.get(index.number) or _Place() for index in indexes}
        found: list[int] = []
        longest = 0
        for index in indexes:
            place, automaton = places[index.number], index.automaton
            start = max(place.known, len(sequence.tokens) - MATCHED)
            if start > place.known:
                place.state = place.length = 0
            for token in sequence.tokens[start:]:
                place.state, place.length = automaton.follow(place.state, place.length, token)
            place.known = len(sequence.tokens)
            if place.length and place.length >= longest:  # the young one counts where both have the same
                behind = automaton.behind_state(place.state)
                text = automaton.text[behind : behind + count].tolist()
                guess = text[: text.index(END)] if END in text else text
                if guess:
                    found, longest = guess, place.length
        if places:
            self._places[sequence] = places
        return found, longest

    def end(self, sequence: Tokens) -> None:
        """Add the text of a sequence that has ended."""
        self._places.pop(sequence, None)
        first = max(sequence.prompt, len(sequence.tokens) - KEPT)
        text = sequence.tokens[max(0, first - BEFORE) :]
        if len(sequence.tokens) == sequence.prompt:
            return
        indexes = self._salts.setdefault(sequence.cache_salt, [])
        self._salts.move_to_end(sequence.cache_salt)
        if not indexes or len(indexes[-1].automaton) + len(text) > PER_SALT:
            indexes.append(_Index(next(self._numbers)))
            del indexes[:-2]
        for token in (*text, END):
            indexes[-1].automaton.push(token)
        while len(self) > TOTAL:
            self._salts.popitem(last=False)

    def reset(self) -> None:
        """Forget everything."""
        self._salts.clear()
        self._places.clear()
