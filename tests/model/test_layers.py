"""What the parts of a block compute in torch's own functions, between kernels: each row's bits depend on that row."""

from __future__ import annotations

import pytest
import torch

from attar.model.layers import sigmoid

EQUAL = 2e-7  # float32's rounding of a number up to 1, twice


@pytest.mark.parametrize("rows", [2, 15, 16, 31, 32, 33, 64, 100, 1000])
def test_a_gate_has_the_same_bits_wherever_its_row_stands(rows: int) -> None:
    x = torch.randn((rows, 1), generator=torch.Generator().manual_seed(rows)) * 3
    found = sigmoid(x)
    assert torch.equal(found, torch.cat([sigmoid(row[None]) for row in x]))
    assert torch.equal(found[1:], sigmoid(x[1:]))
    torch.testing.assert_close(found, x.double().sigmoid().float(), rtol=0, atol=EQUAL)


def test_a_gate_of_any_size_is_a_number() -> None:
    x = torch.tensor([[-1e30], [-100.0], [0.0], [100.0], [1e30]], requires_grad=True)
    found = sigmoid(x)
    assert found.flatten().tolist() == [0, pytest.approx(0), 0.5, 1, 1]
    found.sum().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()
    assert sigmoid(torch.tensor([[torch.nan]])).isnan()
