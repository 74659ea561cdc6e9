"""Drafts of a match where there is one, else of a model: copies cost nothing, and a model guesses what is new.

A match of `SURE` tokens or more (`drafters/suffix.py`) is taken before a model is asked, as TensorRT-LLM does. Such
drafts are a kind of their own for the pace: their evidence is past that of any depth of a model.
"""

from __future__ import annotations

from collections.abc import Sequence

from attar.protocol.speculation import MAX_DRAFT_TOKENS
from attar.sampling.drafters.drafter import NO_DRAFT, Draft, Drafter, DraftRequest, StateReader
from attar.sampling.drafters.suffix import SuffixDrafter
from attar.scheduling.sequence import Sequence as Tokens

SURE = 4  # tokens
MATCHED = 2 * MAX_DRAFT_TOKENS  # evidence of such drafts


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
        if draft.evidence < SURE:
            self._matches.pop(request.sequence, None)
            return NO_DRAFT
        self._matches[request.sequence] = found = draft._replace(evidence=MATCHED)
        return found

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        others = [request for request in requests if request.sequence not in self._matches]
        made = iter(self.second.draft(others) if others else ())
        return [self._matches.pop(each) if each in self._matches else next(made) for each, _, _ in requests]

    def forget(self, sequence: Tokens) -> None:
        self._matches.pop(sequence, None)
        self.first.forget(sequence)
        self.second.forget(sequence)

    def reset(self) -> None:
        self._matches.clear()
        self.first.reset()
        self.second.reset()


def reader_of(drafter: Drafter | None) -> StateReader | None:
    """Return what reads hidden states: a drafter, or the second of two; None where neither does."""
    own: object = drafter.second if isinstance(drafter, FirstOf) else drafter
    return own if isinstance(own, StateReader) else None
