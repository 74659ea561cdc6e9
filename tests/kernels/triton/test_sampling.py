"""The largest logit, interpreted: it is exact."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed here: `make test-triton` has it")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("TRITON_INTERPRET=1 interprets the kernels: `make test-triton` sets it", allow_module_level=True)

from attar.kernels.triton import sampling


@pytest.mark.parametrize("columns", [1, 700, sampling.SHARE, sampling.SHARE + 1, 2 * sampling.SHARE + 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_argmax_is_numpys(columns: int, dtype: torch.dtype) -> None:
    """Of equals the first, of a NaN where it is; -0 equals 0."""
    rows = torch.randint(-9, 9, (6, columns), generator=torch.Generator().manual_seed(0)).to(dtype)
    rows[1] = -torch.inf
    rows[2, columns // 2] = torch.nan
    rows[3, -1] = torch.inf
    rows[4], rows[4, columns // 3] = -0.0, 0.0
    rows[5] -= 100
    expected = torch.from_numpy(rows.numpy().argmax(-1))
    assert torch.equal(sampling.argmax(rows), expected)
    wide = torch.full((6, columns + 5), torch.inf, dtype=dtype)
    wide[:, :columns] = rows
    assert torch.equal(sampling.argmax(wide[:, :columns]), expected)
