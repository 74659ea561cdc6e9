"""Keys and values in 8 bits: codes and a scale for each token and head, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

INT8_MOST, FP8_MOST = 127, 448.0


def quantize_head(x: Tensor, fp8: bool = False) -> tuple[Tensor, Tensor]:
    """Quantize heads [..., D] to codes [..., D], int8 or e4m3 (as uint8 bits), and scales [...]. A head that is not
    finite gets the scale NaN."""
    x = x.float()
    scale, finite = x.abs().amax(-1) / (FP8_MOST if fp8 else INT8_MOST), x.isfinite().all(-1)
    codes = torch.where(finite[..., None], x / torch.where(scale == 0, 1.0, scale)[..., None], 0)
    codes = codes.to(torch.float8_e4m3fn).view(torch.uint8) if fp8 else codes.round().to(torch.int8)
    return codes, torch.where(finite, scale, torch.nan)


def dequantize_head(codes: Tensor, scales: Tensor) -> Tensor:
    """Convert codes [..., D], int8 or e4m3 (as uint8 bits), and scales [...] to heads, float32."""
    if codes.dtype == torch.uint8:
        codes = codes.contiguous().view(torch.float8_e4m3fn)
    return codes.float() * scales[..., None]
