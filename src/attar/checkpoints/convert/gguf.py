"""Weights of folders as GGML blocks, where a type has their very values.

A folder may hold GGML's blocks as they are (recipes such as `rtn-q4_k`): these are copied, byte for byte. MXFP4 is the
same numbers in another order. NVFP4 is too, where its scales divided by the number for the whole tensor are still
numbers of E4M3. Integers (`grids.py`: many forms are) may fit several types, tried in this order:

* blocks of 32 with a scale in float16, to which a group is several blocks whose scales are the same, and a grid of
  fewer bits part of a type's grid. With zero points a value is scale * code - scale * zero, and the type's offset must
  be that product in float16, which it seldom is; a code less its zero point takes one bit more, and needs no offset;
* blocks of 256, whose scales are whole multiples of one float16: for groups of 16, and for scales in float32, which the
  former do not have. A weight that once had such a type gets it back.

The numbers decide the type: where there is more than one, `to_gguf.py` tries them.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from attar.checkpoints.convert.grids import GGML, as_half, as_scheme, blocks_of_fp4, grid_of, not_exact, spread
from attar.checkpoints.convert.source import Stored
from attar.formats import affine
from attar.formats.codecs import ggml_blocks
from attar.formats.codecs.ggml import IQ4_VALUES, TYPES, GgmlType
from attar.formats.codecs.ggml_blocks import Blocks
from attar.formats.packed import PackedTensor
from attar.formats.packing import row_slices
from attar.formats.weight_formats import Fp4, GgmlBlocks

GGUF = "gguf"  # the users' name of the format

DENSE: Mapping[str, str] = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
"""GGML types of dense tensors, by dtype."""

SYMMETRIC, ASYMMETRIC = ((4, "Q4_0"), (5, "Q5_0"), (8, "Q8_0")), ((4, "Q4_1"), (5, "Q5_1"))
"""Types of blocks of 32, by the bits of their grids."""

FINE = ((3, "Q3_K"), (6, "Q6_K"), (8, "IQ4_XS"))
"""Types of blocks of 256 without offsets, by the bits of their grids; the last has 16 of the 256 codes."""

MULTIPLES: Mapping[str, tuple[int, int]] = {"Q3_K": (-32, 31), "Q6_K": (-128, 127), "IQ4_XS": (-32, 31)}
"""Ranges of the whole numbers with which these types scale their groups."""


def kinds_for(each: Stored) -> tuple[GgmlType, ...] | str:
    """Return the types that may hold a linear, the smaller first, or the reason why none does, as the end of a
    sentence."""
    form, columns = each.scheme.weight, each.shape[1]
    if isinstance(form, GgmlBlocks):
        return (form.type,)
    if each.scheme.activation is not None:
        return f"attar writes GGUF files whose activations are not rounded, and those of {each.scheme.name} are"
    if isinstance(form, Fp4):
        kind = TYPES[form.name.upper()]
        whole = columns % kind.elements == 0
        return (kind,) if whole else f"GGML has {kind.name} in blocks of {kind.elements}, which do not divide {columns}"
    scheme = grid_of(each.scheme)
    if scheme is None:
        return f"GGML's quantized types hold integers, 4-bit floats and tables of its own, not {each.scheme.name}"
    if each.permuted:
        return "GGML has no field for columns that are out of their order (desc_act)"
    grid, size = scheme.grid, scheme.grid.group_size or columns
    bits = min(8, grid.bits + (not grid.symmetric))  # without zero points
    found = []
    if size % 32 == 0:
        if not grid.symmetric:
            found += [name for most, name in ASYMMETRIC if grid.bits <= most][:1]
        found += [name for most, name in SYMMETRIC if bits <= most][:1]
    if columns % 256 == 0 and size % 16 == 0 and (size % 32 or scheme.scale_dtype == "float32"):
        most, name = next(known for known in FINE if bits <= known[0])
        found += [name] if most < 8 or size % 32 == 0 else []
    if not found:
        return (
            "GGML has integers of 8 bits with a scale for 32 columns, and of 6 with one for 16 where 256 divides rows: "
            f"without zero points these take {bits}, with a scale for {size} of {columns} columns"
        )
    return tuple(TYPES[name] for name in found)


def blocks(packed: PackedTensor, kind: GgmlType) -> Tensor:
    """Return a weight [O, I] as rows of blocks, uint8 [O, bytes of a row]. Raises ValueError where a number is not
    exact."""
    if isinstance(packed.scheme.weight, GgmlBlocks):
        assert packed.scheme.weight.type is kind, f"{packed.scheme.name} was planned as {kind.name}"
        return packed.parts["blocks"]
    if isinstance(packed.scheme.weight, Fp4):
        return blocks_of_fp4(packed)
    if kind.name in MULTIPLES:
        return _fine_blocks(packed, kind)
    scheme, rows = GGML[kind.name], packed.shape[0]
    if scheme.grid.symmetric:
        codes, half, _ = affine.decode(as_scheme(packed, scheme, kind.name))
        found = Blocks(codes.to(torch.int16).reshape(-1, kind.elements), _each(half))
    else:
        found = _with_offsets(packed, kind)
    return ggml_blocks.pack(kind, found).view(rows, -1)


def _with_offsets(packed: PackedTensor, kind: GgmlType) -> Blocks:
    own = grid_of(packed.scheme)
    assert own is not None
    codes, scale, zero = spread(packed, packed.shape[1] // kind.elements)
    assert zero is not None
    middle = 1 << (own.grid.bits - 1)
    half = _each(as_half(scale, kind.name))
    if not (half > 0).all():  # a sum that cancels is 0, where a product with such a scale is -0
        raise not_exact(f"{kind.name} has no -0, which a scale that is not above zero makes of zeros")
    wanted = -(half.float() * (_each(zero).float() + middle))
    m = wanted.half()
    if not torch.equal(m.float(), wanted):
        raise not_exact(f"{kind.name} has an offset in float16, and a scale times its zero point is none")
    return Blocks(codes.to(torch.int16).reshape(-1, kind.elements) + middle, half, m)


def _fine_blocks(packed: PackedTensor, kind: GgmlType) -> Tensor:
    codes, scale, _ = affine.decode(as_scheme(packed, GGML[kind.name], kind.name))
    rows, columns = packed.shape
    raw = torch.empty((rows, kind.row_bytes(columns)), dtype=torch.uint8)
    for part in row_slices(rows, columns):
        some = codes[part].to(torch.int16).reshape(-1, kind.elements)
        if kind.name == "IQ4_XS" and not torch.isin(some, torch.tensor(IQ4_VALUES, dtype=torch.int16)).all():
            raise not_exact("IQ4_XS has 16 codes, and here are others")
        d, multiples = _shared(scale[part].reshape(len(some), -1), kind)
        raw[part] = ggml_blocks.pack(kind, Blocks(some, d, None, multiples)).view(-1, raw.shape[1])
    return raw


def _shared(scale: Tensor, kind: GgmlType) -> tuple[Tensor, Tensor]:
    """Return a float16 [N, 1] and whole numbers, int16 [N, G], whose products are the scales of N blocks, float32 [N,
    G].

    The largest scale is one of few multiples, so all are tried, those of the largest magnitude first, as quantizers
    choose them. Raises ValueError where a block has none.
    """
    low, high = MULTIPLES[kind.name]
    largest = scale.gather(1, scale.abs().argmax(1, keepdim=True))
    d, found = scale.new_empty((len(scale), 1), dtype=torch.float16), torch.empty(scale.shape, dtype=torch.int16)
    left = torch.arange(len(scale))
    for multiple in sorted((each for each in range(low, high + 1) if each), key=abs, reverse=True):
        wanted = scale[left]
        half = (largest[left] / multiple).half()
        whole = (wanted / half.float()).round().nan_to_num(0, 0, 0).clamp(low, high).to(torch.int16)
        # A factor of 0 or -0 changes the sign, so that a zero is a multiple of zero with its own sign.
        signs = torch.where(wanted.signbit() == half.signbit(), 1, -1).to(torch.int16)
        whole = torch.where(half == 0, signs, whole)
        product = half.float() * whole.float()
        fits = ((product == wanted) & (product.signbit() == wanted.signbit())).all(1)
        d[left[fits]], found[left[fits]] = half[fits], whole[fits]
        left = left[~fits]
        if not len(left):
            return d, found
    raise not_exact(f"the scales of a block of {kind.name} are whole multiples of one float16, and these are of none")


def _each(groups: Tensor) -> Tensor:
    """Return numbers of blocks [O, G] as a column."""
    return groups.reshape(-1, 1).contiguous()
