"""LLM.int8(): the product against float64, the claim that it is for, and bitsandbytes where it is installed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attar.formats.codecs import llm_int8
from attar.formats.packed import codec
from attar.formats.scheme import ROUNDS, Scheme
from attar.kernels import ref
from attar.kernels.operands import Linear
from tests.errors import user_error

SCHEME = Scheme.parse("llm-int8")
FORM = ROUNDS["llm-int8"]


def weight_and_rows() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    return torch.randn(48, 256, generator=generator) / 16, torch.randn(12, 256, generator=generator)


def test_the_product_is_two_products() -> None:
    """int8 by int8 for what is small, exact for outliers: computed apart, in float64, with integers."""
    weight, x = weight_and_rows()
    x[:, 17] *= 60
    x[3, 40] = -6.0
    packed = llm_int8.quantize(weight, SCHEME)
    outlier = x.abs() >= 6
    assert outlier[3, 40]
    rest = x.masked_fill(outlier, 0)
    largest = rest.abs().amax(1, keepdim=True)
    rounded = (rest * (127 / largest)).round().to(torch.int64)
    codes, row = packed.parts["codes"].to(torch.int64), packed.parts["absmax"].double()
    integer = (rounded @ codes.T).double() * (largest.double() / 127) * (row / 127)
    exact = x.masked_fill(~outlier, 0).double() @ (codes.double() * (row / 127)[:, None]).T
    ours = ref.linear(x, [Linear("x", packed)])
    torch.testing.assert_close(ours.double(), integer + exact, rtol=1e-5, atol=1e-5)


def test_outliers_do_not_cost_the_rest() -> None:
    """With planted outliers the error is far below that of int8 scaled for them, and what it is without any."""
    weight, x = weight_and_rows()
    calm = x.clone()
    x[:, [3, 77]] *= 80

    def error(name: str, rows: Tensor) -> float:
        scheme = Scheme.parse(name)
        packed = codec(scheme.weight.kind).quantize(weight, scheme)
        without = rows @ packed.dequantize().T  # rounding of the weight is not what is compared
        return float((ref.linear(rows, [Linear("x", packed)]) - without).norm())

    assert error("llm-int8", x) < 0.05 * error("w8a8", x)
    assert error("llm-int8", x) < 1.05 * error("llm-int8", calm)


def test_rows_do_not_see_each_other() -> None:
    _, x = weight_and_rows()
    x[0, 5] = 50
    together = llm_int8.fake_quantize(x, FORM)
    assert together.equal(torch.cat([llm_int8.fake_quantize(row[None], FORM) for row in x]))
    assert llm_int8.fake_quantize(torch.zeros(2, 8), FORM).equal(torch.zeros(2, 8))


def test_rows_of_the_weight() -> None:
    weight, _ = weight_and_rows()
    weight[5] = 0
    packed = llm_int8.quantize(weight, SCHEME)
    assert packed.dequantize(rows=slice(4, 9)).equal(packed.dequantize()[4:9])
    step = weight.abs().amax(1, keepdim=True) / 127
    assert ((packed.dequantize() - weight).abs() <= 0.5001 * step).all()
    assert SCHEME.bits_per_weight((48, 256)) == 8 + (32 * 48 + 8) / (48 * 256)


def test_bitsandbytes_agrees() -> None:
    functional = pytest.importorskip("bitsandbytes.functional", reason="bitsandbytes is not installed")
    weight, _ = weight_and_rows()
    codes, largest, _ = functional.int8_vectorwise_quant(weight.half())
    ours = llm_int8.quantize(weight.half(), SCHEME)
    assert ours.parts["absmax"].equal(largest.float())
    assert ours.parts["codes"].equal(codes)
    torch.testing.assert_close(ours.dequantize(), functional.int8_vectorwise_dequant(codes, largest), rtol=1e-6, atol=0)


def test_refusals() -> None:
    weight, x = weight_and_rows()
    weight[9, 9] = torch.inf
    with user_error("not_finite"):
        llm_int8.quantize(weight, SCHEME)
    x[1, 1] = torch.nan
    with user_error("not_finite"):
        llm_int8.fake_quantize(x, FORM)
