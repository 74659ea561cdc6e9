"""Multiple-choice knapsack: one option for each group, the least damage for every possible size at once.

Sizes are bytes and damages add up. States are merged group by group: all sums of a state and an option, less those that
another beats in both size and damage. The result is the whole front, so that a budget, a goal for the damage, or every
point between is a look-up. The front is exact until it is longer than `STATES`. Then it is thinned to the state of
least damage in each of so many equal steps of size. A budget is kept either way.

Not done: a Lagrangian, which is faster but only finds the corners of the front's convex hull, and misses budgets
between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

STATES = 1 << 15

Option = tuple[int, float]
"""Bytes and damage of an option."""


@dataclass(frozen=True, eq=False)
class Front:
    """The best choices for every size: `bytes` ascending, `damage` descending, both [F]."""

    bytes: NDArray[np.int64]
    damage: NDArray[np.float64]
    _parents: Sequence[NDArray[np.int64]]  # for each group's states: the state before
    _options: Sequence[NDArray[np.int64]]  # and the option taken

    def __len__(self) -> int:
        return len(self.bytes)

    def within(self, budget: int) -> int | None:
        """Return the index of the least damage whose size is at most `budget`; None where every size is larger."""
        found = int(np.searchsorted(self.bytes, budget, side="right")) - 1
        return found if found >= 0 else None

    def choice(self, index: int) -> tuple[int, ...]:
        """Return the option of each group at a point of the front."""
        chosen = []
        for parents, options in zip(reversed(self._parents), reversed(self._options), strict=True):
            chosen.append(int(options[index]))
            index = int(parents[index])
        return tuple(reversed(chosen))


def front(groups: Sequence[Sequence[Option]], states: int = STATES) -> Front:
    """Return the front of all ways to take one option of each group. Every group has at least one."""
    sizes, damage = np.zeros(1, np.int64), np.zeros(1)
    parents, options = [], []
    for group in groups:
        bytes_ = np.array([size for size, _ in group], np.int64)
        costs = np.array([cost for _, cost in group])
        all_sizes = (sizes[:, None] + bytes_).ravel()
        all_damage = (damage[:, None] + costs).ravel()
        order = np.lexsort((all_damage, all_sizes))
        best = np.minimum.accumulate(all_damage[order])
        better = np.r_[True, best[1:] < best[:-1]]  # than everything smaller
        kept = _thinned(order[better], all_sizes, states)
        sizes, damage = all_sizes[kept], all_damage[kept]
        parents.append(kept // len(group))
        options.append(kept % len(group))
    return Front(sizes, damage, parents, options)


def _thinned(kept: NDArray[np.int64], sizes: NDArray[np.int64], states: int) -> NDArray[np.int64]:
    """Return at most `states` indices of a front in order of size: the last, hence the best, of each equal step of
    size, and the smallest of all, without which small budgets would find nothing."""
    if len(kept) <= states:
        return kept
    low, high = int(sizes[kept[0]]), int(sizes[kept[-1]])
    step = (sizes[kept] - low) * (states - 2) // (high - low)
    last = np.r_[step[1:] != step[:-1], True]
    last[0] = True
    return kept[last]
