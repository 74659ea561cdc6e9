"""Values that the columns of a weight may take, for solvers that go column by column.

GPTQ and its polish choose, for one column of all rows at a time, the nearest representable values to their targets.
This module derives these values from scales and zero points, so that a solver serves every scheme whose scales can be
set before its codes.

Uniform grids: value = (code - zero) * scale in the solver's dtype, on scales rounded to the dtype they are stored in.
Their scales and zero points can also be fitted to codes (`refit`). The damage tr(E H E^T), E = W' - W, is a parabola in
each of them, so the best storable value is the one nearest to its lowest point. With c = code - zero in the columns g
of one group:

    scale       s <- s - (E H)_g c / (c^T H_gg c)
    zero point  z <- nearest(z + (E H)_g 1 / (s 1^T H_gg 1))
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from attar.compression.recipe.methods import ScaleSearch
from attar.compression.solvers.rounding import rtn
from attar.formats import affine
from attar.formats.packed import PackedTensor
from attar.formats.scheme import FLOAT8, Grid, Scheme

_Place = Tensor | slice | int


class Levels(Protocol):
    """Representable values of each column of a weight [O, I]. Codes of all columns are [I, O], in `code_dtype`."""

    @property
    def code_dtype(self) -> torch.dtype: ...

    @property
    def width(self) -> int:
        """Return how many columns share the numbers that `refit` fits."""
        ...

    def nearest(self, column: int, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return codes and their values nearest to x [O]: both in the dtype of x, [O]."""
        ...

    def values(self, columns: slice, codes: Tensor) -> Tensor:
        """Return the values [w, O] of codes [w, O] of some columns of one group."""
        ...

    def rounded(self, weight: Tensor, rows: slice) -> Tensor:
        """Return rows [R, I] of the weight, each value rounded to nearest."""
        ...

    def refit(self, columns: slice, codes: Tensor, pull: Tensor, own: Tensor) -> Tensor | None:
        """Fit the shared numbers of one group's columns to their codes [w, O]; return the change of the values, [w, O].
        `pull` [w, O] is (E H)^T in those columns, `own` [w, w] is H there. Returns None where nothing can be fitted."""
        ...

    def pack(self, codes: Tensor) -> PackedTensor:
        """Return the weight in its stored form."""
        ...


class Uniform:
    """Levels of a `Grid`: whole numbers or float8, times a scale, around a zero point."""

    def __init__(self, scale: Tensor, zero: Tensor | None, scheme: Scheme, shape: tuple[int, int]) -> None:
        self.scheme, self.grid, self.shape = scheme, scheme.grid, shape
        self.scale, self.zero = scale, zero  # [O, G], or [1] for the whole tensor

    @staticmethod
    def of(weight: Tensor, scheme: Scheme, search: ScaleSearch) -> Uniform:
        """Return the levels for the values of a weight [O, I]. Raises ValueError as `affine.min_max` and `qparams`
        do."""
        scale, zero = rtn.group_scales(weight, scheme.grid, getattr(torch, scheme.scale_dtype), search)
        return Uniform(scale, zero, scheme, (weight.shape[0], weight.shape[1]))

    def reset(self, group: int, weight: Tensor, search: ScaleSearch) -> None:
        """Set one group's scale and zero point anew, for its values [O, I/G]."""
        one = replace(self.grid, granularity="channel", group_size=None)
        scale, zero = rtn.group_scales(weight, one, self.scale.dtype, search)
        self.scale[:, group] = scale[:, 0]
        if self.zero is not None and zero is not None:
            self.zero[:, group] = zero[:, 0]

    @property
    def code_dtype(self) -> torch.dtype:
        dtype = torch.int8 if self.grid.kind == "int" else getattr(torch, FLOAT8[self.grid.kind])
        assert isinstance(dtype, torch.dtype)
        return dtype

    @property
    def width(self) -> int:
        return self.shape[1] // self.grid.groups(self.shape[1])

    def nearest(self, column: int, x: Tensor) -> tuple[Tensor, Tensor]:
        return _nearest(x, *self._at((slice(None), column // self.width), x.dtype), self.grid)

    def nearest_at(self, rows: Tensor, columns: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return codes and values nearest to single elements x [n] at these rows and columns."""
        return _nearest(x, *self._at((rows, columns // self.width), x.dtype), self.grid)

    def part(self, rows: slice) -> Uniform:
        """Return the levels of some rows; they share memory, so changes are visible here."""
        zero = self.zero if self.zero is None or self.scale.ndim == 1 else self.zero[rows]
        scale = self.scale if self.scale.ndim == 1 else self.scale[rows]
        return Uniform(scale, zero, self.scheme, (len(range(self.shape[0])[rows]), self.shape[1]))

    def copy(self) -> tuple[Tensor, Tensor | None]:
        """Return the state that `restore` puts back."""
        return self.scale.clone(), None if self.zero is None else self.zero.clone()

    def restore(self, kept: tuple[Tensor, Tensor | None]) -> None:
        self.scale.copy_(kept[0])
        if self.zero is not None and kept[1] is not None:
            self.zero.copy_(kept[1])

    def values(self, columns: slice, codes: Tensor) -> Tensor:
        scale, zero = self._at((slice(None), columns.start // self.width), codes.dtype)
        return (codes if zero is None else codes - zero) * scale

    def rounded(self, weight: Tensor, rows: slice) -> Tensor:
        scale, zero = self._at((rows, slice(None)), weight.dtype)
        parts, shift = weight.unflatten(1, (scale.shape[-1], -1)), None if zero is None else zero[..., None]
        return _nearest(parts, scale[..., None], shift, self.grid)[1].flatten(1)

    def refit(self, columns: slice, codes: Tensor, pull: Tensor, own: Tensor) -> Tensor | None:
        """Fit scale and zero point of one group. Scales stay positive. One scale of a whole tensor is not fitted."""
        if self.scale.ndim == 1:
            return None
        group, dtype = columns.start // self.width, codes.dtype
        scale, zero = self._at((slice(None), group), dtype)
        units = codes if zero is None else codes - zero
        pulled = own @ units
        curve = (pulled * units).sum(0)
        best = (scale - (pull * units).sum(0) / curve).to(self.scale.dtype).to(dtype)
        found = torch.where((curve > 0) & (best > 0) & best.isfinite(), best, scale)
        change = units * (found - scale)
        self.scale[:, group] = found.to(self.scale.dtype)
        if zero is not None and self.zero is not None:
            pull = pull + pulled * (found - scale)
            level = (zero + pull.sum(0) / (found * own.sum())).round_().clamp_(self.grid.qmin, self.grid.qmax)
            level = torch.where(level.isfinite(), level, zero)
            change -= (level - zero) * found
            self.zero[:, group] = level.to(self.zero.dtype)
        return change

    def pack(self, codes: Tensor) -> PackedTensor:
        codes = codes.T.contiguous()
        if self.grid.kind == "int":
            return affine.encode(codes, self.scale, self.zero, self.scheme, self.shape)
        return PackedTensor(self.scheme, self.shape, {"codes": codes, "scale": self.scale})

    def _at(self, place: tuple[_Place, _Place], dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """Return scale and zero point at a place of [O, G] in a solver's dtype, or [1] for the whole tensor."""
        scale, zero = self.scale, self.zero
        if scale.ndim == 2:
            scale, zero = scale[place], None if zero is None else zero[place]
        return scale.to(dtype), None if zero is None else zero.to(dtype)


def _nearest(x: Tensor, scale: Tensor, zero: Tensor | None, grid: Grid) -> tuple[Tensor, Tensor]:
    """Return codes and values of x, with scale and zero in its dtype and broadcast to it, by the codecs' arithmetic."""
    scaled = x / scale
    if zero is not None:
        scaled += zero
    scaled.clamp_(grid.qmin, grid.qmax)
    if grid.kind != "int":
        code = scaled.to(getattr(torch, FLOAT8[grid.kind])).to(x.dtype)
        return code, code * scale
    code = scaled.round_()
    return code, (code if zero is None else code - zero) * scale
