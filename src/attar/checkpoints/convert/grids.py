"""Weights as integers on a grid, whatever form they are stored in, and the same values on another grid.

Many forms are grids in other notation, bit for bit. GGML's blocks are integers times a scale (in k-quants a float times
a small integer of each group, which float32 holds, zero and negative ones too). Twice a 4-bit float is whole; QServe's
two levels make int8 of a row; 2:4 zeros are the code of zero. `grid_of` returns the grid on which the values of a
scheme lie, and `integers` puts them there.

A grid is also part of others, which `as_scheme` writes: of more bits, of shorter groups whose scales repeat, of scales
in another dtype that has them, with zero points in the middle, or without any, of one bit more. The stored size may
grow. Inexact values raise ValueError.

Offsets of GGML's types are zero points where they are whole numbers of their scales, which they seldom are: this is
found when the blocks are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from attar.checkpoints.gguf.checkpoint import SCHEMES
from attar.errors import UserError
from attar.formats import affine
from attar.formats.codecs import fp4, ggml_blocks, progressive, sparse24
from attar.formats.codecs.ggml import FP4_VALUES, TYPES, GgmlType
from attar.formats.packed import PackedTensor
from attar.formats.packing import row_slices
from attar.formats.scheme import Grid, Scheme
from attar.formats.weight_formats import WEIGHT_FORMATS, Fp4, GgmlBlocks, Int8Rows, Progressive, Sparse24


def _schemes(dtype: str, **names: str) -> dict[str, Scheme]:
    return {kind: Scheme.parse(name).with_scale_dtype(dtype) for kind, name in names.items()}


GGML: Mapping[str, Scheme] = {
    **SCHEMES,
    **_schemes("float16", Q4_1="w4g32-asym", Q5_1="w5g32-asym", IQ4_NL="w8g32"),
    **_schemes("float32", Q2_K="w2g16-asym", Q4_K="w4g32-asym", Q5_K="w5g32-asym"),
    **_schemes("float32", Q3_K="w3g16", Q6_K="w6g16", IQ4_XS="w8g32", MXFP4="w5g32", NVFP4="w5g16"),
}
"""Grids of the GGML types with codes: the tables of IQ4 have whole numbers of 8 bits, and doubled FP4 of 5."""


def grid_of(scheme: Scheme) -> Scheme | None:
    """Return the integer grid scheme with the same values as `scheme`, and its activations; None where there is none.

    `integers` finds whether a weight's zero points and scales are exact there.
    """
    form = scheme.weight
    match form:
        case Grid(kind="int"):
            return scheme
        case GgmlBlocks():
            return GGML.get(form.type.name)
        case Fp4() if scheme.activation is None:
            return GGML[form.name.upper()]
        case Progressive():
            layout = replace(scheme, weight=Grid(), layout="plain")
            return layout if scheme.activation is not None else replace(layout, layout="packed")
        case Int8Rows() if scheme.activation is None:
            return Scheme(Grid())
        case Sparse24(values=Grid(kind="int") as values):
            size = None if values.group_size is None else 2 * values.group_size
            return Scheme(replace(values, group_size=size), scale_dtype=scheme.scale_dtype)
    return None


def integers(packed: PackedTensor) -> PackedTensor:
    """Return a weight on the grid of `grid_of`. Raises ValueError where one of its numbers is not exact there."""
    scheme, (rows, columns), form = grid_of(packed.scheme), packed.shape, packed.scheme.weight
    assert scheme is not None, f"{packed.scheme.name} is on no grid"
    zero = None
    match form:
        case Grid():
            return packed
        case GgmlBlocks():
            if form.type.name in ("MXFP4", "NVFP4"):
                return integers(fp4_of_blocks(form.type, packed.parts["blocks"]))
            return _of_blocks(form.type, packed.parts["blocks"], scheme)
        case Fp4():
            codes, scale = _of_fp4(packed)
        case Progressive():
            codes, scale = progressive.decode(packed), packed.parts["scale"]
        case Int8Rows():
            codes, scale = packed.parts["codes"], packed.parts["absmax"][:, None] / 127
        case _:
            assert isinstance(form, Sparse24)
            assert isinstance(form.values, Grid)
            inner = Scheme(form.values, scale_dtype=packed.scheme.scale_dtype)
            parts = {name: part for name, part in packed.parts.items() if name != "places"}
            some, scale, zero = affine.decode(PackedTensor(inner, (rows, columns // 2), parts))
            if zero is not None:  # pruned weights are zero, hence the zero point
                some = _less(some, zero).to(torch.int16)
            codes = sparse24.unpack_24(some, packed.parts["places"])
            if zero is not None:
                codes = (codes.view(rows, zero.shape[1], -1) + zero[..., None]).flatten(1).to(torch.int8)
    return affine.encode(codes, scale, zero, scheme, packed.shape)


def as_scheme(packed: PackedTensor, scheme: Scheme, holder: str = "the format") -> PackedTensor:
    """Return the same values of a weight in a row scheme, with enough bits and with groups that divide the weight's.

    Raises ValueError where a scale is not a number of the scheme's dtype (`holder` names the format in the message), or
    a code less its zero point does not fit the grid.
    """
    if packed.scheme == scheme:
        return packed
    if isinstance(scheme.weight, Fp4):
        assert isinstance(packed.scheme.weight, GgmlBlocks)
        return fp4_of_blocks(packed.scheme.weight.type, packed.parts["blocks"])
    grid, (rows, columns) = scheme.grid, packed.shape
    codes, scale, zero = spread(packed, grid.groups(columns))
    if grid.symmetric and zero is not None:
        wide, zero = _less(codes, zero), None
        if wide.amin() < grid.qmin or wide.amax() > grid.qmax:
            raise not_exact(f"codes less their zero points do not fit the {grid.bits} bits of {holder}")
        codes = wide.to(torch.int8)
    elif not grid.symmetric and zero is None:
        zero = torch.zeros(scale.shape, dtype=torch.int8)
    scale = as_half(scale, holder) if scheme.scale_dtype == "float16" else scale.to(getattr(torch, scheme.scale_dtype))
    return affine.encode(codes, scale, zero, scheme, (rows, columns))


def spread(packed: PackedTensor, groups: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return codes int8 [O, I], scales [O, `groups`] and zero points of a weight on its grid. Raises as `integers`."""
    codes, scale, zero = affine.decode(integers(packed))

    def each(numbers: Tensor) -> Tensor:
        rows = numbers.expand(len(codes), 1) if numbers.ndim == 1 else numbers  # one for the whole tensor
        return rows.repeat_interleave(groups // rows.shape[1], 1)

    return codes, each(scale), None if zero is None else each(zero)


def as_half(scale: Tensor, holder: str = "the format") -> Tensor:
    """Return a scale in float16. Raises ValueError where a value is not exact; `holder` names the format in the
    message."""
    half = scale.half()
    if not torch.equal(half.float(), scale.float()):
        at = int((half.float() != scale.float()).flatten().nonzero()[0])
        raise not_exact(
            f"a scale of {str(scale.dtype).removeprefix('torch.')} is no number of float16, which is what {holder} "
            f"has: {float(scale.flatten()[at]):g}"
        )
    return half


def not_exact(reason: str) -> UserError:
    return UserError("conversion_inexact", reason)


def _less(codes: Tensor, zero: Tensor) -> Tensor:
    """Return codes [O, I] less zero points [O, G]: int16."""
    return (codes.view(len(codes), zero.shape[1], -1).to(torch.int16) - zero[..., None]).flatten(1)


# GGML's blocks


def _of_blocks(kind: GgmlType, raw: Tensor, scheme: Scheme) -> PackedTensor:
    """Return rows of blocks [O, bytes of a row] on their grid."""
    grid, rows = scheme.grid, len(raw)
    columns = raw.shape[1] // kind.block_bytes * kind.elements
    codes = torch.empty((rows, columns), dtype=torch.int8)
    scale = torch.empty((rows, grid.groups(columns)), dtype=getattr(torch, scheme.scale_dtype))
    zero = None if grid.symmetric else torch.empty(scale.shape, dtype=torch.int8)
    middle = 0 if grid.symmetric else 1 << (grid.bits - 1)
    for part in row_slices(rows, columns):
        found = ggml_blocks.unpack(kind, raw[part].reshape(-1, kind.block_bytes))
        step, some = found.d.float(), found.codes
        if found.scales is not None:
            step = step * found.scales.float()
        if zero is not None:
            some, step, times = _zero_points(kind, found, step, 2 * middle - 1)
            zero[part] = (times - middle).to(torch.int8).view(-1, scale.shape[1])
        codes[part] = (some - middle).to(torch.int8).view(-1, columns)
        scale[part] = step.view(-1, scale.shape[1]).to(scale.dtype)
    return affine.encode(codes, scale, zero, scheme, (rows, columns))


def _zero_points(kind: GgmlType, found: ggml_blocks.Blocks, step: Tensor, last: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes 0 .. `last`, scales and zero points of blocks whose value is step * code + offset, steps [N, G].

    Raises ValueError where an offset is not its step times a zero point.
    """
    assert found.m is not None
    offset = found.m.float() if found.mins is None else -(found.m.float() * found.mins.float())
    codes = found.codes.view(*step.shape, -1)
    flat = (step == 0) & (offset != 0)  # the whole group is the offset, which is its own scale once
    step, codes = torch.where(flat, offset, step), torch.where(flat[..., None], 1, codes)
    times = torch.where(flat | (offset == 0), 0.0, (-offset / step).round())
    exact = flat | ((times >= 0) & (times <= last) & (times * step == -offset))
    if not exact.all():  # also where one is not finite
        raise not_exact(
            f"{kind.name} has an offset that is no whole number of its scales, 0 to {last}, as zero points are"
        )
    # With a negative scale a code less itself would be -0, where a sum that cancels is 0.
    turned = step < 0
    codes = torch.where(turned[..., None], last - codes, codes)
    times = torch.where(turned, last - times, times)
    return codes.flatten(1), step.abs(), times


def fp4_of_blocks(kind: GgmlType, raw: Tensor) -> PackedTensor:
    """Return rows of MXFP4's or NVFP4's blocks [O, bytes of a row] as groups of 4-bit floats, NVFP4's under a global 1.

    Raises ValueError where a scale's byte is a number to GGML alone.
    """
    form = WEIGHT_FORMATS[kind.name.lower()]
    assert isinstance(form, Fp4)
    rows, split = len(raw), kind.block_bytes - kind.elements // 2
    blocks = raw.view(rows, -1, kind.block_bytes)
    scale = blocks[..., :split].flatten(1)
    halves = blocks[..., split:].reshape(rows, -1, form.group // 2)  # of a group each: its first half in the low bits
    codes = torch.cat((halves & 15, halves >> 4), -1).flatten(1)
    if kind.name == "NVFP4":
        scale = torch.where(scale == 0x7F, 0, scale)  # GGML reads it as zero
        if (scale == 0xFF).any():
            raise not_exact("NVFP4 has a scale of 480 (byte 255), which GGML alone has: elsewhere it is NaN")
        scale = (scale & 0x7F).view(torch.float8_e4m3fn)  # GGML ignores the sign
    elif (scale == 0xFF).any():
        raise not_exact("MXFP4 has a scale of 2^128 (byte 255), which GGML alone has: elsewhere it is NaN")
    parts = {"codes": fp4.pairs(codes), "scale": scale}
    if form.name == "nvfp4":
        parts["global"] = torch.ones(1)
    return PackedTensor(Scheme(form, layout="plain"), (rows, codes.shape[1]), parts)


def blocks_of_fp4(packed: PackedTensor) -> Tensor:
    """Return groups of 4-bit floats as rows of GGML's blocks, uint8 [O, bytes of a row]; the inverse of
    `fp4_of_blocks`.

    Raises ValueError where GGML has no such scale.
    """
    form, rows = packed.scheme.weight, packed.shape[0]
    assert isinstance(form, Fp4)
    kind = TYPES[form.name.upper()]
    stored = packed.parts["codes"]
    codes = torch.stack((stored & 15, stored >> 4), -1).view(rows, -1, 2, form.group // 2)
    scale = packed.parts["scale"]
    if form.name == "nvfp4":
        factors = fp4.factors(packed)
        narrow = factors.to(torch.float8_e4m3fn)
        if not ((narrow.float() == factors) & ~factors.signbit()).all():
            raise not_exact(
                f"NVFP4's scales are divided by a number for the whole tensor, {float(packed.parts['global']):g}, and "
                "then are none of E4M3, which GGML's blocks hold; the number that a GGUF file may have beside them "
                "multiplies products and not weights, which rounds otherwise"
            )
        scale = narrow.view(torch.uint8)
    elif (scale == 0xFF).any():
        raise not_exact("a scale of MXFP4 is NaN (byte 255), which GGML reads as a number")
    halves = (codes[:, :, 0] | codes[:, :, 1] << 4).view(rows, -1, kind.elements // 2)
    return torch.cat((scale.view(rows, halves.shape[1], -1), halves), -1).flatten(1)


def _of_fp4(packed: PackedTensor) -> tuple[Tensor, Tensor]:
    """Return doubled codes int8 [O, I] and halved scales float32 [O, G]. Raises ValueError where halving is not
    exact."""
    stored, factors = packed.parts["codes"], fp4.factors(packed)
    scale = factors / 2
    if not (scale * 2 == factors).all():
        raise not_exact(f"half of a scale of {packed.scheme.name} is no number of float32")
    table = torch.tensor(FP4_VALUES, dtype=torch.int8)
    codes = torch.empty(packed.shape, dtype=torch.int8)
    for part in row_slices(*packed.shape):
        codes[part] = table[torch.stack((stored[part] & 15, stored[part] >> 4), -1).flatten(1).long()]
    return codes, scale
