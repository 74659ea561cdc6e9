"""KV cache in 4 bits: the scheme `int4` of `kv/schemes.py` in the layout of Triton's kernels.

The coordinates are those of `kv/bit_planes.py`. Heads are rotated, with a scale for each token and sixteen levels. Of
eight candidates for the scale, the one with the least error is taken, rounded to bfloat16 before codes are chosen.
Those planes suit int8 products of one vector register; here a byte holds coordinates j and D / 2 + j of one token, so a
token is one piece of memory and the tensor cores get rows.

Rotating, rounding and packing are parts of the one kernel that writes pages (`kv_write.py`), which has the head in its
registers anyway. Hadamard's matrix is never read: a product with it is log2(D) rounds in which neighbours become their
sum, which goes to the lower half, and their difference, which goes to the upper. After as many rounds as an index has
bits every number is in its place. The sums are those of the matrix product in another order, so a coordinate may differ
from the reference's in its last bits; codes are then chosen by the reference's arithmetic, to the bit.

Attention's result comes back as coordinates and is turned by the same rounds, in a launch of its own. Not done: turning
it in the attention's launch, where a tile of a prompt would cross shared memory seven times.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from attar.kernels.triton.backend import same_device
from attar.kernels.triton.language import kernel, tl
from attar.kernels.triton.pages import NibblePages
from attar.kernels.triton.rows import ROUND
from attar.kv import bit_planes
from attar.kv.schemes import UNIT

BITS = 4
TRIED = tl.constexpr(len(bit_planes.STEPS))
LAST = tl.constexpr(bit_planes.LAST)
SMALLEST = tl.constexpr(bit_planes.SMALLEST)


@functools.cache
def tables(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return the tables of codes on the device.

    They are the level of each code, int8 [16]; the code of each integer from -127 to 127, uint8 [255]; and the
    candidates for a scale, float32 [8], as shares of the root mean square.
    """
    levels, nearest = bit_planes.tables()
    return levels[BITS, :16].to(device), nearest[BITS].to(device), torch.tensor(bit_planes.STEPS, device=device)


@functools.cache
def entry(size: int) -> float:
    """Return the magnitude of the entries of Hadamard's matrix."""
    return float(bit_planes.hadamard(size)[0, 0])


def share(size: int) -> float:
    """Return a coordinate's share in the root mean square of a head, like `bit_planes.Basis.shares` of equal bits."""
    return float(1.0 / (UNIT * size**0.5))


@kernel
def turned(x: tl.tensor, each: tl.tensor, D: tl.constexpr) -> tl.tensor:
    """Multiply x [D] float32 by Hadamard's matrix, whose entries are `each` or its negative."""
    for place in tl.static_range(16):
        if (1 << place) < D:
            a, b = tl.split(tl.reshape(x, (D // 2, 2)))
            x = tl.reshape(tl.trans(tl.join(a + b, a - b)), (D,))
    return x * each


@kernel
def _to_bfloat16(x: tl.tensor) -> tl.tensor:
    """Return the bfloat16 nearest to a nonnegative float32, ties to even, as float32."""
    bits = x.to(tl.int32, bitcast=True)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)


@kernel
def put_nibbles(
    coordinates: tl.tensor, pages: tl.tensor, scales: tl.tensor, place: tl.tensor, levels: tl.tensor,
    nearest: tl.tensor, steps: tl.tensor, share: tl.tensor, D: tl.constexpr,
) -> None:  # fmt: skip
    """Write coordinates [D] float32 to a slot, as codes and their scale."""
    HALF: tl.constexpr = D // 2
    side, j = tl.arange(0, 2), tl.arange(0, HALF)
    y = tl.reshape(coordinates, (2, HALF))
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
        miss = y - scale * tl.load(levels + code).to(tl.float32)
        error = tl.sum(tl.sum(miss * miss, 1), 0)
        better = error < best
        best, kept = tl.where(better, error, best), tl.where(better, scale, kept)
        codes = tl.where(better, code, codes)
    packed = tl.sum(codes * tl.where(side == 0, 1, 16)[:, None], 0)
    tl.store(pages + place * HALF + j, packed.to(tl.uint8))
    tl.store(scales + place, tl.where(finite, kept, float("nan")))


@kernel
def _turn(mixed: tl.tensor, each: tl.tensor, D: tl.constexpr) -> None:
    at = mixed + tl.program_id(0).to(tl.int64) * D + tl.arange(0, D)
    tl.store(at, turned(tl.load(at).to(tl.float32), each, D).to(mixed.dtype.element_ty))


def turn_back(mixed: Tensor, pages: NibblePages) -> Tensor:
    """Turn mixtures [N, H * D] of values' coordinates into mixtures of values, in their place."""
    assert mixed.is_contiguous()
    same_device(mixed, pages.values)
    if len(mixed):
        size = pages.head_dim
        _turn[(mixed.numel() // size,)](mixed, entry(size), D=size, num_warps=1)
    return mixed
