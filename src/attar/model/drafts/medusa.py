"""Medusa-1 heads (Cai et al., arXiv 2401.10774): each guesses a later token from the target's last hidden state.

Head k turns the state h of a row, behind the final norm, into logits of the token k + 2 places behind that row's:

    logits = W h',    h' = h + SiLU(R h + b), once for each residual block.

Every head has an LM head W of its own, or all share the target's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from attar.kernels import ops
from attar.kernels.operands import Linear


@dataclass(eq=False)
class MedusaHeads:
    """Heads for the depths 0, 1, ... `blocks[k]` are the residual blocks R [I, I] of head k, and `heads[k]` is its LM
    head.

    `tokens` are the token ids, int64, that the LM heads' rows stand for; None where these are all of `vocab_size`.
    """

    blocks: tuple[tuple[Linear, ...], ...]
    heads: tuple[Linear, ...]
    vocab_size: int
    tokens: Tensor | None = None

    @property
    def linears(self) -> Iterator[Linear]:
        """Yield every linear layer, a shared one once."""
        yield from dict.fromkeys((*(each for blocks in self.blocks for each in blocks), *self.heads))

    def logits(self, x: Tensor, depths: int) -> list[Tensor]:
        """Return the logits of the first `depths` heads, float32 [N, vocab] each, for states x [N, I] behind the final
        norm. Tokens that no row stands for have -inf."""
        states = [self._state(x, depth) for depth in range(depths)]
        if depths and all(head is self.heads[0] for head in self.heads[:depths]):  # one call reads the matrix once
            products = ops.linear(torch.cat(states), (self.heads[0],)).float().split(len(x))
        else:
            products = tuple(ops.linear(state, (self.heads[depth],)).float() for depth, state in enumerate(states))
        return [spread(each, self.tokens, self.vocab_size) for each in products]

    def _state(self, x: Tensor, depth: int) -> Tensor:
        for block in self.blocks[depth]:
            x = x + F.silu(ops.linear(x, (block,)))
        return x


def spread(logits: Tensor, tokens: Tensor | None, vocab_size: int) -> Tensor:
    """Return logits [N, draft vocabulary] at their token ids, [N, vocab], -inf elsewhere; as they are without
    `tokens`."""
    if tokens is None:
        return logits
    whole = logits.new_full((len(logits), vocab_size), -torch.inf)
    whole[:, tokens] = logits
    return whole
