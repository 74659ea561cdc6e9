"""The peer of `bench/kv.py`, KIVI with its windows as published, against a cache that is kept token by token."""

from __future__ import annotations

import pytest
import torch
from kv import Kivi
from torch import Tensor

from attar.kernels import ref_attention
from attar.kernels.operands import AttentionForm
from attar.kv import kivi
from attar.kv.pages import AttentionMetadata, PagedKV
from attar.kv.schemes import SCHEMES

HEADS, KV_HEADS, SIZE = 4, 2, 64
ROUNDING = 1e-5  # of float32 sums in another order


def rounded(x: Tensor, along: int, group: int) -> Tensor:
    """[T, G, D] as it is read back; the code itself has tests of its own."""
    whole = x.transpose(0, 1)[None]
    return kivi.dequantize(*kivi.quantize(whole, along, group), along)[0].transpose(0, 1)


def step_by_step(q: Tensor, k: Tensor, v: Tensor, group: int, recent: int, scale: float) -> Tensor:
    """One sequence, token after token, as their program keeps it: a full set of unrounded keys is rounded together, and
    of values the oldest as soon as there are more than `recent`; the step's own are in 16 bits either way."""
    old_k, old_v = k[:0].float(), v[:0].float()
    new_k, new_v, out = k[:0], v[:0], []
    for row, key, value in zip(q, k.half().float(), v.half().float(), strict=True):
        new_k, new_v = torch.cat((new_k, key[None])), torch.cat((new_v, value[None]))
        keys, values = (
            torch.cat(both).repeat_interleave(HEADS // KV_HEADS, 1).double()
            for both in ((old_k, new_k), (old_v, new_v))
        )
        weights = (torch.einsum("hd,thd->ht", row.double(), keys) * scale).softmax(-1)
        out.append(torch.einsum("ht,thd->hd", weights, values).flatten().float())
        if len(new_k) == recent:
            old_k, new_k = torch.cat((old_k, rounded(new_k, 2, group))), new_k[:0]
        if len(new_v) > recent:
            old_v, new_v = torch.cat((old_v, rounded(new_v[:1], 3, group))), new_v[1:]
    return torch.stack(out)


@pytest.mark.parametrize("group, recent", [(32, 64), (64, 64), (32, 128)])
@pytest.mark.parametrize("cuts", [[300], [1, 64, 65, 200, 300]], ids=["at once", "in pieces"])
def test_its_windows_are_those_of_a_cache_that_is_kept_token_by_token(group: int, recent: int, cuts: list[int]) -> None:
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(300, count, SIZE, generator=generator) for count in (HEADS, KV_HEADS, KV_HEADS))
    k[:, :, [3, 17]] *= 8
    pages = PagedKV.zeros(10, 32, KV_HEADS, SIZE, SCHEMES["float32"])
    form, table = AttentionForm(HEADS, KV_HEADS, SIZE, 0.2), torch.arange(10)[None]
    ours, start = [], 0
    for end in cuts:
        at = torch.arange(start, end)
        place = AttentionMetadata(torch.tensor([0, end - start]), torch.tensor([end]), table, at.int(), at)
        turned = ref_attention.write_kv(q[start:end], k[start:end], v[start:end], pages, place, None)
        ours.append(Kivi(group, recent).attend(turned, pages, place, form)[0])
        start = end
    expected = step_by_step(q, k, v, group, recent, form.scale)
    assert (torch.cat(ours) - expected).abs().max() <= ROUNDING * expected.abs().max()
