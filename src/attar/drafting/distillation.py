"""Distillation: losses that compare a draft's logits with the target's predictions, row by row.

All drafts use these losses, except that Medusa's published loss has labels instead of predictions. The published loss
(Hinton et al., arXiv 1503.02531; for drafts DistillSpec, arXiv 2310.08461; for EAGLE-3 arXiv 2503.01840) is the
cross-entropy of the draft's distribution q with the target's p, normalized over the draft vocabulary. `acceptance` is
the mean of -log sum min(p, q) (LK losses, arXiv 2602.23881). The sum is the probability that a draft is right under the
best coupling, so p is not normalized there.

Gradients are computed by formulas and not by autograd, in pieces that stay in a processor's cache. Of the target's LM
head only the rows of the draft vocabulary are multiplied.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from attar.drafting.target import States, Target, quick

PIECE = 1 << 21
"""Logits that are computed at once."""

LEAST = 1e-6
"""Least chance of a right draft whose logarithm has a gradient."""

LEAST_ROWS = 64
"""Rows of a product at least."""

NO_LABEL = -1
"""The label of a row that does not count."""

Slopes = Callable[[Tensor, slice], tuple[Tensor, Tensor]]
"""A function (logits [n, V], their rows) that returns losses [n] and their slopes at the logits, [n, V]."""


class Distillation:
    """Losses of draft logits against a target, for the drafted `tokens` (None for all)."""

    def __init__(self, target: Target, tokens: Tensor | None, loss: str) -> None:
        self.target, self.tokens, self.name = target, tokens, loss
        self._rows = target.rows(tokens)

    @property
    def needs_predictions(self) -> bool:
        """Return whether the loss reads the target's predictions over all tokens."""
        return self.name == "acceptance"

    def loss(self, x: Tensor, head: Tensor, states: States, rows: Tensor, counted: Tensor | None = None) -> Tensor:
        """Return the mean loss of draft logits x W^T, for x [N, I] and W [V, I], against the target's predictions
        behind `rows` [N]; of the `counted` rows alone where they are given, bool [N]."""
        hidden = states.of(self.target.config.layers)

        def slopes(logits: Tensor, at: slice) -> tuple[Tensor, Tensor]:
            wanted = self.target.logits(hidden[rows[at]], self._rows)
            if self.name == "published":
                q, p = logits.log_softmax(-1), wanted.softmax(-1)
                return -torch.linalg.vecdot(p, q), q.exp_().sub_(p)
            q, p = logits.softmax(-1), wanted.sub_(states.predictions[1][rows[at], None]).exp_()
            right = torch.minimum(p, q).sum(-1)
            less = q * (q < p)
            slope = less.sub_(q * less.sum(-1, keepdim=True))
            return -right.clamp_min(LEAST).log(), slope.mul_(torch.where(right > LEAST, -1 / right, 0)[:, None])

        return _mean(x, head, torch.ones(len(x), dtype=torch.bool) if counted is None else counted, slopes)

    def labelled(self, x: Tensor, head: Tensor, labels: Tensor) -> Tensor:
        """Return the mean cross-entropy of draft logits x W^T with rows of W, int64 [N]; those that are `NO_LABEL` do
        not count."""

        def slopes(logits: Tensor, at: slice) -> tuple[Tensor, Tensor]:
            q, places = logits.log_softmax(-1), labels[at, None].clamp_min(0)
            losses = -q.gather(1, places)[:, 0]
            return losses, q.exp_().scatter_add_(1, places, torch.full(places.shape, -1.0))

        return _mean(x, head, labels != NO_LABEL, slopes)

    @torch.no_grad()
    def agreement(self, x: Tensor, head: Tensor, best: Tensor) -> tuple[int, int]:
        """Return how many best tokens of the draft logits are the target's `best` [N], and of how many."""
        right = 0
        for rows in torch.arange(len(x)).split(max(1, PIECE // len(head))):
            guess = (x[rows] @ head.T).argmax(-1)
            right += int(((guess if self.tokens is None else self.tokens[guess]) == best[rows]).sum())
        return right, len(x)


def _mean(x: Tensor, head: Tensor, counted: Tensor, slopes: Slopes) -> Tensor:
    """Return the mean loss of the counted rows, whose gradients at x and at a head that learns are known."""
    with torch.no_grad():
        dtype = torch.bfloat16 if quick(head) else torch.float32
        rows, weight, total = x.to(dtype), head.to(dtype), torch.zeros(())
        share = counted / counted.sum().clamp_min(1)
        found = torch.empty(len(x), len(head), dtype=dtype)
        for some in torch.arange(len(x)).split(max(LEAST_ROWS, PIECE // len(head))):
            at = slice(int(some[0]), int(some[-1]) + 1)
            losses, slope = slopes((rows[at] @ weight.T).float(), at)
            found[at] = slope.mul_(share[at, None])
            total += (losses * share[at]).sum()
        of_head = (found.T @ rows).float() if head.requires_grad else None
        of_x = (found @ weight).float()
    made: Tensor = _Known.apply(x, head, total, of_x, of_head)  # type: ignore[no-untyped-call]
    return made


class _Known(torch.autograd.Function):
    """A number whose gradients at x and at a head were computed with it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, head: Tensor, number: Tensor, of_x: Tensor, of_head: Tensor | None) -> Tensor:
        ctx.gradients = of_x, of_head
        return number.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        of_x, of_head = ctx.gradients
        by = gradients[0]
        return of_x * by, None if of_head is None else of_head * by, None, None, None
