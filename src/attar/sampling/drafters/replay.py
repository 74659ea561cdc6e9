"""Drafts of a text that is known already, a given share of them right: for measurements of speed alone.

Models of random weights have nothing that a drafter could guess, and trained pairs have one acceptance each. Here the
text of a first run is drafted, and each position is right or wrong by its own draw, whatever the number of drafts. So
the kernels do all their work at an acceptance that is chosen. What is measured so must be called by this name.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from attar.sampling.drafters.drafter import Draft, DraftRequest
from attar.scheduling.sequence import Sequence as Tokens


class ReplayDrafter:
    """A drafter of known `texts`, by prompt: of the positions the share `right` is drafted right, by `seed`."""

    name, costly = "replay", False

    def __init__(self, texts: Mapping[tuple[int, ...], Sequence[int]], right: float, seed: int = 0) -> None:
        self.texts, self.right, self.seed = texts, right, seed
        self._known: dict[Tokens, list[int]] = {}

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        found = []
        for sequence, limit in ((request.sequence, request.limit) for request in requests):
            if sequence not in self._known:
                self._known[sequence] = self._spoiled(self.texts.get(tuple(sequence.tokens[: sequence.prompt]), ()))
            found.append(Draft(tuple(self._known[sequence][sequence.output : sequence.output + limit]), 1))
        return found

    def _spoiled(self, text: Sequence[int]) -> list[int]:
        draw = random.Random(self.seed)
        return [token if draw.random() < self.right else token ^ 1 for token in text]

    def forget(self, sequence: Tokens) -> None:
        self._known.pop(sequence, None)

    def reset(self) -> None:
        self._known.clear()
