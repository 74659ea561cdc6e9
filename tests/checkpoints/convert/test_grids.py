"""Values on grids of integers and in GGML's blocks, with the gguf package and compressed-tensors as oracles."""

from __future__ import annotations

from dataclasses import replace

import gguf as oracle
import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from compressed_tensors.compressors import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from torch import Tensor

from attar.checkpoints.convert.gguf import MULTIPLES, blocks, kinds_for
from attar.checkpoints.convert.grids import GGML, as_half, as_scheme, blocks_of_fp4, fp4_of_blocks, grid_of, integers
from attar.checkpoints.convert.source import Stored
from attar.formats import affine
from attar.formats.codecs import ggml_blocks, sparse24
from attar.formats.codecs.ggml import TYPES, GgmlType
from attar.formats.codecs.ggml_blocks import Blocks
from attar.formats.packed import PackedTensor, codec
from attar.formats.scheme import Scheme
from attar.formats.weight_formats import GgmlBlocks
from tests.errors import user_error

WITHOUT_OFFSETS = [name for name, scheme in GGML.items() if scheme.grid.symmetric]
WITH_OFFSETS = [name for name, scheme in GGML.items() if not scheme.grid.symmetric]
ROWS = 3

seeds = st.integers(0, 2**32 - 1)
few = hypothesis.settings(max_examples=25, deadline=None)


def same(ours: Tensor, theirs: Tensor) -> bool:
    """To the bit: 0 and -0 differ."""
    return torch.equal(ours.contiguous().view(torch.int32), theirs.contiguous().view(torch.int32))


def dequantized(kind: GgmlType, raw: Tensor) -> Tensor:
    return torch.from_numpy(oracle.dequantize(raw.numpy(), oracle.GGMLQuantizationType[kind.name]))


def of_blocks(kind: GgmlType, raw: Tensor) -> PackedTensor:
    columns = raw.shape[1] // kind.block_bytes * kind.elements
    return PackedTensor(Scheme(GgmlBlocks(kind), layout="plain"), (len(raw), columns), {"blocks": raw})


def random_blocks(kind: GgmlType, seed: int, count: int = 4) -> Tensor:
    """Any bytes, scales of floats finite: among them negative, subnormal and zero ones, and groups scaled by zero."""
    random = np.random.default_rng(seed)
    raw = random.integers(0, 256, (ROWS * count, kind.block_bytes), dtype=np.uint8)
    at = 0
    for name, size in kind.fields:
        some = raw[:, at : at + size]
        if name == "scales":
            some[random.random(some.shape) < 0.1] = 0
        if name in ("d", "m") and kind.name in ("MXFP4", "NVFP4"):
            some[some == 0xFF] = 1
        elif name in ("d", "m"):
            some[:, 1] &= 0xBF  # an exponent that is not all ones
            some[random.random(len(some)) < 0.1] = 0
        at += size
    return torch.from_numpy(raw).view(ROWS, -1)


@pytest.mark.parametrize("name", WITHOUT_OFFSETS)
@few
@hypothesis.given(seed=seeds)
def test_any_block_without_offsets_is_on_its_grid(name: str, seed: int) -> None:
    kind = TYPES[name]
    raw = random_blocks(kind, seed)
    packed = integers(of_blocks(kind, raw))
    assert packed.scheme == GGML[name] == grid_of(Scheme(GgmlBlocks(kind), layout="plain"))
    assert same(packed.dequantize(), dequantized(kind, raw))


@pytest.mark.parametrize("name", [name for name in WITHOUT_OFFSETS if "FP4" not in name])
@few
@hypothesis.given(seed=seeds)
def test_and_comes_back_from_there(name: str, seed: int) -> None:
    """IQ4_NL as Q8_0, whose grid has its codes; the others as what they were, though maybe in other bytes."""
    kind = TYPES[name]
    raw = random_blocks(kind, seed)
    packed = integers(of_blocks(kind, raw))
    kinds = kinds_for(Stored(packed.scheme, packed.shape))
    wanted = TYPES["Q8_0" if name == "IQ4_NL" else name]
    assert wanted in kinds
    assert same(dequantized(wanted, blocks(packed, wanted)), dequantized(kind, raw))


@few
@hypothesis.given(seed=seeds, name=st.sampled_from(WITH_OFFSETS))
def test_offsets_that_are_zero_points_are_found(seed: int, name: str) -> None:
    """Of negative scales and of none too."""
    kind, random = TYPES[name], torch.Generator().manual_seed(seed)
    bits = GGML[name].grid.bits

    def drawn(high: int, *shape: int) -> Tensor:
        return torch.randint(0, high, shape, generator=random)

    groups = kind.elements // (GGML[name].grid.group_size or 0)
    codes = drawn(1 << bits, 12, kind.elements).to(torch.int16)
    d = (drawn(2048, 12, 1) - 1024).half() / 4096
    if groups == 1:
        times = drawn(1 << bits, 12, 1)
        d = d.float().abs().log2().floor().clamp(min=-9).exp2().half() * (1 - 2 * drawn(2, 12, 1))
        found = Blocks(codes, d.half(), (-d.float() * times).half())
    else:
        scales, most = drawn(4, 12, groups).to(torch.int16), 16 if name == "Q2_K" else 64
        mins = scales * drawn(min(1 << bits, (most - 1) // 3 + 1), 12, groups).to(torch.int16)
        found = Blocks(codes, d, d, scales, mins)
    raw = ggml_blocks.pack(kind, found).view(ROWS, -1)
    packed = integers(of_blocks(kind, raw))
    assert packed.scheme == GGML[name]
    assert same(packed.dequantize(), dequantized(kind, raw))
    assert not affine.decode(packed)[1].signbit().any()


@pytest.mark.parametrize("name", WITH_OFFSETS)
def test_other_offsets_are_refused(name: str) -> None:
    kind = TYPES[name]
    with user_error("conversion_inexact"):
        integers(of_blocks(kind, random_blocks(kind, 0)))


def test_a_constant_block_needs_no_scale() -> None:
    """Whose scale is zero: the offset is one."""
    kind = TYPES["Q4_1"]
    codes = torch.arange(16, dtype=torch.int16).repeat(2, 2)
    found = Blocks(codes, torch.zeros(2, 1).half(), torch.tensor([[0.3], [-0.7]]).half())
    raw = ggml_blocks.pack(kind, found)
    assert same(integers(of_blocks(kind, raw)).dequantize(), dequantized(kind, raw))


@pytest.mark.parametrize("name", ["MXFP4", "NVFP4"])
@few
@hypothesis.given(seed=seeds)
def test_four_bit_floats_there_and_back(name: str, seed: int) -> None:
    kind = TYPES[name]
    raw = random_blocks(kind, seed)
    packed = fp4_of_blocks(kind, raw)
    assert packed.scheme == Scheme.parse(f"{name.lower()}-weight")
    assert same(packed.dequantize(), dequantized(kind, raw))
    back = blocks_of_fp4(packed)
    assert same(dequantized(kind, back), dequantized(kind, raw))
    assert name == "NVFP4" or torch.equal(back, raw)  # which has several spellings of a scale


@few
@hypothesis.given(seed=seeds, recipe=st.sampled_from(["mxfp4", "nvfp4"]))
def test_four_bit_floats_are_integers_of_five_bits(seed: int, recipe: str) -> None:
    scheme = Scheme.parse(f"{recipe}-weight")
    weight = torch.randn(4, 64, generator=torch.Generator().manual_seed(seed))
    packed = codec("fp4").quantize(weight, scheme)
    assert same(integers(packed).dequantize(), packed.dequantize())
    if recipe == "mxfp4":
        assert same(dequantized(TYPES["MXFP4"], blocks(packed, TYPES["MXFP4"])), packed.dequantize())
    else:
        with user_error("conversion_inexact"):
            blocks(packed, TYPES["NVFP4"])
        half = PackedTensor(scheme, packed.shape, {**packed.parts, "global": torch.tensor([2.0])})
        assert same(dequantized(TYPES["NVFP4"], blocks(half, TYPES["NVFP4"])), half.dequantize())


def test_scales_that_are_numbers_in_ggml_alone_are_refused() -> None:
    for name, byte, number in (("MXFP4", 0, "2^128"), ("NVFP4", 2, "480")):
        raw = random_blocks(TYPES[name], 0)
        raw[1, byte] = 0xFF
        with user_error("conversion_inexact", number):
            fp4_of_blocks(TYPES[name], raw)
    packed = codec("fp4").quantize(torch.randn(2, 32), Scheme.parse("mxfp4-weight"))
    packed.parts["scale"][0, 0] = 0xFF
    with user_error("conversion_inexact"):
        blocks(packed, TYPES["MXFP4"])


@pytest.mark.parametrize("name", ["Q3_K", "Q6_K"])
def test_compressed_tensors_multiplies_by_scales_that_are_zero_and_negative(name: str) -> None:
    """Its own decompressor, bit for bit."""
    kind = TYPES[name]
    raw = random_blocks(kind, 5)
    packed = integers(of_blocks(kind, raw))
    scale = packed.parts["scale"]
    assert (scale < 0).any()
    assert (scale == 0).any()
    grid = packed.scheme.grid
    args = QuantizationArgs(num_bits=grid.bits, symmetric=True, strategy="group", group_size=grid.group_size)
    stored = {
        "weight_packed": packed.parts["codes"], "weight_scale": scale, "weight_shape": packed.parts["shape"]
    }  # fmt: skip
    theirs = PackedQuantizationCompressor.decompress(stored, QuantizationScheme(targets=["Linear"], weights=args))
    assert same(theirs["weight"].float(), dequantized(kind, raw))


@few
@hypothesis.given(
    seed=seeds, bits=st.integers(2, 7), group=st.sampled_from([32, 64, 128, None]), asymmetric=st.booleans()
)
def test_a_grid_is_part_of_others(seed: int, bits: int, group: int | None, asymmetric: bool) -> None:
    """Of more bits, of shorter groups, with zero points in the middle, and of one bit more without any."""
    scheme = Scheme.parse(f"w{bits}{f'g{group}' if group else ''}{'-asym' if asymmetric else ''}")
    weight = torch.randn(5, 128, generator=torch.Generator().manual_seed(seed)).half().float()
    packed = affine.quantize(weight, scheme.with_scale_dtype("float16"))
    for other in (f"w{bits + 1}g32", f"w{bits + 1}g16-asym", "w8g32"):
        wider = as_scheme(packed, Scheme.parse(other).with_scale_dtype("float16"))
        assert same(wider.dequantize(), packed.dequantize())


def test_negative_scales_with_zero_points_need_no_offset() -> None:
    """Whose zeros are -0, which a sum does not make."""
    packed = affine.quantize(torch.randn(4, 64), Scheme.parse("w4g32-asym").with_scale_dtype("float16"))
    codes, scale, zero = affine.decode(packed)
    assert zero is not None
    turned = affine.encode(codes, -scale.float().log2().round().exp2().half(), zero, packed.scheme, packed.shape)
    with user_error("conversion_inexact"):
        blocks(turned, TYPES["Q4_1"])
    assert same(dequantized(TYPES["Q5_0"], blocks(turned, TYPES["Q5_0"])), turned.dequantize())


def test_one_scale_for_a_tensor_is_one_a_row() -> None:
    packed = affine.quantize(torch.randn(4, 64), Scheme.parse("w4-tensor"))
    assert same(as_scheme(packed, Scheme.parse("w4")).dequantize(), packed.dequantize())


@pytest.mark.parametrize("scheme", ["qserve-g32", "qserve-g32-weight", "llm-int8-weight"])
def test_rows_of_int8_in_other_words(scheme: str) -> None:
    known = Scheme.parse(scheme)
    packed = codec(known.weight.kind).quantize(torch.randn(8, 64), known)
    found = integers(packed)
    assert found.scheme.name == ("w8a8" if scheme == "qserve-g32" else "w8")
    assert same(found.dequantize(), packed.dequantize())


@pytest.mark.parametrize("scheme", ["sparse24-w4g32", "sparse24-w3g16-asym", "sparse24-w4"])
def test_zeros_that_were_left_out_are_codes_of_zero(scheme: str) -> None:
    weight = torch.randn(6, 64)
    weight.view(6, -1, 4)[..., torch.tensor([1, 2])] = 0
    packed = sparse24.quantize(weight, Scheme.parse(scheme))
    found = integers(packed)
    assert found.scheme.grid.group_size in (None, 64, 32)
    assert same(found.dequantize(), packed.dequantize())


@pytest.mark.parametrize("scheme", ["nf4", "lut4", "fp8-weight", "fp8-block-weight", "sparse24", "mxfp4"])
def test_what_is_on_no_grid(scheme: str) -> None:
    assert grid_of(Scheme.parse(scheme)) is None


def test_which_types_may_hold_a_grid() -> None:
    def names(scheme: str, dtype: str = "float16", columns: int = 256) -> list[str] | str:
        found = kinds_for(Stored(Scheme.parse(scheme).with_scale_dtype(dtype), (8, columns)))
        return found if isinstance(found, str) else [kind.name for kind in found]

    assert names("w2g128") == names("w3") == names("w4g32") == ["Q4_0"]
    assert names("w5g128") == ["Q5_0"]
    assert names("w6g64") == names("w7-tensor") == ["Q8_0"]
    assert names("w4g64-asym") == ["Q4_1", "Q5_0"]
    assert names("w5-asym") == ["Q5_1", "Q8_0"]
    assert names("w8-asym") == names("w7g32-asym") == ["Q8_0"]
    assert names("w6g16") == names("w5g16-asym") == ["Q6_K"]
    assert names("w4g128", "float32") == ["Q4_0", "Q6_K"]
    assert names("w8g32", "float32") == ["Q8_0", "IQ4_XS"]
    assert "these take 8, with a scale for 16 of 256 columns" in names("w8g16")
    assert "these take 4, with a scale for 16 of 64 columns" in names("w4g16", columns=64)
    assert "these take 4, with a scale for 8 of 256 columns" in names("w4g8")
    assert names("nvfp4-weight", columns=48) == "GGML has NVFP4 in blocks of 64, which do not divide 48"
    assert names("w8a8") == "attar writes GGUF files whose activations are not rounded, and those of w8a8 are"
    assert names("nf4") == "GGML's quantized types hold integers, 4-bit floats and tables of its own, not nf4"


@pytest.mark.parametrize("name", MULTIPLES)
def test_scales_that_are_multiples_of_no_half_are_refused(name: str) -> None:
    bits, group = {"Q3_K": (3, 16), "Q6_K": (6, 16), "IQ4_XS": (4, 32)}[name]
    scheme = Scheme.parse(f"w{bits}g{group}")
    packed = affine.quantize(torch.randn(4, 512), scheme)
    codes, scale, _ = affine.decode(packed)
    if name == "IQ4_XS":
        codes = torch.ones_like(codes)  # which its table has
        with user_error("conversion_inexact"):
            blocks(packed, TYPES[name])
    with user_error("conversion_inexact"):
        blocks(affine.encode(codes, scale, None, replace(scheme), packed.shape), TYPES[name])


def test_numbers_that_do_not_fit_are_refused() -> None:
    with user_error("conversion_inexact"):
        as_half(torch.tensor([1e-30], dtype=torch.bfloat16))
    packed = affine.quantize(torch.randn(4, 64) * 1e-20, Scheme.parse("w4g32"))
    with user_error("conversion_inexact"):
        blocks(packed, TYPES["Q4_0"])
    packed = affine.quantize(torch.rand(4, 64), Scheme.parse("w8-asym").with_scale_dtype("float16"))
    with user_error("conversion_inexact"):
        blocks(packed, TYPES["Q8_0"])
