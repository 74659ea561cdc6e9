"""Early exits: the first layers of a model, then a norm and a linear layer of their own in front of an LM head.

For the hidden state h that enters layer E,

    logits = W A norm(h),

with A [I, I]. W is the model's own LM head, or rows of it for a draft vocabulary. Embedding and blocks are the model's,
in place, so an exit takes no memory for weights but A and those rows. Early exits for drafts are those of LayerSkip
(Elhoushi et al., arXiv 2404.16710), whose model is trained for them; here the model stays as it is.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attar.kernels import ops
from attar.kernels.operands import Linear, Norm, Routes
from attar.model.config import ModelConfig
from attar.model.decoder import Decoder


@dataclass(eq=False, kw_only=True)
class EarlyExit(Decoder):
    """A decoder of a model's first blocks, whose products are those of `head` behind `linear`.

    `tokens` are the token ids, int64, that the head's rows stand for; None where these are all.
    """

    linear: Linear
    tokens: Tensor | None = None

    def products(self, stream: Tensor, delta: Tensor | None = None, routes: Routes | None = None) -> Tensor:
        _, x = ops.norm(stream, delta, self.final_norm)
        out = ops.linear(ops.linear(x, (self.linear,)), (self.head,))
        return out if out.dtype == torch.float32 else out.float()


def first_layers(config: ModelConfig, count: int) -> ModelConfig:
    """Return the config of a model's first `count` layers."""
    return replace(config, windows=config.windows[:count], ropes=config.ropes[:count], sparse=config.sparse[:count])


def early_exit(
    target: Decoder, layers: int, norm: Norm, linear: Linear, head: Linear, tokens: Tensor | None
) -> EarlyExit:
    """Return the exit behind the first `layers` blocks of a model, which share its weights."""
    config = first_layers(target.config, layers)
    blocks = target.blocks[:layers]
    return EarlyExit(
        config, target.embedding, blocks, norm, head, target.store, linear=linear, tokens=tokens,
    )  # fmt: skip
