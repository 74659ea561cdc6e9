"""Errors of linears, against the same in float64 at once."""

from __future__ import annotations

import pytest
import torch

from attar.compression.block import record
from attar.compression.calibration.loss_weights import Hints, row_groups
from attar.compression.solvers.rounding import rtn
from attar.formats.scheme import Scheme

SAME = 1e-5  # relative: float32 products against float64


def test_errors_are_relative_squares() -> None:
    numbers = torch.Generator().manual_seed(0)
    weight, x = torch.randn(48, 64, generator=numbers), torch.randn(20, 64, generator=numbers)
    packed = rtn.solve(weight, Scheme.parse("w3g32"))
    wrong, whole = (packed.dequantize() - weight).double(), weight.double()
    expected = float(wrong.square().sum() / whole.square().sum())
    assert record.error_on(None, weight, packed) == pytest.approx(expected, rel=SAME)
    assert record.measure_on(None) == "weight"
    seen = float((x.double() @ wrong.T).square().sum() / (x.double() @ whole.T).square().sum())
    assert record.error_on(x, weight, packed) == pytest.approx(seen, rel=SAME)
    assert record.measure_on(x) == "output"


@pytest.mark.parametrize(("groups", "couple"), [(0, True), (1, True), (1, False), (3, False)])
def test_what_the_loss_minds_counts_token_by_token(groups: int, couple: bool) -> None:
    """The quadratic forms that the solvers go by, one token at a time, of as many tokens as there are rows."""
    numbers = torch.Generator().manual_seed(0)
    weight, x = torch.randn(8, 32, generator=numbers), torch.randn(20, 32, generator=numbers)
    weights = torch.rand(50, groups, generator=numbers) if groups else None
    mixing = torch.randn(8, 8, generator=numbers)
    hints = Hints(weights, mixing @ mixing.T if couple else None)
    packed = rtn.solve(weight, Scheme.parse("w3g32"))

    def form(error: torch.Tensor) -> float:
        total = 0.0
        outputs = torch.eye(8) if hints.outputs is None else hints.outputs
        for group, rows in enumerate(row_groups(8, groups or 1)):
            counts = torch.ones(20) if weights is None else weights[:20, group]
            for token, count in zip(x, counts / counts.sum(), strict=True):
                seen = torch.zeros(8)
                seen[rows] = error[rows] @ token
                total += float(count * (seen @ outputs @ seen))
        return total

    found = record.minded_error(x, weight, packed, hints)
    assert found == pytest.approx(form(packed.dequantize() - weight) / form(weight), rel=SAME)


def test_nothing_has_no_error() -> None:
    weight = torch.zeros(4, 32)
    assert record.error_on(None, weight, rtn.solve(weight, Scheme.parse("w4g32"))) == 0.0
