"""Coordinates and their planes, KIVI's groups, and unfinished blocks: the reference by its own promises."""

from __future__ import annotations

import math
import struct

import pytest
import torch
from torch import Tensor

from attar.kernels import ref_attention
from attar.kernels.operands import AttentionForm
from attar.kv import bit_planes, kivi
from attar.kv.bit_planes import Basis
from attar.kv.pages import AttentionMetadata, Bases, PagedKV
from attar.kv.schemes import DISTORTION, LEVELS, scheme

HEADS, SIZE = 2, 32
INVERSE = 1e-4  # of numbers around 1: two products by matrices of moderate condition
SCALE = 2**-7  # of a scale in bfloat16, and of what it scales
for_both = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8])  # that scales are stored in
NEARLY_BEST = 1.15  # error of the scale that is found, over that of the best one, on average
LOST = 0.03  # squared error more than with the best one, over the square of the numbers
ROUNDING = 1e-3  # of outputs, relative: sums in another order, and 16-bit numbers


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def basis(bits: list[list[int]], seed: int = 0) -> Basis:
    """Any invertible one, a mean with it."""
    into = torch.stack([torch.linalg.qr(randn(SIZE, SIZE, seed=seed + g))[0] for g in range(HEADS)])
    into = into * (1 + randn(HEADS, 1, SIZE, seed=seed).abs())
    mean, weights = randn(HEADS, SIZE, seed=seed + 1), randn(HEADS, SIZE, seed=seed + 2).abs() + 0.1
    return Basis(into, torch.linalg.inv(into), mean, weights, tuple(map(tuple, bits)))


UNEVEN = basis([[6, 3, 1, 0], [4, 4, 2, 0]])


def test_a_basis_loses_nothing() -> None:
    q, k = randn(5, 3 * HEADS, SIZE, seed=7), randn(9, HEADS, SIZE, seed=8)
    y = UNEVEN.turn(k)
    assert (UNEVEN.turn_back(y) - k).abs().max() <= INVERSE
    scores = q.unflatten(1, (HEADS, 3)).transpose(0, 1).flatten(1, 2) @ k.permute(1, 2, 0)
    turned = UNEVEN.turn_queries(q).unflatten(1, (HEADS, 3)).transpose(0, 1).flatten(1, 2) @ y.permute(1, 2, 0)
    apart = scores - turned  # the same for all keys of a query
    assert (apart - apart[..., :1]).abs().max() <= INVERSE * 10


@pytest.mark.parametrize("size", [16, 64, 80, 96])
def test_the_rotation_is_orthogonal_and_spreads(size: int) -> None:
    turn = bit_planes.rotation(1, size, 4 * size // 8)
    assert torch.allclose(turn.into[0] @ turn.into[0].T, torch.eye(size), atol=1e-6)
    assert torch.equal(turn.back[0], turn.into[0].T)
    spike = torch.zeros(1, 1, size)
    spike[0, 0, 3] = 8.0
    assert turn.turn(spike).abs().max() <= 8.0 / math.sqrt(size & -size) + 1e-5


def test_planes_hold_codes() -> None:
    """Every code of uneven bits comes back; a plane's bytes are where the layout says."""
    most = (1 << UNEVEN.columns) - 1
    codes = (torch.rand((3, HEADS, 16, SIZE), generator=torch.Generator().manual_seed(1)) * (most[:, None] + 1)).byte()
    for values in (False, True):
        packed = bit_planes.pack(codes, UNEVEN, values)
        assert packed.shape == (3, HEADS, 10, 16)
        assert torch.equal(bit_planes.unpack(packed, UNEVEN, values), codes)
    one = torch.zeros((1, HEADS, 16, SIZE), dtype=torch.uint8)
    one[0, 0, 5, 8 + 6] = 4 + 1  # slot 5, coordinate 6 of bucket 1, which has 3 bits: a plane of 2 and one of 1
    start = 16 * 6
    for values, number in ((False, 64 * 1 + 4 * 5 + 2), (True, 32 * 1 + 4 * 6 + 1)):
        found = bit_planes.pack(one, UNEVEN, values)[0, 0].flatten()
        low, high = found[start + number % 32], found[start + 32 + number % 16]
        assert low == 1 << 2 * (number // 32)
        assert high == 1 << number // 16
        assert found.count_nonzero() == 2


@for_both
@pytest.mark.parametrize("bits", range(1, 7))
def test_normal_numbers_lose_what_lloyd_says(bits: int, dtype: torch.dtype) -> None:
    """Of 4096 rows; a scale of each row's own loses a little less than one for all, be it a byte."""
    turn = Basis(*(randn(1, 1, 1) for _ in range(2)), torch.zeros(1, 64), torch.ones(1, 64), ((bits,) * 8,))  # type: ignore[call-arg, arg-type]
    y = randn(4096, 1, 64, seed=bits) * 3
    codes, scales = bit_planes.quantize(y, turn, dtype)
    assert scales.dtype == dtype
    assert int(codes.max()) == (1 << bits) - 1
    error = (bit_planes.dequantize(codes, scales, turn) - y).square().mean() / 9
    assert 0.75 * DISTORTION[bits] <= error <= 1.01 * DISTORTION[bits]
    nearest = bit_planes.tables()[1]
    levels = torch.tensor([*(-x for x in reversed(LEVELS[bits])), *LEVELS[bits]])
    for i in range(-127, 128):
        assert (levels[int(nearest[bits, i + 127])] - i).abs() == (levels - i).abs().min()


@pytest.mark.parametrize("size", [16, 64, 128, 256])
@pytest.mark.parametrize("bits", [2, 4, 6])
def test_a_coordinate_that_is_most_of_its_token_is_kept(bits: int, size: int) -> None:
    """Keys of attention sinks are like that. Of all scales that a byte can be, nearly the best is found."""
    one = torch.eye(size)[None]
    turn = Basis(one, one, torch.zeros(1, size), torch.ones(1, size), ((bits,) * (size // 8),))
    y = randn(256, 1, size, seed=size) * torch.logspace(-1, 2, 256)[:, None, None]
    y[:, 0, 5] *= torch.logspace(0, 3, 256)[torch.randperm(256, generator=torch.Generator().manual_seed(bits))]
    codes, scales = bit_planes.quantize(y, turn, torch.uint8)
    found = (bit_planes.dequantize(codes, scales, turn) - y).square().sum((1, 2))
    levels, nearest = bit_planes.tables()
    best = torch.full_like(found, math.inf)
    for scale in bit_planes.widen(torch.arange(1, 248).to(torch.uint8)):
        at = (y * (1 / scale)).clamp(-127, 127).round().long() + 127
        error = (y - scale * levels[bits][nearest[bits][at].long()]).square().sum((1, 2))
        best = torch.minimum(best, error)
    assert float((found / best).mean()) <= NEARLY_BEST
    assert float(((found - best) / y.square().sum((1, 2))).max()) <= LOST


def test_a_byte_is_the_upper_half_of_a_float16() -> None:
    """All of them by Python's own float16; a byte is the largest that is not above what it is cut from."""
    every = bit_planes.widen(torch.arange(256).to(torch.uint8))
    expected = [struct.unpack("<e", struct.pack("<H", code << 7))[0] for code in range(256)]
    assert every[:248].tolist() == expected[:248]
    assert not every[248:].isfinite().any()
    y = torch.zeros(4096, 1, 8)
    y[:, 0] = torch.logspace(-5, 4, 4096)[:, None] * randn(4096, 8)
    one = torch.eye(8)[None]
    turn = Basis(one, one, torch.zeros(1, 8), torch.ones(1, 8), ((4,),))
    size = (y * turn.shares).square().sum(-1).sqrt()
    _, scales = bit_planes.quantize(y, turn, torch.uint8)
    usual = size > 2**-12  # above float16's subnormal numbers
    ratio = bit_planes.widen(scales)[usual] / size[usual]
    assert float(ratio.min()) >= 0.66
    assert float(ratio.max()) <= 1.5
    assert bit_planes.widen(scales).isfinite().all()


@for_both
def test_what_is_not_finite_shows(dtype: torch.dtype) -> None:
    x = torch.zeros(3, HEADS, SIZE)
    x[0, 0, 1], x[1, 1, 2] = math.nan, math.inf
    _, scales = bit_planes.quantize(UNEVEN.turn(x), UNEVEN, dtype)
    assert bit_planes.widen(scales).isnan().tolist() == [[True, False], [False, True], [False, False]]
    zero = bit_planes.quantize(torch.zeros(1, HEADS, SIZE), UNEVEN, dtype)
    assert not bit_planes.dequantize(*zero, UNEVEN).any()
    for along in (2, 3):
        infinite = torch.where(torch.arange(64)[:, None] == 40, math.inf, randn(1, 1, 64, 64))
        _, scale, _ = kivi.quantize(infinite, along, 32, 2)
        assert scale.isnan().any()
        assert scale.isfinite().any()


@for_both
@pytest.mark.parametrize("size", [1e21, 1e30, 3e38])
def test_what_is_too_large_shows_in_its_own_row(size: float, dtype: torch.dtype) -> None:
    """Where squares overflow, no scale has an error: not a zero, which would pass for a number."""
    y = randn(3, HEADS, SIZE)
    y[1, 0] *= size / y[1, 0].abs().max()
    codes, scales = bit_planes.quantize(y, UNEVEN, dtype)
    assert bit_planes.widen(scales).isnan().tolist() == [[False, False], [True, False], [False, False]]
    alone = bit_planes.quantize(y[[0, 2]], UNEVEN, dtype)
    assert torch.equal(codes[[0, 2]], alone[0])
    assert torch.equal(scales[[0, 2]], alone[1])


@pytest.mark.parametrize("along", [2, 3])
@pytest.mark.parametrize("group", [32, 64])
@pytest.mark.parametrize("bits", [2, 4])
def test_kivi_by_its_formula(along: int, group: int, bits: int) -> None:
    """Zero is the least of a group, scale its range over the greatest code, codes the nearest."""
    x = randn(2, HEADS, 64, 64, seed=3)
    codes, scales, zeros = kivi.quantize(x, along, group, bits)
    assert codes.shape == ((2, HEADS, 64, 8 * bits) if along == 3 else (2, HEADS, 4, 32 * bits, 4))
    assert scales.shape[along] == 64 // group
    ours = kivi.dequantize(codes, scales, zeros, along, bits)
    groups = x.unflatten(along, (-1, group))
    low, high = groups.amin(along + 1, keepdim=True), groups.amax(along + 1, keepdim=True)
    step = (high - low) / ((1 << bits) - 1)
    plain = (((groups - low) / step).round() * step + low).flatten(along, along + 1)
    assert (ours - plain).abs().quantile(0.99) <= 2**-9 * x.abs().max()  # float16 beside float32
    assert ((ours - x).abs() <= (step.expand_as(groups).flatten(along, along + 1) / 2) * 1.01 + 2**-9).all()


def test_keys_with_channels_of_outliers_want_scales_a_channel() -> None:
    """Why KIVI rounds keys along the tokens of a channel: a few large channels would stretch every token's scale."""
    keys = randn(1, HEADS, 64, 64, seed=4)
    keys[..., [3, 17, 40]] *= 30

    def error(along: int) -> float:
        codes, scales, zeros = kivi.quantize(keys, along, 32, 2)
        ordinary = [channel for channel in range(64) if channel not in (3, 17, 40)]
        return float((kivi.dequantize(codes, scales, zeros, along, 2) - keys)[..., ordinary].norm())

    assert error(2) < 0.2 * error(3)


def paged(pages: PagedKV, k: Tensor, v: Tensor, q: Tensor, cuts: list[int], form: AttentionForm) -> Tensor:
    """Rows through `write_kv` and `paged_attention` in calls that end at `cuts`, on blocks in any order."""
    table, out, start = torch.tensor([[2, 0, 3, 1]]), [], 0
    for end in cuts:
        at = torch.arange(start, end)
        slots = table[0, at // pages.block] * pages.block + at % pages.block
        place = AttentionMetadata(
            torch.tensor([0, end - start]), torch.tensor([end]), table, at.int(), slots, tails=torch.tensor([1])
        )
        turned = ref_attention.write_kv(q[start:end], k[start:end], v[start:end], pages, place, None)
        out.append(ref_attention.paged_attention(turned, pages, place, form)[0])
        start = end
    return torch.cat(out)


@pytest.mark.parametrize("kv", ["kivi4", "kivi2", "klt2"])
def test_a_token_sees_its_own_block_as_it_is_and_others_rounded(kv: str) -> None:
    form, block = AttentionForm(2 * HEADS, HEADS, SIZE, 0.3), 32
    low = Bases(basis([[4, 3, 3, 0]] * HEADS), basis([[3, 3, 3, 1]] * HEADS, seed=5))
    bases = low if kv == "klt2" else None
    pages = PagedKV.zeros(4, block, HEADS, SIZE, scheme(kv), tails=2, bases=bases)
    q, k, v = randn(80, 2 * HEADS, SIZE, seed=1), randn(80, HEADS, SIZE, seed=2), randn(80, HEADS, SIZE, seed=3)
    ours = paged(pages, k, v, q, [20, 32, 50, 64, 65, 80], form)
    again = paged(
        PagedKV.zeros(4, block, HEADS, SIZE, scheme(kv), tails=2, bases=bases), k, v, q, [32, 33, 64, 80], form
    )
    assert (ours - again).norm() <= ROUNDING * ours.norm()
    table = torch.tensor([2, 0])
    old_k, old_v = ref_attention.read_pages(pages, table, torch.float32)
    if bases is not None:
        old_k, old_v = bases.keys.turn_back(old_k), bases.values.turn_back(old_v)
    assert not torch.allclose(old_k, k[:64], atol=0.05)
    for row in (0, 31, 40, 64, 79):
        own = row // block * block
        keys, values = (torch.cat((old[:own], x[own : row + 1])) for old, x in ((old_k, k), (old_v, v)))
        at = torch.arange(row + 1)
        expected = ref_attention.attention(q[row : row + 1], [keys], [values], [at[-1:]], [at], form)
        assert (ours[row] - expected[0]).norm() <= 2 * SCALE * expected.norm()
