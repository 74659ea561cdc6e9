"""The CPU backend. The oracle is `ref`; `ref` itself is held against a slow scalar one and compressed-tensors.

Every test runs at every instruction set level of the machine: they must agree to the bit.
"""

from __future__ import annotations

import math
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attar import _native
from attar.kernels import ref
from attar.kernels.native import rows as native
from tests.errors import user_error

LEVELS = _native.levels()
DTYPES = [torch.float32, torch.bfloat16]
EPS = 2.0**-23

at_every_level = pytest.mark.parametrize("level", LEVELS)
for_every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))


def assert_same(got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor]) -> None:
    (codes, scale), (want_codes, want_scale) = got, want
    assert codes.dtype == want_codes.dtype == torch.int8
    assert scale.dtype == want_scale.dtype == torch.float32
    torch.testing.assert_close(codes, want_codes, rtol=0, atol=0)
    torch.testing.assert_close(scale, want_scale, rtol=0, atol=0)


def float32(value: float) -> float:
    return float(struct.unpack("f", struct.pack("f", value))[0])


def scalar_oracle(row: list[float]) -> tuple[list[int], float]:
    """One row with Python's floats: a double's quotient of two floats, rounded to float, is the float quotient."""
    scale = float32(max(abs(v) for v in row) / 127.5) or EPS
    return [max(-128, min(127, round(float32(v / scale)))) for v in row], scale


finite = st.floats(width=32, allow_nan=False, allow_infinity=False)


@settings(deadline=None)
@given(st.lists(finite, min_size=1, max_size=70))
def test_the_reference_equals_the_scalar_oracle(row: list[float]) -> None:
    codes, scale = scalar_oracle(row)
    assert_same(ref.quantize_rows_int8(torch.tensor([row])), (torch.tensor([codes], dtype=torch.int8),
                                                              torch.tensor([[scale]])))  # fmt: skip


@settings(deadline=None)
@given(st.lists(finite, min_size=1, max_size=70))
def test_native_equals_the_reference_on_any_finite_row(row: list[float]) -> None:
    x = torch.tensor([row])
    for level in LEVELS:
        assert_same(native.quantize_rows_int8(x, level), ref.quantize_rows_int8(x))


@for_every_dtype
@at_every_level
@pytest.mark.parametrize("columns", [1, 7, 15, 16, 17, 63, 64, 65, 768, 1031])
def test_native_equals_the_reference_on_rows_of_any_width(level: str, dtype: torch.dtype, columns: int) -> None:
    spread = torch.logspace(-6, 6, 33)[:, None]
    x = (torch.randn(33, columns, generator=torch.Generator().manual_seed(columns)) * spread).to(dtype)
    assert_same(native.quantize_rows_int8(x, level), ref.quantize_rows_int8(x))


@at_every_level
def test_every_finite_bfloat16(level: str) -> None:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    every = every[every.isfinite()]
    for top in (1.0, 127.5, 3e38, 1e-38, 3e-40):  # every value up to `top`, beside the value that sets the scale
        rows = torch.cat([torch.tensor([top], dtype=torch.bfloat16), every[every.abs() <= top]])[None]
        assert_same(native.quantize_rows_int8(rows, level), ref.quantize_rows_int8(rows))


@at_every_level
def test_ties_go_to_even_and_the_positive_end_saturates(level: str) -> None:
    x = torch.tensor([[127.5, -127.5, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5, -126.5, 0.0, -0.0]])  # scale 1
    codes, scale = native.quantize_rows_int8(x, level)
    assert scale.item() == 1.0
    assert codes[0].tolist() == [127, -128, 0, 2, 2, 0, -2, -2, 126, -126, 0, 0]


@at_every_level
def test_zero_rows_and_rows_too_small_for_a_scale(level: str) -> None:
    x = torch.tensor([[0.0, 0.0], [1e-45, -1e-45], [2e-43, 0.0], [1.0, -1.0]])
    codes, scale = native.quantize_rows_int8(x, level)
    assert scale[:2, 0].tolist() == [EPS, EPS]
    assert codes[:2].eq(0).all()
    assert_same((codes, scale), ref.quantize_rows_int8(x))


def test_equals_dynamic_per_token_quantization_of_compressed_tensors() -> None:
    quantization = pytest.importorskip("compressed_tensors.quantization")
    helpers = pytest.importorskip("compressed_tensors.quantization.utils")
    forward = pytest.importorskip("compressed_tensors.quantization.lifecycle.forward")
    args = quantization.QuantizationArgs(num_bits=8, symmetric=True, strategy="token", dynamic=True)
    x = torch.randn(9, 130, generator=torch.Generator().manual_seed(0))
    x[3] = 0
    scale, zero = helpers.compute_dynamic_scales_and_zp(x[None], args, torch.nn.Module())
    codes = forward.quantize(x[None], scale, zero, args, dtype=torch.int8)
    assert_same(native.quantize_rows_int8(x), (codes[0], scale.reshape(-1, 1)))


@for_every_dtype
@at_every_level
@pytest.mark.parametrize("value", [math.nan, -math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_is_an_error_that_names_the_first(
    level: str, dtype: torch.dtype, value: float
) -> None:
    x = torch.ones(6, 37, dtype=dtype)
    x[4, 36] = x[2, 20] = value
    with user_error("not_finite") as from_native:
        native.quantize_rows_int8(x, level)
    with pytest.raises(ValueError) as from_ref:
        ref.quantize_rows_int8(x)
    assert str(from_native.value) == str(from_ref.value)


@at_every_level
def test_threads_change_no_bit_and_the_first_bad_row_is_named(level: str) -> None:
    x = torch.randn(64, 1024, generator=torch.Generator().manual_seed(1))  # large enough to be shared out
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = native.quantize_rows_int8(x, level)
        torch.set_num_threads(2)
        assert_same(native.quantize_rows_int8(x, level), one)
        x[50, 3] = x[10, 1000] = math.nan
        with user_error("not_finite"):
            native.quantize_rows_int8(x, level)
    finally:
        torch.set_num_threads(before)


def test_no_rows_and_rows_that_are_not_contiguous() -> None:
    codes, scale = native.quantize_rows_int8(torch.empty(0, 5))
    assert (codes.shape, scale.shape) == ((0, 5), (0, 1))
    x = torch.randn(8, 40, generator=torch.Generator().manual_seed(2)).T[::2]  # [20, 8]
    assert_same(native.quantize_rows_int8(x), ref.quantize_rows_int8(x))
