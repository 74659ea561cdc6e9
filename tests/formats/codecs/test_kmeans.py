"""Weighted k-means in one dimension, against every way to cut a short row into cells."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
import torch
from torch import Tensor

from attar.formats.codecs.kmeans import centres

NEAR = 1.1  # times the least error that there is, in a row at worst: Lloyd and single moves end in a local optimum
ON_AVERAGE = 1.01


def error(x: Tensor, count: Tensor, found: Tensor) -> float:
    return float((count * (x[:, None] - found).square().min(1).values).sum())


def least(x: Tensor, count: Tensor, number: int) -> float:
    """By trying all cuts of the sorted row."""
    x, order = x.sort()
    count = count[order]
    best = float("inf")
    for cuts in combinations(range(1, len(x)), number - 1):
        ends = (0, *cuts, len(x))
        cells = [slice(a, b) for a, b in pairwise(ends)]
        means = torch.stack([(count[c] * x[c]).sum() / count[c].sum() for c in cells])
        best = min(best, error(x, count, means))
    return best


@pytest.mark.parametrize("number", [2, 4])
def test_near_the_best_there_is(number: int) -> None:
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(24, 14, generator=generator).double().pow(3)
    count = torch.rand(24, 14, generator=generator).double() + 0.01
    found = centres(x, count, number)
    assert (found.diff(dim=1) >= 0).all()
    ratios = [error(*row) / least(*row[:2], number) for row in zip(x, count, found, strict=True)]
    assert max(ratios) <= NEAR
    assert sum(ratios) / len(ratios) <= ON_AVERAGE


def test_rows_are_independent() -> None:
    x = torch.randn(8, 200, generator=torch.Generator().manual_seed(0))
    count = torch.ones_like(x)
    assert centres(x, count, 8).equal(torch.cat([centres(a[None], b[None], 8) for a, b in zip(x, count, strict=True)]))


@pytest.mark.parametrize("columns", [1, 3, 5])
def test_fewer_values_than_centres(columns: int) -> None:
    x = torch.arange(columns, dtype=torch.float64)[None]
    found = centres(x, torch.ones_like(x), 8)
    assert found.isfinite().all()
    assert error(x[0], torch.ones(columns), found[0]) <= 0.3 * columns
