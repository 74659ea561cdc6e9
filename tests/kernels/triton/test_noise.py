"""Random choices in Triton, interpreted: to the bit those of the reference."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed here: `make test-triton` has it")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("TRITON_INTERPRET=1 interprets the kernels: `make test-triton` sets it", allow_module_level=True)

from attar.kernels import ref
from attar.kernels.noise import draws
from attar.kernels.triton import noise


@pytest.mark.parametrize("columns", [1, 700, noise.SHARE, 2 * noise.SHARE + 300])
@pytest.mark.parametrize("spread", [0.0, 1.0, 20.0])
def test_gumbel_max_equals_the_reference(columns: int, spread: float) -> None:
    rng = np.random.default_rng(columns)
    rows = torch.from_numpy(-np.abs(rng.normal(size=(5, columns))) * spread)
    rows[torch.from_numpy(rng.random((5, columns)) < 0.2)] = -torch.inf
    rows[2] = -torch.inf
    rows[3, -1] = 100
    seeds = [0, 1, 2**64 - 1, 2**63, 12345678901234567890]
    numbers = draws(seeds, [0, 1, 2**40, 3, 4])
    assert torch.equal(noise.gumbel_max(rows, numbers), ref.gumbel_max(rows, numbers))


def test_no_rows() -> None:
    assert noise.gumbel_max(torch.empty((0, 5), dtype=torch.float64), draws([], [])).tolist() == []
