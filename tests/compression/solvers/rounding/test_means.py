"""The mean of columns, over rows in pieces of any size."""

from __future__ import annotations

import pytest
import torch

from attar.compression.solvers.rounding.means import ColumnMean
from tests.errors import user_error

TOLERANCE = 1e-6


def test_a_mean_over_all_rows() -> None:
    statistic = ColumnMean(2, 1)
    with user_error("linear_without_tokens"):
        _ = statistic.value
    statistic.add(torch.tensor([[1.0, -3.0]]).bfloat16())
    statistic.add(torch.tensor([[-2.0, 0.0], [0.0, 0.0]]))
    assert statistic.value.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("power", [1, 2])
def test_pieces_do_not_matter(power: int) -> None:
    x = torch.randn(1300, 16, generator=torch.Generator().manual_seed(0)) * torch.logspace(-1, 1, 16)
    statistic = ColumnMean(16, power)
    for part in x.split(700):
        statistic.add(part)
    torch.testing.assert_close(statistic.value, x.double().abs().pow(power).mean(0).float(), rtol=TOLERANCE, atol=0)


def test_what_is_wrong_with_inputs_is_said() -> None:
    for value, power in ((torch.nan, 1), (torch.inf, 1), (torch.nan, 2), (1e30, 2)):
        statistic = ColumnMean(4, power)
        with user_error("not_finite"):
            statistic.add(torch.tensor([[1.0, 1.0, value, 1.0]]))
    with user_error("linear_without_tokens"):
        _ = ColumnMean(4, 1, "the head").value
