"""The reference of `ops.rope`, `attention`, `write_kv` and `paged_attention`: readable PyTorch, any device.

Pages are gathered into plain keys and values [S, G, D], and then it is the attention of any textbook.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from attar.kernels.operands import AttentionForm
from attar.kernels.pages import Pages, Placement, Rotation

QUERY_TILE = 512  # queries that share one mask: memory grows with the keys, not with their square
INT8_MOST = 127


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    turned = 2 * cos.shape[-1]
    cos, sin = cos[:, None, :], sin[:, None, :]
    a, b = x[..., :turned].float().chunk(2, -1)
    out = torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)
    return out if turned == x.shape[-1] else torch.cat((out, x[..., turned:]), -1)


def attention(
    q: Tensor,
    keys: Sequence[Tensor] | Tensor,
    values: Sequence[Tensor] | Tensor,
    query_positions: Sequence[Tensor],
    key_positions: Sequence[Tensor],
    form: AttentionForm,
) -> Tensor:
    if isinstance(keys, Tensor) and isinstance(values, Tensor):
        alike = q.unflatten(0, (len(keys), -1))
        return _attend_tiled(alike, keys, values, query_positions[0], key_positions[0], form).reshape(q.shape[0], -1)
    queries = q.split([len(at) for at in query_positions])
    pieces = zip(queries, keys, values, query_positions, key_positions, strict=True)
    outputs = [_attend_tiled(one[None], k[None], v[None], at, key_at, form)[0] for one, k, v, at, key_at in pieces]
    return torch.cat(outputs).reshape(q.shape[0], -1)


def _attend_tiled(q: Tensor, k: Tensor, v: Tensor, at: Tensor, key_at: Tensor, form: AttentionForm) -> Tensor:
    """Sequences of the same positions, q [B, T, H, D], k and v [B, S, G, D], to [B, T, H, D], in memory O(T + S)."""
    if form.soft_cap is None and _is_triangle(at, key_at, form.window):
        return _attend(q, k, v, None, form)
    outputs = []
    for first in range(0, max(1, len(at)), QUERY_TILE):
        rows = slice(first, first + QUERY_TILE)
        mask = visible(at[rows], key_at, form.window)
        seen = mask.any(0)
        if seen.all():
            outputs.append(_attend(q[:, rows], k, v, mask, form))
        else:
            outputs.append(_attend(q[:, rows], k[:, seen], v[:, seen], mask[:, seen], form))
    return torch.cat(outputs, 1)


def visible(query_positions: Tensor, key_positions: Tensor, window: int | None) -> Tensor:
    """Which keys each query sees: bool [queries, keys]."""
    distance = query_positions[:, None] - key_positions[None, :]
    return distance >= 0 if window is None else (distance >= 0) & (distance < window)


def _is_triangle(at: Tensor, key_at: Tensor, window: int | None) -> bool:
    """Whether each query sees just its own key and those before it, which needs no mask and memory O(N)."""
    if not torch.equal(at, key_at) or not (at.diff() > 0).all():
        return False
    return window is None or len(at) == 0 or int(at[-1] - at[0]) < window


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, form: AttentionForm) -> Tensor:
    """As `_attend_tiled`, by a mask [T, S] or, without, the lower triangle."""
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    if form.soft_cap is None:
        grouped, scale = form.heads != form.kv_heads, form.scale
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=grouped
        )
        return out.transpose(1, 2)
    assert mask is not None
    v = v.repeat_interleave(form.heads // form.kv_heads, 1)
    return (_weights(q, k, mask, form).to(q.dtype) @ v).transpose(1, 2)


def _weights(q: Tensor, k: Tensor, mask: Tensor, form: AttentionForm) -> Tensor:
    """The softmax of queries [B, H, T, D] over keys [B, G, S, D] by a mask [T, S]: [B, H, T, S], at least float32."""
    wide = torch.promote_types(q.dtype, torch.float32)
    k = k.repeat_interleave(form.heads // form.kv_heads, 1)
    scores = (q.to(wide) @ k.to(wide).transpose(2, 3)) * form.scale
    if form.soft_cap is not None:
        scores = form.soft_cap * torch.tanh(scores / form.soft_cap)
    return scores.masked_fill(~mask, -torch.inf).softmax(-1)


# Pages


def quantize_head(x: Tensor) -> tuple[Tensor, Tensor]:
    """Heads [..., D] to int8 codes [..., D] and scales [...]. What is not finite makes its scale NaN."""
    x = x.float()
    scale = x.abs().amax(-1) / INT8_MOST
    codes = (x / torch.where(scale == 0, 1.0, scale)[..., None]).round()
    finite = x.isfinite().all(-1)
    return torch.where(finite[..., None], codes, 0).to(torch.int8), torch.where(finite, scale, torch.nan)


def write_pages(k: Tensor, v: Tensor, pages: Pages, slots: Tensor) -> None:
    """Keys and values [N, G, D] to their slots [N]."""
    block, place = slots // pages.block, slots % pages.block
    if pages.key_scales is not None and pages.value_scales is not None:
        (k, pages.key_scales[block, :, place]), (v, pages.value_scales[block, :, place]) = map(quantize_head, (k, v))
    together = pages.keys.shape[-1]
    k = F.pad(k, (0, -k.shape[-1] % together)).unflatten(-1, (-1, together))
    pages.keys[block, :, place // 16, :, place % 16] = k.to(pages.dtype)
    pages.values[block, :, place // together, : pages.head_dim, place % together] = v.to(pages.dtype)


def read_pages(pages: Pages, blocks: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Keys and values, each [..., slots, G, D], of the blocks of a table [..., width]."""
    keys = pages.keys[blocks.long()]  # [..., width, G, runs, D / J, 16, J]
    keys = keys.movedim((-4, -2, -5, -3), (-5, -4, -3, -2))  # [..., width, runs, 16, G, D / J, J]
    keys = keys.flatten(-2)[..., : pages.head_dim].flatten(-5, -3)
    values = pages.values[blocks.long()]  # [..., width, G, block / J, P, J]
    values = values.movedim(-1, -2).flatten(-3, -2).movedim(-3, -2)  # [..., width, block, G, P]
    values = values[..., : pages.head_dim].flatten(-4, -3)
    if pages.key_scales is None or pages.value_scales is None:
        return keys.to(dtype), values.to(dtype)
    scales = (
        s[blocks.long()].transpose(-1, -2).flatten(-3, -2)[..., None] for s in (pages.key_scales, pages.value_scales)
    )
    wide = torch.promote_types(dtype, torch.float32)
    keys, values = ((codes.to(wide) * scale).to(dtype) for codes, scale in zip((keys, values), scales, strict=True))
    return keys, values


def write_kv(q: Tensor, k: Tensor, v: Tensor, pages: Pages, place: Placement, rotation: Rotation | None) -> Tensor:
    if rotation is not None:
        cos, sin = rotation.cos[rotation.rows.long()], rotation.sin[rotation.rows.long()]
        q, k = rope(q, cos, sin), rope(k, cos, sin)
    write_pages(k, v, pages, place.slots)
    return q


def paged_attention(
    q: Tensor, pages: Pages, place: Placement, form: AttentionForm, want_mass: bool = False
) -> tuple[Tensor, Tensor | None]:
    starts, lengths = place.row_starts.tolist(), place.lengths.tolist()
    counts = [end - first for first, end in itertools.pairwise(starts)]
    out = torch.zeros_like(q)
    mass = q.new_zeros((len(counts), form.kv_heads, place.tables.shape[1] * pages.block), dtype=torch.float32)
    plain = place.key_positions is None and place.tree is None and not want_mass
    if plain and len(counts) > 1 and len(set(counts)) == len(set(lengths)) == 1 and counts[0] > 0:
        at = place.positions.view(len(counts), -1)
        if (at == at[0]).all():  # sequences of the same positions are computed as one batch
            k, v = read_pages(pages, place.tables[:, : -(-lengths[0] // pages.block)], q.dtype)
            k, v = k[:, : lengths[0]], v[:, : lengths[0]]
            key_at = torch.arange(lengths[0], device=q.device)
            return _attend_tiled(q.view(len(counts), counts[0], *q.shape[1:]), k, v, at[0], key_at, form).reshape(
                q.shape[0], -1
            ), None
    tree_at = 0
    for b, (first, count, length) in enumerate(zip(starts, counts, lengths, strict=False)):
        table = place.tables[b, : -(-length // pages.block)]
        k, v = (t[:length] for t in read_pages(pages, table, q.dtype))
        at = place.positions[first : first + count]
        if place.key_positions is None:
            key_at = torch.arange(length, device=q.device, dtype=at.dtype)
        else:
            key_at = place.key_positions[table.long()].flatten()[:length]
        branches = None
        if place.tree is not None:
            key_at[length - count :] = at
            branches = place.tree[tree_at : tree_at + count * count].view(count, count).bool()
            tree_at += count * count
        for begin in range(0, count, QUERY_TILE):
            rows = slice(begin, min(begin + QUERY_TILE, count))
            mask = visible(at[rows], key_at, form.window) & (key_at >= 0)
            if branches is not None:
                mask[:, length - count :] &= branches[rows]
            seeing = mask.any(-1)  # a query that sees nothing gives zeros
            one = q[first + rows.start : first + rows.stop][seeing]
            mixed = _attend(one[None], k[None], v[None], mask[seeing], form)[0]
            out[first + rows.start : first + rows.stop][seeing] = mixed
            if want_mass:
                weights = _weights(one[None].transpose(1, 2), k[None].transpose(1, 2), mask[seeing], form)[0]
                mass[b, :, :length] += weights.sum(1).unflatten(0, (form.kv_heads, -1)).sum(1)
    return out.reshape(q.shape[0], -1), mass if want_mass else None
