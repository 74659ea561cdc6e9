"""How long two models write the same: of greedy continuations, the tokens before the first that differs.

It is what whoever decodes at temperature 0 sees of compression. One token decides here, where KL weighs a whole
vocabulary, so it needs many prompts; and as a text that has once gone another way is another text, what follows is not
compared. Both models are fed the base's choices, token by token, by the same calls: up to the first difference these
are the choices of both, and a model against itself differs nowhere. An end of text does not end a continuation.

Legend: P prompts, L tokens of one, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attar.kernels import ops
from attar.metrics.bootstrap import Floats
from attar.metrics.streaming import NewCache
from attar.model.cache import Step
from attar.model.decoder import Decoder

PROMPT = 64
LENGTH = 64
AT_ONCE = 16  # continuations that grow together


def prompts(sequences: Sequence[Sequence[int]], count: int, bos: int | None, supported: int) -> Tensor:
    """`count` prompts from all over a text's tokens, int64 [P, PROMPT], each with `bos` in front where there is one.

    Raises ValueError where the text has fewer, or the models do not have the positions.
    """
    if supported < PROMPT + LENGTH:
        raise ValueError(
            f"greedy continuations take {PROMPT + LENGTH} positions, and the model supports {supported}: go without"
        )
    front = [] if bos is None else [bos]
    size = PROMPT - len(front)
    pieces = [each[at : at + size] for each in sequences for at in range(0, len(each) - size + 1, size)]
    if len(pieces) < count:
        raise ValueError(f"the text has {len(pieces)} prompts of {size} tokens, not {count}")
    return torch.tensor([[*front, *pieces[i * len(pieces) // count]] for i in range(count)])


def shared(model: Decoder, base: Decoder, started: Tensor, cache: NewCache | None = None) -> Floats:
    """How many of `LENGTH` tokens after each of the prompts [P, L] are the same: [P]. With `cache`, `model` (not
    `base`) keeps keys and values in such caches."""
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
            ops.argmax(each.forward(fed.to(each.device), Step(lengths, horizon, kept), rows.to(each.device))).cpu()
            for each, kept in caches
        )
        same &= chosen == theirs
        if not same.any():
            break
        count += same
        fed, lengths, rows = chosen, (1,) * batch, torch.arange(batch)
    return count
