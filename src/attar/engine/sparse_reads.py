"""Counts of the keys that rows read under sparse attention and sparse prefill, of an engine and of each request."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from attar.engine.requests.outputs import Choice
from attar.kv.sparse_prefill import SparsePrefill
from attar.model.config import ModelConfig
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


class PrefillReads:
    """Keys that rows of prompts saw, and those that they read, in each layer without a sliding window.

    Keys whose values are skipped count as not read, though their scores are computed.
    """

    def __init__(self, settings: SparsePrefill, config: ModelConfig) -> None:
        self.settings = settings
        self.seen = self.read = 0
        self._each = config.heads * sum(window is None for window in config.windows)  # that skip, in each row

    def count(
        self, chunks: Iterable[ScheduledTokens], choices: Mapping[str, Choice], skipped: Counter[str]
    ) -> None:  # fmt: skip
        """Count the rows of a finished step. `skipped` has the keys that were skipped in it, and is emptied."""
        for chunk in chunks:
            prompt = chunk.sequence.prompt
            until = self.settings.until(prompt)
            lengths = range(chunk.start + 1, min(chunk.start + chunk.rows, prompt) + 1)
            seen = sum(lengths)
            read = sum(n if n > until else self.settings.tokens_read(n) for n in lengths)
            if self._each:
                read -= skipped[chunk.sequence.id] // self._each
            self.seen, self.read = self.seen + seen, self.read + read
            if (choice := choices.get(chunk.sequence.id)) is not None:
                choice.request.prompt_keys_seen += seen
                choice.request.prompt_keys_read += read
        skipped.clear()
