"""Drafts of an early exit (`model/drafts/early_exit.py`): the target's own first layers run ahead of it.

It is a draft model that shares the target's weights. Its cache is its own: keys and values of those layers alone. The
target's could not be used, since a step writes them only once its drafts are known.
"""

from __future__ import annotations

from torch import Tensor

from attar.model.drafts.early_exit import EarlyExit
from attar.model.drafts.medusa import spread
from attar.sampling.drafters.model import ModelDrafter


class EarlyExitDrafter(ModelDrafter):
    """An early exit for sequences of up to `context` tokens; parameters as of `ModelDrafter`."""

    name = "exit"

    def __init__(
        self, decoder: EarlyExit, context: int, sequences: int, vocab_size: int, blocks: int | None = None
    ) -> None:
        super().__init__(decoder, context, sequences, vocab_size, blocks)
        self.tokens = decoder.tokens

    def _of_all_tokens(self, logits: Tensor) -> Tensor:
        return spread(logits, self.tokens, self.vocab_size)
