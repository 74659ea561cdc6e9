"""Calibration of KVQuant as published (`kv/kvquant_published.py`): ranges and levels of every layer.

An error of a number counts by the squared gradient of the loss, summed over the model: the diagonal of the Fisher
information (Hooper et al. 2024, section 3.3). So each text runs forward and backward through the whole model once, and
keys before rotation, values and both gradients are kept.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from attar.errors import UserError
from attar.kernels import ops
from attar.kv.kvquant_published import PublishedCode
from attar.kv.kvquant_published import calibrate as calibrate_layer
from attar.kv.published import PublishedFormat
from attar.model.cache import ForwardBatch
from attar.model.decoder import Decoder
from attar.model.layers import Block

Kept = list[tuple[Tensor, Tensor]]
"""Keys before rotation and values [L, G, D] of each layer."""


@dataclass(eq=False)
class Statistics:
    """Keys before rotation and values of every layer, and squared gradients of the loss at both: [layers, N, G, D]."""

    keys: Tensor
    values: Tensor
    of_keys: Tensor
    of_values: Tensor

    def codes(self, published: PublishedFormat) -> list[PublishedCode]:
        """Return the code of every layer in a format."""
        layers = zip(self.keys, self.values, self.of_keys, self.of_values, strict=True)
        return [calibrate_layer(k, v, k_weights, v_weights, published) for k, v, k_weights, v_weights in layers]


def measure(decoder: Decoder, ids: Tensor) -> Statistics:
    """Return the statistics of token ids [S, L] that the model finds likely.

    Each text begins a sequence: its first token is an attention sink and is left out. Raises ValueError where a text is
    longer than the model's context, and on a NaN or an infinity in keys, values or gradients.
    """
    sequences, length = ids.shape
    if not 2 < length <= decoder.config.context:
        raise UserError(
            "context_exceeded", f"calibration texts have 3 to {decoder.config.context} tokens, not {length}"
        )
    shape = (decoder.config.layers, sequences, length - 1, decoder.config.kv_heads, decoder.config.head_dim)
    keys, values, of_keys, of_values = (torch.empty(shape) for _ in range(4))
    for s, text in enumerate(ids):
        for layer, (k, v) in enumerate(_backward(decoder, text)):
            assert k.grad is not None
            assert v.grad is not None
            keys[layer, s], values[layer, s] = k.detach()[1:], v.detach()[1:]
            of_keys[layer, s], of_values[layer, s] = k.grad[1:].square(), v.grad[1:].square()
    if not all(each.isfinite().all() for each in (keys, values, of_keys, of_values)):
        raise UserError(
            "not_finite",
            "keys, values or gradients hold a NaN or an infinity, so the cache cannot be calibrated",
        )
    return Statistics(*(each.flatten(1, 2) for each in (keys, values, of_keys, of_values)))


def _backward(decoder: Decoder, text: Tensor) -> Kept:
    """Run a text [L] forward and its loss backward; return keys and values, which have their gradients."""
    kept: Kept = []
    with torch.inference_mode(False), torch.enable_grad():
        step, text = ForwardBatch((len(text),), len(text)), text.clone()
        hidden = decoder.embedding.forward(text, step.positions).detach().clone().requires_grad_()
        for block in decoder.blocks:
            hidden = _run(block, hidden, step, kept)
        logits = decoder.logits(hidden[:-1])
        functional.cross_entropy(logits, text[1:]).backward()
    return kept


def _run(block: Block, hidden: Tensor, step: ForwardBatch, kept: Kept) -> Tensor:
    """Run a block on hidden states [L, I], and keep its keys before rotation and its values."""
    attention = block.attention
    q, k, v = attention.heads(ops.norm(hidden, None, block.attention_norm)[1], None)
    k.retain_grad()
    v.retain_grad()
    kept.append((k, v))
    mixed = attention.attend_whole(q, k, v, step)
    stream, x = ops.norm(hidden, block.normed(mixed, block.attention_post_norm), block.feed_forward_norm)
    return stream + block.normed(block.feed_forward.forward(x), block.feed_forward_post_norm)
