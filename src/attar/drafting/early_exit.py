"""Training of an early exit (`model/drafts/early_exit.py`): a norm and a linear layer, by distillation.

The exit begins as the target's final norm and the identity, where it is the target's own LM head on an early state.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from attar.checkpoints.drafts import early_exit
from attar.drafting.distillation import Distillation
from attar.drafting.initial import stored
from attar.drafting.target import States, Target
from attar.errors import UserError


class ExitLearner:
    """An exit behind the first `layers` blocks, whose LM head has the rows of `tokens` (None for all).

    Raises ValueError where the target has no more layers than those.
    """

    def __init__(self, target: Target, layers: int, tokens: Tensor | None, loss: str) -> None:
        config, self.target, self.tokens, self.exit = target.config, target, tokens, layers
        if layers >= config.layers:
            raise UserError(
                "option_out_of_range", f"an exit after {layers} layers saves nothing: the model has {config.layers}"
            )
        self.layers: tuple[int, ...] = (layers, config.layers)
        self.slow: tuple[Tensor, ...] = ()
        norm = target.decoder.final_norm
        self.weight = (norm.weight.detach().float() + norm.offset).clone().requires_grad_()
        self.bias = None if norm.bias is None else norm.bias.detach().float().clone().requires_grad_()
        self.linear = torch.eye(config.hidden).requires_grad_()
        self.head = target.ends[1] if tokens is None else target.ends[1][tokens]
        self.loss = Distillation(target, tokens, loss)

    @property
    def needs_predictions(self) -> bool:
        """Return whether learning reads the target's predictions over all tokens."""
        return self.loss.needs_predictions

    def parameters(self) -> list[Tensor]:
        return [self.weight, *([] if self.bias is None else [self.bias]), self.linear]

    def learn(self, ids: Tensor, states: States) -> float:
        """Add the gradients of the loss on token ids [S, L]; return the loss."""
        x = self._x(states)
        loss = self.loss.loss(x, self.head, states, torch.arange(len(x)))
        loss.backward()
        return float(loss.detach())

    @torch.no_grad()
    def agreement(self, ids: Tensor, states: States) -> list[tuple[int, int]]:
        """Return how often the exit's best token is the target's on token ids [S, L], and of how many."""
        return [self.loss.agreement(self._x(states), self.head, states.best)]

    def write(self, folder: Path) -> None:
        tensors = {"norm.weight": self.weight, "linear.weight": self.linear}
        tensors |= {} if self.bias is None else {"norm.bias": self.bias}
        tensors |= {} if self.tokens is None else {"lm_head.weight": self.head}
        early_exit.write(folder, self.target.config, self.exit, stored(tensors), self.tokens)

    def _x(self, states: States) -> Tensor:
        """Return the inputs of the LM head, [N, I]."""
        h, config = states.of(self.layers[0]), self.target.config
        if config.norm == "layer":
            normed = F.layer_norm(h, h.shape[-1:], self.weight, self.bias, config.norm_eps)
        else:
            normed = F.rms_norm(h, h.shape[-1:], self.weight, config.norm_eps)
        return normed @ self.linear.T
