"""NF4: its values by their definition, its layout by hand, and bitsandbytes where it is installed."""

from __future__ import annotations

import json
from statistics import NormalDist

import pytest
import torch

from attar.formats.codecs import nf4
from attar.formats.packed import PackedTensor
from attar.formats.scheme import Scheme
from tests.errors import user_error

SCHEME = Scheme.parse("nf4")
TABLE_ERROR = 2e-7  # bitsandbytes' constants were computed from an end of seven digits
GAUSSIAN = (0.00846, 2e-4)  # squared error of N(0, 1), published for NF4 in blocks of 64, and what sampling moves it by


def random_weight(rows: int, columns: int) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows))


def test_values_are_quantiles_of_a_normal_distribution() -> None:
    end = 1 - (1 / 32 + 1 / 30) / 2

    def half(points: int) -> list[float]:
        return [NormalDist().inv_cdf(end + (0.5 - end) * i / points) for i in range(points)]

    derived = [-x for x in half(7)] + [0.0] + half(8)[::-1]
    expected = torch.tensor(derived, dtype=torch.float64) / max(derived)
    assert (nf4.values().double() - expected).abs().max() <= TABLE_ERROR


def test_second_level_values() -> None:
    values = nf4.dynamic_values()
    assert len(values) == len(values.unique()) == 256
    assert values.diff().min() > 0
    assert values[[0, 127, 255]].tolist() == pytest.approx([-0.99296875, 0.0, 1.0])
    assert values[values > 0].min() == pytest.approx(5.5e-7)


def test_layout_and_values() -> None:
    weight = random_weight(6, 128)
    weight[2, :64] = 0
    packed = nf4.quantize(weight, SCHEME)
    codes = packed.parts["codes"].view(6, 64)
    codes = torch.stack([codes >> 4, codes & 15], -1).view(6, 2, 64)  # the first weight is the high half
    largest = weight.view(6, 2, 64).abs().amax(-1, keepdim=True)
    scaled = torch.where(largest == 0, 0.0, weight.view(6, 2, 64) / largest)
    nearest = (scaled[..., None] - nf4.values()).abs().argmin(-1)
    assert codes.equal(nearest.to(torch.uint8))
    offset = largest.mean()
    state = json.loads(bytes(packed.parts["state"].tolist()))
    assert state["nested_offset"] == pytest.approx(float(offset))
    assert (state["shape"], state["dtype"], state["quant_type"]) == ([6, 128], "float32", "nf4")
    spread = (largest - offset).abs().max()
    restored = nf4.dynamic_values()[packed.parts["absmax"].long()].view(6, 2, 1) * spread + offset
    expected = (nf4.values()[codes.long()] * restored).view(6, 128)
    torch.testing.assert_close(packed.dequantize(), expected)
    assert packed.dequantize(rows=slice(3, 5)).equal(packed.dequantize()[3:5])


def test_error_of_a_gaussian_is_the_published_one() -> None:
    weight = random_weight(128, 2048)
    error = (nf4.quantize(weight, SCHEME).dequantize() - weight).square().mean()
    assert float(error) == pytest.approx(GAUSSIAN[0], abs=GAUSSIAN[1])


def test_magnitudes_as_they_are() -> None:
    weight, scheme = random_weight(6, 128), Scheme.parse("nf4-single")
    packed = nf4.quantize(weight, scheme)
    assert packed.parts["absmax"].equal(weight.view(-1, 64).abs().amax(1))
    assert packed.parts["codes"].equal(nf4.quantize(weight, SCHEME).parts["codes"])
    codes = packed.parts["codes"].view(6, 64)
    codes = torch.stack([codes >> 4, codes & 15], -1).view(6, 2, 64)
    expected = (nf4.values()[codes.long()] * packed.parts["absmax"].view(6, 2, 1)).view(6, 128)
    assert packed.dequantize().equal(expected)
    assert packed.dequantize(rows=slice(1, 3)).equal(expected[1:3])


def test_bits() -> None:
    constants = 16 * 4 + 256 * 4 + 256
    shape = (4096, 4096)
    assert Scheme.parse("nf4-single").bits_per_weight(shape) == 4.5 + 8 * (64 + 256) / 4096**2
    assert SCHEME.bits_per_weight(shape) == 4 + 8 / 64 + 32 / (64 * 256) + 8 * constants / 4096**2


def test_bitsandbytes_agrees() -> None:
    functional = pytest.importorskip("bitsandbytes.functional", reason="bitsandbytes is not installed")
    weight = random_weight(96, 256)
    codes, state = functional.quantize_4bit(weight, blocksize=64, compress_statistics=True, quant_type="nf4")
    ours = nf4.quantize(weight, SCHEME)
    assert functional.create_dynamic_map().equal(nf4.dynamic_values())
    assert state.code.equal(nf4.values())
    assert ours.parts["codes"].equal(codes)
    theirs = state.as_dict(packed=True)
    assert ours.parts["nested_absmax"].allclose(theirs["nested_absmax"], rtol=1e-6)
    assert (ours.parts["absmax"].int() - theirs["absmax"].int()).abs().max() <= 1  # an edge may fall either way
    torch.testing.assert_close(ours.dequantize(), functional.dequantize_4bit(codes, state), rtol=1e-2, atol=1e-3)
    stored = dict(ours.parts) | {"absmax": theirs["absmax"], "nested_absmax": theirs["nested_absmax"]}
    stored["state"] = nf4.state((96, 256), SCHEME, float(state.offset))
    read = PackedTensor(SCHEME, (96, 256), stored).dequantize()
    torch.testing.assert_close(read, functional.dequantize_4bit(codes, state), rtol=1e-6, atol=1e-7)


def test_refusals() -> None:
    with user_error("group_size_indivisible"):
        nf4.quantize(torch.ones(2, 96), SCHEME)
    weight = torch.ones(4, 64)
    weight[2, 1] = torch.nan
    with user_error("not_finite"):
        nf4.quantize(weight, SCHEME)


@pytest.mark.parametrize(
    "line, words",
    [
        (b"\xff", "quantization_invalid"),
        (b"[" * 256, "quantization_invalid"),
        (b"[]", "quantization_invalid"),
        (b'{"quant_type": "fp4"}', "quantization_unsupported"),
        (b'{"quant_type": "nf4", "blocksize": 128}', "quantization_unsupported"),
        (b'{"quant_type": "nf4", "blocksize": 64}', "quantization_unsupported"),
        (b'{"quant_type": "nf4", "blocksize": 64, "nested_blocksize": 256}', "quantization_invalid"),
    ],
)
def test_states_that_are_not_read(line: bytes, words: str) -> None:
    with user_error(words):
        nf4.read_state(torch.tensor(list(line), dtype=torch.uint8))
