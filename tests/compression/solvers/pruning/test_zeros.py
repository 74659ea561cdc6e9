"""Patterns and masks against plain Python, and that zeros stay zero on every grid."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from attar.compression.recipe.pattern import LARGEST, Pattern
from attar.compression.solvers.pruning import zeros
from attar.compression.solvers.pruning.zeros import Unit
from attar.formats.packed import PackedTensor
from attar.formats.scheme import Scheme
from tests.errors import user_error

TOLERANCE = 1e-6

PATTERNS = ("s1", "s50", "s99", "1:2", "2:4", "3:4", "4:8")


@pytest.mark.parametrize("name", PATTERNS)
def test_a_pattern_keeps_its_name(name: str) -> None:
    assert Pattern.parse(name).name == name


WRONG = ("", "50", "s0", "s100", "s5.5", "s05", "0:4", "4:4", "4:2", f"2:{LARGEST + 1}", "2:4:8")


@pytest.mark.parametrize("name", WRONG)
def test_other_words_are_refused(name: str) -> None:
    with user_error("sparsity_invalid"):
        Pattern.parse(name)


def naive(score: list[list[float]], pattern: Pattern, unit: Unit) -> set[tuple[int, int]]:
    """Places of the smallest scores, the first of equal ones."""
    places = [[(i, j) for j in range(len(row))] for i, row in enumerate(score)]
    if pattern.grouped:
        sets = [row[at : at + pattern.of] for row in places for at in range(0, len(row), pattern.of)]
    else:
        sets = places if unit == "row" else [[place for row in places for place in row]]
    chosen = set()
    for each in sets:
        chosen |= set(sorted(each, key=lambda p: (score[p[0]][p[1]], p))[: len(each) * pattern.zeros // pattern.of])
    return chosen


@given(
    st.sampled_from(PATTERNS),
    st.sampled_from(["row", "matrix"]),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(0, 5),
    st.integers(0, 2**31),
)
def test_the_smallest_go_and_equal_ones_by_place(
    name: str, unit: Unit, rows: int, eights: int, levels: int, seed: int
) -> None:
    score = torch.randint(0, levels + 1, (rows, 8 * eights), generator=torch.Generator().manual_seed(seed)).float()
    pattern = Pattern.parse(name)
    found = {(int(i), int(j)) for i, j in zeros.mask(score, pattern, unit).nonzero()}
    assert found == naive(score.tolist(), pattern, unit)


def test_groups_must_divide_a_row() -> None:
    with user_error("group_size_indivisible"):
        zeros.mask(torch.ones(2, 6), Pattern.parse("2:4"))


def test_wanda_weighs_by_the_norm_of_inputs_and_compares_within_rows() -> None:
    generator = torch.Generator().manual_seed(0)
    weight, x = torch.randn(6, 16, generator=generator), torch.randn(900, 16, generator=generator)
    x *= torch.logspace(-1, 1, 16)
    found = zeros.by_wanda(weight, x.square().mean(0), Pattern.parse("s50"), None, "mse").packed
    score = weight.abs() * x.norm(dim=0)
    assert isinstance(found, Tensor)
    for row, scores in zip(found, score, strict=True):
        assert set(row.nonzero()[:, 0].tolist()) == set(scores.argsort()[8:].tolist())
    assert torch.equal(found[found != 0], weight[found != 0])


@pytest.mark.parametrize("name", ["w4g16", "w4g16-asym", "w3g32", "w8", "w8a8", "fp8"])
def test_zeros_survive_rounding(name: str) -> None:
    weight = torch.randn(8, 32, generator=torch.Generator().manual_seed(1)) + 0.7  # hardly any zero by chance
    pattern = Pattern.parse("2:4")
    found = zeros.by_magnitude(weight, pattern, Scheme.parse(name), "mse").packed
    assert isinstance(found, PackedTensor)
    gone = zeros.mask(weight.abs(), pattern)
    assert not found.dequantize()[gone].any()
    kept = found.dequantize()[~gone]
    assert float((kept - weight[~gone]).square().mean() / weight[~gone].square().mean()) < 0.05


def test_bfloat16_weights_stay_bfloat16_and_only_lose() -> None:
    weight = torch.randn(8, 32, generator=torch.Generator().manual_seed(2)).bfloat16()
    found = zeros.by_magnitude(weight, Pattern.parse("s25"), None, "mse")
    assert isinstance(found.packed, Tensor)
    assert found.packed.dtype == torch.bfloat16
    assert int((found.packed == 0).sum()) == 64
    assert torch.equal(found.packed[found.packed != 0], weight[found.packed != 0])
    lost = weight.float() - found.packed.float()
    assert found.error == pytest.approx(float(lost.square().sum() / weight.float().square().sum()), rel=TOLERANCE)
