"""KIVI's code (Liu et al. 2024): 2 or 4 bits from minimum to maximum, keys per channel and values per token.

Keys of large models have channels that are large in every token. A scale per token would serve those and round all
others away, so each channel of 32 tokens gets its own. Values have no such channels, and a token's are mixed as a
whole: 32 columns of a token share a scale. Zero and scale are float16, a bit a number.

The code is as published, the 16-bit windows are not: see `kv/schemes.py`. `kernels/ref_published.py` has those of the
paper, for measurements.

Legend: M blocks, G key-value heads, D head size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attar.kv.schemes import RUN


def quantize(x: Tensor, along: int, group: int, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize blocks [M, G, block, D], in groups of `group` along axis 2 or 3, to (codes, scales, zeros) of pages.

    A byte has two bits of four neighbours along that axis: [M, G, block / 16, D, 4] or [M, G, block, D / 4]. Codes of 4
    bits have a second plane of such bytes for their high bits, behind the first on axis 3. Scales and zeros are
    float16, one for each group. A group that is not finite gets the scale NaN.
    """
    codes, scale, zero = _codes(x, along, group, (1 << bits) - 1)
    codes = codes.flatten(along, along + 1)
    if along == 2:
        codes = codes.unflatten(2, (-1, RUN)).transpose(3, 4)
    places = torch.arange(0, 8, 2, device=x.device).byte()
    planes = [
        ((codes >> low & 3).unflatten(-1, (-1, 4)) << places).sum(-1).to(torch.uint8) for low in range(0, bits, 2)
    ]
    return torch.cat(planes, 3), scale.squeeze(along + 1), zero.squeeze(along + 1)


def rounded(x: Tensor, along: int, group: int, bits: int) -> Tensor:
    """Return blocks [M, G, block, D] as they are read, float32, from `bits` bits in groups as in `quantize`."""
    codes, scale, zero = _codes(x, along, group, (1 << bits) - 1)
    numbers: Tensor = codes.float() * scale.float() + zero.float()
    return numbers.flatten(along, along + 1)


def _codes(x: Tensor, along: int, group: int, most: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes up to `most` of the groups of x along an axis, which is split in two, with scales and zeros."""
    groups = x.float().unflatten(along, (-1, group))
    low, high = groups.amin(along + 1, keepdim=True), groups.amax(along + 1, keepdim=True)
    scale, zero = ((high - low) / most).half(), low.half()
    scale = torch.where(groups.isfinite().all(along + 1, keepdim=True) & zero.isfinite(), scale, torch.nan)
    s = torch.where(scale == 0, 1.0, scale.float())
    codes = ((groups - zero.float()) / s).nan_to_num(0.0).round().clamp(0, most).to(torch.uint8)
    return codes, scale, zero


def dequantize(codes: Tensor, scales: Tensor, zeros: Tensor, along: int, bits: int) -> Tensor:
    """Convert codes, scales and zeros of `quantize` to float32 [M, G, block, D]."""
    places = torch.arange(0, 8, 2, device=codes.device).byte()
    planes = [(plane[..., None] >> places & 3).flatten(-2) for plane in codes.chunk(bits // 2, 3)]
    each = torch.stack([plane << 2 * number for number, plane in enumerate(planes)]).sum(0)
    if along == 2:
        each = each.transpose(3, 4).flatten(2, 3)
    groups = each.unflatten(along, (scales.shape[along], -1)).float()
    numbers: Tensor = groups * scales.float().unsqueeze(along + 1) + zeros.float().unsqueeze(along + 1)
    return numbers.flatten(along, along + 1)
