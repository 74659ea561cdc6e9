"""FP8 against torch's conversions: every code, every in-range bfloat16 and float16, every midpoint and neighbour."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from attar.formats import floats
from attar.formats.scheme import FLOAT8, Grid, Scheme

KINDS: list[floats.Float8] = ["e4m3", "e5m2"]


def dtype_of(kind: floats.Float8) -> torch.dtype:
    dtype = getattr(torch, FLOAT8[kind])
    assert isinstance(dtype, torch.dtype)
    return dtype


def every(dtype: torch.dtype, largest: float) -> Tensor:
    """Every finite value of a 16-bit dtype whose magnitude is at most `largest`, as float32."""
    values = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype).float()
    return values[values.abs() <= largest]


def scalar_decode(code: int, kind: floats.Float8) -> float:
    """The definition for one code, in integers: mantissa units times a power of two."""
    mantissa_bits = floats.MANTISSA_BITS[kind]
    exponent, mantissa = (code & 0x7F) >> mantissa_bits, code & ((1 << mantissa_bits) - 1)
    units = mantissa if exponent == 0 else mantissa + (1 << mantissa_bits)
    sign = -1.0 if code & 0x80 else 1.0
    return sign * math.ldexp(units, max(exponent, 1) - floats.BIAS[kind] - mantissa_bits)


@pytest.mark.parametrize("kind", KINDS)
def test_all_codes_decode_as_torchs(kind: floats.Float8) -> None:
    codes = torch.arange(256).to(torch.uint8)
    ours, theirs = floats.decode(codes, kind), codes.view(dtype_of(kind)).float()
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
def test_numbers_encode_to_themselves(kind: floats.Float8) -> None:
    codes = torch.arange(256).to(torch.uint8)
    values = floats.decode(codes, kind)
    finite = values.isfinite()
    assert torch.equal(floats.encode(values[finite], kind), codes[finite])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_in_range_values_encode_as_torchs(kind: floats.Float8, dtype: torch.dtype) -> None:
    """Subnormals of either format, signed zeros and everything between."""
    values = every(dtype, Grid(kind).qmax)
    assert torch.equal(floats.encode(values, kind), values.to(dtype_of(kind)).view(torch.uint8))


@pytest.mark.parametrize("kind", KINDS)
def test_ties_go_to_the_even_code(kind: floats.Float8) -> None:
    codes = torch.arange(floats.LARGEST_CODE[kind] + 1).to(torch.uint8)
    values = floats.decode(codes, kind)
    midpoints = (values[:-1] + values[1:]) / 2  # exact in float32
    for sign, bit in ((1, 0), (-1, 128)):
        at = floats.encode(sign * midpoints, kind)
        assert torch.equal(at, (sign * midpoints).to(dtype_of(kind)).view(torch.uint8))
        assert bool((at % 2 == 0).all())
        below = floats.encode(sign * torch.nextafter(midpoints, torch.zeros(1)), kind)
        above = floats.encode(sign * torch.nextafter(midpoints, torch.full((1,), torch.inf)), kind)
        assert torch.equal(below, codes[:-1] + bit)
        assert torch.equal(above, codes[1:] + bit)


@pytest.mark.parametrize("kind", KINDS)
def test_out_of_range(kind: floats.Float8) -> None:
    """Saturated, or what the format has for it: NaN for E4M3, infinity for E5M2.

    The midpoint beyond the largest value still rounds to it in E4M3, where it is the even one of the two; not in E5M2.
    """
    code = floats.LARGEST_CODE[kind]
    inside, first_outside = {"e4m3": (464.0, 464.1), "e5m2": (61439.0, 61440.0)}[kind]
    outside = torch.tensor([first_outside, 1e5, 1e30, torch.inf])
    for sign, bit in ((1, 0), (-1, 128)):
        assert floats.encode(torch.tensor([sign * inside]), kind, saturate=False).item() == code + bit
        assert floats.encode(sign * outside, kind).tolist() == [code + bit] * 4
        beyond = floats.decode(floats.encode(sign * outside, kind, saturate=False), kind)
        assert bool(beyond.isnan().all() if kind == "e4m3" else (beyond == sign * torch.inf).all())
    nan = floats.encode(torch.tensor([torch.nan]), kind)
    assert bool(floats.decode(nan, kind).isnan())
    assert bool(nan.view(dtype_of(kind)).float().isnan())


def test_precision_and_range_are_not_swapped() -> None:
    """Trap: E4M3 rounds closer, E5M2 reaches further."""
    x = torch.linspace(1, 2, 1000)
    errors = {kind: float((floats.decode(floats.encode(x, kind), kind) - x).abs().max()) for kind in KINDS}
    assert errors["e4m3"] < errors["e5m2"]
    far = torch.tensor([10_000.0])
    assert floats.decode(floats.encode(far, "e4m3"), "e4m3").item() == 448
    assert floats.decode(floats.encode(far, "e5m2"), "e5m2").item() == 10240


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("suffix", ["", "-tensor", "g16"])
def test_weights_are_encoded_values(kind: floats.Float8, suffix: str) -> None:
    """The fast path gives what the definition gives, with the largest magnitude of each part on the largest value."""
    x = torch.randn(9, 48, generator=torch.Generator().manual_seed(2))
    x[3] = 0
    name = {"": "fp8{}-weight", "-tensor": "fp8{}-tensor-weight", "g16": "fp8{}g16-weight"}[suffix]
    scheme = Scheme.parse(name.format("" if kind == "e4m3" else "-e5m2"))
    packed = floats.quantize(x, scheme)
    scale = packed.parts["scale"]
    spread = scale.repeat_interleave(48 // scale.shape[-1], -1)
    codes = packed.parts["codes"].view(torch.uint8)
    assert torch.equal(codes, floats.encode((x / spread).clamp(-Grid(kind).qmax, Grid(kind).qmax), kind))
    assert torch.equal(packed.dequantize(), floats.decode(codes, kind) * spread)
    assert float(floats.decode(codes, kind).abs().max()) == Grid(kind).qmax


@pytest.mark.parametrize("kind", KINDS)
def test_activations(kind: floats.Float8) -> None:
    x = torch.randn(5, 16, generator=torch.Generator().manual_seed(3))
    grid = Grid(kind, granularity="token")
    scale = x.abs().amax(-1, keepdim=True) / grid.qmax
    expected = floats.decode(floats.encode((x / scale).clamp(grid.qmin, grid.qmax), kind), kind) * scale
    assert torch.equal(floats.fake_quantize(x, grid), expected)
    static = floats.fake_quantize(x.bfloat16() * 1e6, Grid(kind, granularity="tensor"), torch.tensor([0.5]))
    assert static.dtype == torch.bfloat16
    assert float(static.abs().max()) == grid.qmax / 2, "clipped to the static range"
    x[2, 2] = torch.inf
    with pytest.raises(ValueError, match="NaN or an infinity"):
        floats.fake_quantize(x, grid)
    with pytest.raises(ValueError, match="NaN or an infinity"):
        floats.quantize(x, Scheme.parse("fp8"))
