"""Norms, activations, rounding and argmax of rows, interpreted, against the reference; argmax is exact."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed here: `make test-triton` has it")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("TRITON_INTERPRET=1 interprets the kernels: `make test-triton` sets it", allow_module_level=True)

from attar.kernels import ref
from attar.kernels.operands import Norm
from attar.kernels.triton import rows

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3}  # of values around 1: the order of sums; one rounding of float16
ACTIVATED = {torch.float32: 1e-5, torch.float16: 2e-3}  # the reference's 1 + tanh cancels
dtypes = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def close(ours: Tensor, expected: Tensor, tolerance: dict[torch.dtype, float] = TOLERANCE) -> None:
    assert (ours.shape, ours.dtype) == (expected.shape, expected.dtype)
    most = tolerance[ours.dtype]
    assert torch.allclose(ours.float(), expected.float(), rtol=most, atol=most)


@dtypes
@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("columns", [1, 96, 128])
@pytest.mark.parametrize("kind", ["rms", "gemma", "layer", "layer with bias"])
def test_norm(kind: str, columns: int, add: bool, dtype: torch.dtype) -> None:
    stream, delta, weight, bias = (randn(5, columns, seed=i).to(dtype) for i in range(4))
    spec = Norm("layer" if "layer" in kind else "rms", weight[0], bias[0] if "bias" in kind else None)
    spec.offset = 1.0 if kind == "gemma" else 0.0
    total, out = rows.norm(stream, delta if add else None, spec)
    expected_total, expected = ref.norm(stream, delta if add else None, spec)
    assert torch.equal(total, expected_total)
    close(out, expected)


def test_norm_of_heads_and_of_what_does_not_fit() -> None:
    heads, spec = randn(3, 4, 16), Norm("rms", randn(16, seed=1))
    close(rows.norm(heads, None, spec)[1], ref.norm(heads, None, spec)[1])
    with pytest.raises(ValueError, match="do not fit a norm over 16"):
        rows.norm(randn(3, 8), None, spec)
    with pytest.raises(ValueError, match="has its shape"):
        rows.norm(randn(3, 16), randn(2, 16), spec)


@dtypes
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("kind", rows.KINDS)
def test_activate(kind: str, gated: bool, dtype: torch.dtype) -> None:
    x = torch.cat((randn(3, 2 * 1100) * 3, torch.tensor([[-60.0, 60.0] * 1100]))).to(dtype)
    close(rows.activate(x, kind, gated), ref.activate(x.clone(), kind, gated), ACTIVATED)  # type: ignore[arg-type]


def test_gated_rows_have_two_halves() -> None:
    with pytest.raises(ValueError, match="odd"):
        rows.activate(randn(1, 3), "silu", True)


@dtypes
def test_rounding_to_int8_is_that_of_the_door(dtype: torch.dtype) -> None:
    x = randn(6, 70).to(dtype) * 3
    x[1] = 0
    x[2] = torch.arange(70) - 35.5  # ties
    codes, scales = rows.round_rows(x, torch.int8)
    expected, expected_scales = ref.quantize_rows_int8(x)
    assert torch.equal(codes, expected)
    assert torch.equal(scales, expected_scales[:, 0])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_row_that_is_not_finite_says_so(bad: float) -> None:
    x = randn(3, 40)
    x[1, 7] = bad
    codes, scales = rows.round_rows(x, torch.int8)
    assert scales.isnan().tolist() == [False, True, False]
    assert not codes[1].any()
    _, scales = rows.round_rows(x, torch.int8, fixed=torch.tensor([0.5]))
    assert scales.isnan().tolist() == [False, True, False]


def test_float8_keeps_what_lies_on_its_grid() -> None:
    """Rounding itself is the card's: the interpreter's does not carry into the exponent."""
    values = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    x = torch.stack((values, -values, values.flip(0))) * 2.0**-5
    codes, scales = rows.round_rows(x, torch.float8_e4m3fn)
    assert torch.equal(scales, torch.full((3,), 2.0**-5))
    assert torch.equal(codes.float() * scales[:, None], x)


@pytest.mark.parametrize("columns", [1, 32, 700, rows.STEP + 5])
def test_masked_rows_are_the_references(columns: int) -> None:
    """Rows between masked ones, and what lies behind a row, stay as they are."""
    generator = torch.Generator().manual_seed(columns)
    wide = torch.randn(5, columns + 3, generator=generator, dtype=torch.float64)
    places = torch.tensor([3, 0, 4])
    bits = torch.randint(-(2**31), 2**31, (3, -(-columns // 32)), generator=generator).to(torch.int32)
    bits[1] = 0
    expected = wide.clone()
    ref.mask(expected[:, :columns], places, bits)
    rows.mask(wide[:, :columns], places, bits)
    assert torch.equal(wide, expected)
    assert wide[[1, 2]].isfinite().all()


@pytest.mark.parametrize("columns", [1, 700, rows.SHARE, rows.SHARE + 1, 2 * rows.SHARE + 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_argmax_is_numpys(columns: int, dtype: torch.dtype) -> None:
    """Of equals the first, of a NaN where it is; -0 equals 0."""
    x = torch.randint(-9, 9, (6, columns), generator=torch.Generator().manual_seed(0)).to(dtype)
    x[1] = -torch.inf
    x[2, columns // 2] = torch.nan
    x[3, -1] = torch.inf
    x[4], x[4, columns // 3] = -0.0, 0.0
    x[5] -= 100
    expected = torch.from_numpy(x.numpy().argmax(-1))
    assert torch.equal(rows.argmax(x), expected)
    wide = torch.full((6, columns + 5), torch.inf, dtype=dtype)
    wide[:, :columns] = x
    assert torch.equal(rows.argmax(wide[:, :columns]), expected)
