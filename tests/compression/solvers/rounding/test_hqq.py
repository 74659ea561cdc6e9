"""HQQ against its formulas, and never worse than plain rounding by its own measure."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from attar.compression.runs.pipeline import compress
from attar.compression.solvers.rounding import hqq, rtn
from attar.formats import affine
from attar.formats.scheme import Scheme
from tests.errors import user_error

SAME = 1e-5


def heavy(*shape: int) -> Tensor:
    """Weights of which a few are far out."""
    return torch.distributions.StudentT(3.0).sample(shape) * 0.02


def cost(weight: Tensor, scheme: Scheme, found: Tensor) -> Tensor:
    return affine.by_scale((found - weight).abs().pow(hqq.POWER), scheme.grid.groups(weight.shape[1])).sum(-1)


@pytest.mark.parametrize("beta", [0.5, 10.0])
def test_shrink(beta: float) -> None:
    x = torch.tensor([-2.0, -0.3, -1e-4, 0.0, 1e-4, 0.3, 2.0])
    for found, value in zip(hqq.shrink(x, beta).tolist(), x.tolist(), strict=True):
        expected = max(0.0, abs(value) - abs(value) ** -0.3 / beta) if value else 0.0
        assert found == pytest.approx(expected if value > 0 else -expected, rel=SAME)


def test_one_step_is_the_formula() -> None:
    """The scale after one step, in float32, for the largest of a group lies right between two codes."""
    torch.manual_seed(0)
    weight = heavy(3, 16)
    scheme = Scheme.parse("w3g8")
    start = affine.qparams(*affine.min_max(weight, scheme.grid), scheme.grid)[0]
    best, _ = hqq.fit(weight, scheme.grid, torch.float32, 1)
    for o in range(3):
        for g in range(2):
            part, s = weight[o, 8 * g : 8 * g + 8], start[o, g]
            code = (part / s).clamp(-4, 3).round()
            set_apart = hqq.shrink(part / s - code, hqq.BETA)
            moved = s * (code * (part / s - set_apart)).sum() / code.square().sum()
            costs = [float(((part / t).clamp(-4, 3).round() * t - part).abs().pow(0.7).sum()) for t in (s, moved)]
            assert float(best[o, g]) == pytest.approx(float(moved if costs[1] < costs[0] else s), rel=SAME)


@pytest.mark.parametrize("scheme", ["w4g32-asym", "w3g16", "w4", "w8-tensor"])
def test_no_group_is_worse_than_rounded_to_nearest(scheme: str) -> None:
    torch.manual_seed(0)
    weight, stored = heavy(24, 96), Scheme.parse(scheme).with_scale_dtype("bfloat16")
    weight[3, :32] = 0
    ours, plain = (solve(weight, stored).dequantize() for solve in (hqq.solve, rtn.solve))
    over = (lambda x: x.sum()) if "tensor" in scheme else (lambda x: x)
    before, after = (over(cost(weight, stored, found)) for found in (plain, ours))
    assert (after <= before * (1 + SAME)).all()
    assert scheme == "w8-tensor" or after.sum() < before.sum()
    assert not ours[3, :32].any()


def test_a_model_needs_no_text(tiny: Path, tmp_path: Path) -> None:
    found = compress(tiny, tmp_path / "out", recipe="hqq-w4g64-asym")
    assert found.recipe == "hqq-w4g64-asym"
    assert {record.measure for record in found.records} == {"weight"}
    assert sum(r.error for r in found.records) < sum(r.rtn_error for r in found.records)


def test_floats_are_refused() -> None:
    with user_error("scheme_unsupported"):
        hqq.solve(heavy(4, 8), Scheme.parse("fp8-weight"))
