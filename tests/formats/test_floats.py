"""FP8 against torch's conversions: every code, every in-range bfloat16 and float16, every midpoint and neighbour."""

from __future__ import annotations

import math
from functools import cache
from typing import Literal

import pytest
import torch
from torch import Tensor

from attar.formats import floats
from attar.formats.scheme import FLOAT8, Grid, Scheme
from tests.errors import user_error

Float8 = Literal["e4m3", "e5m2"]

MANTISSA_BITS = {"e4m3": 3, "e5m2": 2}
BIAS = {"e4m3": 7, "e5m2": 15}
LARGEST_CODE = {"e4m3": 0x7E, "e5m2": 0x7B}
"""Code of the largest finite value; the codes above it are E4M3's NaN, and E5M2's infinity and NaNs."""
NAN_CODE = {"e4m3": 0x7F, "e5m2": 0x7F}
KINDS: list[Float8] = ["e4m3", "e5m2"]


@cache
def _table(kind: Float8) -> Tensor:
    """Return the value of each of the 256 codes, float32 [256]."""
    mantissa_bits, bias, largest = MANTISSA_BITS[kind], BIAS[kind], LARGEST_CODE[kind]
    magnitudes = []
    for code in range(128):
        exponent, mantissa = code >> mantissa_bits, code & ((1 << mantissa_bits) - 1)
        fraction = mantissa / (1 << mantissa_bits)
        if kind == "e5m2" and code == largest + 1:
            magnitudes.append(float("inf"))
        elif code > largest:
            magnitudes.append(float("nan"))
        elif exponent == 0:  # subnormal
            magnitudes.append(fraction * 2.0 ** (1 - bias))
        else:
            magnitudes.append((1 + fraction) * 2.0 ** (exponent - bias))
    return torch.tensor(magnitudes + [-magnitude for magnitude in magnitudes])


def decode(codes: Tensor, kind: Float8) -> Tensor:
    """Return the values of uint8 codes, float32, of the same shape."""
    return _table(kind).to(codes.device)[codes.long()]


def encode(x: Tensor, kind: Float8, saturate: bool = True) -> Tensor:
    """Return the nearest code to each value of x, float32, ties to the even code; uint8, of the same shape.

    Values beyond the largest become the largest, infinities too; without `saturate`, the NaN of E4M3 or the infinity of
    E5M2. NaN stays NaN. The sign is kept, zero's too.
    """
    assert x.dtype == torch.float32, "any narrower float converts to float32 exactly; a wider one would round twice"
    mantissa_bits, bias, largest = MANTISSA_BITS[kind], BIAS[kind], LARGEST_CODE[kind]
    magnitude = x.abs().clamp(max=1e6).nan_to_num(0.0)
    exponent = (torch.frexp(magnitude).exponent - 1).clamp(min=1 - bias)  # subnormals share the smallest exponent
    exponent = exponent.where(magnitude > 0, 1 - bias)
    # In units of the last place every neighbour is a whole number, so rounding is exact. A carry out of the mantissa
    # moves into the exponent field, which correctly gives the next binade's first value.
    units = torch.ldexp(magnitude, mantissa_bits - exponent).round().to(torch.int32)
    codes = ((exponent + bias) << mantissa_bits) + units - (1 << mantissa_bits)
    codes = codes.clamp(max=largest if saturate else largest + 1)
    codes = codes.where(~x.isnan(), NAN_CODE[kind])
    return (codes + 128 * x.signbit()).to(torch.uint8)


def dtype_of(kind: Float8) -> torch.dtype:
    dtype = getattr(torch, FLOAT8[kind])
    assert isinstance(dtype, torch.dtype)
    return dtype


def every(dtype: torch.dtype, largest: float) -> Tensor:
    """Every finite value of a 16-bit dtype whose magnitude is at most `largest`, as float32."""
    values = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype).float()
    return values[values.abs() <= largest]


def scalar_decode(code: int, kind: Float8) -> float:
    """The definition for one code, in integers: mantissa units times a power of two."""
    mantissa_bits = MANTISSA_BITS[kind]
    exponent, mantissa = (code & 0x7F) >> mantissa_bits, code & ((1 << mantissa_bits) - 1)
    units = mantissa if exponent == 0 else mantissa + (1 << mantissa_bits)
    sign = -1.0 if code & 0x80 else 1.0
    return sign * math.ldexp(units, max(exponent, 1) - BIAS[kind] - mantissa_bits)


@pytest.mark.parametrize("kind", KINDS)
def test_all_codes_decode_as_torchs(kind: Float8) -> None:
    codes = torch.arange(256).to(torch.uint8)
    ours, theirs = decode(codes, kind), codes.view(dtype_of(kind)).float()
    assert torch.equal(ours.isnan(), theirs.isnan())
    number = ~ours.isnan()
    assert torch.equal(ours[number].view(torch.int32), theirs[number].view(torch.int32))
    finite = ours.isfinite()
    assert ours[finite].tolist() == [scalar_decode(code, kind) for code in codes[finite].tolist()]
    assert int(finite.sum()) == {"e4m3": 254, "e5m2": 248}[kind]
    assert int(ours.isinf().sum()) == {"e4m3": 0, "e5m2": 2}[kind]
    assert float(ours[finite].max()) == {"e4m3": 448.0, "e5m2": 57344.0}[kind]
    assert float(ours[ours > 0].min()) == {"e4m3": 2.0**-9, "e5m2": 2.0**-16}[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_encode_to_themselves(kind: Float8) -> None:
    codes = torch.arange(256).to(torch.uint8)
    values = decode(codes, kind)
    finite = values.isfinite()
    assert torch.equal(encode(values[finite], kind), codes[finite])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_in_range_values_encode_as_torchs(kind: Float8, dtype: torch.dtype) -> None:
    """Subnormals of either format, signed zeros and everything between."""
    values = every(dtype, Grid(kind).qmax)
    assert torch.equal(encode(values, kind), values.to(dtype_of(kind)).view(torch.uint8))


@pytest.mark.parametrize("kind", KINDS)
def test_ties_go_to_the_even_code(kind: Float8) -> None:
    codes = torch.arange(LARGEST_CODE[kind] + 1).to(torch.uint8)
    values = decode(codes, kind)
    midpoints = (values[:-1] + values[1:]) / 2  # exact in float32
    for sign, bit in ((1, 0), (-1, 128)):
        at = encode(sign * midpoints, kind)
        assert torch.equal(at, (sign * midpoints).to(dtype_of(kind)).view(torch.uint8))
        assert bool((at % 2 == 0).all())
        below = encode(sign * torch.nextafter(midpoints, torch.zeros(1)), kind)
        above = encode(sign * torch.nextafter(midpoints, torch.full((1,), torch.inf)), kind)
        assert torch.equal(below, codes[:-1] + bit)
        assert torch.equal(above, codes[1:] + bit)


@pytest.mark.parametrize("kind", KINDS)
def test_out_of_range(kind: Float8) -> None:
    """Saturated, or what the format has for it: NaN for E4M3, infinity for E5M2.

    The midpoint beyond the largest value still rounds to it in E4M3, where it is the even one of the two; not in E5M2.
    """
    code = LARGEST_CODE[kind]
    inside, first_outside = {"e4m3": (464.0, 464.1), "e5m2": (61439.0, 61440.0)}[kind]
    outside = torch.tensor([first_outside, 1e5, 1e30, torch.inf])
    for sign, bit in ((1, 0), (-1, 128)):
        assert encode(torch.tensor([sign * inside]), kind, saturate=False).item() == code + bit
        assert encode(sign * outside, kind).tolist() == [code + bit] * 4
        beyond = decode(encode(sign * outside, kind, saturate=False), kind)
        assert bool(beyond.isnan().all() if kind == "e4m3" else (beyond == sign * torch.inf).all())
    nan = encode(torch.tensor([torch.nan]), kind)
    assert bool(decode(nan, kind).isnan())
    assert bool(nan.view(dtype_of(kind)).float().isnan())


def test_precision_and_range_are_not_swapped() -> None:
    """Trap: E4M3 rounds closer, E5M2 reaches further."""
    x = torch.linspace(1, 2, 1000)
    errors = {kind: float((decode(encode(x, kind), kind) - x).abs().max()) for kind in KINDS}
    assert errors["e4m3"] < errors["e5m2"]
    far = torch.tensor([10_000.0])
    assert decode(encode(far, "e4m3"), "e4m3").item() == 448
    assert decode(encode(far, "e5m2"), "e5m2").item() == 10240


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("suffix", ["", "-tensor", "g16"])
def test_weights_are_encoded_values(kind: Float8, suffix: str) -> None:
    """The fast path gives what the definition gives, with the largest magnitude of each part on the largest value."""
    x = torch.randn(9, 48, generator=torch.Generator().manual_seed(2))
    x[3] = 0
    name = {"": "fp8{}-weight", "-tensor": "fp8{}-tensor-weight", "g16": "fp8{}g16-weight"}[suffix]
    scheme = Scheme.parse(name.format("" if kind == "e4m3" else "-e5m2"))
    packed = floats.quantize(x, scheme)
    scale = packed.parts["scale"]
    spread = scale.repeat_interleave(48 // scale.shape[-1], -1)
    codes = packed.parts["codes"].view(torch.uint8)
    assert torch.equal(codes, encode((x / spread).clamp(-Grid(kind).qmax, Grid(kind).qmax), kind))
    assert torch.equal(packed.dequantize(), decode(codes, kind) * spread)
    assert float(decode(codes, kind).abs().max()) == Grid(kind).qmax


@pytest.mark.parametrize("kind", KINDS)
def test_activations(kind: Float8) -> None:
    x = torch.randn(5, 16, generator=torch.Generator().manual_seed(3))
    grid = Grid(kind, granularity="token")
    scale = x.abs().amax(-1, keepdim=True) / grid.qmax
    expected = decode(encode((x / scale).clamp(grid.qmin, grid.qmax), kind), kind) * scale
    assert torch.equal(floats.fake_quantize(x, grid), expected)
    static = floats.fake_quantize(x.bfloat16() * 1e6, Grid(kind, granularity="tensor"), torch.tensor([0.5]))
    assert static.dtype == torch.bfloat16
    assert float(static.abs().max()) == grid.qmax / 2, "clipped to the static range"
    x[2, 2] = torch.inf
    with user_error("not_finite"):
        floats.fake_quantize(x, grid)
    with user_error("not_finite"):
        floats.quantize(x, Scheme.parse("fp8"))
