"""Length of agreement of two models' greedy continuations: the tokens before the first that differs.

A user who decodes at temperature 0 sees this effect of compression. One token decides here, where KL weighs a whole
vocabulary, so the figure needs many prompts. Texts that have diverged once stay different, so what follows is not
compared. Both models are fed the base's choices, token by token, by the same calls. Up to the first difference these
are the choices of both, and a model against itself differs nowhere. An end of text does not end a continuation.

Legend: P prompts, L tokens of one, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attar.errors import UserError
from attar.kernels import ops
from attar.metrics.bootstrap import Floats
from attar.metrics.streaming import NewCache
from attar.model.cache import ForwardBatch
from attar.model.decoder import Decoder

PROMPT = 64
LENGTH = 64
AT_ONCE = 16  # continuations that run as one batch


def prompts(sequences: Sequence[Sequence[int]], count: int, bos: int | None, supported: int) -> Tensor:
    """Return `count` prompts spread over a text's tokens, int64 [P, PROMPT], each with `bos` in front where there is
    one. Raises ValueError where the text has fewer, or the models support too few positions."""
    if supported < PROMPT + LENGTH:
        raise UserError(
            "context_exceeded",
            f"greedy continuations take {PROMPT + LENGTH} positions, and the model supports {supported}: go without",
        )
    front = [] if bos is None else [bos]
    size = PROMPT - len(front)
    pieces = [each[at : at + size] for each in sequences for at in range(0, len(each) - size + 1, size)]
    if len(pieces) < count:
        raise UserError("text_too_short", f"the text has {len(pieces)} prompts of {size} tokens, not {count}")
    return torch.tensor([[*front, *pieces[i * len(pieces) // count]] for i in range(count)])


def shared(model: Decoder, base: Decoder, started: Tensor, cache: NewCache | None = None) -> Floats:
    """Return how many of `LENGTH` greedy tokens after each of the prompts [P, L] agree: float64 [P]. With `cache`,
    `model` (not `base`) keeps its KV cache in such caches."""
    found = [_shared(model, base, some, cache or model.cache) for some in started.split(AT_ONCE)]
    return torch.cat(found).double().numpy()


def _shared(model: Decoder, base: Decoder, started: Tensor, cache: NewCache) -> Tensor:
    batch, size = started.shape
    horizon = size + LENGTH
    caches = ((base, base.cache(horizon, batch)), (model, cache(horizon, batch)))
    fed, lengths, rows = started.flatten(), (size,) * batch, torch.arange(1, batch + 1) * size - 1
    same, count = torch.ones(batch, dtype=torch.bool), torch.zeros(batch, dtype=torch.int64)
    for _ in range(LENGTH):
        chosen, theirs = (
            ops.argmax(
                each.forward(fed.to(each.device), ForwardBatch(lengths, horizon, kept), rows.to(each.device))
            ).cpu()
            for each, kept in caches
        )
        same &= chosen == theirs
        if not same.any():
            break
        count += same
        fed, lengths, rows = chosen, (1,) * batch, torch.arange(batch)
    return count
