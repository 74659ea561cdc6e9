"""`ops.write_kv` in Triton: norms of heads, rotation and the writing of keys and values, in one launch.

One program takes one head of one row: a few hundred bytes, so it is a single warp. The partner of a rotated number is
read a second time rather than moved between lanes, which for a head of 128 has no visible cost. In 4 bits heads, and
queries with them, are turned into coordinates before they are stored (`nibbles.py`).

Slots, like everything in a `AttentionMetadata`, are read when the kernel runs and are not checked: checking them would
stop the device. The maker of placements (`model.cache`) makes only slots that exist.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attar.kernels.operands import Norm
from attar.kernels.triton import nibbles
from attar.kernels.triton.backend import same_device
from attar.kernels.triton.language import kernel, next_power, nothing, tl
from attar.kernels.triton.nibbles import put_nibbles, turned
from attar.kernels.triton.pages import NibblePages, PlainPages
from attar.kernels.triton.rows import ROUND
from attar.kv.pages import AttentionMetadata, Rotation


@kernel
def _head(
    source: tl.tensor, weight: tl.tensor, cos: tl.tensor, sin: tl.tensor, eps: tl.tensor, offset: tl.tensor,
    NORM: tl.constexpr, OFFSET: tl.constexpr, HALF: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return a head normed and rotated, rounded to its dtype like `ref`'s, in float32 [BLOCK]."""
    d = tl.arange(0, BLOCK)
    x = tl.load(source + d, mask=d < D, other=0.0)
    dtype: tl.constexpr = x.dtype
    wide = x.to(tl.float32)
    turns = d < 2 * HALF
    partner = tl.where(d < HALF, d + HALF, d - HALF)
    other = tl.load(source + partner, mask=turns, other=0.0).to(tl.float32)
    if NORM:
        factor = tl.rsqrt(tl.sum(wide * wide, 0) / D + eps)
        w = tl.load(weight + d, mask=d < D, other=0.0).to(tl.float32)
        w_other = tl.load(weight + partner, mask=turns, other=0.0).to(tl.float32)
        if OFFSET:
            wide, other = wide * factor * (w + offset), other * factor * (w_other + offset)
        else:
            wide = (wide * factor).to(dtype).to(tl.float32) * w
            other = (other * factor).to(dtype).to(tl.float32) * w_other
        wide, other = wide.to(dtype).to(tl.float32), other.to(dtype).to(tl.float32)
    if HALF > 0:
        angle = tl.where(d < HALF, d, d - HALF)
        c = tl.load(cos + angle, mask=turns, other=1.0)
        s = tl.load(sin + angle, mask=turns, other=0.0)
        wide = wide * c + tl.where(d < HALF, -other, other) * s
        wide = wide.to(dtype).to(tl.float32)
    return wide


@kernel
def _put(
    wide: tl.tensor, pages: tl.tensor, scales: tl.tensor, place: tl.tensor, SCALED: tl.constexpr, D: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Write a head [BLOCK] float32 to its slot, unrounded or as codes with a scale."""
    d = tl.arange(0, BLOCK)
    if SCALED:
        finite = tl.sum(tl.where(tl.abs(wide) < float("inf"), 0, 1), 0) == 0
        INTEGER: tl.constexpr = pages.dtype.element_ty == tl.int8
        scale = tl.div_rn(tl.max(tl.abs(wide), 0), 127.0 if INTEGER else 448.0)
        wide = tl.div_rn(wide, tl.where(scale == 0, 1.0, scale))
        if INTEGER:
            wide = (wide + ROUND) - ROUND
        wide = tl.where(finite, wide, 0.0)
        tl.store(scales + place, tl.where(finite, scale, float("nan")))
        if INTEGER:
            tl.store(pages + place * D + d, wide.to(tl.int8), mask=d < D)
        else:
            tl.store(pages + place * D + d, wide.to(tl.float8e4nv, fp_downcast_rounding="rtne"), mask=d < D)
    else:
        tl.store(pages + place * D + d, wide.to(pages.dtype.element_ty), mask=d < D)


@kernel
def _write(
    q: tl.tensor, k: tl.tensor, v: tl.tensor, out: tl.tensor, keys: tl.tensor, values: tl.tensor,
    key_scales: tl.tensor, value_scales: tl.tensor, q_weight: tl.tensor, k_weight: tl.tensor, cos: tl.tensor,
    sin: tl.tensor, turns: tl.tensor, slots: tl.tensor, levels: tl.tensor, nearest: tl.tensor, steps: tl.tensor,
    share: tl.tensor, each: tl.tensor, q_stride: tl.tensor, k_stride: tl.tensor, v_stride: tl.tensor,
    block: tl.tensor, eps: tl.tensor, offset: tl.tensor, H: tl.constexpr, G: tl.constexpr, NORM: tl.constexpr,
    OFFSET: tl.constexpr, SCALED: tl.constexpr, FOUR: tl.constexpr, HALF: tl.constexpr, D: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    d = tl.arange(0, BLOCK)
    angle = tl.load(turns + row).to(tl.int64) * HALF if HALF > 0 else row
    if head < H:
        source = q + row * q_stride + head * D
        wide = _head(source, q_weight, cos + angle, sin + angle, eps, offset, NORM, OFFSET, HALF, D, BLOCK)
        if FOUR:
            wide = turned(wide, each, D)
        tl.store(out + (row * H + head) * D + d, wide.to(out.dtype.element_ty), mask=d < D)
    else:
        g = (head - H) % G
        slot = tl.load(slots + row)
        place = (slot // block * G + g) * block + slot % block
        if head < H + G:
            source = k + row * k_stride + g * D
            wide = _head(source, k_weight, cos + angle, sin + angle, eps, offset, NORM, OFFSET, HALF, D, BLOCK)
            if FOUR:
                put_nibbles(turned(wide, each, D), keys, key_scales, place, levels, nearest, steps, share, D)
            else:
                _put(wide, keys, key_scales, place, SCALED, D, BLOCK)
        else:
            wide = tl.load(v + row * v_stride + g * D + d, mask=d < D, other=0.0).to(tl.float32)
            if FOUR:
                put_nibbles(turned(wide, each, D), values, value_scales, place, levels, nearest, steps, share, D)
            else:
                _put(wide, values, value_scales, place, SCALED, D, BLOCK)


def write_kv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pages: PlainPages,
    place: AttentionMetadata,
    rotation: Rotation | None = None,
    q_norm: Norm | None = None,
    k_norm: Norm | None = None,
) -> Tensor:
    """Run `ops.write_kv` on pages of any kind here; the two norms are RMSNorms that differ in the weight alone. Raises
    ValueError where shapes, strides or devices do not fit."""
    rows, heads, size = q.shape
    for name, heads_of, count in (("q", q, heads), ("k", k, pages.kv_heads), ("v", v, pages.kv_heads)):
        if heads_of.shape != (rows, count, pages.head_dim) or heads_of.stride()[1:] != (size, 1):
            raise ValueError(
                f"{name} is {list(heads_of.shape)}, not {[rows, count, pages.head_dim]} with heads together"
            )
    if place.slot_mapping.shape != (rows,) or (rotation is not None and rotation.rows.shape != (rows,)):
        raise ValueError(f"{rows} rows need as many slots and angles")
    if (q_norm is None) != (k_norm is None):
        raise ValueError("queries and keys are normed both or neither")
    eps = offset = 0.0
    none = nothing(q.device)
    weights = (none, none)
    if q_norm is not None and k_norm is not None:
        if (q_norm.kind, q_norm.eps, q_norm.offset) != ("rms", k_norm.eps, k_norm.offset) or k_norm.kind != "rms":
            raise ValueError("queries and keys are normed by RMSNorms of one epsilon and one offset")
        eps, offset, weights = q_norm.eps, q_norm.offset, (q_norm.weight, k_norm.weight)
    cos, sin, turns, half = none, none, none, 0
    if rotation is not None:
        cos, sin, turns, half = rotation.cos, rotation.sin, rotation.rows, rotation.cos.shape[1]
        if not 0 < 2 * half <= size:
            raise ValueError(f"{2 * half} columns cannot turn in heads of {size}")
    same_device(q, k, v, pages.keys, place.slot_mapping, cos, weights[0], weights[1])
    out = torch.empty((rows, heads, size), dtype=q.dtype, device=q.device)
    scaled, four = pages.key_scales is not None, isinstance(pages, NibblePages)
    tables = nibbles.tables(q.device) if four else (none, none, none)
    if rows:
        _write[(rows, heads + 2 * pages.kv_heads)](
            q, k, v, out, pages.keys, pages.values, pages.key_scales if scaled else none,
            pages.value_scales if scaled else none, *weights, cos, sin, turns, place.slot_mapping, *tables,
            nibbles.share(size), nibbles.entry(size) if four else 1.0, q.stride(0), k.stride(0), v.stride(0),
            pages.block, eps, offset, H=heads, G=pages.kv_heads, NORM=q_norm is not None, OFFSET=offset != 0,
            SCALED=scaled, FOUR=four, HALF=half, D=size, BLOCK=next_power(size), num_warps=1,
        )  # fmt: skip
    return out
