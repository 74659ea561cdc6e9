"""Hadamard matrices by their definition, and the fast product against the plain one."""

from __future__ import annotations

import pytest
import torch

from attar.kernels import hadamard
from tests.errors import user_error

SAME = 1e-12
ORDERS = (1, 2, 4, 8, 12, 20, 24, 28, 32, 36, 40, 44, 48, 56, 60, 76, 84, 96, 104, 256, 768, 896)
WIDTHS = (1152, 1280, 1536, 2304, 2560, 3072, 3584, 4096, 4608, 5120, 5376, 6144, 6656, 7168, 8192, 14336, 18944)


@pytest.mark.parametrize("order", ORDERS)
def test_matrices_are_what_hadamard_asked_for(order: int) -> None:
    found = hadamard.matrix(order)
    assert torch.equal(found.abs(), torch.ones(order, order, dtype=torch.float64))
    assert torch.equal(found @ found.T, order * torch.eye(order, dtype=torch.float64))
    assert torch.equal(found[0], torch.ones(order, dtype=torch.float64))
    x = torch.randn(3, 2 * order, generator=torch.Generator().manual_seed(order), dtype=torch.float64)
    for transposed in (False, True):
        plain = x.view(3, 2, order) @ (found.T if transposed else found) / order**0.5
        fast = hadamard.rotate(x, order, transposed)
        assert torch.allclose(fast, plain.view(3, -1), atol=SAME)


@pytest.mark.parametrize("width", WIDTHS)
def test_published_widths_have_a_matrix(width: int) -> None:
    base, power = hadamard.factors(width)
    assert base * power == width
    assert power & (power - 1) == 0


@pytest.mark.parametrize("order", [3, 6, 52, 92, 100, 11008])
def test_an_order_without_a_known_matrix_is_named(order: int) -> None:
    with user_error("architecture_unsupported"):
        hadamard.factors(order)


def test_a_row_has_the_same_bits_whatever_is_in_the_call() -> None:
    x = torch.randn(33, 384, generator=torch.Generator().manual_seed(1))
    together = hadamard.rotate(x, 128)
    assert torch.equal(torch.cat([hadamard.rotate(row[None], 128) for row in x]), together)


def test_half_precision_is_rounded_once() -> None:
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(2)).bfloat16()
    assert torch.equal(hadamard.rotate(x, 64), hadamard.rotate(x.float(), 64).bfloat16())
