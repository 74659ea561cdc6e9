"""A compressed weight is a value: its scheme, its shape, and the named arrays that the scheme declares.

Algorithms choose the value, formats store it, kernels multiply by it. Nothing else about a linear layer lives here:
bias, input permutation and activation scales belong to `kernels.operands.Linear`.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, cast

import torch
from torch import Tensor

import attar.vml  # noqa: F401 - before anything is computed with weights
from attar.errors import UserError
from attar.formats.scheme import Scheme
from attar.formats.weight_formats import WeightFormat

ALL = slice(None)


@dataclass(frozen=True, eq=False)
class PackedTensor:
    """A weight of `shape` (out, in), stored as the parts that `scheme.parts(shape)` declares. Raises ValueError on
    construction where a part is missing, unknown, or of another dtype or shape."""

    scheme: Scheme
    shape: tuple[int, int]
    parts: Mapping[str, Tensor]

    def __post_init__(self) -> None:
        declared = self.scheme.parts(self.shape)
        if declared.keys() != self.parts.keys():
            raise UserError(
                "checkpoint_malformed", f"{self.scheme.name} stores {sorted(declared)}, not {sorted(self.parts)}"
            )
        for name, part in declared.items():
            tensor = self.parts[name]
            if tensor.dtype != getattr(torch, part.dtype) or tuple(tensor.shape) != part.shape:
                raise UserError(
                    "checkpoint_malformed",
                    f"part {name!r} of {self.scheme.name} {self.shape} must be {part.dtype} {part.shape}, "
                    f"not {str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}",
                )

    @property
    def bytes(self) -> int:
        """Stored bytes: the sum over the declared parts."""
        return sum(t.numel() * t.element_size() for t in self.parts.values())

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.bytes / (self.shape[0] * self.shape[1])

    def dequantize(self, dtype: torch.dtype = torch.float32, rows: slice = ALL, out: Tensor | None = None) -> Tensor:
        """Return the weight, or some of its rows, as a dense [out, in] tensor of `dtype`: new memory, or `out`."""
        return codec(self.scheme.weight.kind).dequantize(self, dtype, rows, out)


class Codec(Protocol):
    """The functions of a codec's module. `fake_quantize` exists where activations can have the format; `fixed_scale`
    where they can have it with a scale [1] that calibration found from their `largest` magnitude [1]."""

    def dequantize(self, packed: PackedTensor, dtype: torch.dtype, rows: slice, out: Tensor | None) -> Tensor: ...

    def quantize(self, weight: Tensor, scheme: Scheme) -> PackedTensor: ...

    def fake_quantize(self, x: Tensor, grid: WeightFormat, scale: Tensor | None = None) -> Tensor: ...

    def fixed_scale(self, largest: Tensor, form: WeightFormat) -> Tensor: ...


_CODECS: Mapping[str, str] = {
    "int": "affine", "e4m3": "floats", "e5m2": "floats", "ggml": "codecs.ggml_codec", "fp8-block": "codecs.fp8_blocks",
    "fp4": "codecs.fp4", "nf4": "codecs.nf4", "progressive": "codecs.progressive", "llm-int8": "codecs.llm_int8",
    "lookup": "codecs.lookup", "sparse24": "codecs.sparse24",
}  # fmt: skip
"""Codec module of each `WeightFormat.kind`."""


def codec(kind: str) -> Codec:
    """Return the codec module of a kind of format, imported here because codecs themselves build `PackedTensor`s."""
    return cast(Codec, importlib.import_module(f"attar.formats.{_CODECS[kind]}"))
