"""The knapsack against every choice there is."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from attar.compression.search import knapsack

OPTIONS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 30).map(float)), min_size=1, max_size=4)


@given(st.lists(OPTIONS, min_size=1, max_size=5))
def test_the_front_is_that_of_all_choices(groups: list[list[tuple[int, float]]]) -> None:
    best: dict[int, float] = {}
    for picked in itertools.product(*groups):
        size, damage = sum(b for b, _ in picked), sum(d for _, d in picked)
        best[size] = min(damage, best.get(size, damage))
    expected: list[tuple[int, float]] = []
    for size in sorted(best):
        if not expected or best[size] < expected[-1][1]:
            expected.append((size, best[size]))
    found = knapsack.front(groups)
    assert list(zip(found.bytes.tolist(), found.damage.tolist(), strict=True)) == expected
    for i, (size, damage) in enumerate(expected):
        picked = [group[c] for group, c in zip(groups, found.choice(i), strict=True)]
        assert (sum(b for b, _ in picked), sum(d for _, d in picked)) == (size, damage)


@given(st.lists(OPTIONS, min_size=2, max_size=6), st.integers(0, 200), st.integers(3, 12))
def test_a_long_front_keeps_budgets(groups: list[list[tuple[int, float]]], budget: int, states: int) -> None:
    """Thinned, the front is shorter and its choices are still what it says they are, within the budget."""
    whole, thin = knapsack.front(groups), knapsack.front(groups, states)
    assert len(thin) <= max(states, len(groups[-1]))
    assert thin.bytes[0] == whole.bytes[0]
    assert thin.damage[-1] >= whole.damage[-1]
    at = thin.within(budget)
    assert (at is None) == (whole.within(budget) is None)
    if at is not None:
        picked = [group[c] for group, c in zip(groups, thin.choice(at), strict=True)]
        assert sum(b for b, _ in picked) == thin.bytes[at] <= budget
        assert sum(d for _, d in picked) == thin.damage[at]
