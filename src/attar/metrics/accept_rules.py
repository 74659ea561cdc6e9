"""Rules that accept drafts, for measurements: attar's engine has the match rule alone (`sampling/verify.py`).

`ratio` is the test of Leviathan et al. (arXiv 2211.17192): a draft x is kept with probability min(1, p(x) / q(x)), and
the first that is not is replaced by a draw from max(p - q, 0). The text has the target's distribution, but which text
it is depends on the drafts. `typical` is Medusa's (arXiv 2401.10774): a draft is kept where p(x) >= min(eps, delta
exp(-H(p))). It changes the distribution, by `typical_tv`.

Legend: N chains, K drafts of each, V vocabulary. p and q are the distributions as sampled from, of target and drafter:
float64 [N, K + 1, V] and [N, K, V].
"""

from __future__ import annotations

import torch
from torch import Tensor

EPS, DELTA = 0.09, 0.3  # the paper's


def total_variation(p: Tensor, q: Tensor) -> Tensor:
    """Return the total variation distance of distributions over the last axis."""
    return (p - q).abs().sum(-1) / 2


def ratio(p: Tensor, q: Tensor, drafts: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Return how many drafts of each chain are kept, int64 [N], and the token behind them.

    drafts: int64 [N, K], drawn from q. uniforms: in [0, 1), float64 [N, K + 1], the last for the token behind.
    """
    kept = uniforms[:, :-1] * _of(q, drafts) < _of(p[:, :-1], drafts)
    count = kept.long().cumprod(-1).sum(-1)
    row = torch.arange(len(p))
    behind = p[row, count]
    left = (behind - torch.cat([q, torch.zeros_like(p[:, :1])], 1)[row, count]).clamp(min=0)
    return count, draw(torch.where(left.sum(-1, keepdim=True) > 0, left, behind), uniforms[:, -1])


def typical(p: Tensor, drafts: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Return how many drafts [N, K] of each chain are kept, int64 [N], and the token drawn behind them by `uniforms`
    [N]."""
    kept = _of(_allowed(p[:, :-1]).double(), drafts) > 0
    count = kept.long().cumprod(-1).sum(-1)
    return count, draw(p[torch.arange(len(p)), count], uniforms)


def typical_tv(p: Tensor, q: Tensor) -> Tensor:
    """Return the total variation distance from p of the token that `typical` gives for a draft drawn from q: exact, of
    distributions over the last axis."""
    kept = q * _allowed(p)
    return total_variation(kept + (1 - kept.sum(-1, keepdim=True)) * p, p)


def draw(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Return a token of each row of weights [N, V], by inverse CDF."""
    sums = weights.cumsum(-1)
    found = torch.searchsorted(sums, (uniforms[:, None] * sums[:, -1:]), right=True).squeeze(-1)
    return found.clamp(max=weights.shape[-1] - 1)


def _allowed(p: Tensor) -> Tensor:
    entropy: Tensor = -torch.special.xlogy(p, p).sum(-1, keepdim=True)
    return p >= (DELTA * (-entropy).exp()).clamp(max=EPS)


def _of(rows: Tensor, tokens: Tensor) -> Tensor:
    return rows.gather(-1, tokens[..., None]).squeeze(-1)
