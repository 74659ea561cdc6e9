"""Divergence of a compressed model's predictions from its base's: KL divergence, acceptance, and top-1 agreement.

Perplexity averages over tokens that became more probable and tokens that became less probable, so damage can hide in
it. The divergence KL(base || model) = sum_v p(v) (log p(v) - log q(v)) cannot be negative at any position: nothing
cancels. It is taken over the whole vocabulary in float64, because truncated or quantized base logits leave a floor of
their own (5e-4 and more in common tools). Here the floor is exactly zero: a model against itself gives 0.0 at every
position.

The acceptance sum_v min(p(v), q(v)) is the chance that rejection sampling against one model keeps a token sampled from
the other. Its mean is the expected acceptance rate, EAR; SLQ (arXiv 2605.02404) calls 0.99 and more statistically
lossless. Computed as 1 - sum_v |p - q| / 2, it is exactly 1 for a model against itself.

Legend: T positions, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from attar.kernels import ops
from attar.metrics.perplexity import in_rows


class Comparison(NamedTuple):
    """Figures of each position, [T] each; losses and divergence in nats and float64."""

    nll: Tensor
    base_nll: Tensor
    kl: Tensor
    agree: Tensor  # bool: both have the same most probable token
    accept: Tensor


def compare(base: Tensor, model: Tensor, targets: Tensor) -> Comparison:
    """Compare float32 logits base, model [T, V] at positions with targets [T], in one pass over all figures. Rows are
    widened to float64 a few at a time, so the extra memory does not grow with T."""
    assert base.shape == model.shape, (base.shape, model.shape)
    runs = zip(in_rows(base), in_rows(model), in_rows(targets, base.shape[1]), strict=True)
    return Comparison(*(torch.cat(column) for column in zip(*(_compare(*run) for run in runs), strict=True)))


def _compare(base: Tensor, model: Tensor, targets: Tensor) -> Comparison:
    log_p, log_q = base.double().log_softmax(-1), model.double().log_softmax(-1)
    at, p = targets[:, None], log_p.exp()
    return Comparison(
        -log_q.gather(1, at)[:, 0],
        -log_p.gather(1, at)[:, 0],
        (p * (log_p - log_q)).sum(-1),
        ops.argmax(base) == ops.argmax(model),
        1 - (p - log_q.exp()).abs_().sum(-1) / 2,
    )
