"""What drafters of trees share: several candidates for one place, and the shape of a tree that is always the same.

Candidates are drawn like the target's token, with its filters, penalties and noise: the first is what a chain would
draft, and each further one is what would be drawn without those before.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from attar.sampling.sampler import SampledToken, Sampler, sample


class Node(NamedTuple):
    """A node of a tree of ranks: the row that it follows, its depth from 0, and its rank among candidates."""

    parent: int
    depth: int
    rank: int


@cache
def static_tree(nodes: int, depths: int) -> tuple[Node, ...]:
    """Return the best `nodes` nodes of a tree of at most `depths` drafts, the best first.

    The candidate of rank r, from 0, is taken to be right in one of 2^(r+1) cases.
    """
    found: list[Node] = []
    left = [(1, 0, Node(0, 0, 0))] if depths else []
    while left and len(found) < nodes:
        cost, _, node = heapq.heappop(left)
        found.append(node)
        more = [(cost + 1, node._replace(rank=node.rank + 1))]
        if node.depth + 1 < depths:
            more.append((cost + 1, Node(len(found), node.depth + 1, 0)))
        for order, (price, other) in enumerate(more):
            heapq.heappush(left, (price, 2 * len(found) + order, other))
    return tuple(found)


def candidates(logits: Tensor, states: Sequence[Sampler], count: int) -> list[list[int]]:
    """Return up to `count` different tokens for each row of logits [B, V], the first being that of `sample`. There are
    fewer where no more are allowed. Raises ValueError for a row without a finite maximum."""
    rows, found = logits.clone(), [list[int]() for _ in states]
    for turn in range(count):
        for row, drawn in enumerate(sample(rows, states)):
            if isinstance(drawn, SampledToken) and len(found[row]) == turn:
                found[row].append(drawn.token_id)
                rows[row, drawn.token_id] = -torch.inf
            elif not turn:
                raise ValueError("the logits of a draft head hold no finite maximum")
    return found
