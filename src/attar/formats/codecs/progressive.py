"""Weights of 4 bits that become int8 before they are multiplied: the two levels of QServe (Lin et al. 2024, QoQ).

    int8 = code * factor - offset        code 0 .. 15; factor and offset whole numbers of each row and group of columns
    weight = int8 * scale                one float a row

Products with rows rounded to int8 then sum whole numbers from the first column to the last, and floats come in once, at
the end. A grid of 4 bits with a float for each group cannot do that. The code is multiplied first, and the offset
subtracted afterwards, so that four products fit the bytes of one 32-bit word: none exceeds 255.

As published a weight is rounded twice: to int8 of the row, no further than the *protective range* of -119 .. 119, then
a group from its least to its greatest int8, zero among them, to 4 bits:

    factor = nearest((greatest - least) / 15)    zero = nearest(-least / factor)    offset = zero * factor

At the full range of int8 the decoded value may lie outside of it: least -119, greatest 120 gives factor 16 and zero 7,
and the greatest comes back as (15 - 7) * 16 = 128. Within +-119 no rounding does; all cases were tried.

`minmax` does exactly this. `mse` rounds once, to the stored numbers, and searches for them. The offset is stored
itself, so it need not be a multiple of the factor. The int8 needs no protection, once factor and offset are such that
all sixteen codes fit: offset <= 128 and 15 * factor - offset <= 127. A row's scale is chosen for how well whole factors
fit its groups.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attar.errors import UserError
from attar.formats import affine, observers
from attar.formats.packed import ALL, PackedTensor
from attar.formats.packing import pack_words, row_slices, unpack_words
from attar.formats.scheme import Grid, Scheme
from attar.formats.weight_formats import Progressive

PROTECTED = 119
"""Magnitude of int8 that is safe to round a second time."""
LAST = 15  # code
MIDDLE = 8  # stored codes are signed, smaller by this
LARGEST_FACTOR = 17  # of which all sixteen codes can fit
LOWEST, HIGHEST = -128, 127  # int8
SHARES = tuple(9.0 + 0.5 * i for i in range(19))
"""Factors tried for the widest group of a row, from which its scale follows."""


def quantize(weight: Tensor, scheme: Scheme, search: str = "minmax") -> PackedTensor:
    """Round a weight [O, I] to nearest, as published (`minmax`) or searched (`mse`). Raises ValueError on a NaN or an
    infinity, on groups that do not divide I and on a scale that overflows."""
    rows, columns = weight.shape
    codes = torch.empty((rows, columns), dtype=torch.int8, device=weight.device)
    found = []
    for part in row_slices(rows, columns):
        some = weight[part].float()
        scale, factor, offset = levels_of(some, scheme, search)
        codes[part] = (_round_twice if search == "minmax" else round_to)(some / scale.float(), factor, offset)
        found.append((scale, factor, offset))
    scale, factor, offset = (torch.cat(each) for each in zip(*found, strict=True))
    return encode(codes, scale, factor, offset, scheme)


def levels_of(weight: Tensor, scheme: Scheme, search: str = "minmax") -> tuple[Tensor, Tensor, Tensor]:
    """Return scale [O, 1] in the scheme's dtype, factor and offset uint8 [O, G] for a weight [O, I]. Raises like
    `quantize`."""
    form, dtype = _form(scheme), getattr(torch, scheme.scale_dtype)
    weight = weight.float()
    low, high = affine.min_max(weight, _grid(form))
    largest = torch.maximum(-low, high).amax(1, keepdim=True)
    if search == "mse":
        low, high = observers.mse_range(weight, _grid(form))
        return _search(weight, low.clamp(max=0), high.clamp(min=0), dtype)
    scale = _stored(largest / PROTECTED, dtype)
    bounds = torch.stack((low.clamp(max=0), high.clamp(min=0)))
    low, high = (bounds / scale.float()).round().clamp(-PROTECTED, PROTECTED)
    factor = ((high - low) / LAST).round().clamp(min=1)
    offset = (-low / factor).round().clamp(0, LAST) * factor
    return scale, factor.to(torch.uint8), offset.to(torch.uint8)


def _search(weight: Tensor, low: Tensor, high: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return scale, factor and offset with the least squared error of a weight [O, I], from groups' best ranges
    [O, G]."""
    groups = weight.unflatten(1, (low.shape[1], -1))
    step, centre = (high - low) / LAST, (high + low) / 2
    widest = step.amax(1, keepdim=True)
    least = torch.full_like(widest, torch.inf)
    best: tuple[Tensor, ...] = ()
    for share in SHARES:
        scale = _stored(widest / share, dtype)
        wide = scale.float()
        factor, offset, error = torch.ones_like(low), torch.zeros_like(low), torch.full_like(low, torch.inf)
        for beside in (-1, 0, 1):
            one = ((step / wide).round() + beside).clamp(1, LARGEST_FACTOR)
            two = (one * (LAST / 2) - centre / wide).round()
            two = torch.minimum(torch.maximum(two, LAST * one - HIGHEST).clamp(min=0), two.new_tensor(-LOWEST))
            units = groups / wide[..., None]
            nearest = ((units + two[..., None]) / one[..., None]).round_().clamp_(0, LAST)
            wrong = (nearest * one[..., None] - two[..., None] - units).square_().sum(-1) * wide.square()
            better = wrong < error
            factor, offset = torch.where(better, one, factor), torch.where(better, two, offset)
            error = torch.where(better, wrong, error)
        total = error.sum(1, keepdim=True)
        better = total < least
        found = (scale, factor, offset)
        best = tuple(torch.where(better, new, old) for new, old in zip(found, best, strict=True)) if best else found
        least = torch.where(better, total, least)
    scale, factor, offset = best
    return scale, factor.to(torch.uint8), offset.to(torch.uint8)


def round_to(units: Tensor, factor: Tensor, offset: Tensor) -> Tensor:
    """Return codes 0 .. 15, int8, of weights [O, I] over their scale: the nearest whose int8 exists."""
    parts = units.unflatten(1, (factor.shape[1], -1))
    by, less = factor[..., None].float(), offset[..., None].float()
    codes = ((parts + less) / by).round().clamp(min=0)
    return torch.minimum(codes, top(factor, offset)[..., None].float()).to(torch.int8).flatten(1)


def _round_twice(units: Tensor, factor: Tensor, offset: Tensor) -> Tensor:
    """Return codes 0 .. 15, int8, of weights [O, I] over their scale, rounded twice as published."""
    numbers: Tensor = units.round().clamp(-PROTECTED, PROTECTED).unflatten(1, (factor.shape[1], -1))
    by, zero = factor[..., None].float(), (offset // factor)[..., None].float()
    codes: Tensor = ((numbers / by).round() + zero).clamp(0, LAST)
    return codes.to(torch.int8).flatten(1)


def top(factor: Tensor, offset: Tensor) -> Tensor:
    """Return the largest code, int32 [O, G], whose int8 exists: 15, except for factor 16 and offset 112."""
    return ((HIGHEST + offset.int()) // factor.int().clamp(min=1)).clamp(max=LAST)


def encode(codes: Tensor, scale: Tensor, factor: Tensor, offset: Tensor, scheme: Scheme) -> PackedTensor:
    """Store codes [O, I], 0 .. 15, with their scale, factor and offset. Raises ValueError like `PackedTensor`."""
    words = pack_words(codes.to(torch.int8) - MIDDLE, Progressive.bits)
    parts = {"codes": words, "scale": scale, "factor": factor, "offset": offset}
    return PackedTensor(scheme, (codes.shape[0], codes.shape[1]), parts)


def decode(packed: PackedTensor, rows: slice = ALL) -> Tensor:
    """Return the int8 [R, I] of all or some rows. Raises ValueError where a damaged file exceeds int8."""
    parts, columns = packed.parts, packed.shape[1]
    codes = unpack_words(parts["codes"][rows], Progressive.bits, columns).short() + MIDDLE
    factor, offset = parts["factor"][rows].short(), parts["offset"][rows].short()
    found: Tensor = (codes.unflatten(1, (factor.shape[1], -1)) * factor[..., None] - offset[..., None]).flatten(1)
    if (offset > -LOWEST).any() or (found > HIGHEST).any():
        raise UserError("checkpoint_malformed", "codes times factors, less offsets, are no int8: the file is damaged")
    return found.to(torch.int8)


def dequantize(
    packed: PackedTensor, dtype: torch.dtype = torch.float32, rows: slice = ALL, out: Tensor | None = None
) -> Tensor:
    """Return the weight [O, I] in `dtype`, or some of its rows: int8 * scale, in the wider dtype. Raises like
    `decode`."""
    words, scale = packed.parts["codes"][rows], packed.parts["scale"][rows]
    wide = scale.to(torch.promote_types(dtype, scale.dtype))
    weight = torch.empty((len(words), packed.shape[1]), dtype=dtype, device=words.device) if out is None else out
    first = rows.indices(packed.shape[0])[0]
    for part in row_slices(*weight.shape):
        weight[part] = decode(packed, slice(first + part.start, first + part.stop)).to(wide.dtype) * wide[part]
    return weight


def _stored(scale: Tensor, dtype: torch.dtype) -> Tensor:
    stored = scale.to(dtype)
    if not stored.isfinite().all():
        raise UserError("not_finite", f"a scale overflows {str(dtype).removeprefix('torch.')}: store scales as float32")
    return stored.masked_fill(stored == 0, torch.finfo(dtype).eps)


def _grid(form: Progressive) -> Grid:
    return Grid("int", form.bits, False, "group", form.group)


def _form(scheme: Scheme) -> Progressive:
    assert isinstance(scheme.weight, Progressive)
    return scheme.weight
