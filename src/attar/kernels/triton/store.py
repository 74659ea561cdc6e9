"""A model in a GPU's memory: its parts move there on loading, and weights without a kernel are noted.

Each part moves as it is read, so that ordinary memory never holds more than one. The numbers keep the model's dtype:
unlike on CPUs, where rows are float32, a GPU computes in bfloat16 or float16, with sums in float32.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attar.formats.packed import PackedTensor
from attar.kernels.operands import Linear, Norm, Prepared
from attar.kernels.triton.weights import NIBBLES, TritonWeight, against, prepare


class GpuWeights:
    """The weights of one model in the layout of Triton's kernels, on `device`; dense ones in `dtype`."""

    def __init__(self, device: torch.device | str, dtype: torch.dtype) -> None:
        self.device, self.dtype = torch.device(device), dtype
        if self.device.index is not None:
            torch.cuda.set_device(self.device)  # Triton launches on the current one
        self.refused: dict[str, str] = {}
        """Reasons why some linear layers stay with the reference, by name: they round rows in a way of their own."""
        self.widened: dict[str, str] = {}
        """Reasons why some linear layers are dequantized to the model's dtype, by name: no kernel reads the codes."""

    def take(self, each: Linear) -> None:
        """Move the linear layer, and prepare its weight, or note why it cannot be."""
        stored = each.weight
        each.weight, each.dense = _moved(stored, self.device), None
        for name in ("bias", "permutation", "input_scale", "activation_scale", "adapter"):
            part = getattr(each, name)
            if part is not None:
                setattr(each, name, part.to(self.device))
        reason = against(each)
        if reason is not None and isinstance(stored, PackedTensor) and stored.scheme.activation is None:
            self.widened[each.name], reason = reason, None
            each.weight = stored.dequantize(self.dtype).to(self.device)  # where it is stored: not all codecs know GPUs
        if reason is None:
            prepare(each, self.dtype)
        else:
            self.refused[each.name] = reason

    def take_norm(self, norm: Norm) -> None:
        norm.weight = norm.weight.to(self.device, self.dtype).contiguous()
        norm.bias = None if norm.bias is None else norm.bias.to(self.device, self.dtype).contiguous()
        norm.prepared = True

    def table(self, table: Tensor | PackedTensor | Prepared) -> TritonTable:
        """Return the rows of an embedding, for reading."""
        if isinstance(table, PackedTensor):
            table = table.dequantize(self.dtype)
        if isinstance(table, Tensor):
            dense = table.to(self.device, self.dtype)
            table = TritonWeight("dense", (dense.shape[0], dense.shape[1]), dense)
        assert isinstance(table, TritonWeight)
        return TritonTable(table)


class TritonTable:
    """The rows of an embedding [vocab, I]: a weight of its own, or the LM head of a tied model."""

    def __init__(self, weight: TritonWeight) -> None:
        self.weight, self.shape = weight, weight.shape


def embed(table: TritonTable, ids: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    """Run `ops.embed` on a table of this device. Rows of 4-bit codes are widened as they are read."""
    from attar.kernels.triton import w4  # which needs Triton; a store does not

    weight, factor = table.weight, float(torch.tensor(scale, dtype=dtype))
    if weight.form in NIBBLES:
        return w4.dense(weight, dtype, ids, factor)
    hidden = weight.codes.index_select(0, ids) if weight.form == "dense" else weight.codes[ids]
    hidden = hidden.to(dtype) if weight.scales is None else (hidden.float() * weight.scales[ids, None]).to(dtype)
    return hidden if factor == 1.0 else hidden * factor


def _moved(weight: Any, device: torch.device) -> Any:
    """Copy a weight to the device, in memory of its own: parts from a file may still lie on its pages."""
    if isinstance(weight, PackedTensor):
        return replace(weight, parts={name: part.to(device, copy=True) for name, part in weight.parts.items()})
    return weight.to(device) if isinstance(weight, Tensor) else weight
