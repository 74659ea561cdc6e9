"""MXFP4 and NVFP4: compressed-tensors and the definition of E2M1 are the oracles, ggml a third for MXFP4's values."""

from __future__ import annotations

import pytest
import torch
from compressed_tensors.compressors.mxfp4.base import MXFP4PackedCompressor
from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from torch import Tensor

from attar.formats.codecs import fp4, ggml_blocks
from attar.formats.codecs.ggml import TYPES
from attar.formats.packed import PackedTensor
from attar.formats.scheme import ROUNDS, Scheme
from tests.errors import user_error

NV = QuantizationArgs(
    num_bits=4, type="float", strategy="tensor_group", group_size=16,
    scale_dtype="float8_e4m3fn", zp_dtype="float8_e4m3fn",
)  # fmt: skip
MX = QuantizationArgs(
    num_bits=4, type="float", strategy="group", group_size=32, scale_dtype="uint8", zp_dtype="uint8"
)  # fmt: skip


def hard_weight(rows: int = 10, columns: int = 128) -> Tensor:
    """Zeros, one-sided and constant rows, outliers, ties on the grid, values from tiny to large."""
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(columns))
    x[0] = 0
    x[1] = x[1].abs()
    x[2] = 0.7
    x[3] *= 1e-6
    x[4, 3] = 300
    x[5] = torch.arange(columns) / 8 - 6
    x[6, : columns // 2] = 0
    x[7] *= torch.logspace(-8, 3, columns)
    x[8] = -0.0
    return x


def test_codes_are_the_nearest_of_sixteen_values() -> None:
    """All of E2M1, and ties between neighbours to the even code, by definition: sign, exponent, mantissa."""
    defined = [
        s * (m / 2 if e == 0 else (1 + m / 2) * 2.0 ** (e - 1)) for s in (1, -1) for e in range(4) for m in (0, 1)
    ]
    codes = torch.arange(16, dtype=torch.uint8)
    values = fp4.to_values(codes)
    assert values.tolist() == defined
    assert fp4.to_codes(values[:8]).equal(codes[:8])
    middles = (values[:7] + values[1:8]) / 2
    assert fp4.to_codes(middles).tolist() == [0, 2, 2, 4, 4, 6, 6]
    assert fp4.to_codes(-middles[1:]).tolist() == [10, 10, 12, 12, 14, 14]
    up, down = (fp4.to_codes(torch.nextafter(middles, torch.tensor(to))).tolist() for to in (9.0, 0.0))
    assert (up, down) == (list(range(1, 8)), list(range(7)))
    assert fp4.to_codes(torch.tensor([6.1, 1e30, -0.1, -0.0])).tolist() == [7, 7, 8, 0]


@pytest.mark.parametrize("name", ["nvfp4-weight", "mxfp4-weight"])
def test_weights_bit_for_bit(name: str) -> None:
    x, args, compressor = hard_weight(), MX, MXFP4PackedCompressor
    state = {"weight": x}
    if name == "nvfp4-weight":
        args, compressor = NV, NVFP4PackedCompressor
        state["weight_global_scale"] = generate_gparam(x.min(), x.max())
    groups = x.unflatten(1, (-1, args.group_size))
    divisor = state.get("weight_global_scale")
    state["weight_scale"], state["weight_zero_point"] = calculate_qparams(
        groups.amin(-1), groups.amax(-1), args, divisor
    )
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    theirs = compressor.compress(dict(state), scheme)
    ours = fp4.quantize(x, Scheme.parse(name), "nearest")
    used = groups.amax(-1) != 0  # of groups of zeros they take another scale of no consequence
    used |= groups.amin(-1) != 0
    scale = theirs["weight_scale"]
    assert ours.parts["scale"].view(torch.uint8)[used].equal(scale.view(torch.uint8)[used])
    assert ours.parts["codes"].equal(theirs["weight_packed"])
    if divisor is not None:
        assert ours.parts["global"].equal(theirs["weight_global_scale"])
    back = compressor.decompress(dict(theirs), scheme)["weight"]
    assert ours.dequantize(torch.bfloat16).equal(back.bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_activations(dtype: torch.dtype) -> None:
    x = hard_weight()[4:8].to(dtype)
    groups = x.float().unflatten(1, (-1, 32))
    scale, zero = calculate_qparams(groups.amin(-1), groups.amax(-1), MX)
    theirs = fake_quantize(x.float(), scale, zero, MX)
    assert fp4.fake_quantize(x, ROUNDS["mxfp4"]).equal(theirs.to(dtype))
    divisor = fp4.fixed_scale(torch.tensor([200.0]), ROUNDS["nvfp4"])  # one outlier is beyond what calibration saw
    groups = x.float().unflatten(1, (-1, 16))
    scale, zero = calculate_qparams(groups.amin(-1), groups.amax(-1), NV, divisor)
    theirs = fake_quantize(x.float(), scale, zero, NV, divisor)
    assert fp4.fake_quantize(x, ROUNDS["nvfp4"], divisor).equal(theirs.to(dtype))


def test_the_specification_takes_the_floor() -> None:
    """Of groups whose largest magnitudes are 4, 6, 6.99, 7 and 7.99 times a power of two."""
    x = torch.zeros(5, 32)
    x[:, 0] = torch.tensor([4, 6, 6.99, 7, 7.99]) * 2.0**-5
    scheme = Scheme.parse("mxfp4-weight")
    assert fp4.quantize(x, scheme).parts["scale"].flatten().tolist() == [122] * 5
    assert fp4.quantize(x, scheme, "nearest").parts["scale"].flatten().tolist() == [122, 122, 122, 123, 123]


@pytest.mark.parametrize("name, gain", [("mxfp4-weight", 0.97), ("nvfp4-weight", 0.76)])
def test_searched_scales_are_better_for_every_group(name: str, gain: float) -> None:
    scheme, size = Scheme.parse(name), 32
    gaussian = torch.randn(64, 512, generator=torch.Generator().manual_seed(3))
    for x in (hard_weight(), gaussian):
        plain, searched = (
            (fp4.quantize(x, scheme, rule).dequantize() - x).square().unflatten(1, (-1, size)).sum(-1)
            for rule in ("floor", "mse")
        )
        assert (searched <= plain * (1 + 1e-5) + 1e-12).all()
    assert float(searched.sum() / plain.sum()) < gain


def test_values_over_all_exponents_are_ggmls() -> None:
    """Every E8M0 byte but NaN, with every code. GGML keeps the lower halves of codes together, we neighbours."""
    exponents = torch.arange(255, dtype=torch.uint8)[:, None]
    codes = torch.arange(16, dtype=torch.uint8).repeat(255, 2)
    packed = codes[:, ::2] | codes[:, 1::2] << 4
    ours = PackedTensor(Scheme.parse("mxfp4-weight"), (255, 32), {"codes": packed, "scale": exponents})
    theirs = torch.cat([exponents, codes[:, :16] | codes[:, 16:] << 4], 1)
    assert ours.dequantize().equal(ggml_blocks.decode(TYPES["MXFP4"], theirs))
    nan = PackedTensor(ours.scheme, (1, 32), {"codes": packed[:1], "scale": torch.tensor([[255]], dtype=torch.uint8)})
    assert nan.dequantize().isnan().all()


def test_sizes_and_refusals() -> None:
    assert Scheme.parse("mxfp4").bits_per_weight((64, 4096)) == 4.25
    assert Scheme.parse("nvfp4").bits_per_weight((64, 4096)) == 4.5 + 32 / (64 * 4096)
    for name, columns in (("mxfp4-weight", 48), ("nvfp4", 24)):
        with user_error("group_size_indivisible"):
            Scheme.parse(name).parts((4, columns))
    for bad in (torch.nan, torch.inf):
        x = torch.ones(2, 32)
        x[1, 20] = bad
        with user_error("not_finite"):
            fp4.quantize(x, Scheme.parse("nvfp4-weight"))
