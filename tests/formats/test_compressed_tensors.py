"""Round to nearest is compressed-tensors', bit for bit: scales, zero points, codes, words and values.

Its own functions are the oracle: calculate_qparams, quantize, the compressors, dequantize and fake_quantize.
"""

from __future__ import annotations

import pytest
import torch
from compressed_tensors.compressors.naive_quantized.base import NaiveQuantizationCompressor
from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.utils import calculate_qparams, compute_dynamic_scales_and_zp
from torch import Tensor

from attar.formats.packed import codec
from attar.formats.packing import pack_words, unpack_words
from attar.formats.scheme import Grid, Scheme

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
GROUP = 32


def args_of(grid: Grid, dynamic: bool = False) -> QuantizationArgs:
    return QuantizationArgs(
        num_bits=grid.bits,
        type="int" if grid.kind == "int" else "float",
        symmetric=grid.symmetric,
        strategy=grid.granularity,
        group_size=grid.group_size,
        dynamic=dynamic,
    )


def same(ours: Tensor, theirs: Tensor) -> bool:
    """Equal in dtype, shape and value."""
    return ours.dtype == theirs.dtype and torch.equal(ours, theirs)


def hard_weight(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Outliers, one-sided, constant, tiny and all-zero groups, and many exact ties."""
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(columns))
    x[0] = 0
    x[1] = x[1].abs()
    x[2] = -x[2].abs() - 1
    x[3] = 0.7
    x[4] *= 1e-6
    x[5, 3] = 300
    x[6] = torch.arange(columns) / 2 - 7.5
    x[7, : columns // 2] = 0
    return x.to(dtype)


def their_qparams(x: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
    if grid.granularity == "tensor":
        low, high = torch.aminmax(x)
    else:
        blocks = x.unflatten(-1, (grid.groups(x.shape[-1]), -1))
        low, high = blocks.amin(-1), blocks.amax(-1)
    scale, zero = calculate_qparams(low, high, args_of(grid))
    return scale, zero


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("granularity", ["tensor", "channel", "group"])
@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_weights_bit_for_bit(dtype: torch.dtype, bits: int, granularity: str, symmetric: bool) -> None:
    size = GROUP if granularity == "group" else None
    grid = Grid("int", bits, symmetric, granularity, size)  # type: ignore[arg-type]
    name = str(dtype).removeprefix("torch.")
    for columns in (2 * GROUP, 3 * GROUP) if size else (61, 64):
        x = hard_weight(13, columns, dtype)
        scale, zero = their_qparams(x, grid)
        state = {"weight": x, "weight_scale": scale, "weight_zero_point": zero}
        for layout, compressor in (("packed", PackedQuantizationCompressor), ("plain", NaiveQuantizationCompressor)):
            scheme = Scheme(grid, scale_dtype=name, layout=layout)  # type: ignore[arg-type]
            theirs_scheme = QuantizationScheme(targets=["Linear"], weights=args_of(grid))
            theirs = compressor.compress(dict(state), theirs_scheme)
            ours = codec("int").quantize(x, scheme)
            names = {"codes": "weight_packed" if layout == "packed" else "weight", "scale": "weight_scale"}
            names |= {"zero": "weight_zero_point", "shape": "weight_shape"}
            for part, tensor in ours.parts.items():
                expected = theirs[names[part]]
                assert same(tensor, expected), part
            assert {names[part] for part in ours.parts} == set(theirs)
            back = compressor.decompress(dict(theirs), theirs_scheme)["weight"]
            assert same(ours.dequantize(dtype), back)
            assert torch.equal(ours.dequantize(torch.float32).to(dtype), back)


@pytest.mark.parametrize("granularity", ["tensor", "channel", "group"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_float8_weights_bit_for_bit(dtype: torch.dtype, granularity: str) -> None:
    grid = Grid("e4m3", 8, True, granularity, GROUP if granularity == "group" else None)  # type: ignore[arg-type]
    x = hard_weight(13, 2 * GROUP, dtype)
    scale, zero = their_qparams(x, grid)
    theirs_scheme = QuantizationScheme(targets=["Linear"], weights=args_of(grid))
    theirs = NaiveQuantizationCompressor.compress(
        {"weight": x, "weight_scale": scale, "weight_zero_point": zero}, theirs_scheme
    )
    scheme = Scheme(grid, scale_dtype=str(dtype).removeprefix("torch."), layout="plain")  # type: ignore[arg-type]
    ours = codec("e4m3").quantize(x, scheme)
    assert same(ours.parts["scale"], theirs["weight_scale"])
    assert same(ours.parts["codes"].view(torch.uint8), theirs["weight"].view(torch.uint8))
    back = NaiveQuantizationCompressor.decompress(dict(theirs), theirs_scheme)["weight"]
    assert same(ours.dequantize(dtype), back)


@pytest.mark.parametrize("kind, symmetric", [("int", True), ("int", False), ("e4m3", True)])
@pytest.mark.parametrize("granularity", ["tensor", "token", "group"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dynamic_activations(dtype: torch.dtype, granularity: str, kind: str, symmetric: bool) -> None:
    grid = Grid(kind, 8, symmetric, granularity, GROUP if granularity == "group" else None)  # type: ignore[arg-type]
    # Three dimensions: for two, their token strategy quantizes the whole tensor by one scale.
    x = hard_weight(12, 2 * GROUP, dtype).view(3, 4, 2 * GROUP)
    scale, zero = compute_dynamic_scales_and_zp(x, args_of(grid, dynamic=True), torch.nn.Module())
    theirs = fake_quantize(x, scale, zero, args_of(grid, dynamic=True))
    assert same(codec(grid.kind).fake_quantize(x, grid), theirs)


@pytest.mark.parametrize("kind", ["int", "e4m3"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_static_activations(dtype: torch.dtype, kind: str) -> None:
    grid = Grid(kind, 8, True, "tensor")  # type: ignore[arg-type]
    x = hard_weight(12, 2 * GROUP, dtype)
    scale = torch.tensor([0.013], dtype=dtype)
    theirs = fake_quantize(x, scale, torch.zeros(1, dtype=torch.int8), args_of(grid))
    assert same(codec(grid.kind).fake_quantize(x, grid, scale), theirs)


@pytest.mark.parametrize("bits", range(2, 9))
def test_words(bits: int) -> None:
    generator = torch.Generator().manual_seed(bits)
    for columns in (1, 7, 31, 32, 33, 96):
        codes = torch.randint(-(1 << (bits - 1)), 1 << (bits - 1), (5, columns), generator=generator).to(torch.int8)
        words = pack_to_int32(codes, bits)
        assert same(pack_words(codes, bits), words)
        assert same(unpack_words(words, bits, columns), unpack_from_int32(words, bits, codes.shape))
        down = pack_to_int32(codes, bits, packed_dim=0)
        assert same(pack_words(codes.t(), bits).t().contiguous(), down)
