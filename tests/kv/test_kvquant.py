"""KVQuant's scheme: its codes by their definition, what stands apart, and a cache of them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from attar.kernels import ref_attention
from attar.kernels.operands import AttentionForm
from attar.kv import kvquant
from attar.kv.kvquant import Channels
from attar.kv.pages import AttentionMetadata, Bases, PagedKV
from attar.kv.schemes import scheme
from tests.errors import user_error

HEADS, SIZE, BLOCK = 2, 32, 32
BFLOAT16 = 2**-8
ROUNDING = 1e-3  # of outputs, relative: sums in another order, and 16-bit numbers


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def channels(bits: int, scaled: bool, seed: int = 0) -> Channels:
    levels = randn(1 << bits, seed=seed).sort().values * 1.2
    mean, spread = randn(HEADS, SIZE, seed=seed + 1), randn(HEADS, SIZE, seed=seed + 2).abs() + 0.2
    return Channels(mean, spread, levels, scaled)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("bits, outliers", [(4, 1), (3, 2)])
def test_the_nearest_level_and_outliers_as_they_are(bits: int, outliers: int, scaled: bool) -> None:
    of, y = channels(bits, scaled), randn(50, HEADS, SIZE, seed=9)
    coded = kvquant.quantize(y, of, outliers)
    assert coded.codes.shape == (50, HEADS, bits, SIZE // 8)
    ours = kvquant.dequantize(coded, of)
    apart = torch.zeros_like(y, dtype=torch.bool).scatter(-1, y.abs().topk(outliers, -1).indices, True)
    assert ((ours - y).abs()[apart] <= BFLOAT16 * y.abs()[apart]).all()
    inside = torch.where(apart, 0.0, y)
    scale = (inside.square().sum(-1, keepdim=True) / (SIZE - outliers)).sqrt().bfloat16().float() if scaled else 1.0
    wanted = (y / scale)[..., None].sub(of.levels).abs().amin(-1) * scale
    assert torch.allclose((ours - y).abs()[~apart], wanted[~apart], atol=1e-5)


def test_what_is_not_finite_shows_in_its_own_head() -> None:
    y = randn(4, HEADS, SIZE)
    y[0, 1, 3], y[2, 0, 7] = math.nan, -math.inf
    for scaled in (False, True):
        of = channels(4, scaled)
        broken = kvquant.dequantize(kvquant.quantize(y, of, 1), of).isnan().any(-1)
        assert broken.tolist() == [[False, True], [False, False], [True, False], [False, False]]
    huge = torch.full((1, HEADS, SIZE), 3e38)
    of = channels(4, True)
    assert kvquant.dequantize(kvquant.quantize(huge, of, 1), of).isnan().any(-1).all()


def paged(cuts: list[int], order: list[int], q: Tensor, k: Tensor, v: Tensor, bases: Bases) -> Tensor:
    form, pages = AttentionForm(4, HEADS, SIZE, 0.3), PagedKV.zeros(3, BLOCK, HEADS, SIZE, scheme("nuq4"), bases=bases)
    table, out, start = torch.tensor([order]), [], 0
    for end in cuts:
        at = torch.arange(start, end)
        slots = table[0, at // BLOCK] * BLOCK + at % BLOCK
        place = AttentionMetadata(torch.tensor([0, end - start]), torch.tensor([end]), table, at.int(), slots)
        turned = ref_attention.write_kv(q[start:end], k[start:end], v[start:end], pages, place, None)
        out.append(ref_attention.paged_attention(turned, pages, place, form)[0])
        start = end
    return torch.cat(out)


def test_a_cache_of_them() -> None:
    """By hand: every token rounded but the first of each block; whatever the calls and the blocks."""
    q, k, v = randn(70, 4, SIZE, seed=1), randn(70, HEADS, SIZE, seed=2), randn(70, HEADS, SIZE, seed=3)
    bases = Bases(channels(4, False), channels(4, True, seed=5))
    ours = paged([70], [0, 1, 2], q, k, v, bases)
    again = paged([1, 31, 33, 64, 70], [2, 0, 1], q, k, v, bases)
    assert (ours - again).norm() <= ROUNDING * ours.norm()
    rounded = []
    for x, of in ((k, bases.keys), (v, bases.values)):
        assert isinstance(of, Channels)
        y = of.turn(x)
        codes = kvquant.dequantize(kvquant.quantize(y, of, 1), of)
        codes[::BLOCK] = y[::BLOCK].bfloat16().float()
        rounded.append(codes * of.spread + of.mean)
    at = torch.arange(70)
    wanted = ref_attention.attention(q, [rounded[0]], [rounded[1]], [at], [at], AttentionForm(4, HEADS, SIZE, 0.3))
    assert (ours - wanted).norm() <= ROUNDING * wanted.norm()
    assert not torch.allclose(rounded[0], k, atol=0.05)


def test_a_block_is_bounded() -> None:
    """4 bits, a coordinate and its column of 64, a token of 64, and a value's scale."""
    assert scheme("nuq4").bits_per_value(64, 64) == 4 + (16 + 8) / 64 + 16 / 64 + 16 / 64 / 2
    with user_error("kv_unsupported"):
        scheme("nuq4").bytes(2, 20, 64)
