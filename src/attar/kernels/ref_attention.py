"""The reference of `ops.rope`, `attention`, `write_kv` and `paged_attention`: readable PyTorch, any device.

Pages are gathered into plain keys and values [S, G, D]; the rest is textbook attention.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from attar.kernels.operands import AttentionForm
from attar.kv import bit_planes as coding
from attar.kv import kivi, kvquant
from attar.kv.bit_planes import Basis
from attar.kv.eight_bits import quantize_head
from attar.kv.kvquant import Channels
from attar.kv.pages import AttentionMetadata, PagedKV, Rotation
from attar.kv.schemes import Layout

QUERY_TILE = 512  # queries that share one mask: memory grows with the keys, not with their square


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
    """Attend in sequences of equal positions: q [B, T, H, D], k and v [B, S, G, D] to [B, T, H, D], in memory
    O(T + S)."""
    if form.soft_cap is None and _is_triangle(at, key_at, form.window):
        return attend(q, k, v, None, form)
    outputs = []
    for first in range(0, max(1, len(at)), QUERY_TILE):
        rows = slice(first, first + QUERY_TILE)
        mask = visible(at[rows], key_at, form.window)
        seen = mask.any(0)
        kept = slice(None) if seen.all() else seen
        outputs.append(attend(q[:, rows], k[:, kept], v[:, kept], mask[:, kept], form))
    return torch.cat(outputs, 1)


def visible(query_positions: Tensor, key_positions: Tensor, window: int | None) -> Tensor:
    """Return which keys each query sees: bool [queries, keys]."""
    distance = query_positions[:, None] - key_positions[None, :]
    return distance >= 0 if window is None else (distance >= 0) & (distance < window)


def _is_triangle(at: Tensor, key_at: Tensor, window: int | None) -> bool:
    """Return whether each query sees just its own key and those before it, which needs no mask and memory O(N)."""
    if not torch.equal(at, key_at) or not (at.diff() > 0).all():
        return False
    return window is None or len(at) == 0 or int(at[-1] - at[0]) < window


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, form: AttentionForm) -> Tensor:
    """Attend like `_attend_tiled`, by a mask [T, S] or, without one, the lower triangle."""
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    if form.soft_cap is None:
        grouped, scale = form.heads != form.kv_heads, form.scale
        if grouped and q.device.type == "cpu":  # where torch's fused attention takes no groups: scores would be stored
            k, v = (each.repeat_interleave(form.heads // form.kv_heads, 1) for each in (k, v))
            grouped = False
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=grouped
        ).transpose(1, 2)
    assert mask is not None
    v = v.repeat_interleave(form.heads // form.kv_heads, 1)
    return (_weights(q, k, mask, form).to(q.dtype) @ v).transpose(1, 2)


def _weights(q: Tensor, k: Tensor, mask: Tensor, form: AttentionForm) -> Tensor:
    """Return the softmax of queries [B, H, T, D] over keys [B, G, S, D] by a mask [T, S]: [B, H, T, S], at least
    float32."""
    wide = torch.promote_types(q.dtype, torch.float32)
    k = k.repeat_interleave(form.heads // form.kv_heads, 1)
    scores = (q.to(wide) @ k.to(wide).transpose(2, 3)) * form.scale
    if form.soft_cap is not None:
        scores = form.soft_cap * torch.tanh(scores / form.soft_cap)
    return scores.masked_fill(~mask, -torch.inf).softmax(-1)


# Pages


def write_pages(k: Tensor, v: Tensor, pages: PagedKV, slots: Tensor, tails: Tensor | None = None) -> None:
    """Write keys and values [N, G, D] to their slots [N].

    Where pages keep unfinished blocks apart, they go to the slots of `tails` [N], and blocks that a row finishes to
    their place.
    """
    if pages.bases is not None:
        k, v = pages.bases.keys.turn(k), pages.bases.values.turn(v)
    if pages.recent is not None:
        assert tails is not None, "unfinished blocks lie apart, and nobody says where"
        _write_recent(k, v, pages, slots, tails)
        return
    if pages.scheme.layout == Layout.BIT_PLANES:
        _write_planes(k, v, pages, slots)
        return
    if pages.scheme.layout == Layout.KVQUANT:
        _write_channels(k, v, pages, slots)
        return
    block, place = slots // pages.block, slots % pages.block
    if pages.key_scales is not None and pages.value_scales is not None:
        fp8 = pages.scheme.layout == Layout.FP8
        k, pages.key_scales[block, :, place] = quantize_head(k, fp8)
        v, pages.value_scales[block, :, place] = quantize_head(v, fp8)
    together = pages.keys.shape[-1]
    k = F.pad(k, (0, -k.shape[-1] % together)).unflatten(-1, (-1, together))
    pages.keys[block, :, place // 16, :, place % 16] = k.to(pages.keys.dtype)
    pages.values[block, :, place // together, : pages.head_dim, place % together] = v.to(pages.keys.dtype)


def _write_recent(k: Tensor, v: Tensor, pages: PagedKV, slots: Tensor, tails: Tensor) -> None:
    assert pages.recent is not None
    place = slots % pages.block
    pages.recent.keys[tails, :, place], pages.recent.values[tails, :, place] = k.bfloat16(), v.bfloat16()
    finishing = place == pages.block - 1
    whole, tail = slots[finishing] // pages.block, tails[finishing]
    if not len(whole):
        return
    keys, values = pages.recent.keys[tail].float(), pages.recent.values[tail].float()  # [M, G, block, D]
    if pages.scheme.layout == Layout.KIVI:
        assert pages.key_scales is not None
        assert pages.key_zeros is not None
        assert pages.value_scales is not None
        assert pages.value_zeros is not None
        group, bits = pages.scheme.group, round(pages.scheme.bits)
        pages.keys[whole], pages.key_scales[whole], pages.key_zeros[whole] = kivi.quantize(keys, 2, group, bits)
        pages.values[whole], pages.value_scales[whole], pages.value_zeros[whole] = kivi.quantize(values, 3, group, bits)
        return
    every = (whole[:, None] * pages.block + torch.arange(pages.block, device=slots.device)).flatten()
    _write_planes(keys.transpose(1, 2).flatten(0, 1), values.transpose(1, 2).flatten(0, 1), pages, every)


def _sides(pages: PagedKV) -> tuple[tuple[str, Basis | Channels, Tensor, Tensor | None], ...]:
    """Return name, coordinates, codes and scales of keys, and those of values."""
    assert pages.bases is not None
    keys = "key", pages.bases.keys, pages.keys, pages.key_scales
    return keys, ("value", pages.bases.values, pages.values, pages.value_scales)


def _write_planes(k: Tensor, v: Tensor, pages: PagedKV, slots: Tensor) -> None:
    """Write coordinates [N, G, D] as bit planes. A run's 16 slots share bytes, so it is read, changed and written."""
    runs, which = torch.unique(slots // 16, return_inverse=True)
    block, run = runs * 16 // pages.block, runs % (pages.block // 16)
    for x, (side, basis, planes, scales) in zip((k, v), _sides(pages), strict=True):
        assert isinstance(basis, Basis)
        assert scales is not None
        rows, scales[slots // pages.block, :, slots % pages.block] = coding.quantize(x, basis, scales.dtype)
        codes = coding.unpack(planes[block, :, run], basis, side == "value")
        codes[which, :, slots % 16] = rows
        planes[block, :, run] = coding.pack(codes, basis, side == "value")


def _write_channels(k: Tensor, v: Tensor, pages: PagedKV, slots: Tensor) -> None:
    """Write coordinates [N, G, D] as channel codes; those of a block's first slot also unrounded."""
    block, place = slots // pages.block, slots % pages.block
    first, outliers = place == 0, pages.scheme.outliers(pages.head_dim)
    for y, (side, channels, codes, scales) in zip((k, v), _sides(pages), strict=True):
        assert isinstance(channels, Channels)
        coded = kvquant.quantize(y, channels, outliers)
        codes[block, :, place] = coded.codes
        pages.more[f"{side}_outliers"][block, :, place] = coded.outliers
        pages.more[f"{side}_columns"][block, :, place] = coded.columns
        pages.more[f"{side}_firsts"][block[first]] = y[first].bfloat16()
        if coded.scales is not None and scales is not None:
            scales[block, :, place] = coded.scales


def read_pages(pages: PagedKV, blocks: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return keys and values, each [..., slots, G, D], of the finished blocks of a table [..., width]. Where the pages
    have bases, they are coordinates."""
    if pages.scheme.layout in (Layout.BIT_PLANES, Layout.KIVI, Layout.KVQUANT):
        shape = (*blocks.shape[:-1], blocks.shape[-1] * pages.block, pages.kv_heads, pages.head_dim)
        keys, values = (
            x.transpose(1, 2).reshape(shape).to(dtype) for x in _read_blocks(pages, blocks.long().flatten())
        )
        return keys, values
    keys = pages.keys[blocks.long()]  # [..., width, G, runs, D / J, 16, J]
    keys = keys.movedim((-4, -2, -5, -3), (-5, -4, -3, -2))  # [..., width, runs, 16, G, D / J, J]
    keys = keys.flatten(-2)[..., : pages.head_dim].flatten(-5, -3)
    values = pages.values[blocks.long()]  # [..., width, G, block / J, P, J]
    values = values.movedim(-1, -2).flatten(-3, -2).movedim(-3, -2)  # [..., width, block, G, P]
    values = values[..., : pages.head_dim].flatten(-4, -3)
    if pages.key_scales is None or pages.value_scales is None:
        return keys.to(dtype), values.to(dtype)
    if pages.scheme.layout == Layout.FP8:
        keys, values = keys.contiguous().view(torch.float8_e4m3fn), values.contiguous().view(torch.float8_e4m3fn)
    scales = (
        s[blocks.long()].transpose(-1, -2).flatten(-3, -2)[..., None] for s in (pages.key_scales, pages.value_scales)
    )
    wide = torch.promote_types(dtype, torch.float32)
    keys, values = ((codes.to(wide) * scale).to(dtype) for codes, scale in zip((keys, values), scales, strict=True))
    return keys, values


def _read_blocks(pages: PagedKV, blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys and values of blocks [M], float32 [M, G, block, D] each."""
    if pages.scheme.layout == Layout.KVQUANT:
        return _read_channels(pages, blocks)
    assert pages.key_scales is not None
    assert pages.value_scales is not None
    if pages.key_zeros is not None and pages.value_zeros is not None:
        bits = round(pages.scheme.bits)
        keys = kivi.dequantize(pages.keys[blocks], pages.key_scales[blocks], pages.key_zeros[blocks], 2, bits)
        values = kivi.dequantize(pages.values[blocks], pages.value_scales[blocks], pages.value_zeros[blocks], 3, bits)
        return keys, values
    found = []
    for side, basis, planes, scales in _sides(pages):
        assert isinstance(basis, Basis)
        assert scales is not None
        runs = planes[blocks].transpose(1, 2).flatten(0, 1)  # [M * runs, G, U, 16]
        codes = coding.unpack(runs, basis, side == "value").unflatten(0, (len(blocks), pages.block // 16))
        codes = codes.movedim(2, 3).flatten(1, 2)  # [M, runs, G, 16, D] to [M, block, G, D]
        found.append(coding.dequantize(codes, scales[blocks].transpose(1, 2), basis).transpose(1, 2))
    return found[0], found[1]


def _read_channels(pages: PagedKV, blocks: Tensor) -> tuple[Tensor, Tensor]:
    found = []
    for side, channels, codes, scales in _sides(pages):
        assert isinstance(channels, Channels)
        outliers, columns = (pages.more[f"{side}_{what}"][blocks] for what in ("outliers", "columns"))
        coded = kvquant.Coded(codes[blocks], outliers, columns, None if scales is None else scales[blocks])
        y = kvquant.dequantize(coded, channels)  # [M, G, block, D]
        y[:, :, 0] = pages.more[f"{side}_firsts"][blocks].float()
        found.append(y)
    return found[0], found[1]


def read_sequence(
    pages: PagedKV, table: Tensor, length: int, tail: int | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return the first `length` slots of a sequence, keys and values [S, G, D] each. The block of the last slot comes
    from its tail, where the pages keep unfinished blocks apart."""
    if pages.recent is None or tail is None or not length:
        k, v = read_pages(pages, table[: -(-length // pages.block)], dtype)
        return k[:length], v[:length]
    done = (length - 1) // pages.block
    k, v = read_pages(pages, table[:done], dtype)
    own = length - done * pages.block
    last = (x[tail, :, :own].transpose(0, 1).to(dtype) for x in (pages.recent.keys, pages.recent.values))
    return torch.cat((k, next(last))), torch.cat((v, next(last)))


def write_kv(
    q: Tensor, k: Tensor, v: Tensor, pages: PagedKV, place: AttentionMetadata, rotation: Rotation | None
) -> Tensor:
    if rotation is not None:
        cos, sin = rotation.cos[rotation.rows.long()], rotation.sin[rotation.rows.long()]
        q, k = rope(q, cos, sin), rope(k, cos, sin)
    tails = None if place.tails is None else place.tails.repeat_interleave(place.row_starts.diff().long())
    write_pages(k, v, pages, place.slot_mapping, tails)
    return q if pages.bases is None else pages.bases.keys.turn_queries(q)


def paged_attention(
    q: Tensor, pages: PagedKV, place: AttentionMetadata, form: AttentionForm, want_mass: bool = False
) -> tuple[Tensor, Tensor | None]:
    mixed, mass = _paged_attention(q, pages, place, form, want_mass)
    if pages.bases is not None:
        mixed = pages.bases.values.turn_back(mixed.unflatten(1, (form.heads, -1))).flatten(1)
    return mixed, mass


def _paged_attention(
    q: Tensor, pages: PagedKV, place: AttentionMetadata, form: AttentionForm, want_mass: bool
) -> tuple[Tensor, Tensor | None]:
    starts, lengths = place.row_starts.tolist(), place.lengths.tolist()
    counts = [end - first for first, end in itertools.pairwise(starts)]
    out = torch.zeros_like(q)
    mass = q.new_zeros((len(counts), form.kv_heads, place.block_tables.shape[1] * pages.block), dtype=torch.float32)
    plain = place.key_positions is None and place.tree is None and not want_mass and pages.recent is None
    if plain and len(counts) > 1 and len(set(counts)) == len(set(lengths)) == 1 and counts[0] > 0:
        at = place.positions.view(len(counts), -1)
        if (at == at[0]).all():  # sequences of the same positions are computed as one batch
            k, v = read_pages(pages, place.block_tables[:, : -(-lengths[0] // pages.block)], q.dtype)
            k, v = k[:, : lengths[0]], v[:, : lengths[0]]
            queries, key_at = q.view(len(counts), counts[0], *q.shape[1:]), torch.arange(lengths[0], device=q.device)
            return _attend_tiled(queries, k, v, at[0], key_at, form).reshape(q.shape[0], -1), None
    tree_at = 0
    for b, (first, count, length) in enumerate(zip(starts, counts, lengths, strict=False)):
        table = place.block_tables[b, : -(-length // pages.block)]
        k, v = read_sequence(pages, table, length, None if place.tails is None else int(place.tails[b]), q.dtype)
        at = place.positions[first : first + count]
        if place.key_positions is None:
            key_at = torch.arange(length, device=q.device, dtype=at.dtype)
            if form.window is not None and count:
                behind = max(0, int(at.min()) - form.window + 1)  # blocks there may be released, and another's NaN
                k[:behind] = v[:behind] = 0
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
            mixed = attend(one[None], k[None], v[None], mask[seeing], form)[0]
            out[first + rows.start : first + rows.stop][seeing] = mixed
            if want_mass:
                weights = _weights(one[None].transpose(1, 2), k[None].transpose(1, 2), mask[seeing], form)[0]
                mass[b, :, :length] += weights.sum(1).unflatten(0, (form.kv_heads, -1)).sum(1)
    return out.reshape(q.shape[0], -1), mass if want_mass else None
