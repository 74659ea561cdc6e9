"""EAGLE-3 heads (Li et al., arXiv 2503.01840): one decoder block that continues the target's hidden states.

Row i reads the token behind it, t_{i+1}, and the state f_i: fc([low; middle; high]) of the hidden states that enter
three layers of the target, or behind a draft the block's own output there. With e = norm(embed(t_{i+1})) and
h = norm(f_i),

    y = f_i + attention([e; h]),    z = y + feed_forward(norm(y)),    logits of t_{i+2} = W norm(z),

and z is f_{i+1} of the next draft. With `norm_before_residual` y is h + attention([e; h]). W has the rows of a draft
vocabulary. Keys and values are the block's own.
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
from attar.model.decoder import Embedding
from attar.model.drafts.medusa import spread
from attar.model.layers import Attention, FeedForward


@dataclass(eq=False)
class EagleHead:
    """An EAGLE-3 head of the shape `config`, one layer, for a target of `vocab_size` tokens.

    `layers` are those of the target whose inputs it reads. `tokens` are the token ids, int64, that the LM head's rows
    stand for; None where these are all.
    """

    config: ModelConfig
    layers: tuple[int, ...]
    embedding: Embedding
    fc: Linear
    input_norm: Norm
    hidden_norm: Norm
    attention: Attention
    feed_forward_norm: Norm
    feed_forward: FeedForward
    final_norm: Norm
    head: Linear
    vocab_size: int
    tokens: Tensor | None = None
    norm_before_residual: bool = False

    name = "eagle3"

    def linears(self) -> Iterator[Linear]:
        """Yield every linear layer."""
        yield from (self.fc, *self.attention.qkv, self.attention.output, *self.feed_forward.up)
        yield from (self.feed_forward.down, self.head)

    def norms(self) -> Iterator[Norm]:
        """Yield every norm."""
        yield from (self.input_norm, self.hidden_norm, self.feed_forward_norm, self.final_norm)

    def fuse(self, states: Tensor) -> Tensor:
        """Return the states f [N, I] of rows, given the inputs of the target's layers side by side, [N, 3 T]."""
        return ops.linear(states, (self.fc,))

    def forward(self, ids: Tensor, states: Tensor, step: ForwardBatch) -> tuple[Tensor, Tensor]:
        """Run the block on the tokens behind rows [N] and their states f [N, I]; return the next states and the inputs
        of the LM head, [N, I] each."""
        _, embedded = ops.norm(self.embedding.forward(ids, step.positions), None, self.input_norm)
        residual, hidden = ops.norm(states, None, self.hidden_norm)
        delta = self.attention.forward(torch.cat((embedded, hidden), 1), step)
        stream, x = ops.norm(hidden if self.norm_before_residual else residual, delta, self.feed_forward_norm)
        return ops.norm(stream, self.feed_forward.forward(x), self.final_norm)

    def logits(self, x: Tensor) -> Tensor:
        """Return logits, float32 [N, vocab], for inputs of the LM head [N, I]; -inf where no row stands for a token."""
        return spread(ops.linear(x, (self.head,)).float(), self.tokens, self.vocab_size)
