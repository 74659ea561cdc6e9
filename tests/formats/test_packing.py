"""Bit orders: golden words by hand, the definition spelt out bit by bit, and round trips."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attar.formats import packing
from attar.formats.packing import pack_awq, pack_words, unpack_awq, unpack_gptq, unpack_words
from tests.errors import user_error

BITS = range(2, 9)


def random_codes(rows: int, columns: int, bits: int, seed: int = 0) -> Tensor:
    half = 1 << (bits - 1)
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-half, half, (rows, columns), dtype=torch.int8, generator=generator)


def bit_string(codes: list[int], bits: int) -> int:
    """The definition: one long integer, element i at bit i * bits, as unsigned values."""
    return sum((code + (1 << (bits - 1))) << (i * bits) for i, code in enumerate(codes))


def test_golden_words() -> None:
    assert pack_words(torch.tensor([[-8, -7, -6, -5, -4, -3, -2, -1, 7]]), 4).tolist() == [[0x76543210, 0x0000000F]]
    # 3 bits: value 10 straddles the first two words, its lowest two bits in the first.
    codes = torch.full((1, 12), -4)
    codes[0, 10] = 3
    assert pack_words(codes, 3).tolist() == [[-(1 << 30), 1]]


@settings(deadline=None, max_examples=60)
@given(bits=st.integers(2, 8), rows=st.integers(1, 4), columns=st.integers(1, 70), seed=st.integers(0, 1000))
def test_words_are_the_bit_string(bits: int, rows: int, columns: int, seed: int) -> None:
    codes = random_codes(rows, columns, bits, seed)
    words = pack_words(codes, bits)
    assert words.shape == (rows, -(-columns * bits // 32))
    for row, stored in zip(codes.tolist(), words.tolist(), strict=True):
        assert sum((word & 0xFFFFFFFF) << (32 * i) for i, word in enumerate(stored)) == bit_string(row, bits)
    assert torch.equal(unpack_words(words, bits, columns), codes)


@pytest.mark.parametrize("bits", BITS)
def test_slices_do_not_show(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    codes = random_codes(7, 45, bits)
    whole = pack_words(codes, bits)
    monkeypatch.setattr(packing, "_SLICE", 100)
    assert torch.equal(pack_words(codes, bits), whole)
    assert torch.equal(unpack_words(whole, bits, 45), codes)
    assert torch.equal(unpack_words(whole.t().contiguous().t(), bits, 45), codes), "strided words"


def test_wrong_width_is_refused() -> None:
    with user_error("checkpoint_malformed"):
        unpack_words(torch.zeros(2, 4, dtype=torch.int32), 4, 33)


def test_codes_out_of_range_are_a_bug() -> None:
    with pytest.raises(AssertionError, match="do not fit 4 bits"):
        pack_words(torch.tensor([[8]]), 4)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_gptq_runs_down_the_input_dimension(bits: int) -> None:
    """Packed as GPTQ's authors do it: for 3 bits in runs of 32 values and 3 words, else 32/bits values a word."""
    inputs, outputs = 64, 5
    codes = random_codes(outputs, inputs, bits)
    unsigned = (codes.t().int() + (1 << (bits - 1))).tolist()  # [I][O]
    qweight = []
    run, words_a_run = (32, 3) if bits == 3 else (32 // bits, 1)
    for start in range(0, inputs, run):
        words = [[0] * outputs for _ in range(words_a_run)]
        for o in range(outputs):
            value = sum(unsigned[start + j][o] << (bits * j) for j in range(run))
            for k in range(words_a_run):
                words[k][o] = (value >> (32 * k)) & 0xFFFFFFFF
        qweight += words
    stored = torch.tensor(qweight, dtype=torch.int64).to(torch.int32)
    assert torch.equal(unpack_gptq(stored, bits), codes)


def test_gptq_three_bit_seams() -> None:
    """In a run of 3 words, value 10 has 2 bits in the first and 1 in the second; value 21 has 1 and 2."""
    qweight = torch.tensor([[0b10 << 30], [0b1 | (0b1 << 31)], [0b11]], dtype=torch.int64).to(torch.int32)
    values = (unpack_gptq(qweight, 3)[0] + 4).tolist()
    assert values[10] == 0b110
    assert values[21] == 0b111
    assert sum(values) == values[10] + values[21]


def test_awq_nibbles_are_interleaved() -> None:
    # Outputs 0..7 have the values 0..7; nibble i, from the lowest, holds output (0, 2, 4, 6, 1, 3, 5, 7)[i].
    assert unpack_awq(torch.tensor([[0x75316420]], dtype=torch.int32)).tolist() == [[o - 8 for o in range(8)]]
    codes = random_codes(3, 40, 4)
    assert pack_awq(codes).shape == (3, 5)
    assert torch.equal(unpack_awq(pack_awq(codes)), codes)
