"""Learning from the target's predictions, row by row: what an early exit and a small model are trained with.

The published loss of a distillation (Hinton et al., arXiv 1503.02531; for drafts DistillSpec, arXiv 2310.08461) is the
cross-entropy with the target's prediction p, over the tokens that can be drafted, where p is normed. `acceptance` is
the mean of -log sum min(p, q), whose sum is the chance that a draft is right under the best coupling (LK losses, arXiv
2602.23881); p is not normed there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attar.drafting.target import LOGITS_AT_ONCE, Target


class Distillation:
    """Losses of draft logits against a target, for the drafted `tokens` (None for all)."""

    def __init__(self, target: Target, tokens: Tensor | None, loss: str) -> None:
        self.target, self.tokens, self.loss = target, tokens, loss

    def learn(self, x: Tensor, head: Tensor, hidden: Tensor) -> float:
        """Add the gradients of the mean loss of draft logits x W^T, for x [N, I], W [V, I], and the target's inputs of
        the final norm `hidden` [N, T] of the same rows; return the loss. Logits are made in pieces."""
        total, inputs = 0.0, x.detach().requires_grad_()
        for rows in torch.arange(len(x)).split(max(1, LOGITS_AT_ONCE // len(head))):
            p, q = self.target.probabilities(hidden[rows], self.tokens), (inputs[rows] @ head.T).log_softmax(-1)
            if self.loss == "published":
                losses = -(p / p.sum(-1, keepdim=True).clamp_min(1e-9) * q).sum(-1)
            else:
                losses = -torch.minimum(p, q.exp()).sum(-1).clamp_min(1e-6).log()
            part = losses.sum() / len(x)
            part.backward()
            total += float(part.detach())
        x.backward(inputs.grad)
        return total

    @torch.no_grad()
    def agreement(self, x: Tensor, head: Tensor, hidden: Tensor) -> list[tuple[int, int]]:
        """Return how many best tokens of the draft logits are the target's, and of how many."""
        right = 0
        for rows in torch.arange(len(x)).split(max(1, LOGITS_AT_ONCE // len(head))):
            guess = (x[rows] @ head.T).argmax(-1)
            guess = guess if self.tokens is None else self.tokens[guess]
            right += int((guess == self.target.best(hidden[rows])).sum())
        return [(right, len(x))]
