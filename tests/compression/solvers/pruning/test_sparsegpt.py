"""SparseGPT against what it stands for, optimal brain surgery column by column, and against its authors' formulas."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from attar.compression.recipe.pattern import Pattern
from attar.compression.solvers.pruning import sparsegpt, zeros
from attar.compression.solvers.rounding import gptq
from attar.formats import affine
from attar.formats.packed import PackedTensor
from attar.formats.scheme import Scheme

SAME = 1e-9  # float64 by two ways
DAMPING = 0.01


Problem = Callable[..., tuple[Tensor, Tensor]]


def hessian(x: Tensor) -> gptq.Hessian:
    found = gptq.Hessian(x.shape[1], x.dtype)
    found.add(x)
    return found


def damped(x: Tensor) -> Tensor:
    h = hessian(x).mean.clone()
    h.diagonal().add_(DAMPING * h.diagonal().mean())
    return h


def surgery(weight: Tensor, h: Tensor, pattern: Pattern, block: int) -> Tensor:
    """Every column in turn; what is left is always the best there is, found by solving for it, given what is fixed."""
    columns = weight.shape[1]
    done = torch.zeros_like(weight)
    step = pattern.of if pattern.grouped else block
    gone = torch.zeros_like(weight, dtype=torch.bool)
    for k in range(columns):
        lost = weight[:, :k] - done[:, :k]
        ahead = weight[:, k:] + torch.linalg.solve(h[k:, k:], h[k:, :k] @ lost.T).T
        if k % step == 0:
            width = min(step, columns - k)
            cost = [1 / torch.linalg.inv(h[j:, j:])[0, 0] for j in range(k, k + width)]
            gone[:, k : k + width] = zeros.mask(ahead[:, :width].square() * torch.stack(cost), pattern)
        done[:, k] = ahead[:, 0].masked_fill(gone[:, k], 0)
    return done


def published(weight: Tensor, h: Tensor, pattern: Pattern, block: int, scheme: Scheme | None = None) -> Tensor:
    """The algorithm as it is published: U, the upper factor of H^-1, and a running copy of the weights."""
    upper = torch.linalg.cholesky(torch.linalg.inv(h), upper=True)
    running, rows = weight.clone(), weight.shape[0]
    if scheme is not None:
        scale, zero = affine.qparams(*affine.min_max(weight, scheme.grid), scheme.grid, torch.float32)
    for start in range(0, weight.shape[1], block):
        stop = min(start + block, weight.shape[1])
        diagonal, errors = upper.diagonal(), []
        if not pattern.grouped:
            gone = zeros.mask((running[:, start:stop] / diagonal[start:stop]).square(), pattern)
        for k in range(start, stop):
            if pattern.grouped and k % pattern.of == 0:
                here = slice(k, k + pattern.of)
                now = zeros.mask((running[:, here] / diagonal[here]).square(), pattern)
            lost = now[:, k % pattern.of] if pattern.grouped else gone[:, k - start]
            kept = running[:, k].masked_fill(lost, 0)
            if scheme is not None:
                codes = affine.round_to_grid(kept[:, None], scale.double(), zero, scheme.grid)
                kept = affine.to_values(codes, scale.double(), zero)[:, 0]
            error = (running[:, k] - kept) / upper[k, k]
            running[:, k + 1 : stop] -= torch.outer(error, upper[k, k + 1 : stop])
            running[:, k] = kept
            errors.append(error)
        running[:, stop:] -= torch.stack(errors, 1) @ upper[start:stop, stop:]
    assert running.shape == (rows, weight.shape[1])
    return running


@pytest.mark.parametrize("name", ["s50", "s30", "2:4", "4:8", "1:4"])
@pytest.mark.parametrize("block", [8, 128])
def test_masks_and_weights_are_those_of_the_surgeon_and_of_the_paper(problem: Problem, name: str, block: int) -> None:
    weight, x = problem(3, rows=6, columns=24)
    pattern = Pattern.parse(name)
    prepared = gptq.prepare(hessian(x), DAMPING, "natural")
    found = sparsegpt.sweep(weight, prepared, pattern, block=block)[0].T
    for oracle in (surgery, published):
        expected = oracle(weight, damped(x), pattern, block)
        assert torch.equal(found == 0, expected == 0)
        assert torch.allclose(found, expected, rtol=SAME, atol=SAME)


@pytest.mark.parametrize("scheme", ["w4", "w3-asym"])
@pytest.mark.parametrize("name", ["s50", "2:4"])
def test_joint_rounding_is_the_papers(problem: Problem, name: str, scheme: str) -> None:
    weight, x = problem(4, rows=6, columns=24)
    pattern, form = Pattern.parse(name), Scheme.parse(scheme).with_scale_dtype("float32")
    prepared = gptq.prepare(hessian(x), DAMPING, "natural")
    found = sparsegpt.solve(weight, prepared, pattern, form, block=8, scale_search="minmax")
    assert isinstance(found.packed, PackedTensor)
    expected = published(weight, damped(x), pattern, 8, form)
    assert torch.allclose(found.packed.dequantize().double(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["s50", "2:4", "4:8"])
def test_it_costs_less_than_magnitude_always_and_than_wanda_as_a_rule(problem: Problem, name: str) -> None:
    pattern, below_wanda = Pattern.parse(name), 0
    for seed in range(10):
        weight, x = problem(seed, rows=24, columns=32)
        h = hessian(x)
        found = sparsegpt.solve(weight, gptq.prepare(h, DAMPING, "natural"), pattern)
        wanda = zeros.by_wanda(weight, h.mean.diagonal(), pattern, None, "mse").packed
        assert isinstance(wanda, Tensor)
        assert found.error < found.rtn_error
        below_wanda += found.error < zeros.damage(weight - wanda, h.mean) / zeros.damage(weight, h.mean)
    assert below_wanda >= 9


def test_inputs_that_were_always_zero_have_no_weights(problem: Problem) -> None:
    weight, x = problem(5, columns=16)
    x[:, 3] = 0
    found = sparsegpt.solve(weight, gptq.prepare(hessian(x), DAMPING, "natural"), Pattern.parse("2:4")).packed
    assert isinstance(found, Tensor)
    assert not found[:, 3].any()
    assert int((found == 0).sum()) == found.numel() // 2
