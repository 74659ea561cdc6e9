"""SqueezeLLM: the statistic against gradients of weights, and tables that go where the loss looks."""

from __future__ import annotations

import pytest
import torch

from attar.compression.recipe.recipe_file import load_recipe
from attar.compression.solvers.rounding import rtn, squeezellm
from attar.formats.scheme import Scheme
from tests.errors import user_error

TOLERANCE = 1e-4


def test_the_statistic_is_the_sum_of_squared_gradients_of_single_tokens() -> None:
    generator = torch.Generator().manual_seed(0)
    x, target = (torch.randn(50, n, generator=generator) for n in (6, 4))
    weight = torch.randn(4, 6, generator=generator, requires_grad=True)
    wanted = torch.zeros(4, 6)
    out = (x @ weight.T).detach().requires_grad_()
    (g,) = torch.autograd.grad((out - target).square().sum(), out)
    for row, each in zip(x, target, strict=True):
        loss = (weight @ row - each).square().sum()
        wanted += torch.autograd.grad(loss, weight)[0].square()
    statistic = squeezellm.Sensitivity((4, 6))
    for part in (slice(0, 20), slice(20, 50)):
        statistic.add(x[part], g[part])
    torch.testing.assert_close(statistic.total, wanted, rtol=TOLERANCE, atol=0)


@pytest.mark.parametrize("name", ["lut4", "lut3-s45"])
def test_what_the_loss_minds_is_rounded_better(name: str) -> None:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(32, 256, generator=generator)
    minded = torch.rand(32, 256, generator=generator) ** 8
    scheme = Scheme.parse(name)
    found, plain = squeezellm.solve(weight, scheme, minded), rtn.solve(weight, scheme)
    assert squeezellm.damage(weight, found, minded) < 0.75 * squeezellm.damage(weight, plain, minded)
    again = squeezellm.solve(weight, scheme, 1000 * minded)
    assert all(torch.equal(again.parts[part], tensor) for part, tensor in found.parts.items()), "no unit"
    assert squeezellm.damage(weight, found, torch.zeros_like(minded)) == 0


@pytest.mark.parametrize("scheme", ["w4g128", "nf4", "q4_k"])
def test_only_tables_are_squeezed(scheme: str) -> None:
    recipe = load_recipe(f"squeezellm-{scheme}")
    with user_error("scheme_unsupported"):
        recipe.schemes({"a": (256, 256)})
