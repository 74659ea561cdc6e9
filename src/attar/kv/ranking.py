"""The ranking of a prompt's keys, by which eviction keeps some of each layer and key-value head, in plain torch.

Legend: N keys, w watched rows, H query heads, G key-value heads, D head size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

SINKS = 4  # first tokens, which Expected Attention and diffuse heads keep
LEAST = 0.9  # share of weight: a head is diffuse whose chosen keys hold less
PEAK = 0.1  # weight that a single row gives a key which a diffuse head keeps
ROWS = 32  # last rows of a prompt whose weights say so
POOL = 7  # neighbours that share the greatest score among them: what follows a match stays beside it


def weights(q: Tensor, keys: Tensor, scale: float, soft_cap: float | None = None) -> Tensor:
    """Return attention weights float32 [G, H / G, w, N] of the last w rows, queries [w, H, D], over keys [N, G, D]."""
    rows, count, heads = len(q), len(keys), keys.shape[1]
    grouped = q.float().unflatten(1, (heads, -1)).permute(1, 2, 0, 3)  # [G, H / G, w, D]
    scores = grouped @ keys.float().permute(1, 2, 0)[:, None] * scale
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    behind = torch.ones(rows, count, dtype=torch.bool).triu(count - rows + 1)
    found: Tensor = scores.masked_fill(behind, -torch.inf).softmax(-1)
    return found


class Seen(NamedTuple):
    """Attention weights of a prompt's last rows on its N keys, in each of G key-value heads: float32 [G, N].

    shares: of their weight together. peaks: the greatest weight of a row.
    """

    shares: Tensor
    peaks: Tensor

    @classmethod
    def by(cls, q: Tensor, keys: Tensor, scale: float, soft_cap: float | None = None) -> Seen:
        """Take the weights of the last rows' queries [w, H, D] over keys [N, G, D]."""
        found = weights(q, keys, scale, soft_cap)
        return cls(found.mean((1, 2)), found.amax((1, 2)))


def snapkv(q: Tensor, keys: Tensor, budget: int, scale: float, soft_cap: float | None = None) -> Tensor:
    """Choose the `budget` keys that SnapKV keeps, int64 [G, budget], ascending in each head.

    q: queries [w, H, D] of the prompt's last rows; keys: [N, G, D], of the whole prompt. These rows' keys stay. Of the
    others those stay that the rows weigh most: weights are summed over rows and the queries of a key-value head, and
    each key takes the greatest sum among its `POOL` neighbours. Of equal ones the first stays. Diffuse heads keep what
    `_settled` says.
    """
    rows = len(q)
    seen = Seen.by(q, keys, scale, soft_cap)
    return _settled(_with_last(_pooled(seen.shares[:, :-rows]), budget, rows), seen)


def h2o(sums: Tensor, budget: int) -> Tensor:
    """Choose the `budget` keys that H2O keeps, int64 [G, budget], ascending in each head.

    sums: [G, N], of the weights that all rows of the prompt gave each key. The newest half stays, and of the others
    those of the largest sums. Of equal ones the first stays.
    """
    newest = budget // 2
    return _with_last(sums[:, : sums.shape[1] - newest], budget, newest)


def expected(scores: Tensor, seen: Seen, budget: int) -> Tensor:
    """Choose the `budget` keys that Expected Attention keeps, int64 [G, budget], ascending in each head.

    scores: `expected_scores` [G, N]; seen: what the last rows weigh. The first `SINKS` stay, and the newest quarter,
    because the mean turn of so many positions tells no near key from a far one. Of equal ones the first stays. Diffuse
    heads keep what `_settled` says.
    """
    newest = budget // 4
    early = scores[:, : scores.shape[1] - newest].clone()
    early[:, :SINKS] = torch.inf
    return _settled(_with_last(early, budget, newest), seen)


def expected_scores(queries: Tensor, keys: Tensor, values: Tensor, turn: tuple[Tensor, Tensor], scale: float) -> Tensor:
    """Return the scores [G, N] of keys by Expected Attention.

    queries: [w, H, D] of a prompt's rows, before rotation; keys and values: [N, G, D]; `turn`: means of cos and sin
    [R / 2] over the positions to come. Queries are taken for Gaussian. A key's score is the mean weight that it then
    gets from the queries of its head, times the length of its value.
    """
    heads, size = keys.shape[1:]
    future = _rotated(torch.eye(size), *turn)  # row vectors: x @ future is x turned
    grouped = queries.float().unflatten(1, (heads, -1)).permute(1, 2, 0, 3) @ future  # [G, H / G, w, D]
    mean = grouped.mean(2)
    spread = grouped - mean[:, :, None]
    k = keys.float().transpose(0, 1)  # [G, N, D]
    covariance = spread.transpose(2, 3) @ spread / (len(queries) - 1)  # [G, H / G, D, D]
    variance = ((k[:, None] @ covariance) * k[:, None]).sum(-1)
    scores = scale * (k[:, None] @ mean[..., None])[..., 0] + scale**2 / 2 * variance
    found: Tensor = scores.softmax(-1).mean(1) * values.float().norm(dim=-1).T
    return found


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the first columns of x [N, D] by cos and sin [R / 2]."""
    turned = 2 * len(cos)
    a, b = x[:, :turned].chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin, x[:, turned:]), -1)


def _settled(kept: Tensor, seen: Seen) -> Tensor:
    """Return the indices `kept` [G, budget] where these keys hold most of a head's weight, and others in diffuse heads.

    A diffuse head spreads its weight over many more keys than it keeps, so the keys of greatest weight do not represent
    the others. It keeps the first `SINKS` keys, those to which a single row gives much weight, with their neighbours,
    and the newest.
    """
    count = seen.shares.shape[1]
    ranks = torch.arange(count) / count
    ranks = torch.where(_pooled(seen.peaks) >= PEAK, 1 + _pooled(seen.shares), ranks)
    ranks[:, :SINKS] = torch.inf
    diffuse = seen.shares.gather(1, kept).sum(1, keepdim=True) < LEAST
    return torch.where(diffuse, _with_last(ranks, kept.shape[1], 0), kept)


def _pooled(x: Tensor) -> Tensor:
    """Return the greatest among the `POOL` neighbours of each of x [G, N]."""
    return functional.max_pool1d(x, POOL, 1, POOL // 2)


def _with_last(scores: Tensor, budget: int, last: int) -> Tensor:
    """Return the indices of the best of scores [G, N], ascending, and of the `last` ones behind them, [G, budget]."""
    best = torch.sort(scores, dim=-1, descending=True, stable=True).indices[:, : budget - last].sort(-1).values
    count = scores.shape[1]
    return torch.cat((best, torch.arange(count, count + last).expand(len(best), -1)), 1)
