"""EAGLE heads (Li et al., arXiv 2401.15077), whose weights are those of EAGLE-2 (arXiv 2406.16858) too.

Row i reads the token behind it, t_{i+1}, and the state f_i: that of the target behind its final norm, or behind a draft
the head's own output there. With

    x = fc([embed(t_{i+1}); f_i]),    y = x + attention(x),    z = y + feed_forward(norm(y)),

the logits of t_{i+2} are the target's LM head on z, and z is f_{i+1} of the next draft. The block has no norm in front
of its attention, and none behind.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from attar.kernels import ops
from attar.kernels.operands import Linear, Norm
from attar.model.cache import ForwardBatch
from attar.model.config import ModelConfig
from attar.model.decoder import Decoder, Embedding, soft_capped
from attar.model.layers import Attention, FeedForward


@dataclass(eq=False)
class Eagle1Head:
    """An EAGLE head of the shape `config`, one layer, for the model `target`, whose final norm and LM head it uses."""

    config: ModelConfig
    target: Decoder
    embedding: Embedding
    fc: Linear
    attention: Attention
    feed_forward_norm: Norm
    feed_forward: FeedForward

    name = "eagle"

    @property
    def layers(self) -> tuple[int, ...]:
        return (self.target.config.layers,)

    def linears(self) -> Iterator[Linear]:
        """Yield every linear layer of the head's own."""
        yield from (self.fc, *self.attention.qkv, self.attention.output, *self.feed_forward.up, self.feed_forward.down)

    def fuse(self, states: Tensor) -> Tensor:
        """Return the states f [N, I] of rows, given the inputs of the target's final norm, [N, I]."""
        return ops.norm(states, None, self.target.final_norm)[1]

    def forward(self, ids: Tensor, states: Tensor, step: ForwardBatch) -> tuple[Tensor, Tensor]:
        """Run the block on the tokens behind rows [N] and their states f [N, I]; return the next states and the inputs
        of the LM head, [N, I] each, which are the same."""
        embedded = self.embedding.forward(ids, step.positions)
        x = ops.linear(torch.cat((embedded, states), 1), (self.fc,))
        stream, normed = ops.norm(x, self.attention.forward(x, step), self.feed_forward_norm)
        z = stream + self.feed_forward.forward(normed)
        return z, z

    def logits(self, x: Tensor) -> Tensor:
        """Return logits, float32 [N, vocab], for inputs of the LM head [N, I]."""
        return soft_capped(self.target.config, ops.linear(x, (self.target.head,)).float())
