"""Feedback across rows and columns against GPTQ on the Kronecker product itself: one column, of all elements."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from attar.compression.recipe.methods import Gptq
from attar.compression.solvers.rounding import gptq, rtn, two_sided
from attar.compression.solvers.rounding.gptq import Hessian, Prepared
from attar.compression.solvers.rounding.levels import Uniform
from attar.formats import affine
from attar.formats.scheme import Scheme

SAME = 1e-9  # relative, of float64 damages
LEVELS = 1e-4  # relative: the codec's scales are computed in float32, the solver's in its own dtype


def hessian(seed: int, size: int) -> Hessian:
    generator = torch.Generator().manual_seed(seed)
    found = Hessian(size, torch.float64)
    mixing = torch.eye(size) + torch.randn(size, size, generator=generator) / size**0.5
    found.add((torch.randn(4 * size, size, generator=generator) @ mixing).double())
    return found


def problem(rows: int, columns: int) -> tuple[Tensor, Prepared, Prepared]:
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return weight, gptq.prepare(hessian(1, columns), 0.02), gptq.prepare(hessian(2, rows), 0.05)


def damped(prepared: Prepared, damping: float) -> Tensor:
    return prepared.hessian + damping * prepared.hessian.diagonal().mean() * torch.eye(len(prepared.hessian))


@pytest.mark.parametrize("name", ["w4g4", "w3g8-asym", "w4-tensor"])
@pytest.mark.parametrize("tile", [3, 128])
def test_codes_are_those_of_the_kronecker_product(name: str, tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(two_sided, "TILE", tile)
    weight, inputs, outputs = problem(rows=6, columns=16)
    scheme = Scheme.parse(name)
    levels = Uniform.of(weight, scheme, "minmax")
    product = torch.kron(damped(outputs, 0.05), damped(inputs, 0.02))  # of elements, rows after rows
    order = (outputs.sweep[:, None] * 16 + inputs.sweep).flatten()
    left, inverse = weight.flatten().clone(), torch.linalg.inv(product)
    expected = torch.empty(96, dtype=torch.int8)
    for at in order.tolist():
        code, value = levels.nearest_at(torch.tensor([at // 16]), torch.tensor([at % 16]), left[at : at + 1])
        expected[at] = int(code)
        left -= (left[at] - value) / inverse[at, at] * inverse[at]
        inverse -= torch.outer(inverse[at], inverse[at]) / inverse[at, at]
    found = two_sided.solve(weight, inputs, outputs, scheme, Gptq(scale_search="minmax"))
    assert torch.equal(affine.decode(found.packed)[0].flatten(), expected)
    error = found.packed.dequantize(torch.float64) - weight
    assert found.damage == pytest.approx(float((outputs.hessian @ error @ inputs.hessian * error).sum()), rel=SAME)
    assert found.damage < found.rtn_damage < found.energy


def test_uncoupled_rows_are_gptq() -> None:
    weight, inputs, _ = problem(rows=8, columns=32)
    alone = Hessian(8, torch.float64)
    alone.mean, alone.tokens = torch.eye(8, dtype=torch.float64), 8
    found = two_sided.solve(weight, inputs, gptq.prepare(alone), Scheme.parse("w4g16"))
    plain = gptq.solve(weight, inputs, Scheme.parse("w4g16"))
    assert torch.equal(found.packed.parts["codes"], plain.packed.parts["codes"])
    assert found.error == pytest.approx(plain.error)


@pytest.mark.parametrize("name", ["w3g16", "w3g8-asym"])
def test_polish_never_raises_the_damage(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(two_sided, "TOGETHER", 4)
    weight, inputs, outputs = problem(rows=24, columns=32)
    levels = Uniform.of(weight, Scheme.parse(name), "minmax")
    codes = torch.stack([levels.nearest(k, weight[:, k])[0] for k in range(32)]).to(torch.int8)
    left = []
    for _ in range(4):
        error = levels.pack(codes).dequantize(torch.float64) - weight
        left.append(float((damped(outputs, 0.01) @ error @ damped(inputs, 0.01) * error).sum()))
        two_sided._polish(codes, levels, weight, inputs.hessian, outputs.hessian, Gptq(polish=1, output_damping=0.01))
    assert all(after <= before * (1 + SAME) for before, after in pairwise(left))
    assert left[-1] < 0.9 * left[0]


@pytest.mark.parametrize("name", ["w3g16", "w3g8-asym", "qserve-g32"])
def test_rounding_to_nearest_is_judged_on_levels_as_first_found(name: str) -> None:
    """Polish fits scales to its own codes, on which rounding to nearest would look worse than it is."""
    weight, inputs, outputs = problem(rows=24, columns=32)
    weight, scheme = weight.float(), Scheme.parse(name)
    plain = two_sided.solve(weight, inputs, outputs, scheme)
    polished = two_sided.solve(weight, inputs, outputs, scheme, Gptq(polish=4))
    assert polished.damage < plain.damage
    assert polished.rtn_damage == plain.rtn_damage
    rounded = rtn.solve(weight, scheme, scale_search="mse").dequantize(torch.float64)
    error = weight - rounded
    assert plain.rtn_damage == pytest.approx(
        float((outputs.hessian @ error @ inputs.hessian * error).sum()), rel=LEVELS
    )
