"""Argmax over logits, in Triton.

`argmax` is the choice of a greedy request and the basis of every other. A row of 128,000 logits is shared out among
programs. Each leaves the best of its share as one integer in the wanted order: the number's bits, made monotone, above
the index counted down. So the first among equals wins, and a NaN is above everything.

Random numbers for sampling come from the host: they follow from a request's seed and the token's index alone
(`sampling/sampler.py`), so they are known before the logits are.
"""

from __future__ import annotations

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
    """Run `ops.argmax` on rows [B, V] whose numbers lie side by side: int64 [B]."""
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
