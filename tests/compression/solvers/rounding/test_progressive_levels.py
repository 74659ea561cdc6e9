"""Levels of two-level weights in the solvers: that what they reckon with is what is stored, and what they gain."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from attar.compression.recipe.methods import Gptq
from attar.compression.solvers.rounding import gptq, rtn, two_sided
from attar.compression.solvers.rounding.progressive_levels import TwoLevel
from attar.formats.codecs import progressive
from attar.formats.codecs.progressive import HIGHEST, LARGEST_FACTOR, LAST, LOWEST, MIDDLE
from attar.formats.packed import PackedTensor
from attar.formats.scheme import Scheme
from tests.compression.conftest import Problem

SCHEME = Scheme.parse("qserve-g32")
CLOSE = 1e-5  # relative: products of float32 scales beside exact integers


def damage(packed: PackedTensor | Tensor, weight: Tensor, hessian: Tensor) -> float:
    assert isinstance(packed, PackedTensor)
    wrong = packed.dequantize(torch.float64) - weight
    return float(((wrong @ hessian) * wrong).sum())


@pytest.mark.parametrize("search", ["minmax", "mse"])
def test_values_are_those_that_are_stored(search: str) -> None:
    weight = torch.randn(12, 96, generator=torch.Generator().manual_seed(0)).double()
    levels = TwoLevel.of(weight, SCHEME, search)  # type: ignore[arg-type]
    found = [levels.nearest(column, weight[:, column]) for column in range(96)]
    codes = torch.stack([code for code, _ in found]).to(levels.code_dtype)
    values = torch.stack([value for _, value in found], 1)
    stored = levels.pack(codes).dequantize(torch.float64)
    torch.testing.assert_close(values, stored, rtol=CLOSE, atol=CLOSE)
    torch.testing.assert_close(levels.rounded(weight[2:5], slice(2, 5)), stored[2:5], rtol=CLOSE, atol=CLOSE)
    one = levels.values(slice(32, 40), codes[32:40].double())
    torch.testing.assert_close(one.T, stored[:, 32:40], rtol=CLOSE, atol=CLOSE)
    rows, columns = torch.tensor([3, 7]), torch.tensor([90, 1])
    torch.testing.assert_close(
        levels.nearest_at(rows, columns, weight[rows, columns])[1], stored[rows, columns], rtol=CLOSE, atol=CLOSE
    )


def test_refit_finds_the_best_factor_and_offset_there_are(problem: Problem) -> None:
    weight, x = problem(1, rows=5, columns=32)
    hessian = x.T @ x / len(x)
    levels = TwoLevel.of(weight, SCHEME, "minmax")
    codes = torch.stack([levels.nearest(k, weight[:, k])[0] for k in range(32)])
    before = levels.values(slice(0, 32), codes)
    error = before - weight.T
    change = levels.refit(slice(0, 32), codes, hessian @ error, hessian)
    after = levels.values(slice(0, 32), codes)
    torch.testing.assert_close(after - before, change, rtol=CLOSE, atol=CLOSE)
    units, row = codes + MIDDLE, levels.row.double()[:, 0]
    for r in range(5):
        least = torch.inf
        for factor, offset in itertools.product(range(1, LARGEST_FACTOR + 1), range(-LOWEST + 1)):
            if LAST * factor - offset <= HIGHEST:
                wrong = row[r] * (units[:, r] * factor - offset) - weight[r]
                least = min(least, float(wrong @ hessian @ wrong))
        wrong = after[:, r] - weight[r]
        assert float(wrong @ hessian @ wrong) <= min(least * (1 + CLOSE), float(error[:, r] @ hessian @ error[:, r]))


def test_solvers_gain_on_the_published_rounding(problem: Problem) -> None:
    weight, x = problem(2, rows=24, columns=96, tokens=512)
    seen = gptq.Hessian(96, torch.float64)
    seen.add(x)
    prepared = gptq.prepare(seen)
    hessian = seen.mean
    published = damage(rtn.solve(weight, SCHEME), weight, hessian)
    searched = damage(rtn.solve(weight, SCHEME, scale_search="mse"), weight, hessian)
    plain = gptq.solve(weight, prepared, SCHEME)
    polished = gptq.solve(weight, prepared, SCHEME, Gptq(polish=3))
    for each in (plain, polished):
        assert each.damage == pytest.approx(damage(each.packed, weight, hessian), rel=1e-3)
    assert polished.damage < plain.damage < searched < published


def test_rows_can_make_up_for_one_another(problem: Problem) -> None:
    weight, x = problem(3, rows=32, columns=64, tokens=512)
    inputs, outputs = gptq.Hessian(64, torch.float64), gptq.Hessian(32, torch.float64)
    inputs.add(x)
    outputs.add(problem(4, rows=1, columns=32, tokens=512)[1])
    solve = (gptq.prepare(inputs), gptq.prepare(outputs, 0.1))
    found = two_sided.solve(weight, *solve, SCHEME, Gptq(polish=2))
    assert isinstance(found.packed, PackedTensor)
    progressive.decode(found.packed)  # all of it int8
    assert found.damage < two_sided.solve(weight, *solve, SCHEME).damage < found.rtn_damage


def test_parts_of_levels_are_the_levels_themselves() -> None:
    weight = torch.randn(8, 32, generator=torch.Generator().manual_seed(5))
    levels = TwoLevel.of(weight, SCHEME, "mse")
    part = levels.part(slice(1, None, 2))
    kept = part.copy()
    part.factor += 1
    part.scale *= 2
    assert levels.factor[1::2].equal(kept[0] + 1)
    part.restore(kept)
    assert levels.scale.equal(levels.row.float() * levels.factor)
