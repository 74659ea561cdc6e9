"""The reference of sparse prefill: what rows of prompts read, except the last of each (`ops.paged_attention`)."""

from __future__ import annotations

import torch
from torch import Tensor

from attar.kernels import ref_attention
from attar.kernels.operands import AttentionForm
from attar.kv.pages import AttentionMetadata, PagedKV
from attar.kv.sparse_prefill import SparsePrefill

SPLIT, STRETCH = 512, 64  # slots whose scores are known before a row skips any, and slots that it skips together
SURE, PART = 1.001, 4  # far above the rounding of weights, and the part of what may be lost that a stretch takes
ROWS = 128  # that share one matrix of scores


def seen(at: Tensor, length: int, settings: SparsePrefill) -> Tensor:
    """Return which of the first `length` slots rows at positions `at` [T] read by their place, bool [T, S]."""
    slots = torch.arange(length, device=at.device)
    visible = ref_attention.visible(at, slots, None)
    return visible if settings.skips else visible & ((slots < settings.sinks) | (slots > at[:, None] - settings.window))


def skipped(scores: Tensor, at: Tensor, settings: SparsePrefill) -> Tensor:
    """Return which slots rows at positions `at` [T] skip by their scores [H, T, S], -inf where unseen: bool [H, T, S].

    The 64 weights of a stretch of slots add up to 64 exp(its greatest score) at most. A stretch is skipped where that
    is no more than a quarter of what the row may still lose: the share `lost` of the weights that it keeps so far, less
    what it lost so far. Kept are all splits of 512 slots before, and the greatest weight of this one.
    """
    found = torch.zeros_like(scores, dtype=torch.bool)
    top, kept = torch.full_like(scores[..., 0], -torch.inf), torch.zeros_like(scores[..., 0])
    gone = torch.zeros_like(kept)  # both relative to exp(top)
    for first in range(0, scores.shape[-1], SPLIT):
        split = scores[..., first : first + SPLIT]
        own = split.amax(-1)
        higher = torch.maximum(top, own)
        scale = torch.where(top == -torch.inf, 0, (top - higher).exp())
        kept, gone, leads = kept * scale, gone * scale, own >= top
        room = settings.lost * (kept + leads) - gone
        for place in range(0, split.shape[-1], STRETCH):
            stretch = split[..., place : place + STRETCH]
            most = stretch.amax(-1)
            weight = STRETCH * SURE * (most - higher).exp()
            skips = (weight * PART <= room) & ~(leads & (most == own)) & (at >= settings.whole)
            room, gone = room - weight * skips, gone + weight * skips
            found[..., first + place : first + place + STRETCH] = skips[..., None] & (stretch > -torch.inf)
        read = split.masked_fill(found[..., first : first + SPLIT], -torch.inf)
        top, kept = higher, kept + (read - higher[..., None]).exp().nan_to_num(0).sum(-1)
    return found


def attend(
    q: Tensor, at: Tensor, keys: Tensor, values: Tensor, form: AttentionForm, settings: SparsePrefill
) -> tuple[Tensor, int]:
    """Return the outputs [T, H, D] of rows q [T, H, D] at positions `at` [T], over keys and values [S, G, D].

    The number is how many keys' values they skipped, those of each row and head.
    """
    repeat, length = form.heads // form.kv_heads, int(at.max()) + 1
    keys, values = (each[:length].float().repeat_interleave(repeat, 1) for each in (keys, values))
    scores = torch.einsum("thd,shd->hts", q.float(), keys) * form.scale
    if form.soft_cap is not None:
        scores = form.soft_cap * torch.tanh(scores / form.soft_cap)
    scores = scores.masked_fill(~seen(at, length, settings), -torch.inf)
    count = 0
    if settings.skips:
        unread = skipped(scores, at, settings)
        scores, count = scores.masked_fill(unread, -torch.inf), int(unread.sum())
    return torch.einsum("hts,shd->thd", scores.softmax(-1), values), count


def replace_rows(mixed: Tensor, q: Tensor, pages: PagedKV, place: AttentionMetadata, form: AttentionForm) -> Tensor:
    """Return the output of full attention [N, H * D] with each row replaced that reads few keys.

    Keys whose values are skipped are counted in `place.prompts`.
    """
    assert place.prompts is not None
    mixed, settings, starts = mixed.clone(), place.prompts.settings, place.row_starts.tolist()
    for b, until in enumerate(place.prompts.until.tolist()):
        rows = torch.arange(starts[b], starts[b + 1])
        rows = rows[place.positions[rows] < until]
        if not len(rows):
            continue
        tail = None if place.tails is None else int(place.tails[b])
        whole = ref_attention.read_sequence(pages, place.block_tables[b], int(place.lengths[b]), tail, torch.float32)
        for some in rows.split(ROWS):
            found, count = attend(q[some], place.positions[some], *whole, form, settings)
            if pages.bases is not None:
                found = pages.bases.values.turn_back(found)
            mixed[some] = found.flatten(1).to(mixed.dtype)
            place.prompts.skipped[b] += count
    return mixed
