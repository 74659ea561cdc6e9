"""Find which layers of a model read few keys, and statistics of their keys, on a sample of text.

Both are functions of the weights, the sample and the settings. A layer stays dense where its attention is diffuse, or
has a window. Choosing keys by weight harms diffuse layers more than choosing at random.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from attar.errors import UserError
from attar.kernels import ops
from attar.kernels.operands import AttentionForm
from attar.kv.pages import PagedKV
from attar.kv.signs import Signs
from attar.kv.sparse import SparseAttention
from attar.model.cache import ForwardBatch
from attar.model.config import ModelConfig
from attar.model.decoder import Decoder
from attar.model.rope import table

MOST_OF_WEIGHT = 0.9
ROWS = 32  # of each text, by which layers are judged
DIFFUSE = 0.5  # share of visible keys that this weight takes in a diffuse layer


class KeyStatistics(NamedTuple):
    """Means and spreads of one layer's keys before rotation, float32 [G, D] each."""

    means: Tensor
    spreads: Tensor  # mean absolute deviations; those of a rotated pair are averaged


class SparseLayers(NamedTuple):
    """Sparse attention of one model: its settings, and the statistics of each layer's keys, None where it is dense."""

    settings: SparseAttention
    statistics: Sequence[KeyStatistics | None]

    @property
    def dense(self) -> tuple[int, ...]:
        """Return the layers in which every row reads every key that it sees."""
        return tuple(i for i, each in enumerate(self.statistics) if each is None)

    def __str__(self) -> str:
        dense = ", ".join(map(str, self.dense)) or "none"
        return f"sparse attention {self.settings}: dense layers {dense}, of {len(self.statistics)}"


def check(config: ModelConfig) -> None:
    """Raise ValueError (`option_conflict`) where a model's angles grow with the length of a sequence."""
    if config.angles_grow:
        message = "sparse attention needs angles that are the same at every length: this model's grow"
        raise UserError("option_conflict", message)


@torch.inference_mode()
def calibrate(
    decoder: Decoder, ids: Tensor, progress: Callable[[int, int], None] | None = None
) -> list[KeyStatistics | None]:
    """Return the statistics of each layer's keys; None for layers that stay dense.

    ids: int64 [sequences, L], texts that the model finds likely. `progress` is called with finished and all layers.
    Raises ValueError as `check`.
    """
    check(decoder.config)
    count, length = ids.shape
    step = ForwardBatch((length,) * count, length)
    hidden = decoder.embedding.forward(ids.flatten(), step.positions)
    found = list[KeyStatistics | None]()
    for block in decoder.blocks:
        one = block.attention
        own = None
        if one.form.window is None:
            x = ops.norm(hidden, None, block.attention_norm)[1]
            q, k, _ = one.heads(x, None)
            kept = k.unflatten(0, (count, length))[:, 1:]  # a first token's keys are like no other's
            if one.rope is not None:
                turn = step.rotation(one.rope)
                q, k = (ops.rope(each, turn.cos[turn.rows], turn.sin[turn.rows]) for each in (q, k))
            shares = [_share(*each, one.form) for each in zip(step.split(q), step.split(k), strict=True)]
            if sum(shares) / count <= DIFFUSE:
                own = _statistics(kept.flatten(0, 1).float(), 0 if one.rope is None else one.rope.dims // 2)
        found.append(own)
        if len(found) < len(decoder.blocks):
            hidden = block.run(hidden, step)
        if progress is not None:
            progress(len(found), len(decoder.blocks))
    return found


def _statistics(keys: Tensor, pairs: int) -> KeyStatistics:
    """Return the statistics of keys [N, G, D], of whose columns i and i + `pairs` turn together."""
    means = keys.mean(0)
    spreads = (keys - means).abs().mean(0)
    a, b, rest = spreads.split((pairs, pairs, spreads.shape[1] - 2 * pairs), 1)
    return KeyStatistics(means, torch.cat(((a + b) / 2, (a + b) / 2, rest), 1))


def _share(q: Tensor, k: Tensor, form: AttentionForm) -> float:
    """Return the share of visible keys that has `MOST_OF_WEIGHT`: the mean over heads and some later rows."""
    length = len(q)
    at = torch.arange(length // 2, length, max(1, length // 2 // ROWS))
    keys = k.float().repeat_interleave(form.heads // form.kv_heads, 1)
    scores = torch.einsum("thd,shd->hts", q[at].float(), keys) * form.scale
    if form.soft_cap is not None:
        scores = form.soft_cap * torch.tanh(scores / form.soft_cap)
    hidden = torch.arange(length)[None] > at[:, None]
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1).sort(-1, descending=True).values
    needed = (weights.cumsum(-1) < MOST_OF_WEIGHT).sum(-1) + 1
    return float((needed / (at + 1)).mean())


def attach(layers: Sequence[PagedKV], decoder: Decoder, found: SparseLayers, context: int) -> None:
    """Give the layers of a new cache one-bit keys, except dense ones, for sequences of up to `context` tokens.

    Raises ValueError where the cache's scheme has none, or the device is no CPU.
    """
    found.settings.check(layers[0].scheme, layers[0].keys.device.type)
    for pages, block, own in zip(layers, decoder.blocks, found.statistics, strict=True):
        if own is not None:
            rope = block.attention.rope
            angles = None if rope is None else table(rope, context)
            pages.signs = Signs.zeros(pages.blocks, pages.block, *own, found.settings, angles)
            assert len(pages.signs.numbers)  # made now: while a step is recorded, nothing may be computed
