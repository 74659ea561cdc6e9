"""Training of Medusa-1 heads (Cai et al., arXiv 2401.10774) on a frozen target.

Head k learns the token k + 2 places behind a row. The published loss is the sum over heads of 0.8^k times the mean
cross-entropy of the text's tokens. `acceptance` is the mean of -log sum min(p, q), whose sum is the chance that a draft
is right under the best coupling (LK losses, arXiv 2602.23881); p is the target's prediction there. Residual blocks
begin at zero, where a head is the LM head itself.

All heads share rows of the target's own LM head, which stay as they are: an LM head of their own would cost more than a
small target's step. In vLLM's layout that is `original_lm_head`.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from attar.checkpoints.drafts import medusa
from attar.drafting.distillation import NO_LABEL, Distillation
from attar.drafting.initial import stored
from attar.drafting.target import States, Target

DECAY = 0.8


class MedusaLearner:
    """`depths` heads of one residual block each, whose LM head has the rows of `tokens` (None for all)."""

    def __init__(self, target: Target, depths: int, tokens: Tensor | None, loss: str) -> None:
        hidden, self.target, self.tokens = target.config.hidden, target, tokens
        self.loss = Distillation(target, tokens, loss)
        self.layers: tuple[int, ...] = (target.config.layers,)
        self.slow: tuple[Tensor, ...] = ()
        self.head = target.ends[1] if tokens is None else target.ends[1][tokens]
        self.weights = [torch.zeros(hidden, hidden, requires_grad=True) for _ in range(depths)]
        self.biases = [torch.zeros(hidden, requires_grad=True) for _ in range(depths)]
        self._place = torch.arange(target.config.vocab_size)
        if tokens is not None:
            self._place = torch.full((target.config.vocab_size,), NO_LABEL)
            self._place[tokens] = torch.arange(len(tokens))

    def parameters(self) -> list[Tensor]:
        return [*self.weights, *self.biases]

    @property
    def needs_predictions(self) -> bool:
        """Return whether learning reads the target's predictions over all tokens."""
        return self.loss.needs_predictions

    def learn(self, ids: Tensor, states: States) -> float:
        """Add the gradients of the loss on token ids [S, L]; return the loss."""
        x, total = self.target.normed(states.of(self.layers[0])), 0.0
        for k in range(len(self.weights)):
            rows, later = _pairs(ids, k)
            drafted = self._inputs(k, x[rows])
            if self.loss.name == "published":
                part = self.loss.labelled(drafted, self.head, self._place[ids.reshape(-1)[later + 1]])
            else:
                part = self.loss.loss(drafted, self.head, states, later)
            part = part * DECAY**k
            part.backward()
            total += float(part.detach())
        return total

    @torch.no_grad()
    def agreement(self, ids: Tensor, states: States) -> list[tuple[int, int]]:
        """Return, for each depth, how often a head's best token is the target's on token ids [S, L], and of how
        many. Every row stands behind the text's own tokens."""
        x, found = self.target.normed(states.of(self.layers[0])), []
        for k in range(len(self.weights)):
            rows, later = _pairs(ids, k, label=False)
            found.append(self.loss.agreement(self._inputs(k, x[rows]), self.head, states.best[later]))
        return found

    def write(self, folder: Path) -> None:
        tensors = {"lm_heads.0.weight": self.head}
        for k, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            tensors |= {f"blocks.{k}.layers.0.weight": weight, f"blocks.{k}.layers.0.bias": bias}
        medusa.write(folder, self.target.config, 1, stored(tensors), self.tokens)

    def _inputs(self, k: int, x: Tensor) -> Tensor:
        """Return head k's inputs of the LM head, [N, I]."""
        return x + F.silu(F.linear(x, self.weights[k], self.biases[k]))


def _pairs(ids: Tensor, k: int, label: bool = True) -> tuple[Tensor, Tensor]:
    """Return rows of ids [S, L], flattened, that head k reads, and for each the row behind which its token is
    predicted; with `label` only where the text has that token."""
    sequences, length = ids.shape
    count = max(0, length - k - 1 - label)
    rows = (torch.arange(sequences)[:, None] * length + torch.arange(count)).reshape(-1)
    return rows, rows + k + 1
