"""Norms, activations, rounding and embedding of rows, in C++. Shapes: N rows, I columns.

A row's bits depend on that row alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attar.errors import UserError
from attar.formats.packed import PackedTensor
from attar.kernels.native import extension
from attar.kernels.native.extension import library
from attar.kernels.native.linear import PackedWeight
from attar.kernels.operands import Activation, Norm, Prepared


def norm(stream: Tensor, delta: Tensor | None, spec: Norm, level: str | None = None) -> tuple[Tensor, Tensor]:
    """Run `ops.norm` on contiguous float32 rows. Raises ValueError where shapes do not fit."""
    weight, bias = spec.weight, spec.bias
    assert spec.prepared
    assert stream.is_contiguous()
    columns = stream.shape[-1]
    if any(each is not None and each.shape != (columns,) for each in (weight, bias)):
        raise ValueError(f"{spec.name}: rows of {columns} columns do not fit a norm over {weight.numel()}")
    if delta is not None and (delta.shape != stream.shape or not delta.is_contiguous()):
        raise ValueError(f"{spec.name}: what is added to the stream has its shape and is contiguous")
    out = extension.empty(tuple(stream.shape))
    total = stream if delta is None else extension.empty(tuple(stream.shape))
    extension.call(
        library.norm, spec.kind, stream.data_ptr(), 0 if delta is None else delta.data_ptr(),
        stream.numel() // columns, columns, weight.data_ptr(), 0 if bias is None else bias.data_ptr(), spec.eps,
        spec.offset, total.data_ptr(), out.data_ptr(), level or extension.cpu_level(),
    )  # fmt: skip
    return total, out


def activate(x: Tensor, kind: Activation, gated: bool, level: str | None = None) -> Tensor:
    """Run `ops.activate` on contiguous float32 rows. Raises ValueError for gated rows of odd length."""
    assert x.is_contiguous()
    rows, columns = x.shape[0], x.shape[1] // (2 if gated else 1)
    if gated and x.shape[1] % 2:
        raise ValueError(f"gated rows have two halves: {x.shape[1]} columns are odd")
    out, level = extension.empty((rows, columns)), level or extension.cpu_level()
    extension.call(library.activate, kind, gated, x.data_ptr(), rows, columns, out.data_ptr(), level)
    return out


class Table:
    """The rows of an embedding [vocab, I]: a prepared weight, shared with the LM head, or dense numbers."""

    def __init__(self, table: Tensor | PackedTensor | Prepared) -> None:
        self.source = table
        self.shape = (table.shape[0], table.shape[1])
        if isinstance(table, PackedWeight):
            self.native = library.Table(table.matrix)
        else:
            dense = table.dequantize() if isinstance(table, PackedTensor) else table
            assert isinstance(dense, Tensor)
            self.source = table = dense.contiguous()
            self.native = library.Table(table.data_ptr(), *self.shape, extension.number_name(table.dtype))


def embed(
    table: Table,
    ids: Tensor,
    scale: float,
    learned: Tensor | None = None,
    positions: Tensor | None = None,
    offset: int = 0,
) -> Tensor:
    """Run `ops.embed`: float32 [N, I]. Raises ValueError where the tables or the positions do not fit."""
    assert ids.dtype == torch.int64
    assert positions is None or positions.dtype == torch.int64
    if learned is not None and (learned.shape[1] != table.shape[1] or positions is None):
        raise ValueError("a table of positions has the columns of the embedding, and is read at positions")
    if positions is not None and positions.shape != ids.shape:
        raise ValueError(f"{len(positions)} positions do not fit {len(ids)} ids")
    out = extension.empty((len(ids), table.shape[1]))
    of_positions = None if learned is None else Table(learned)  # keeps its memory alive
    at = 0 if positions is None else positions.data_ptr()
    second = None if of_positions is None else of_positions.native
    extension.call(library.embed, table.native, ids.data_ptr(), len(ids), scale, second, at, offset, out.data_ptr())
    return out


def gumbel_max(scaled: Tensor, draws: Tensor) -> Tensor:
    """Run `ops.gumbel_max` on contiguous float64 rows [B, V], with the bits of seeds and indices, int64 [2, B]."""
    assert scaled.is_contiguous()
    assert scaled.dtype == torch.float64
    assert (draws.shape, draws.dtype) == ((2, len(scaled)), torch.int64)
    seeds, indices = draws.contiguous()
    chosen = torch.empty(len(scaled), dtype=torch.int64)
    if len(scaled):
        count, columns = scaled.shape
        library.gumbel_max(scaled.data_ptr(), count, columns, seeds.data_ptr(), indices.data_ptr(), chosen.data_ptr())
    return chosen


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
    kernel = library.quantize_rows_int8_float32 if x.dtype == torch.float32 else library.quantize_rows_int8_bfloat16
    rows, columns = x.shape
    bad = kernel(x.data_ptr(), rows, columns, codes.data_ptr(), scale.data_ptr(), level or extension.cpu_level())
    if bad >= 0:
        raise UserError("not_finite", f"row {bad} holds a NaN or an infinity: it cannot be quantized")
    return codes, scale
