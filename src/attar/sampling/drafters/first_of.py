"""Drafts of a match where there is one, else of a model: copies cost nothing, and a model guesses what is new.

A match of `LEAST` tokens or more (`drafters/suffix.py`) may be taken before a model is asked. TensorRT-LLM takes each
of four tokens or more. Here the pace decides, by how often such matches were right. Their evidence is the length of the
match, of a source of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

from attar.sampling.drafters.drafter import NO_DRAFT, Draft, Drafter, DraftRequest, StateReader, Stopping
from attar.sampling.drafters.suffix import SuffixDrafter
from attar.sampling.pace import SOURCE
from attar.scheduling.sequence import Sequence as Tokens

LEAST = 2  # tokens
MATCHED = SOURCE  # where evidences of matches begin


class FirstOf:
    """The suffix drafter where it has a long match, else `second`. Where that reads hidden states, the engine gives
    them to it (`reader_of`)."""

    costly = True

    def __init__(self, second: Drafter) -> None:
        self.first, self.second = SuffixDrafter(), second
        self.name = f"{self.first.name}, then {second.name}"
        self._matches: dict[Tokens, Draft] = {}  # of the present step

    def matched(self, request: DraftRequest) -> Draft:
        """Return the drafts that there are without a model; none where the match is too short."""
        (draft,) = self.first.draft([request])
        if draft.evidence < LEAST:
            self._matches.pop(request.sequence, None)
            return NO_DRAFT
        self._matches[request.sequence] = found = draft._replace(evidence=MATCHED + draft.evidence)
        return found

    def refuse(self, sequence: Tokens) -> None:
        """Ask the second drafter for this sequence's drafts, although there is a match."""
        self._matches.pop(sequence, None)

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        others = [request for request in requests if request.sequence not in self._matches]
        made = iter(self.second.draft(others) if others else ())
        sequences = [request.sequence for request in requests]
        return [self._matches.pop(each) if each in self._matches else next(made) for each in sequences]

    def forget(self, sequence: Tokens) -> None:
        self._matches.pop(sequence, None)
        self.first.forget(sequence)
        self.second.forget(sequence)

    def reset(self) -> None:
        self._matches.clear()
        self.first.reset()
        self.second.reset()


def stops(drafter: Drafter | None) -> bool:
    """Return whether a drafter, or the second of two, asks before each further draft whether that pays."""
    own: object = drafter.second if isinstance(drafter, FirstOf) else drafter
    return isinstance(own, Stopping) and own.stops


def reader_of(drafter: Drafter | None) -> StateReader | None:
    """Return what reads hidden states: a drafter, or the second of two; None where neither does."""
    own: object = drafter.second if isinstance(drafter, FirstOf) else drafter
    return own if isinstance(own, StateReader) else None
