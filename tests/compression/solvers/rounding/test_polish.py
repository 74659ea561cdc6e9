"""Coordinate descent against its definition: every code tried in turn, the damage of each computed whole."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attar.compression.solvers.rounding import polish
from attar.compression.solvers.rounding.levels import Uniform
from attar.formats.scheme import Scheme

SAME = 1e-9  # relative, of float64 damages


def problem(seed: int, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """A weight [O, I] and a Hessian [I, I] of strongly correlated inputs, float64."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    x = torch.randn(4 * columns, columns, generator=generator, dtype=torch.float64)
    x = x @ torch.randn(columns, columns, generator=generator, dtype=torch.float64)
    return weight, x.T @ x / len(x)


def start(weight: Tensor, name: str) -> tuple[Uniform, Tensor]:
    """Levels, and codes [I, O] of rounding to nearest."""
    levels = Uniform.of(weight, Scheme.parse(name), "minmax")
    codes = torch.stack([levels.nearest(k, weight[:, k])[0] for k in range(weight.shape[1])])
    return levels, codes.to(levels.code_dtype)


def values(levels: Uniform, codes: Tensor) -> Tensor:
    return levels.pack(codes).dequantize(torch.float64)


def damage(error: Tensor, hessian: Tensor, damping: float) -> Tensor:
    """tr(E H' E^T), row by row."""
    damped = hessian + damping * hessian.diagonal().mean() * torch.eye(len(hessian))
    return ((error @ damped) * error).sum(1)


@pytest.mark.parametrize("name", ["w4-tensor", "w3-tensor-asym"])
def test_codes_are_those_of_brute_force(name: str) -> None:
    """One scale for the whole tensor is not fitted: what is left to choose are the codes of four columns."""
    weight, hessian = problem(seed=1, rows=40, columns=4)
    levels, codes = start(weight, name)
    expected = codes.clone()
    grid = Scheme.parse(name).grid
    for _ in range(3):
        for k in range(4):
            tried = []
            for code in range(int(grid.qmin), int(grid.qmax) + 1):
                expected[k] = code
                tried.append(damage(values(levels, expected) - weight, hessian, 0.02))
            expected[k] = torch.stack(tried).argmin(0).to(expected.dtype) + int(grid.qmin)
    assert not torch.equal(codes, expected)
    polish.descend(codes, levels, weight, hessian, 3, 0.02)
    assert torch.equal(codes, expected)


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    name=st.sampled_from(["w4g16", "w3g8-asym", "w2g32", "w4", "w4-tensor-asym", "fp8"]),
    damping=st.sampled_from([0.0, 0.01]),
    dead=st.booleans(),
)
def test_damage_never_rises_and_values_stay_on_the_grid(seed: int, name: str, damping: float, dead: bool) -> None:
    weight, hessian = problem(seed, rows=5, columns=32)
    if dead:
        hessian[3] = hessian[:, 3] = 0
        weight[:, 3] = 0
    levels, codes = start(weight, name)
    left = damage(values(levels, codes) - weight, hessian, damping)
    for _ in range(3):
        error = polish.descend(codes, levels, weight, hessian, 1, damping)
        now = damage(values(levels, codes) - weight, hessian, damping)
        assert bool((now <= left * (1 + SAME)).all())
        torch.testing.assert_close(error.T, values(levels, codes) - weight)
        left = now
    assert not values(levels, codes)[:, 3].any() or not dead


def test_scales_are_those_that_fit_best() -> None:
    """One group a row: once codes rest, no other scale that can be stored is better."""
    weight, hessian = problem(seed=2, rows=8, columns=16)
    scheme = Scheme.parse("w3").with_scale_dtype("bfloat16")
    levels = Uniform.of(weight, scheme, "minmax")
    codes = torch.stack([levels.nearest(k, weight[:, k])[0] for k in range(16)]).to(torch.int8)
    polish.descend(codes, levels, weight, hessian, 20, 0.0)
    found = damage(values(levels, codes) - weight, hessian, 0.0)
    best = levels.scale.clone()
    for step in (-1, 1):
        levels.scale = (best.view(torch.int16) + step).view(torch.bfloat16)
        assert bool((damage(values(levels, codes) - weight, hessian, 0.0) >= found * (1 - SAME)).all())


def test_columns_at_once_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, hessian = problem(seed=3, rows=7, columns=48)
    found = []
    for at_once in (1, 5, 128):
        monkeypatch.setattr(polish, "COLUMNS_AT_ONCE", at_once)
        levels, codes = start(weight, "w3g24-asym")
        polish.descend(codes, levels, weight, hessian, 2)
        found.append((codes, levels.scale, levels.zero))
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True) if a is not None and b is not None)
