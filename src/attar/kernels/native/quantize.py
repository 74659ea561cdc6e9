"""Rows quantized to int8, in C++. Shapes: N rows, I input columns."""

from __future__ import annotations

import torch
from torch import Tensor

from attar.kernels.native import extension


def quantize_rows_int8(x: Tensor, level: str | None = None) -> tuple[Tensor, Tensor]:
    """Run `ops.quantize_rows_int8` on rows that `extension.supports` accepts: x [N, I] to (codes [N, I], scale [N, 1]).

    The bits equal the reference's at every level, for any thread count. `level` is for tests. Raises ValueError naming
    the first row that holds a NaN or an infinity.
    """
    assert x.ndim == 2, x.shape
    assert extension.supports("quantize_rows_int8", x.device.type, x.dtype) is None
    x = x.contiguous()
    codes = torch.empty(x.shape, dtype=torch.int8)  # [N, I]
    scale = torch.empty((x.shape[0], 1), dtype=torch.float32)
    lib = extension.library
    kernel = lib.quantize_rows_int8_float32 if x.dtype == torch.float32 else lib.quantize_rows_int8_bfloat16
    rows, columns = x.shape
    bad = kernel(x.data_ptr(), rows, columns, codes.data_ptr(), scale.data_ptr(), level or extension.cpu_level())
    if bad >= 0:
        raise ValueError(f"row {bad} holds a NaN or an infinity: it cannot be quantized")
    return codes, scale
