"""Find which layers of a model read few keys, and statistics of their keys, on a sample of text.

Both are functions of the weights, the sample and the settings. A layer stays dense where its attention is diffuse, or
has a window. Choosing keys by weight harms diffuse layers more than choosing at random.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from attar.errors import UserError
from attar.kernels import ops
from attar.kernels.operands import AttentionForm
from attar.kv.signs import Signs
from attar.kv.sparse import SparseAttention
from attar.model.cache import ForwardBatch, KVCache
from attar.model.decoder import Decoder
from attar.model.rope import table

MOST_OF_WEIGHT = 0.9
DIFFUSE = 0.5  # share of visible keys that this weight takes in a diffuse layer


class KeyStatistics(NamedTuple):
    """Means and spreads of one layer's keys before rotation, float32 [G, D] each."""

    means: Tensor
    spreads: Tensor  # mean absolute deviations; those of a rotated pair are averaged


@torch.inference_mode()
def calibrate(decoder: Decoder, ids: Tensor) -> list[KeyStatistics | None]:
    """Return the statistics of each layer's keys; None for layers that stay dense.

    ids: int64 [sequences, L], texts that the model finds likely. Raises ValueError where angles grow with the length
    of a sequence.
    """
    length = ids.shape[1]
    step = ForwardBatch((length,), length)
    hidden = [decoder.embedding.forward(text, step.positions) for text in ids]
    found = list[KeyStatistics | None]()
    for block in decoder.blocks:
        one = block.attention
        if one.rope is not None and one.rope.grows:
            message = "sparse attention needs angles that are the same at every length: this model's grow"
            raise UserError("option_conflict", message)
        kept, shares = [], []
        for i, rows in enumerate(hidden):
            x = ops.norm(rows, None, block.attention_norm)[1]
            kept.append(one.heads(x, None)[1][1:].float())  # a first token's keys are like no other's
            q, k, _ = one.heads(x, None if one.rope is None else step.rotation(one.rope))
            shares.append(_share(q, k, one.form))
            hidden[i] = block.run(rows, step)
        diffuse = sum(shares) / len(shares) > DIFFUSE
        pairs = 0 if one.rope is None else one.rope.dims // 2
        found.append(None if diffuse or one.form.window is not None else _statistics(torch.cat(kept), pairs))
    return found


def _statistics(keys: Tensor, pairs: int) -> KeyStatistics:
    """Return the statistics of keys [N, G, D], of whose columns i and i + `pairs` turn together."""
    means = keys.mean(0)
    spreads = (keys - means).abs().mean(0)
    a, b, rest = spreads.split((pairs, pairs, spreads.shape[1] - 2 * pairs), 1)
    return KeyStatistics(means, torch.cat(((a + b) / 2, (a + b) / 2, rest), 1))


def _share(q: Tensor, k: Tensor, form: AttentionForm) -> float:
    """Return the share of visible keys that has `MOST_OF_WEIGHT`: the mean over heads and later rows."""
    length = len(q)
    first = length // 2
    keys = k.float().repeat_interleave(form.heads // form.kv_heads, 1)
    scores = torch.einsum("thd,shd->hts", q[first:].float(), keys) * form.scale
    if form.soft_cap is not None:
        scores = form.soft_cap * torch.tanh(scores / form.soft_cap)
    at = torch.arange(first, length)
    hidden = torch.arange(length)[None] > at[:, None]
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1).sort(-1, descending=True).values
    needed = (weights.cumsum(-1) < MOST_OF_WEIGHT).sum(-1) + 1
    return float((needed / (at + 1)).mean())


def attach(cache: KVCache, decoder: Decoder, statistics: list[KeyStatistics | None], settings: SparseAttention) -> None:
    """Give the layers of a new cache one-bit keys, except those without statistics.

    Raises ValueError where the cache's scheme has none, or the device is no CPU.
    """
    settings.check(cache.scheme)
    if cache.device.type != "cpu":
        raise UserError("option_conflict", f"sparse attention runs on CPUs, not on {cache.device.type}")
    for pages, block, own in zip(cache.layers, decoder.blocks, statistics, strict=True):
        if own is not None:
            rope = block.attention.rope
            angles = None if rope is None else table(rope, cache.capacity)
            pages.signs = Signs.zeros(pages.blocks, pages.block, *own, settings, angles)
