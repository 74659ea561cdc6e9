"""Levels of weights of two levels, (code * factor - offset) * scale (`codecs.progressive`), for solvers that go by
columns.

For one column that is a uniform grid: steps of factor * scale around a zero point that need not be a code. Only
the fit to codes differs. Scales of groups are whole multiples of the row's, so they are not moved to
the lowest point of a parabola but chosen: with pull = E H, own = H in the columns of a group and code vector c,
changing factor and offset by (f, o) changes the damage tr(E H E^T) by

    2 s (f pull c - o pull 1) + s^2 (f^2 c^T own c - 2 f o c^T own 1 + o^2 1^T own 1)

For each of the 17 factors the best offset follows, to the nearest whole number that leaves all sixteen codes within
int8; the least of the 17 is taken. The row's scale stays: it is one number for all groups, and tuning moves it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attar.compression.recipe.methods import ScaleSearch
from attar.compression.solvers.rounding.levels import Uniform
from attar.formats.codecs import progressive
from attar.formats.codecs.progressive import HIGHEST, LARGEST_FACTOR, LAST, LOWEST, MIDDLE
from attar.formats.packed import PackedTensor
from attar.formats.scheme import Grid, Scheme
from attar.formats.weight_formats import Progressive


class TwoLevel(Uniform):
    """Levels of a `Progressive` weight [O, I]. Codes are signed, -8 .. 7, as they are stored."""

    def __init__(self, row: Tensor, factor: Tensor, offset: Tensor, scheme: Scheme, shape: tuple[int, int]) -> None:
        form = scheme.weight
        assert isinstance(form, Progressive)
        self.scheme, self.shape = scheme, shape
        self.grid = Grid("int", form.bits, False, "group", form.group)
        self.row, self.factor, self.offset = row, factor, offset  # [O, 1], uint8 [O, G], uint8 [O, G]
        self.scale = row.float() * factor.float()  # [O, G]
        self.zero: Tensor = offset.float() / factor.float() - MIDDLE
        self.top = (progressive.top(factor, offset) - MIDDLE).float()

    @staticmethod
    def of(weight: Tensor, scheme: Scheme, search: ScaleSearch) -> TwoLevel:
        """Return the levels for the values of a weight [O, I]. Raises ValueError as `progressive.quantize`."""
        return TwoLevel(*progressive.levels_of(weight, scheme, search), scheme, (weight.shape[0], weight.shape[1]))

    def nearest(self, column: int, x: Tensor) -> tuple[Tensor, Tensor]:
        at = column // self.width
        return _nearest(x, self.scale[:, at], self.zero[:, at], self.top[:, at])

    def nearest_at(self, rows: Tensor, columns: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        at = (rows, columns // self.width)
        return _nearest(x, self.scale[at], self.zero[at], self.top[at])

    def rounded(self, weight: Tensor, rows: slice) -> Tensor:
        parts = weight.unflatten(1, (self.scale.shape[1], -1))
        return _nearest(parts, *(each[rows, :, None] for each in (self.scale, self.zero, self.top)))[1].flatten(1)

    def part(self, rows: slice) -> TwoLevel:
        found = object.__new__(TwoLevel)
        found.scheme, found.grid, found.shape = self.scheme, self.grid, (len(range(self.shape[0])[rows]), self.shape[1])
        for name in ("row", *_FITTED):
            setattr(found, name, getattr(self, name)[rows])
        return found

    def copy(self) -> tuple[Tensor, ...]:  # type: ignore[override]
        return tuple(getattr(self, name).clone() for name in _FITTED)

    def restore(self, kept: tuple[Tensor, ...]) -> None:  # type: ignore[override]
        for name, tensor in zip(_FITTED, kept, strict=True):
            getattr(self, name).copy_(tensor)

    def refit(self, columns: slice, codes: Tensor, pull: Tensor, own: Tensor) -> Tensor:
        """Fit factor and offset; the damage never rises, since the present ones are among the choices."""
        group, dtype = columns.start // self.width, codes.dtype
        present = self.row[:, 0], self.factor[:, group], self.offset[:, group]
        row, factor, offset = (each.to(dtype) for each in present)
        units = codes + MIDDLE
        pulled = own @ units
        by_units, by_ones = row * (pull * units).sum(0), row * pull.sum(0)
        both = row.square()
        square, mixed, ones = both * (pulled * units).sum(0), both * pulled.sum(0), both * own.sum()
        least = torch.zeros_like(row)
        more, further = torch.zeros_like(row), torch.zeros_like(row)  # changes of factor and offset
        for candidate in range(1, LARGEST_FACTOR + 1):
            f = candidate - factor
            to = (offset + (by_ones + mixed * f) / ones).round()
            o = to.clamp(max(0, LAST * candidate - HIGHEST), -LOWEST) - offset
            rise = 2 * (by_units * f - by_ones * o) + square * f.square() - 2 * mixed * f * o + ones * o.square()
            better = rise < least
            least = torch.where(better, rise, least)
            more, further = torch.where(better, f, more), torch.where(better, o, further)
        self.factor[:, group] = (factor + more).to(torch.uint8)
        self.offset[:, group] = (offset + further).to(torch.uint8)
        at = (slice(None), slice(group, group + 1))
        found = TwoLevel(self.row, self.factor[at], self.offset[at], self.scheme, self.shape)
        self.scale[at], self.zero[at], self.top[at] = found.scale, found.zero, found.top
        return row * (units * more - further)

    def pack(self, codes: Tensor) -> PackedTensor:
        return progressive.encode(codes.T.to(torch.int8) + MIDDLE, self.row, self.factor, self.offset, self.scheme)


_FITTED = ("factor", "offset", "scale", "zero", "top")


def _nearest(x: Tensor, scale: Tensor, zero: Tensor, top: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes and values of x, all broadcast to it."""
    scale, zero = scale.to(x.dtype), zero.to(x.dtype)
    code = torch.minimum((x / scale + zero).round_().clamp_(min=-MIDDLE), top.to(x.dtype))
    return code, (code - zero) * scale
