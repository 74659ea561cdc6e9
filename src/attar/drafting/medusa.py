"""Training of Medusa-1 heads (Cai et al., arXiv 2401.10774) on a frozen target.

Head k learns the token k + 2 places behind a row. The published loss is the sum over heads of 0.8^k times the mean
cross-entropy of the text's tokens. `acceptance` is the mean of -log sum min(p, q), whose sum is the chance that a draft
is right under the best coupling (LK losses, arXiv 2602.23881); p is the target's prediction there. Residual blocks
begin at zero, where a head is the LM head itself.

All heads share rows of the target's own LM head, which stay as they are: an LM head of their own would cost more than a
small target's step. In vLLM's layout that is `original_lm_head`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from attar.checkpoints.drafts import medusa
from attar.drafting.target import LOGITS_AT_ONCE, Target
from attar.model.cache import KeptStates

DECAY = 0.8
NO_LABEL = -100


class MedusaLearner:
    """`depths` heads of one residual block each, whose LM head has the rows of `tokens` (None for all)."""

    def __init__(self, target: Target, depths: int, tokens: Tensor | None, loss: str) -> None:
        hidden, self.target, self.tokens, self.loss = target.config.hidden, target, tokens, loss
        self.layers: tuple[int, ...] = (target.config.layers,)
        self.head = target.ends()[1] if tokens is None else target.ends()[1][tokens]
        self.weights = [torch.zeros(hidden, hidden, requires_grad=True) for _ in range(depths)]
        self.biases = [torch.zeros(hidden, requires_grad=True) for _ in range(depths)]
        self._place = torch.arange(target.config.vocab_size)
        if tokens is not None:
            self._place = torch.full((target.config.vocab_size,), NO_LABEL)
            self._place[tokens] = torch.arange(len(tokens))

    def parameters(self) -> list[Tensor]:
        return [*self.weights, *self.biases]

    def learn(self, ids: Tensor, states: KeptStates) -> float:
        """Add the gradients of the loss on token ids [S, L]; return the loss."""
        hidden, total = states.of(self.layers[0]), 0.0
        x = self.target.normed(hidden)
        for k in range(len(self.weights)):
            rows, later = _pairs(ids, k)
            labels = self._place[ids.reshape(-1)[later + 1]]
            count = max(1, int((labels != NO_LABEL).sum()))
            for some in self._pieces(len(rows)):
                logits = self._logits(k, x[rows[some]])
                if self.loss == "published":
                    part = F.cross_entropy(logits, labels[some], ignore_index=NO_LABEL, reduction="sum") / count
                else:
                    p = self.target.probabilities(hidden[later[some]], self.tokens)
                    part = -torch.minimum(p, logits.softmax(-1)).sum(-1).clamp_min(1e-6).log().sum() / len(rows)
                part = part * DECAY**k
                part.backward()
                total += float(part.detach())
        return total

    @torch.no_grad()
    def agreement(self, ids: Tensor, states: KeptStates) -> list[tuple[int, int]]:
        """Return, for each depth, how often a head's best token is the target's on token ids [S, L], and of how
        many. Every row stands behind the text's own tokens."""
        hidden = states.of(self.layers[0])
        x, best, found = self.target.normed(hidden), self.target.best(hidden), []
        for k in range(len(self.weights)):
            rows, later = _pairs(ids, k, label=False)
            right = 0
            for some in self._pieces(len(rows)):
                guess = self._logits(k, x[rows[some]]).argmax(-1)
                guess = guess if self.tokens is None else self.tokens[guess]
                right += int((guess == best[later[some]]).sum())
            found.append((right, len(rows)))
        return found

    def write(self, folder: Path) -> None:
        tensors = {"lm_heads.0.weight": self.head}
        for k, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            tensors |= {f"blocks.{k}.layers.0.weight": weight, f"blocks.{k}.layers.0.bias": bias}
        medusa.write(folder, self.target.config, 1, tensors, self.tokens)

    def _logits(self, k: int, x: Tensor) -> Tensor:
        return (x + F.silu(F.linear(x, self.weights[k], self.biases[k]))) @ self.head.T

    def _pieces(self, rows: int) -> Iterator[slice]:
        size = max(1, LOGITS_AT_ONCE // len(self.head))
        return (slice(at, min(at + size, rows)) for at in range(0, rows, size))


def _pairs(ids: Tensor, k: int, label: bool = True) -> tuple[Tensor, Tensor]:
    """Return rows of ids [S, L], flattened, that head k reads, and for each the row behind which its token is
    predicted; with `label` only where the text has that token."""
    sequences, length = ids.shape
    count = max(0, length - k - 1 - label)
    rows = (torch.arange(sequences)[:, None] * length + torch.arange(count)).reshape(-1)
    return rows, rows + k + 1
