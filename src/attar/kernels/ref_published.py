"""Simulated caches of published formats (`kv/published.py`): pages hold floats that are rounded as the papers do.

KVQuant's numbers are rounded once, when they are written. Its keys are rounded before rotation, and rotated when they
are written; the paper rotates them at each read, with the same result. KIVI rounds numbers after some rows have read
them in 16 bits. So its pages hold 16-bit numbers, and each row rounds those that would be rounded at its own step.

Shapes: N rows, T rows of a sequence, H query heads, G key-value heads, D head size, S keys of a sequence.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from attar.kernels import ref_attention
from attar.kernels.operands import AttentionForm
from attar.kv import kivi
from attar.kv.pages import AttentionMetadata, PagedKV, Rotation
from attar.kv.published import PublishedFormat

ROWS = 128  # that are computed at once


def write_kv(
    q: Tensor, k: Tensor, v: Tensor, pages: PagedKV, place: AttentionMetadata, rotation: Rotation | None
) -> Tensor:
    """Run `ops.write_kv` on normed queries, keys and values."""
    code = pages.published
    assert code is not None
    if code.format.calibrated:
        first = place.positions == 0
        k, v = code.round_keys(k, first).to(k.dtype), code.round_values(v, first).to(v.dtype)
    if rotation is not None:
        cos, sin = rotation.cos[rotation.rows.long()], rotation.sin[rotation.rows.long()]
        q, k = ref_attention.rope(q, cos, sin), ref_attention.rope(k, cos, sin)
    if not code.format.calibrated:
        k, v = k.half().to(k.dtype), v.half().to(v.dtype)
    ref_attention.write_pages(k, v, pages, place.slot_mapping)
    return q.contiguous()


def attend_kivi(q: Tensor, pages: PagedKV, place: AttentionMetadata, form: AttentionForm) -> Tensor:
    """Return attention of queries [N, H, D] over pages of KIVI's numbers: [N, H * D]. Raises ValueError for trees,
    positions of keys and one-bit keys."""
    code = pages.published
    assert code is not None
    if place.tree is not None or place.key_positions is not None or pages.signs is not None:
        raise ValueError("a cache as published has no trees, positions of keys or one-bit keys")
    out, starts, lengths = q.new_zeros((len(q), form.heads * form.head_dim)), place.row_starts.tolist(), place.lengths
    for b, (first, end) in enumerate(itertools.pairwise(starts)):
        length = int(lengths[b])
        k, v = ref_attention.read_sequence(pages, place.block_tables[b], length, None, torch.float32)
        own = q[first:end], k.transpose(0, 1), v.transpose(0, 1), place.positions[first:end]
        out[first:end] = _attend_windows(*own, form, code.format)
    return out


def _attend_windows(
    q: Tensor, k: Tensor, v: Tensor, positions: Tensor, form: AttentionForm, published: PublishedFormat
) -> Tensor:
    """Attend in one sequence: q [T, H, D] over k and v [G, S, D], by Algorithm 1 of Liu et al. (2024).

    A row at position p finds the keys up to the last multiple of the window rounded, and of the values all but the
    `window` before its own. The step's own key and value are read before any is rounded for it.
    """
    window, length, repeat = published.window, k.shape[1], form.heads // form.kv_heads
    full = length // window * window
    rounded_k = torch.cat((_rounded(k[:, :full], 2, published), k[:, full:]), 1)
    rounded_v = _rounded(v, 3, published)
    k, rounded_k, v, rounded_v = (x.repeat_interleave(repeat, 0) for x in (k, rounded_k, v, rounded_v))  # [H, S, D]
    key_at, mixed = torch.arange(length), [q.new_zeros((0, form.heads * form.head_dim))]
    for rows, at in zip(q.float().split(ROWS), positions.split(ROWS), strict=True):
        one, since = rows.transpose(0, 1), max(0, int(at[0]) // window - 1) * window
        new = slice(since, None)  # all that any of these rows reads in 16 bits
        scores = one @ rounded_k.mT  # [H, T, S]
        old = key_at[new] < at[:, None] // window * window
        scores[..., new] = torch.where(old, scores[..., new], one @ k[:, new].mT)
        scores *= form.scale
        if form.soft_cap is not None:
            scores = form.soft_cap * torch.tanh(scores / form.soft_cap)
        seen = ref_attention.visible(at, key_at, form.window)
        weights = scores.masked_fill_(~seen, -torch.inf).softmax(-1)
        old = key_at[new] < at[:, None] - window
        found = weights[..., new].masked_fill(old, 0) @ v[:, new]
        weights[..., new].masked_fill_(~old, 0)
        found += weights @ rounded_v
        mixed.append(found.transpose(0, 1).flatten(1).to(q.dtype))
    return torch.cat(mixed)


def _rounded(x: Tensor, along: int, published: PublishedFormat) -> Tensor:
    """Return numbers [G, S, D] as they are read once rounded: keys along axis 2 of [1, G, S, D], values along 3."""
    return kivi.rounded(x[None], along, published.group, published.bits)[0] if x.numel() else x
