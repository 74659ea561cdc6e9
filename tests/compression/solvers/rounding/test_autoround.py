"""AutoRound against its formula, on inputs whose errors can cancel, and on a model."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from torch import Tensor

from attar.compression.recipe.recipe_file import recipe_from_dict
from attar.compression.runs.pipeline import compress
from attar.compression.solvers.rounding.autoround import Rounding, search
from attar.formats import affine
from attar.formats.scheme import Scheme
from tests.errors import user_error

GAIN = 0.85  # of plain rounding's error is left, at most, where errors can cancel

SCHEMES = ("w4g8", "w3g8-asym", "w4", "w2-tensor", "w8g16-asym")


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def moved(scheme: str, dtype: str = "bfloat16") -> Rounding:
    """A rounding that has learned something, at random; some weights are clipped."""
    found = Rounding(randn(6, 16), Scheme.parse(scheme).with_scale_dtype(dtype))
    with torch.no_grad():
        for seed, number in enumerate(found.learned, 1):
            number.add_(randn(*number.shape, seed=seed) * 0.3)
    return found


@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_is_stored_is_the_formula(scheme: str) -> None:
    found = moved(scheme)
    grid, groups = found.grid, found.low.shape[-1]
    codes, scale, zero = affine.decode(found.packed())
    assert torch.equal(found.packed().dequantize(), found.value().detach())
    low, high = found.low * found.bottom, found.high * found.top
    for o, i in itertools.product(range(6), range(16)):
        at = (0,) if grid.granularity == "tensor" else (o, i * groups // 16)
        a, b = min(float(low[at].detach()), 0.0), max(float(high[at].detach()), 0.0)
        wide = 2 * max(-a, b) if grid.symmetric else b - a
        s = (torch.tensor(wide) / (2**grid.bits - 1)).bfloat16()
        assert scale[at] == s
        z = 0 if zero is None else round(grid.qmin - a / (wide / (2**grid.bits - 1)))
        assert zero is None or zero[at] == max(grid.qmin, min(grid.qmax, z))
        exact = float(found.weight[o, i]) / float(s) + (0 if zero is None else int(zero[at]))
        exact += float(found.shift[o, i].detach())
        assert abs(float(codes[o, i]) - max(grid.qmin, min(grid.qmax, exact))) <= 0.5 + 1e-5


def test_gradients_pass_through_rounding_and_stop_at_the_ends() -> None:
    found = Rounding(randn(4, 8), Scheme.parse("w3g8"), "mse")
    codes, scale, _ = affine.decode(found.packed())
    (slope,) = torch.autograd.grad(found.value().sum(), found.shift)
    free = (codes > found.grid.qmin) & (codes < found.grid.qmax)
    assert free.any()
    assert torch.equal(slope[free], scale.expand(4, 8)[free])
    wanted = (found.weight / scale).round()
    clipped = (wanted < found.grid.qmin) | (wanted > found.grid.qmax)
    assert clipped.any()
    assert not slope[clipped].any()


def test_steps_follow_signs_within_limits() -> None:
    found = Rounding(randn(4, 8), Scheme.parse("w4g8"))
    slopes = [randn(*number.shape, seed=7) for number in found.learned]
    expected = [(n.detach() - 0.2 * s.sign()).clamp(*limit) for n, s, limit in zip(
        found.learned, slopes, ((-0.5, 0.5), (0.5, 1.5), (0.5, 1.5)), strict=True
    )]  # fmt: skip
    found.step([slopes[0].clone(), None, slopes[2].clone()], 0.2)
    assert torch.equal(found.shift.detach(), expected[0])
    assert torch.equal(found.bottom.detach(), torch.ones_like(found.bottom))
    assert torch.equal(found.top.detach(), expected[2])
    found.step([slopes[0].clone(), None, None], 5.0)
    assert found.shift.detach().abs().max() == 0.5


def test_errors_of_correlated_inputs_cancel() -> None:
    """Where ten inputs follow three, the errors of a row's weights can make up for each other."""
    mixed = randn(10, 3, seed=3)
    x = randn(200, 3, seed=1) @ mixed.T + 0.05 * randn(200, 10, seed=2)
    weight = randn(32, 10)
    found = Rounding(weight, Scheme.parse("w3"))

    def error(weights: list[Tensor]) -> Tensor:
        return (x @ (weights[0] - weight).T).square().mean()

    plain = found.packed()
    before, after = search([found], lambda w, step: error(w), lambda w: float(error(w)), steps=200)
    assert before == pytest.approx(float(error([plain.dequantize()])))
    assert after == pytest.approx(float(error([found.packed().dequantize()])))
    assert after < GAIN * before


def test_the_best_iterate_is_kept() -> None:
    found = Rounding(randn(2, 8), Scheme.parse("w4g8"))
    errors = iter([5.0, 4.0, 3.0, 1.0, 2.0, 6.0, 7.0, 8.0, 9.0])
    seen: list[Tensor] = []

    def check(weights: list[Tensor]) -> float:
        seen.append(weights[0].clone())
        return next(errors)

    target = randn(2, 8, seed=5)
    assert search([found], lambda w, step: (w[0] - target).square().mean(), check, steps=8) == (5.0, 1.0)
    assert torch.equal(found.value().detach(), seen[3])
    assert not torch.equal(seen[3], seen[-1])


@pytest.mark.parametrize("scheme", ["w3g32", "w8a8"])
def test_a_model(tiny: Path, calibration: list[list[int]], tmp_path: Path, scheme: str) -> None:
    recipe = recipe_from_dict({"recipe": f"autoround-{scheme}", "steps": 30, "batch": 128})
    found = compress(tiny, tmp_path / "a", recipe=recipe, calibration=calibration)
    assert found.recipe == f"autoround-{scheme}"
    assert len(found.records) == 21
    again = compress(tiny, tmp_path / "b", recipe=recipe, calibration=calibration)
    assert (again.path / "model.safetensors").read_bytes() == (found.path / "model.safetensors").read_bytes()


def test_floats_are_refused() -> None:
    with user_error("scheme_unsupported"):
        Rounding(randn(4, 8), Scheme.parse("fp8-weight"))
