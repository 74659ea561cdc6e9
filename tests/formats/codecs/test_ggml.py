"""GGML's types, their bytes and their values, with the gguf package as oracle."""

from __future__ import annotations

import subprocess
import sys

import gguf as oracle
import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from attar.formats.codecs import ggml_blocks, ggml_round
from attar.formats.codecs.ggml import BY_ID, DECODED, TYPES, GgmlType
from tests.errors import user_error

CODED = [kind for kind in DECODED if "codes" in dict(kind.fields) and kind.name not in ("MXFP4", "NVFP4")]
ROUNDED = ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"]
OF_PROGRAMS = {"Q8_1", "Q8_K"}  # no file holds them
HALF_SPECIALS = (0x0000, 0x8000, 0x0001, 0x83FF, 0x0400, 0x7BFF, 0xFBFF, 0x7C00, 0xFC00, 0x7C01, 0x7E00, 0xFFFF, 0x3C00)


def same(ours: NDArray[np.float32], theirs: NDArray[np.float32]) -> bool:
    """Equal to the bit, but for which NaN a NaN is."""
    return bool(((ours.view(np.uint32) == theirs.view(np.uint32)) | (np.isnan(ours) & np.isnan(theirs))).all())


def dequantized(kind: GgmlType, raw: NDArray[np.uint8]) -> NDArray[np.float32]:
    with np.errstate(all="ignore"):
        return oracle.dequantize(raw, oracle.GGMLQuantizationType[kind.name])


def test_the_table_is_that_of_the_oracle() -> None:
    for number, (elements, size) in oracle.GGML_QUANT_SIZES.items():
        if number.name not in OF_PROGRAMS:
            kind = TYPES[number.name]
            assert (kind.id, kind.elements, kind.block_bytes) == (number.value, elements, size)
            assert BY_ID[number.value] is kind
    assert len(TYPES) == len(oracle.GGML_QUANT_SIZES) - len(OF_PROGRAMS)


def test_bits_per_weight() -> None:
    expected = {
        "Q4_0": 4.5, "Q4_1": 5.0, "Q5_0": 5.5, "Q5_1": 6.0, "Q8_0": 8.5, "Q2_K": 2.625, "Q3_K": 3.4375, "Q4_K": 4.5,
        "Q5_K": 5.5, "Q6_K": 6.5625, "IQ4_NL": 4.5, "IQ4_XS": 4.25, "MXFP4": 4.25, "NVFP4": 4.5, "BF16": 16.0,
    }  # fmt: skip
    assert {name: TYPES[name].bits_per_weight for name in expected} == expected


def test_sizes_are_whole_blocks_of_rows() -> None:
    assert TYPES["Q4_K"].bytes((3, 512)) == 3 * 2 * 144
    assert TYPES["F16"].bytes((5,)) == 10
    with user_error("group_size_indivisible"):
        TYPES["Q4_K"].bytes((3, 288))


@pytest.mark.parametrize("kind", DECODED, ids=lambda kind: kind.name)
@hypothesis.settings(max_examples=20, deadline=None)
@hypothesis.given(seed=st.integers(0, 2**32 - 1))
def test_any_bytes_decode_as_the_oracle_says(kind: GgmlType, seed: int) -> None:
    """Random bytes: one block in 32 has a scale that is infinite or NaN, as many a subnormal one."""
    blocks = 32 if kind.elements > 1 else 1024
    raw = np.random.default_rng(seed).integers(0, 256, (3, blocks * kind.block_bytes), dtype=np.uint8)
    assert same(ggml_blocks.decode(kind, torch.from_numpy(raw)).numpy(), dequantized(kind, raw))


@pytest.mark.parametrize("kind", CODED, ids=lambda kind: kind.name)
def test_every_special_scale_decodes_as_the_oracle_says(kind: GgmlType) -> None:
    count = len(HALF_SPECIALS)
    raw = np.random.default_rng(0).integers(0, 256, (count * count, kind.block_bytes), dtype=np.uint8)
    at = 0
    for name, size in kind.fields:
        if name in ("d", "m"):
            pattern = np.array(HALF_SPECIALS, dtype="<u2")
            pattern = np.repeat(pattern, count) if name == "d" else np.tile(pattern, count)
            raw[:, at : at + 2] = pattern.view(np.uint8).reshape(-1, 2)
        at += size
    assert same(ggml_blocks.decode(kind, torch.from_numpy(raw)).numpy(), dequantized(kind, raw))


@pytest.mark.parametrize("name", ["F16", "BF16"])
def test_all_16_bit_numbers_decode_as_the_oracle_says(name: str) -> None:
    raw = np.arange(1 << 16, dtype=np.uint16).view(np.uint8)[None]
    assert same(ggml_blocks.decode(TYPES[name], torch.from_numpy(raw)).numpy(), dequantized(TYPES[name], raw))


@pytest.mark.parametrize("kind", CODED, ids=lambda kind: kind.name)
def test_packing_undoes_unpacking(kind: GgmlType) -> None:
    raw = torch.randint(0, 256, (300, kind.block_bytes), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    assert torch.equal(ggml_blocks.pack(kind, ggml_blocks.unpack(kind, raw)), raw)


def test_decoding_keeps_leading_dimensions_and_fills_what_is_given() -> None:
    kind, generator = TYPES["Q5_0"], torch.Generator().manual_seed(2)
    raw = torch.randint(0, 120, (2, 3, 2 * kind.block_bytes), generator=generator, dtype=torch.uint8)
    values = ggml_blocks.decode(kind, raw)
    assert values.shape == (2, 3, 64)
    assert torch.equal(ggml_blocks.decode(kind, raw[1, 2]), values[1, 2])
    out = torch.empty(2, 3, 64, dtype=torch.bfloat16)
    assert ggml_blocks.decode(kind, raw, torch.bfloat16, out) is out
    assert torch.equal(out, values.bfloat16())


def test_what_cannot_be_decoded_says_so() -> None:
    with user_error("quantization_unsupported"):
        ggml_blocks.decode(TYPES["IQ2_XXS"], torch.zeros(66, dtype=torch.uint8))
    with pytest.raises(ValueError, match=r"\[17\] bytes are not rows of Q4_0's blocks of 18 bytes"):
        ggml_blocks.decode(TYPES["Q4_0"], torch.zeros(17, dtype=torch.uint8))


def weights() -> dict[str, NDArray[np.float32]]:
    rng = np.random.default_rng(3)
    normal = rng.standard_normal((16, 512)).astype(np.float32)
    return {
        "normal": normal,
        "bfloat16": torch.from_numpy(normal).bfloat16().float().numpy(),
        "ties": (rng.integers(-20, 21, (16, 512)) / 8).astype(np.float32),
        "zeros": np.concatenate([np.zeros((2, 512)), -np.zeros((2, 512))]).astype(np.float32),
        "constant": np.full((2, 512), -3.3, np.float32),
        "every magnitude": (normal * np.exp2(rng.integers(-60, 13, (16, 1)))).astype(np.float32),
    }


@pytest.mark.parametrize("name", ROUNDED)
@pytest.mark.parametrize("case", weights())
def test_rounding_gives_the_bytes_of_the_oracle(name: str, case: str) -> None:
    x = weights()[case]
    expected = oracle.quantize(x, oracle.GGMLQuantizationType[name]).view(np.uint8).reshape(len(x), -1)
    assert np.array_equal(ggml_round.encode(TYPES[name], torch.from_numpy(x)).numpy(), expected)


@hypothesis.settings(max_examples=50, deadline=None)
@hypothesis.given(seed=st.integers(0, 2**32 - 1), name=st.sampled_from(["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"]))
def test_rounding_any_floats_gives_the_bytes_of_the_oracle(seed: int, name: str) -> None:
    """Floats of any bits whose scale fits fp16 and is not so small that its inverse overflows."""
    bits = np.random.default_rng(seed).integers(0, 2**32, (64, 32), dtype=np.uint64).astype(np.uint32)
    exponents = np.uint32(np.random.default_rng(seed + 1).integers(20, 140))
    x = ((bits & 0x807FFFFF) | ((bits >> 23) % 2 + exponents) << 23).astype(np.uint32).view(np.float32)
    expected = oracle.quantize(x, oracle.GGMLQuantizationType[name])
    assert np.array_equal(ggml_round.encode(TYPES[name], torch.from_numpy(x)).numpy(), expected)


def test_bf16_of_any_bits_is_that_of_the_oracle() -> None:
    x = np.random.default_rng(4).integers(0, 2**32, (64, 1024), dtype=np.uint64).astype(np.uint32).view(np.float32)
    expected = oracle.quantize(x, oracle.GGMLQuantizationType.BF16).view(np.uint8)
    assert np.array_equal(ggml_round.encode(TYPES["BF16"], torch.from_numpy(x)).numpy(), expected)


@pytest.mark.parametrize("name", [name for name in ROUNDED if name not in ("F32", "BF16")])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e38])
def test_what_no_scale_can_hold_is_refused(name: str, value: float) -> None:
    x = torch.zeros(2, 32)
    x[1, 7] = value
    with user_error("not_finite"):
        ggml_round.encode(TYPES[name], x)


def test_values_too_small_for_a_scale_become_zero() -> None:
    x = torch.full((1, 32), 1e-45)
    for name in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"):
        raw = ggml_round.encode(TYPES[name], x)
        assert ggml_blocks.decode(TYPES[name], raw).count_nonzero() == 0


def test_types_without_a_recipe_are_refused() -> None:
    with user_error("scheme_unsupported"):
        ggml_round.encode(TYPES["Q4_K"], torch.zeros(1, 256))
    with user_error("group_size_indivisible"):
        ggml_round.encode(TYPES["Q8_0"], torch.zeros(2, 48))


def test_the_table_needs_no_torch() -> None:
    code = "import sys; from attar.formats.codecs.ggml import TYPES; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
