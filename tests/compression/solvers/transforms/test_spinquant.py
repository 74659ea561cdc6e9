"""A learned rotation: its gradient, that it stays orthogonal, and that it finds what is there to be found."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attar.compression.solvers.transforms import rotations, spinquant

SAME = 1e-9
SIZE = 16


def hidden_spikes(count: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows that are one coordinate each in some basis, with noise: the best rotation spreads every one of them evenly.
    Returns rows [N, I], costs [N] and the rotation to begin with."""
    generator = torch.Generator().manual_seed(seed)
    basis = rotations.draw("orthogonal", SIZE, 0, 1).apply(torch.eye(SIZE, dtype=torch.float64)).float()
    spikes = torch.eye(SIZE)[torch.randint(0, 3, (count,), generator=generator)]
    rows = (spikes + 0.05 * torch.randn(count, SIZE, generator=generator)) @ basis
    costs = torch.rand(count, generator=generator) + 0.5
    return rows, costs, rotations.draw("hadamard", SIZE, 3, 0).apply(torch.eye(SIZE, dtype=torch.float64))


def test_gradient_is_that_of_the_loss() -> None:
    rows, costs, start = hidden_spikes(40, 0)
    matrix = start.float().requires_grad_()
    spinquant.loss(rows, costs, matrix).backward()
    assert matrix.grad is not None
    assert torch.allclose(spinquant._gradient(rows, costs, start.float()), matrix.grad, atol=1e-6)


def test_descent_spreads_what_stood_out_and_stays_orthogonal() -> None:
    rows, costs, start = hidden_spikes(512, 0)
    found = spinquant.solve(rows, costs, start, steps=150, batch=256, seed=0)
    eye = torch.eye(SIZE, dtype=torch.float64)
    assert (found.matrix @ found.matrix.T - eye).abs().max() < SAME
    assert found.after < 0.6 * found.before
    unseen, prices, _ = hidden_spikes(512, 1)
    losses = [float(spinquant.loss(unseen, prices, each.float())) for each in (start, found.matrix)]
    assert losses[1] < 0.6 * losses[0]
    again = spinquant.solve(rows, costs, start, steps=150, batch=256, seed=0)
    assert torch.equal(again.matrix, found.matrix)


def test_what_is_no_better_is_not_kept() -> None:
    start = torch.eye(SIZE, dtype=torch.float64)
    rows = torch.ones(8, SIZE)  # nothing can be spread better
    found = spinquant.solve(rows, torch.ones(8), start, steps=5, batch=8, seed=0)
    assert torch.equal(found.matrix, start)
    assert found.after == pytest.approx(found.before)
