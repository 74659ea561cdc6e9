"""Writing keys and values in 4 bits: the scheme `int4` of `formats/kv.py`, as Triton's kernels keep it.

The coordinates are those of `kernels/planes.py`: heads rotated, a scale for each token, sixteen levels, and of eight
candidates for the scale the one that leaves the least error, rounded to bfloat16 before codes are chosen. Where those
planes suit int8 products of one vector register, a byte here holds coordinates j and D / 2 + j of one token, so a
token is one piece of memory and the tensor cores get rows.

One program takes one head of one row. The rotations before and after are torch's: a product with a matrix for each
head. Not done: those in the same launch, which would save some ten small ones a layer.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from attar.formats.kv import UNIT
from attar.kernels import planes
from attar.kernels.pages import Placement
from attar.kernels.triton.backend import same_device
from attar.kernels.triton.language import kernel, tl
from attar.kernels.triton.pages import NibblePages
from attar.kernels.triton.rows import ROUND

BITS = 4
TRIED = tl.constexpr(len(planes.STEPS))
LAST = tl.constexpr(planes.LAST)
SMALLEST = tl.constexpr(planes.SMALLEST)


@functools.cache
def tables(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """The level of each code, int8 [16]; the code of each integer from -127 to 127, uint8 [255]; the candidates for a
    scale, float32 [8], as shares of the root mean square."""
    levels, nearest = planes.tables()
    return levels[BITS, :16].to(device), nearest[BITS].to(device), torch.tensor(planes.STEPS, device=device)


@kernel
def _to_bfloat16(x: tl.tensor) -> tl.tensor:
    """The bfloat16 nearest to a float32 that is not negative, of two the even one, as float32."""
    bits = x.to(tl.int32, bitcast=True)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)


@kernel
def _pack(
    coordinates: tl.tensor, pages: tl.tensor, scales: tl.tensor, slots: tl.tensor, levels: tl.tensor,
    nearest: tl.tensor, steps: tl.tensor, share: tl.tensor, block: tl.tensor, G: tl.constexpr, D: tl.constexpr,
) -> None:  # fmt: skip
    HALF: tl.constexpr = D // 2
    row, g = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + row)
    place = (slot // block * G + g) * block + slot % block
    side, j = tl.arange(0, 2), tl.arange(0, HALF)
    y = tl.load(coordinates + (row * G + g) * D + side[:, None] * HALF + j[None, :])
    finite = tl.sum(tl.sum(tl.where(tl.abs(y) < float("inf"), 0, 1), 1), 0) == 0
    y = tl.where(finite, y, 0.0)
    size = tl.sqrt(tl.sum(tl.sum(y * share * (y * share), 1), 0))
    best = float("inf")
    kept = float("nan")
    codes = tl.zeros([2, HALF], tl.int32)
    for i in range(TRIED):
        scale = _to_bfloat16(size * tl.load(steps + i))
        s = tl.where(scale < SMALLEST, 1.0, scale)
        at = tl.minimum(tl.maximum(y * tl.div_rn(1.0, s), -LAST), LAST)
        code = tl.load(nearest + ((at + ROUND) - ROUND).to(tl.int32) + LAST).to(tl.int32)
        miss = y - s * tl.load(levels + code).to(tl.float32)
        error = tl.sum(tl.sum(miss * miss, 1), 0)
        better = error < best
        best, kept = tl.where(better, error, best), tl.where(better, scale, kept)
        codes = tl.where(better, code, codes)
    packed = tl.sum(codes * tl.where(side == 0, 1, 16)[:, None], 0)
    tl.store(pages + place * HALF + j, packed.to(tl.uint8))
    tl.store(scales + place, tl.where(finite, kept, float("nan")))


def write(q: Tensor, k: Tensor, v: Tensor, pages: NibblePages, place: Placement) -> Tensor:
    """Keys and values [N, G, D], normed and rotated, to their slots; returns the queries [N, H, D] as attention over
    such pages wants them. Raises ValueError where shapes or devices do not fit."""
    if k.shape != v.shape or k.shape[1:] != (pages.kv_heads, pages.head_dim) or place.slots.shape != k.shape[:1]:
        raise ValueError(
            f"keys are {list(k.shape)} and values {list(v.shape)}, not [rows, heads, columns] of the pages"
        )
    same_device(q, k, v, pages.keys, place.slots)
    bases = pages.bases
    assert bases is not None
    assert pages.key_scales is not None
    assert pages.value_scales is not None
    share = 1.0 / (UNIT * pages.head_dim**0.5)
    for x, basis, held, scales in (
        (k, bases.keys, pages.keys, pages.key_scales),
        (v, bases.values, pages.values, pages.value_scales),
    ):
        if len(x):
            _pack[(len(x), pages.kv_heads)](
                basis.turn(x).contiguous(), held, scales, place.slots, *tables(q.device), share, pages.block,
                G=pages.kv_heads, D=pages.head_dim, num_warps=1,
            )  # fmt: skip
    return bases.keys.turn_queries(q)
