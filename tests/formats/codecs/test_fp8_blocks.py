"""FP8 in blocks of 128 by 128: compressed-tensors is the oracle."""

from __future__ import annotations

import pytest
import torch
from compressed_tensors.compressors.naive_quantized.base import NaiveQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from torch import Tensor

from attar.formats.packed import codec
from attar.formats.scheme import ROUNDS, Scheme
from tests.errors import user_error

ARGS = QuantizationArgs(num_bits=8, type="float", strategy="block", block_structure=[128, 128])


def hard_weight(rows: int, columns: int) -> Tensor:
    """An outlier, a block of zeros, a tiny and a one-sided one."""
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows))
    x[3, 5] = 900
    x[:128, 128:256] = 0
    x[128:, :128] *= 1e-5
    x[128:, 128:] = x[128:, 128:].abs()
    return x


@pytest.mark.parametrize("shape", [(256, 384), (200, 300), (130, 128), (16, 40)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_weights_bit_for_bit(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x = hard_weight(*shape).to(dtype)
    padded = torch.nn.functional.pad(x, (0, -shape[1] % 128, 0, -shape[0] % 128))
    blocks = padded.unflatten(1, (-1, 128)).unflatten(0, (-1, 128))
    scale, zero = calculate_qparams(blocks.amin((1, 3)), blocks.amax((1, 3)), ARGS)
    scheme = QuantizationScheme(targets=["Linear"], weights=ARGS)
    state = {"weight": x, "weight_scale": scale, "weight_zero_point": zero}
    theirs = NaiveQuantizationCompressor.compress(state, scheme)
    ours = codec("fp8-block").quantize(
        x, Scheme.parse("fp8-block-weight").with_scale_dtype(str(dtype).removeprefix("torch."))
    )
    assert ours.parts["scale"].dtype == dtype
    assert ours.parts["scale"].equal(theirs["weight_scale"])
    assert ours.parts["codes"].view(torch.uint8).equal(theirs["weight"].view(torch.uint8))
    back = NaiveQuantizationCompressor.decompress(dict(theirs), scheme)["weight"]
    assert ours.dequantize(dtype).equal(back)
    assert ours.dequantize(dtype, slice(10, 16)).equal(back[10:16])


def test_activations_are_e4m3_in_groups_of_128() -> None:
    scheme = Scheme.parse("fp8-block")
    assert scheme.activation == ROUNDS["fp8-block"]
    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(0))
    x[:, 0] = 1000
    rounded = codec("e4m3").fake_quantize(x, scheme.activation)
    scale = x.view(3, 2, 128).abs().amax(-1, keepdim=True) / 448
    expected = ((x.view(3, 2, 128) / scale).to(torch.float8_e4m3fn).float() * scale).view(3, 256)
    assert rounded.equal(expected)
    scheme.check(192)
    shorter = codec("e4m3").fake_quantize(x[:, :192], scheme.activation)
    assert shorter[:, :128].equal(rounded[:, :128]), "the last group is of what there is"
    assert shorter[:, 128:].equal(codec("e4m3").fake_quantize(x[:, 128:192], scheme.activation))


def test_refusals() -> None:
    x = torch.ones(200, 200)
    x[150, 199] = torch.inf
    with user_error("not_finite"):
        codec("fp8-block").quantize(x, Scheme.parse("fp8-block-weight"))
