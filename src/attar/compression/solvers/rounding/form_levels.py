"""Levels of forms without a grid, for solvers that go by columns: 4-bit floats, NF4, FP8 blocks, int8 rows, tables.

In all of these everything but the codes can be fixed beforehand. Scales, or the table of each row, are those of
rounding to nearest (a table by k-means, weighted by the importance of each column). A solver then only chooses codes,
and `pack` puts them into that weight in place of its own. NF4's magnitudes are themselves rounded; codes are chosen for
the rounded ones. An outlier beside a table takes any value that the solver wants.

Only NVFP4's scales are fitted to codes afterwards: powers of two are too coarse to gain from it, and most other numbers
here are shared beyond one row and group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from attar.compression.recipe.methods import ScaleSearch
from attar.compression.solvers.transforms import fold
from attar.formats.codecs import fp4, fp8_blocks, llm_int8, lookup, nf4
from attar.formats.packed import PackedTensor
from attar.formats.scheme import NVFP4, Scheme
from attar.formats.weight_formats import Fp4, Fp8Blocks, Int8Rows, Lookup, Nf4
from attar.kernels.operands import Linear

LEVELLED = (Fp4, Fp8Blocks, Int8Rows, Lookup, Nf4)
"""The forms that this module supports."""


def levels_of(
    weight: Tensor,
    scheme: Scheme,
    importance: Tensor | None = None,
    search: ScaleSearch = "mse",
    largest: Tensor | None = None,
) -> Scaled | Tables:
    """Return the levels for the values of a weight [O, I]. `importance` [I] weighs the squared error of each column,
    for tables; `search` is for the scales of 4-bit floats, and `largest` [1] as in `fp4.quantize`. Raises ValueError as
    the codecs do."""
    weight, form = weight.float(), scheme.weight
    if isinstance(form, Lookup):
        counts = None if importance is None else importance.float().expand(weight.shape)
        return Tables(lookup.quantize(weight, scheme, counts))
    if isinstance(form, Fp4):
        packed = fp4.quantize(weight, scheme, "mse" if search == "mse" else fp4.RULE, largest)
        return Scaled(packed, fp4.factors(packed), form.group, _FP4)
    if isinstance(form, Nf4):
        packed = nf4.quantize(weight, scheme)
        return Scaled(packed, nf4.magnitudes(packed), nf4.BLOCK, _NF4)
    if isinstance(form, Int8Rows):
        packed = llm_int8.quantize(weight, scheme)
        return Scaled(packed, packed.parts["absmax"][:, None] / llm_int8.LARGEST, weight.shape[1], _INT8)
    packed = fp8_blocks.quantize(weight, scheme)
    scale = packed.parts["scale"].float().repeat_interleave(fp8_blocks.SIZE, 0)[: len(weight)]
    return Scaled(packed, scale, fp8_blocks.SIZE, _FP8)


def shared_largest(groups: Iterable[Sequence[tuple[Linear, Scheme | None]]]) -> dict[str, Tensor]:
    """Return the largest magnitude [1] of all NVFP4 weights of each group of linears that read one input, by linear.
    Engines fuse these linears, which then share one NVFP4 tensor scale."""
    found: dict[str, Tensor] = {}
    for members in groups:
        floats = [linear for linear, scheme in members if scheme is not None and scheme.weight == NVFP4]
        if floats:
            largest = torch.cat([fp4.largest_of(fold.dense_weight(linear)) for linear in floats]).amax().reshape(1)
            found |= {linear.name: largest for linear in floats}
    return found


class _Coding(NamedTuple):
    """Coding of one family for values divided by their scales; codes are uint8. `store` returns the part `codes` of a
    weight with the codes [O, I]."""

    encode: Callable[[Tensor], Tensor]
    decode: Callable[[Tensor], Tensor]
    store: Callable[[Tensor], Tensor]


_FP4 = _Coding(fp4.to_codes, fp4.to_values, fp4.pairs)
_NF4 = _Coding(
    nf4.to_codes,
    lambda codes: nf4.values().to(codes.device)[codes.long()],
    lambda codes: nf4.pairs(codes).reshape(-1, 1),
)
_FP8 = _Coding(
    lambda x: (x + 0.0).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8),
    lambda codes: codes.view(torch.float8_e4m3fn).float(),
    lambda codes: codes.view(torch.float8_e4m3fn),
)
_INT8 = _Coding(
    lambda x: x.round().clamp(-llm_int8.LARGEST, llm_int8.LARGEST).to(torch.int8).view(torch.uint8),
    lambda codes: codes.view(torch.int8).float(),
    lambda codes: codes.view(torch.int8),
)


class Scaled:
    """Levels that are a form's values times a scale [O, G], float32, for each row and group of `width` columns."""

    code_dtype = torch.uint8

    def __init__(self, packed: PackedTensor, scale: Tensor, width: int, coding: _Coding) -> None:
        self.packed, self.scale, self.width, self.coding = packed, scale, width, coding

    def nearest(self, column: int, x: Tensor) -> tuple[Tensor, Tensor]:
        scale = self.scale[:, column // self.width].to(x.dtype)
        codes = self._encode(x, scale)
        return codes.to(x.dtype), self._decode(codes, scale)

    def values(self, columns: slice, codes: Tensor) -> Tensor:
        return self._decode(codes.to(torch.uint8), self.scale[:, columns.start // self.width].to(codes.dtype))

    def rounded(self, weight: Tensor, rows: slice) -> Tensor:
        scale = self.scale[rows].to(weight.dtype).repeat_interleave(self.width, 1)[:, : weight.shape[1]]
        return self._decode(self._encode(weight, scale), scale)

    def refit(self, columns: slice, codes: Tensor, pull: Tensor, own: Tensor) -> Tensor | None:
        """Refit NVFP4's scales, to the nearest E4M3 number; scales of zero or less stay unchanged."""
        if self.packed.scheme.weight != NVFP4:
            return None
        group, divisor = columns.start // self.width, self.packed.parts["global"]
        scale = self.scale[:, group].to(codes.dtype)
        units = self._decode(codes.to(torch.uint8), torch.ones_like(scale))
        curve = ((own @ units) * units).sum(0)
        best = scale - (pull * units).sum(0) / curve
        stored = (best * divisor).clamp(0, fp4.SCALE_LARGEST).nan_to_num(0.0).to(torch.float8_e4m3fn)
        found = stored.float() / divisor
        better = (curve > 0) & (found > 0)
        found = torch.where(better, found, self.scale[:, group])
        kept = self.packed.parts["scale"][:, group].view(torch.uint8)
        kept.copy_(torch.where(better, stored.view(torch.uint8), kept))
        change = units * (found.to(codes.dtype) - scale)
        self.scale[:, group] = found
        return change

    def pack(self, codes: Tensor) -> PackedTensor:
        return replace(self.packed, parts={**self.packed.parts, "codes": self.coding.store(codes.T.contiguous())})

    def _encode(self, x: Tensor, scale: Tensor) -> Tensor:
        return self.coding.encode(torch.where(scale == 0, 0.0, x / scale).float())

    def _decode(self, codes: Tensor, scale: Tensor) -> Tensor:
        return self.coding.decode(codes).to(scale.dtype) * scale


class Tables:
    """Levels that are a table for each row, with arbitrary values for its outliers."""

    code_dtype = torch.uint8
    width = 128  # nothing is fitted: the columns that a solver takes at once

    def __init__(self, packed: PackedTensor) -> None:
        self.packed = packed
        self.table = packed.parts["table"].float()
        self.middles = (self.table[:, :-1] + self.table[:, 1:]) / 2
        self.apart = self.extras = None
        if "starts" in packed.parts:
            counts = packed.parts["starts"].diff().long()
            row = torch.arange(len(counts), device=counts.device).repeat_interleave(counts)
            self.apart = torch.zeros(packed.shape, dtype=torch.bool, device=counts.device)
            self.apart[row, packed.parts["places"].long()] = True
            self.extras = torch.zeros(packed.shape, dtype=packed.parts["extras"].dtype, device=counts.device)
            self.extras[self.apart] = packed.parts["extras"]

    def nearest(self, column: int, x: Tensor) -> tuple[Tensor, Tensor]:
        codes = torch.searchsorted(self.middles, x.float()[:, None].contiguous())
        value = self.table.gather(1, codes)[:, 0]
        if self.apart is not None and self.extras is not None:
            self.extras[:, column] = (x.float() - value).to(self.extras.dtype).where(self.apart[:, column], 0.0)
            value = value + self.extras[:, column]
        return codes[:, 0].to(x.dtype), value.to(x.dtype)

    def values(self, columns: slice, codes: Tensor) -> Tensor:
        value = self.table.gather(1, codes.T.long())
        if self.extras is not None:
            value += self.extras[:, columns]
        return value.T.to(codes.dtype)

    def rounded(self, weight: Tensor, rows: slice) -> Tensor:
        codes = torch.searchsorted(self.middles[rows], weight.float().contiguous())
        value = self.table[rows].gather(1, codes).to(weight.dtype)
        return value if self.apart is None else torch.where(self.apart[rows], weight, value)

    def refit(self, columns: slice, codes: Tensor, pull: Tensor, own: Tensor) -> Tensor | None:
        return None

    def pack(self, codes: Tensor) -> PackedTensor:
        parts = dict(self.packed.parts)
        parts["codes"] = lookup.words(self.packed.scheme, codes.T)
        if self.apart is not None and self.extras is not None:
            parts["extras"] = self.extras[self.apart]
        return replace(self.packed, parts=parts)
