"""Counts of the keys that rows of outputs read under sparse attention, of an engine and of each request."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from attar.engine.outputs import Choice
from attar.model.sparse_layers import SparseLayers
from attar.scheduling.step_plan import ScheduledTokens


class SparseReads:
    """Keys that rows past their prompts saw, and those that they read, in each layer that is not dense."""

    def __init__(self, layers: SparseLayers) -> None:
        self.layers = layers
        self.seen = self.read = 0

    def count(self, chunks: Iterable[ScheduledTokens], choices: Mapping[str, Choice]) -> None:
        """Count the rows of a finished step, drafts among them."""
        settings = self.layers.settings
        for chunk in chunks:
            first = max(chunk.start, chunk.sequence.prompt)
            lengths = range(first + 1, chunk.start + chunk.rows + 1)
            seen, read = sum(lengths), sum(map(settings.tokens_read, lengths))
            self.seen, self.read = self.seen + seen, self.read + read
            if (choice := choices.get(chunk.sequence.id)) is not None:
                choice.request.keys_seen += seen
                choice.request.keys_read += read
