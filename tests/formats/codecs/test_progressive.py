"""Weights of two levels: that no number leaves int8, for all there are; the published rounding, and ours beside it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attar.formats.codecs import progressive
from attar.formats.codecs.progressive import HIGHEST, LARGEST_FACTOR, LAST, LOWEST, PROTECTED
from attar.formats.packed import PackedTensor, codec
from attar.formats.scheme import Grid, Scheme
from tests.errors import user_error

SEARCHES = ("minmax", "mse")
GAIN = 0.9  # of the published squared error, on normal numbers: what rounding once and searching leaves at most


def scheme(group: int = 32, scales: str = "float32") -> Scheme:
    return Scheme.parse(f"qserve-g{group}").with_scale_dtype(scales)


def randn(rows: int, columns: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator) * torch.rand(rows, 1, generator=generator).exp()


def back(numbers: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """int8 rounded to 4 bits between `low` and `high` and back, as published: written down a second time, in integers
    but for two divisions."""
    factor = ((high - low) / LAST).round().clamp(min=1)
    zero = (-low / factor).round().clamp(0, LAST)
    code = ((numbers / factor).round() + zero).clamp(0, LAST)
    return code * factor - zero * factor


@pytest.mark.parametrize("limit", [PROTECTED, PROTECTED + 1])
def test_the_protective_range_is_as_wide_as_it_can_be(limit: int) -> None:
    worst = 0.0
    numbers = torch.arange(-limit, limit + 1.0)
    for least in range(-limit, 1):
        high = torch.arange(0.0, limit + 1)[:, None]
        low = torch.full_like(high, least)
        inside = torch.minimum(torch.maximum(numbers, low), high)
        found = back(inside, low, high)
        assert found.min() >= LOWEST
        worst = max(worst, float(found.max()))
    assert (worst <= HIGHEST) == (limit == PROTECTED), worst


def test_every_factor_and_offset_that_is_searched_keeps_all_codes_within_int8() -> None:
    codes = torch.arange(LAST + 1)
    for factor in range(1, LARGEST_FACTOR + 1):
        for offset in range(max(0, LAST * factor - HIGHEST), -LOWEST + 1):
            assert LOWEST <= int((codes * factor - offset).min()) <= int((codes * factor - offset).max()) <= HIGHEST
            assert int((codes * factor).max()) <= 255  # four of them fit a word
    assert LAST * (LARGEST_FACTOR + 1) - HIGHEST > -LOWEST  # and the next factor has no offset


@pytest.mark.parametrize("scales", ["float32", "bfloat16"])
def test_minmax_is_what_was_published(scales: str) -> None:
    weight = randn(8, 128)
    packed = progressive.quantize(weight, scheme(32, scales))
    scale = packed.parts["scale"].float()
    assert scale.equal((weight.abs().amax(1, keepdim=True) / PROTECTED).to(getattr(torch, scales)).float())
    numbers = (weight / scale).round().clamp(-PROTECTED, PROTECTED).unflatten(1, (4, 32))
    low, high = (bound[..., None] for bound in numbers.aminmax(dim=-1))
    want = back(numbers, low.clamp(max=0), high.clamp(min=0)).flatten(1)
    assert progressive.decode(packed).float().equal(want)
    assert packed.dequantize().equal(want * scale)


def test_a_group_whose_last_code_would_overflow_does_not_get_it() -> None:
    # The published zero of these is 7, the factor 16: (15 - 7) * 16 is 128. Who moves weights may want that code.
    factor, offset = torch.tensor([[[16]], [[112]]], dtype=torch.uint8)
    assert progressive.top(factor, offset).tolist() == [[14]]
    assert progressive.round_to(torch.full((1, 32), 500.0), factor, offset).tolist() == [[14] * 32]


@pytest.mark.parametrize("group", [32, 128])
def test_rounding_once_to_searched_levels_is_nearer(group: int) -> None:
    weight = randn(32, 512)

    def wrong(search: str) -> float:
        return float((progressive.quantize(weight, scheme(group), search).dequantize() - weight).square().sum())

    assert wrong("mse") < GAIN * wrong("minmax")


@pytest.mark.parametrize("search", SEARCHES)
def test_rows_are_rounded_alone_and_read_alone(search: str) -> None:
    weight = randn(6, 96)
    weight[2] = 0
    weight[4] = weight[4].abs()
    packed = progressive.quantize(weight, scheme(), search)
    assert packed.dequantize()[2].eq(0).all()
    for row in range(6):
        alone = progressive.quantize(weight[row : row + 1], scheme(), search)
        assert alone.dequantize().equal(packed.dequantize(rows=slice(row, row + 1)))
    into = torch.empty(6, 96, dtype=torch.bfloat16)
    assert packed.dequantize(torch.bfloat16, out=into) is into
    assert into.equal(packed.dequantize().bfloat16())


def test_the_ledger_counts_both_levels() -> None:
    packed = codec("progressive").quantize(randn(16, 256), scheme(128, "float16"))
    assert {name: part.dtype for name, part in packed.parts.items()} == {
        "codes": torch.int32, "scale": torch.float16, "factor": torch.uint8, "offset": torch.uint8,
    }  # fmt: skip
    assert packed.bits_per_weight == 4 + 2 * 8 / 128 + 16 / 256
    assert scheme().activation == Grid("int", 8, True, "token")


def test_what_cannot_be_stored_is_refused() -> None:
    with user_error("group_size_indivisible"):
        progressive.quantize(randn(4, 96), scheme(128))
    with user_error("not_finite"):
        progressive.quantize(torch.full((4, 32), torch.inf), scheme())
    with user_error("not_finite"):
        progressive.quantize(torch.full((4, 32), 1e8), scheme(32, "float16"))


@pytest.mark.parametrize(("part", "value"), [("factor", 200), ("offset", 129)])
def test_numbers_of_a_damaged_file_are_refused(part: str, value: int) -> None:
    packed = progressive.quantize(randn(4, 64), scheme())
    parts = {name: tensor.clone() for name, tensor in packed.parts.items()}
    parts[part][3, 1] = value
    with user_error("checkpoint_malformed"):
        PackedTensor(packed.scheme, packed.shape, parts).dequantize()
