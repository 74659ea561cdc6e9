"""What sampling asks of every logit, in Triton: the largest, and numbers to draw with.

`argmax` is the choice of a greedy request and the ground of every other. A row of 128,000 logits is shared out among
programs, each of which leaves the best of its share as one integer whose order is the order wanted: the number's bits,
made monotone, above the place counted down, so that of equals the first wins; a NaN is above everything.

`uniforms` is the CPU sampler's Philox4x64-10 (Salmon et al. 2011), word for word: a token's number follows from the
request's seed and the token's index alone, wherever it is drawn, so that a request can move between devices and keep
its luck. Products of 64 by 64 bits are put together from halves, which is exact and needs no instruction of one card.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from attar.kernels.triton.language import arrive_last, counters, kernel, next_power, nothing, tl

SHARE = 8192  # logits of one program
STEP = 1024


@kernel
def _argmax(
    rows: tl.tensor, parts: tl.tensor, out: tl.tensor, arrived: tl.tensor, columns: tl.tensor, stride: tl.tensor,
    SPLITS: tl.constexpr, BLOCK_P: tl.constexpr, SHARE: tl.constexpr, STEP: tl.constexpr,
) -> None:  # fmt: skip
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    least = -9223372036854775808
    best = tl.full([STEP], least, tl.int64)
    for start in range(split * SHARE, tl.minimum(split * SHARE + SHARE, columns), STEP):
        at = start + tl.arange(0, STEP)
        x = tl.load(rows + row * stride + at, mask=at < columns, other=0.0).to(tl.float32)
        x = tl.where(x == 0, 0.0, x)  # -0 equals 0
        bits = x.to(tl.int32, bitcast=True)
        order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
        order = tl.where(x != x, 2147483647, order)
        key = (order.to(tl.int64) << 32) | (2147483647 - at).to(tl.int64)
        best = tl.maximum(best, tl.where(at < columns, key, least))
    found = tl.max(best, 0)
    if SPLITS > 1:
        tl.store(parts + row * SPLITS + split, found)
        if not arrive_last(arrived, tl.program_id(0), SPLITS):
            return
        each = tl.arange(0, BLOCK_P)
        found = tl.max(tl.load(parts + row * SPLITS + each, mask=each < SPLITS, other=least, cache_modifier=".cg"), 0)
    tl.store(out + row, 2147483647 - (found & 0xFFFFFFFF))


def argmax(rows: Tensor) -> Tensor:
    """`ops.argmax` of rows [B, V], of which numbers lie side by side: int64 [B]."""
    assert rows.ndim == 2
    assert rows.stride(1) == 1
    assert rows.shape[1] > 0
    out = torch.empty(len(rows), dtype=torch.int64, device=rows.device)
    splits = -(-rows.shape[1] // SHARE)
    parts = torch.empty((len(rows), splits), dtype=torch.int64, device=rows.device) if splits > 1 else out
    if len(rows):
        _argmax[(len(rows), splits)](
            rows, parts, out, counters(rows.device) if splits > 1 else nothing(rows.device), rows.shape[1],
            rows.stride(0), SPLITS=splits, BLOCK_P=next_power(splits), SHARE=SHARE, STEP=STEP, num_warps=4,
        )  # fmt: skip
    return out


@kernel
def _high(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    """The upper 64 bits of the product of two 64-bit numbers."""
    low = 0xFFFFFFFF
    a0, a1, b0, b1 = a & low, a >> 32, b & low, b >> 32
    middle = a1 * b0 + ((a0 * b0) >> 32)
    return a1 * b1 + (middle >> 32) + (((middle & low) + a0 * b1) >> 32)


@kernel
def _uniforms(
    seeds: tl.tensor, indices: tl.tensor, constants: tl.tensor, out: tl.tensor, count: tl.tensor, BLOCK: tl.constexpr
) -> None:
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    held = at < count
    c0 = tl.load(indices + at, mask=held, other=0).to(tl.uint64, bitcast=True)
    k0 = tl.load(seeds + at, mask=held, other=0).to(tl.uint64, bitcast=True)
    m0 = tl.load(constants).to(tl.uint64, bitcast=True)
    m1 = tl.load(constants + 1).to(tl.uint64, bitcast=True)
    w0 = tl.load(constants + 2).to(tl.uint64, bitcast=True)
    w1 = tl.load(constants + 3).to(tl.uint64, bitcast=True)
    c1 = tl.zeros([BLOCK], tl.uint64)
    c2, c3, k1 = c1, c1, c1
    for _ in range(10):
        high, higher = _high(c0, m0), _high(c2, m1)
        low, lower = c0 * m0, c2 * m1
        c0, c1, c2, c3 = higher ^ c1 ^ k0, lower, high ^ c3 ^ k1, low
        k0, k1 = k0 + w0, k1 + w1
    number = (c0 >> 11).to(tl.int64).to(tl.float64)  # 53 bits: exact
    tl.store(out + at, number * 1.1102230246251565e-16, mask=held)


@functools.cache
def _constants(device: torch.device) -> Tensor:
    """Philox's two multipliers and two increments of its key: int64 [4] of their bits."""
    words = (0xD2E7470EE14C6C93, 0xCA5A826395121157, 0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)
    return torch.tensor([word - (word >> 63 << 64) for word in words], device=device)


def uniforms(seeds: Tensor, indices: Tensor) -> Tensor:
    """Float64 [B] in [0, 1): the sampler's `uniform(seed, index)` of each row, from int64 [B] each, whose bits are
    taken as unsigned."""
    assert seeds.dtype == indices.dtype == torch.int64
    assert seeds.shape == indices.shape
    out = torch.empty(len(seeds), dtype=torch.float64, device=seeds.device)
    block = min(128, next_power(len(seeds)))
    if len(seeds):
        _uniforms[(-(-len(seeds) // block),)](
            seeds.contiguous(),
            indices.contiguous(),
            _constants(seeds.device),
            out,
            len(seeds),
            BLOCK=block,
            num_warps=1,
        )
    return out
