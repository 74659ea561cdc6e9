"""Products in bfloat16 on tiles: how far they are from exact ones, and where they are used."""

from __future__ import annotations

import pytest
import torch

from attar import env
from attar.kernels import ops, tiles
from attar.kernels.native import extension
from attar.kernels.operands import Linear

ROUNDING = 2.0**-8  # of a product of two factors, each within half a unit of 8 bits


def test_only_processors_with_tiles_round(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not tiles.faster("cuda")
    monkeypatch.setattr(env, "get", lambda: env.read({"ATTAR_KERNELS": "ref"}))
    assert not tiles.faster()


@pytest.mark.parametrize("level", ["avx2", "amx"])
def test_a_lower_level_rounds_nothing(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extension, "cpu_level", lambda: level)
    assert tiles.faster() == (level == "amx")


def test_products_of_a_linear_in_bfloat16() -> None:
    generator = torch.Generator().manual_seed(0)
    x, bias = torch.randn(40, 96, generator=generator), torch.randn(24, generator=generator)
    weight = torch.randn(24, 96, generator=generator).bfloat16()
    exact = ops.linear(x, (Linear("exact", weight, bias),))
    found = ops.linear(x, (Linear("rounded", weight, bias, product_dtype=torch.bfloat16),))
    bound = 2 * ROUNDING * (x.abs() @ weight.float().abs().T)
    assert found.dtype == torch.float32
    assert ((found - exact).abs() <= bound).all()
    assert not torch.equal(found, exact)
