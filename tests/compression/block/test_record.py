"""Errors of linears, against the same in float64 at once."""

from __future__ import annotations

import pytest
import torch

from attar.compression.block import record
from attar.compression.solvers import rtn
from attar.formats.scheme import Scheme

SAME = 1e-5  # relative: float32 products against float64


def test_errors_are_relative_squares() -> None:
    numbers = torch.Generator().manual_seed(0)
    weight, x = torch.randn(48, 64, generator=numbers), torch.randn(20, 64, generator=numbers)
    packed = rtn.solve(weight, Scheme.parse("w3g32"))
    wrong, whole = (packed.dequantize() - weight).double(), weight.double()
    expected = float(wrong.square().sum() / whole.square().sum())
    assert record.weight_error(weight, packed) == record.error_on(None, weight, packed)
    assert record.weight_error(weight, packed) == pytest.approx(expected, rel=SAME)
    assert record.measure_on(None) == "weight"
    seen = float((x.double() @ wrong.T).square().sum() / (x.double() @ whole.T).square().sum())
    assert record.output_error(x, weight, packed) == record.error_on(x, weight, packed)
    assert record.output_error(x, weight, packed) == pytest.approx(seen, rel=SAME)
    assert record.measure_on(x) == "output"


def test_nothing_has_no_error() -> None:
    weight = torch.zeros(4, 32)
    assert record.weight_error(weight, rtn.solve(weight, Scheme.parse("w4g32"))) == 0.0
