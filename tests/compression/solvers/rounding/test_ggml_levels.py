"""Levels of GGML blocks: what a solver means by a code is what a reader of the blocks makes of it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attar.compression.recipe.methods import Gptq
from attar.compression.solvers.rounding import gptq, two_sided
from attar.compression.solvers.rounding.ggml_levels import Ggml
from attar.compression.solvers.rounding.gptq import Hessian
from attar.formats.packed import codec
from attar.formats.scheme import Scheme

NAMES = ["q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq4_nl", "iq4_xs"]


def problem() -> tuple[Tensor, Hessian]:
    generator = torch.Generator().manual_seed(5)
    found = Hessian(512)
    found.add(torch.randn(900, 512, generator=generator) @ (torch.eye(512) + torch.randn(512, 512) / 30))
    return torch.randn(12, 512, generator=generator), found


@pytest.mark.parametrize("name", NAMES)
def test_codes_mean_what_a_reader_reads(name: str) -> None:
    weight, _ = problem()
    scheme = Scheme.parse(name)
    levels = Ggml(weight, scheme, torch.rand(512, generator=torch.Generator().manual_seed(1)))
    codes, values = zip(*(levels.nearest(k, 0.9 * weight[:, k]) for k in range(512)), strict=True)
    stored = torch.stack(codes).to(levels.code_dtype)
    assert torch.equal(levels.pack(stored).dequantize(), torch.stack(values, 1))
    group = slice(256, 256 + levels.width)
    assert torch.equal(levels.values(group, stored[group].float()), torch.stack(values)[group])
    rows, columns = torch.tensor([3, 7]), torch.tensor([300, 17])
    for part, at in ((0, rows), (1, rows - 3)):
        of = levels if part == 0 else levels.part(slice(3, None))
        code, value = of.nearest_at(at, columns, 0.9 * weight[rows, columns])
        assert torch.equal(code, stored[columns, rows].float())
        assert torch.equal(value, torch.stack(values)[columns, rows])


@pytest.mark.parametrize("name", NAMES)
def test_gptq_costs_less_than_the_encoder(name: str) -> None:
    """On the encoder's own scales, by the outputs' error; what is stored is what was meant."""
    weight, hessian = problem()
    scheme = Scheme.parse(name)
    prepared = gptq.prepare(hessian)
    found = gptq.solve(weight, prepared, scheme, Gptq(polish=1))
    plain = codec("ggml").quantize(weight, scheme).dequantize()
    assert found.damage < found.rtn_damage
    assert found.damage < gptq._damage(plain - weight, hessian.mean)
    assert found.damage == pytest.approx(gptq._damage(found.packed.dequantize() - weight, hessian.mean), rel=1e-3)


def test_feedback_across_rows_too() -> None:
    weight, hessian = problem()
    rows = Hessian(12)
    rows.add(torch.randn(40, 12, generator=torch.Generator().manual_seed(2)))
    found = two_sided.solve(weight, gptq.prepare(hessian), gptq.prepare(rows), Scheme.parse("q4_k"), Gptq(polish=1))
    assert found.damage < found.rtn_damage
