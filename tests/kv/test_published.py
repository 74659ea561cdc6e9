"""Formats as published: their bits by hand, and that nothing but a measurement takes them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attar.kv.kvquant_published import token_ranges
from attar.kv.published import PUBLISHED, PublishedFormat, outliers_of_a_side
from attar.kv.schemes import check_name, scheme
from tests.errors import user_error

PAPER = {4: 4.33, 3: 3.33, 2: 2.33}  # bits that Hooper et al. give, with 1 % outliers
ROUNDED = 0.01  # of those


def test_bits_of_kivi() -> None:
    """A scale and a zero of 16 bits in each 32; 64 keys and 128 values of 4,096 tokens in 16 bits."""
    for bits in (2, 4):
        rounded = bits + 1
        by_hand = rounded + (16 - rounded) * (64 + 128) / 2 / 4096
        assert PUBLISHED[f"kivi{bits}-published"].bits_per_value(2, 64, 4096) == pytest.approx(by_hand)
    assert PUBLISHED["kivi2-published"].bits_per_value(2, 64, 50) == 16


@pytest.mark.parametrize("bits", PAPER)
def test_bits_of_kvquant_are_those_of_the_paper(bits: int) -> None:
    """The heads of Llama 7B."""
    form = PUBLISHED[f"nuq{bits}-published"]
    assert form.bits_per_value(32, 128, 1 << 20) == pytest.approx(PAPER[bits], abs=ROUNDED)
    assert form.bits_per_value(32, 128, 4096, 0.05) > form.bits_per_value(32, 128, 4096) + 0.5
    assert form.model_bytes(32, 128) == 2 * (2 * 4096 + 2 * 2**bits)
    assert PUBLISHED["kivi4-published"].model_bytes(32, 128) == 0


@given(st.integers(2, 3000))
def test_so_many_values_of_a_token_are_outliers(width: int) -> None:
    apart, _, _ = token_ranges(torch.randperm(width, generator=torch.Generator().manual_seed(width)).float()[None])
    assert int(apart.sum()) == 2 * outliers_of_a_side(width)


@pytest.mark.parametrize("name", PUBLISHED)
def test_no_engine_keeps_them(name: str) -> None:
    with user_error("kv_unsupported"):
        check_name(name)
    with user_error("kv_unsupported"):
        scheme(name)


def test_heads_that_no_group_divides() -> None:
    with user_error("kv_unsupported"):
        PublishedFormat("KIVI", "kivi", 2, 64).check(96)
    PUBLISHED["nuq2-published"].check(96)
