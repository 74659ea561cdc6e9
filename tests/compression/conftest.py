"""A linear to compress, for the tests of solvers."""

from __future__ import annotations

from typing import Protocol

import pytest
import torch
from torch import Tensor


class Problem(Protocol):
    def __call__(self, seed: int, rows: int = 16, columns: int = 16, tokens: int = 256) -> tuple[Tensor, Tensor]:
        """A weight [O, I] and inputs [N, I] that are correlated and of different sizes, float64."""
        ...


@pytest.fixture(scope="session")
def problem() -> Problem:
    def make(seed: int, rows: int = 16, columns: int = 16, tokens: int = 256) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        weight = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
        mixing = torch.randn(columns, columns, generator=generator, dtype=torch.float64) / columns**0.5
        x = torch.randn(tokens, columns, generator=generator, dtype=torch.float64) @ (mixing + torch.eye(columns))
        return weight, x * torch.rand(columns, generator=generator, dtype=torch.float64).mul(3).exp()

    return make
