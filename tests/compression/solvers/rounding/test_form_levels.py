"""Levels of forms that are no grid: rounding on them is the codec's, and what a solver packs is what it meant."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attar.compression.solvers.rounding.form_levels import levels_of
from attar.compression.solvers.rounding.levels import Levels
from attar.formats.packed import codec
from attar.formats.scheme import Scheme

NAMES = ["nvfp4-weight", "mxfp4-weight", "nf4", "fp8-block-weight", "llm-int8-weight", "lut4", "lut3-s45"]
NAMES += ["lut4-s45-f32", "lut4-s45-bf16"]


def weight() -> Tensor:
    return torch.randn(24, 256, generator=torch.Generator().manual_seed(5))


def sweep(levels: Levels, target: Tensor) -> tuple[Tensor, Tensor]:
    """Every column to nearest: codes [I, O] and values [O, I]."""
    codes = torch.empty(target.shape[::-1], dtype=levels.code_dtype)
    values = torch.empty_like(target)
    for column in range(target.shape[1]):
        codes[column], values[:, column] = levels.nearest(column, target[:, column])
    return codes, values


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_nearest_is_the_codecs_rounding(name: str, dtype: torch.dtype) -> None:
    scheme, target = Scheme.parse(name), weight().to(dtype)
    levels = levels_of(target, scheme, search="minmax")
    codes, values = sweep(levels, target)
    plain = codec(scheme.weight.kind).quantize(weight(), scheme).dequantize()
    packed = levels.pack(codes)
    torch.testing.assert_close(packed.dequantize().to(dtype), values, rtol=2e-6, atol=1e-7)
    assert (values - target).square().sum() <= 1.0001 * (plain - target).square().sum()
    if name != "nf4":  # which here is rounded for the magnitudes as stored
        torch.testing.assert_close(values, plain.to(dtype), rtol=1e-3, atol=1e-7)
    whole = levels.rounded(target[3:9], slice(3, 9))
    torch.testing.assert_close(whole, values[3:9], rtol=1e-3, atol=1e-6)
    group = slice(128, 128 + min(levels.width, 128))
    torch.testing.assert_close(levels.values(group, codes[group].to(dtype)), values[:, group].T, rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("name", NAMES)
def test_another_target_than_the_first(name: str) -> None:
    """What a solver asks for differs from the weight that scales were found for."""
    scheme = Scheme.parse(name)
    levels = levels_of(weight(), scheme, importance=torch.rand(256, generator=torch.Generator().manual_seed(1)))
    codes, values = sweep(levels, weight() * 0.9 + 0.01)
    torch.testing.assert_close(levels.pack(codes).dequantize(), values, rtol=2e-6, atol=1e-7)


def test_nvfp4s_scales_are_fitted() -> None:
    """A group's scale that is off comes back, and the change that is returned is that of the values."""
    scheme, target = Scheme.parse("nvfp4-weight"), weight()
    levels = levels_of(target, scheme)
    codes, before = sweep(levels, target * 1.4)
    group, own = slice(32, 48), torch.eye(16)
    change = levels.refit(group, codes[group].float(), (before - target)[:, group].T, own)
    assert change is not None
    after = levels.pack(codes).dequantize()
    torch.testing.assert_close(after[:, group], before[:, group] + change.T, rtol=1e-5, atol=1e-6)
    assert (after - target)[:, group].square().sum() < (before - target)[:, group].square().sum()
