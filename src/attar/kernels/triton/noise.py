"""`ops.gumbel_max` in Triton: random choices from rows of scaled logits.

Noise costs ten rounds of integer products and two logarithms a token, and no memory. Sums and products are not fused
(`enable_fp_fusion`), so that the noise has the bits of `kernels/noise.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attar.kernels.noise import NOISE_KEY
from attar.kernels.triton.language import kernel, tl

SHARE = 8192  # tokens of a row for one program
STEP = 1024

_KEY: tl.constexpr = tl.constexpr(NOISE_KEY)


@kernel
def _logarithm(x: tl.tensor) -> tl.tensor:
    bits = x.to(tl.int64, bitcast=True)
    exponent = (bits - 0x3FE6A09E667F3BCD) >> 52
    m = (bits - (exponent << 52)).to(tl.float64, bitcast=True)
    s = (m - 1.0) / (m + 1.0)
    z = s * s
    total = tl.full(z.shape, 1.0, tl.float64) / 23.0
    for i in tl.static_range(11):
        total = total * z + tl.full(z.shape, 1.0, tl.float64) / (21.0 - 2.0 * i)
    ln2 = tl.full(z.shape, 0x162E42FEFA39EF, tl.int64).to(tl.float64) * 1.1102230246251565e-16  # 2^-53: exact
    return exponent.to(tl.float64) * ln2 + 2.0 * s * total


@kernel
def _noise(seed: tl.tensor, index: tl.tensor, at: tl.tensor) -> tl.tensor:
    """Return the Gumbel noise of the tokens `at`."""
    block = (at // 4).to(tl.uint64)
    zero = tl.zeros_like(block)
    c0, c1, c2, c3 = zero + index, zero, block, zero
    k0, k1 = zero + seed, zero + _KEY
    for _ in tl.static_range(10):
        low, high = zero + 0xD2E7470EE14C6C93, zero + 0xCA5A826395121157
        carry_low, carry_high = tl.umulhi(low, c0), tl.umulhi(high, c2)
        low, high = low * c0, high * c2
        c0, c1, c2, c3 = carry_high ^ c1 ^ k0, high, carry_low ^ c3 ^ k1, low
        k0 += 0x9E3779B97F4A7C15
        k1 += 0xBB67AE8584CAA73B
    lane = at % 4
    word = tl.where(lane == 0, c0, tl.where(lane == 1, c1, tl.where(lane == 2, c2, c3)))
    u = ((word >> 12).to(tl.int64).to(tl.float64) + 0.5) * 2.220446049250313e-16
    return -_logarithm(-_logarithm(u))


@kernel
def _gumbel_max(
    rows: tl.tensor, seeds: tl.tensor, indices: tl.tensor, most: tl.tensor, chosen: tl.tensor, columns: tl.tensor,
    splits: tl.tensor, SHARE: tl.constexpr, STEP: tl.constexpr,
) -> None:  # fmt: skip
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    seed, index = tl.load(seeds + row).to(tl.uint64, bitcast=True), tl.load(indices + row).to(tl.uint64, bitcast=True)
    best = tl.full([STEP], float("-inf"), tl.float64)
    place = tl.full([STEP], 0, tl.int64)
    for start in range(split * SHARE, tl.minimum(split * SHARE + SHARE, columns), STEP):
        at = start + tl.arange(0, STEP)
        x = tl.load(rows + row * columns + at, mask=at < columns, other=float("-inf"))
        total = x + _noise(seed, index, at)
        better = total > best
        place = tl.where(better, at.to(tl.int64), place)
        best = tl.where(better, total, best)
    found = tl.max(best, 0)
    tl.store(most + row * splits + split, found)
    tl.store(chosen + row * splits + split, tl.min(tl.where(best == found, place, columns.to(tl.int64)), 0))


def gumbel_max(rows: Tensor, draws: Tensor) -> Tensor:
    """Run `ops.gumbel_max` on contiguous float64 rows [B, V], with the bits of seeds and indices, int64 [2, B]."""
    assert rows.is_contiguous()
    seeds, indices = draws.contiguous()
    splits = -(-rows.shape[1] // SHARE)
    most = torch.empty((len(rows), splits), dtype=torch.float64, device=rows.device)
    chosen = torch.empty((len(rows), splits), dtype=torch.int64, device=rows.device)
    if len(rows):
        _gumbel_max[(len(rows), splits)](
            rows, seeds, indices, most, chosen, rows.shape[1], splits, SHARE=SHARE, STEP=STEP, enable_fp_fusion=False
        )
    best = most == most.amax(-1, keepdim=True)
    return torch.where(best, chosen, rows.shape[1]).amin(-1).clamp(max=rows.shape[1] - 1)
