"""Caches as published, against ones that are kept token by token."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attar.kernels import ops, ref_attention
from attar.kernels.operands import AttentionForm
from attar.kv import kivi
from attar.kv.kvquant_published import ChannelRanges, Levels, PublishedCode
from attar.kv.pages import AttentionMetadata, PagedKV, Rotation
from attar.kv.published import PUBLISHED, PublishedFormat
from attar.kv.schemes import SCHEMES

HEADS, KV_HEADS, SIZE, TOKENS = 4, 2, 64, 300
ROUNDING = 1e-5  # of float32 sums in another order
FORM = AttentionForm(HEADS, KV_HEADS, SIZE, 0.2)


def numbers(count: int, seed: int) -> Tensor:
    return torch.randn(TOKENS, count, SIZE, generator=torch.Generator().manual_seed(seed))


def placed(start: int, end: int) -> AttentionMetadata:
    """Rows of one sequence at positions start .. end, on blocks of 32 slots in order."""
    at = torch.arange(start, end)
    rows, length = torch.tensor([0, end - start], dtype=torch.int32), torch.tensor([end], dtype=torch.int32)
    return AttentionMetadata(rows, length, torch.arange(10, dtype=torch.int32)[None], at.int(), at)


def cached(code: PublishedCode, q: Tensor, k: Tensor, v: Tensor, cuts: list[int], angles: Tensor | None) -> Tensor:
    """Attention [N, H * D] of one sequence through pages of the code, in calls that end at `cuts`."""
    pages, found, start = PagedKV.zeros(10, 32, KV_HEADS, SIZE, SCHEMES["float32"]), [], 0
    pages.published = code
    for end in cuts:
        place = placed(start, end)
        rotation = None if angles is None else Rotation(angles.cos(), angles.sin(), place.positions)
        turned = ops.write_kv(q[start:end], k[start:end], v[start:end], pages, place, rotation)
        found.append(ops.paged_attention(turned, pages, place, FORM)[0])
        start = end
    return torch.cat(found)


def rounded(x: Tensor, along: int, form: PublishedFormat) -> Tensor:
    """[T, G, D] as it is read back."""
    return kivi.rounded(x.transpose(0, 1)[None], along, form.group, form.bits)[0].transpose(0, 1)


def step_by_step(q: Tensor, k: Tensor, v: Tensor, form: PublishedFormat) -> Tensor:
    """One sequence, token after token, as Liu et al. keep it: a full set of unrounded keys is rounded together, and of
    values the oldest as soon as there are more than the window; the step's own are in 16 bits either way."""
    old_k, old_v = k[:0].float(), v[:0].float()
    new_k, new_v, out = k[:0], v[:0], []
    for row, key, value in zip(q, k.half().float(), v.half().float(), strict=True):
        new_k, new_v = torch.cat((new_k, key[None])), torch.cat((new_v, value[None]))
        keys, values = (
            torch.cat(both).repeat_interleave(HEADS // KV_HEADS, 1).double()
            for both in ((old_k, new_k), (old_v, new_v))
        )
        weights = (torch.einsum("hd,thd->ht", row.double(), keys) * FORM.scale).softmax(-1)
        out.append(torch.einsum("ht,thd->hd", weights, values).flatten().float())
        if len(new_k) == form.window:
            old_k, new_k = torch.cat((old_k, rounded(new_k, 2, form))), new_k[:0]
        if len(new_v) > form.window:
            old_v, new_v = torch.cat((old_v, rounded(new_v[:1], 3, form))), new_v[1:]
    return torch.stack(out)


@pytest.mark.parametrize("bits, group, window", [(2, 32, 64), (2, 64, 64), (4, 32, 128)])
@pytest.mark.parametrize("cuts", [[TOKENS], [1, 64, 65, 200, TOKENS]], ids=["at once", "in pieces"])
def test_windows_of_kivi_slide(bits: int, group: int, window: int, cuts: list[int]) -> None:
    q, k, v = numbers(HEADS, 1), numbers(KV_HEADS, 2), numbers(KV_HEADS, 3)
    k[:, :, [3, 17]] *= 8
    form = PublishedFormat("KIVI", "kivi", bits, group, window)
    ours = cached(PublishedCode(form), q, k, v, cuts, None)
    expected = step_by_step(q, k, v, form)
    assert (ours - expected).abs().max() <= ROUNDING * expected.abs().max()


@pytest.mark.parametrize("cuts", [[TOKENS], [1, 33, TOKENS]], ids=["at once", "in pieces"])
def test_kvquant_rounds_keys_before_they_are_rotated(cuts: list[int]) -> None:
    q, k, v = numbers(HEADS, 1), numbers(KV_HEADS, 2), numbers(KV_HEADS, 3)
    angles = torch.arange(TOKENS)[:, None] / 10 ** (torch.arange(SIZE // 2) / 8)
    levels = Levels(torch.tensor([-0.8, -0.2, 0.3, 0.9]), torch.tensor([-0.8, -0.2, 0.3, 0.9]))
    ranges = ChannelRanges(k.amin(0) * 0.9, k.amax(0) * 0.8)
    code = PublishedCode(PUBLISHED["nuq2-published"], ranges, levels, levels)
    ours = cached(code, q, k, v, cuts, angles)
    assert 0 < code.outliers < code.numbers == (TOKENS - 1) * KV_HEADS * SIZE
    first = torch.arange(TOKENS) == 0
    turned = [
        ref_attention.rope(x, angles.cos(), angles.sin())
        for x in (q, PublishedCode(code.format, ranges, levels, levels).round_keys(k, first))
    ]
    at = torch.arange(TOKENS)
    expected = ref_attention.attention(turned[0], [turned[1]], [code.round_values(v, first)], [at], [at], FORM)
    assert (ours - expected).abs().max() <= ROUNDING * expected.abs().max()


def test_sequences_are_read_apart() -> None:
    """Two sequences of one call, of other lengths, give each what it gives alone."""
    q, k, v = numbers(HEADS, 1), numbers(KV_HEADS, 2), numbers(KV_HEADS, 3)
    form = PUBLISHED["kivi2-published"]
    both = PagedKV.zeros(10, 32, KV_HEADS, SIZE, SCHEMES["float32"])
    both.published = PublishedCode(form)
    at = torch.cat((torch.arange(140), torch.arange(160)))
    tables = torch.arange(10, dtype=torch.int32).view(2, 5)
    starts, lengths = (torch.tensor(each, dtype=torch.int32) for each in ([0, 140, TOKENS], [140, 160]))
    slots = at + torch.tensor([0] * 140 + [160] * 160)
    place = AttentionMetadata(starts, lengths, tables, at.int(), slots)
    ours = ops.paged_attention(ops.write_kv(q, k, v, both, place), both, place, FORM)[0]
    alone = [
        cached(PublishedCode(form), *(x[one] for x in (q, k, v)), [len(q[one])], None)
        for one in (slice(140), slice(140, None))
    ]
    assert (ours - torch.cat(alone)).abs().max() <= ROUNDING * ours.abs().max()


def test_what_a_cache_as_published_does_not_have() -> None:
    pages = PagedKV.zeros(10, 32, KV_HEADS, SIZE, SCHEMES["float32"])
    pages.published = PublishedCode(PUBLISHED["kivi2-published"])
    place = placed(0, 4)
    with pytest.raises(ValueError, match="no mass"):
        ops.paged_attention(numbers(HEADS, 1)[:4], pages, place, FORM, want_mass=True)
    place.tree = torch.ones(16, dtype=torch.bool)
    with pytest.raises(ValueError, match="no trees"):
        ops.paged_attention(numbers(HEADS, 1)[:4], pages, place, FORM)
