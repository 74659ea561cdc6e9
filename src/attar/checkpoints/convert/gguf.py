"""Weights of folders as GGML blocks, where a type has their very values, and blocks with an offset as a grid.

A folder may hold GGML's blocks as they are (recipes such as `rtn-q4_k`): these are copied, byte for byte. Integers need
a type of blocks of 32 with a scale in float16. So groups must be whole blocks (a longer one becomes several, whose
scales are the same), and scales numbers of float16; a grid with fewer bits than a type is a part of its grid. With zero
points a value is scale * code - scale * zero, and the type's offset must be that product in float16, which it seldom
is: whoever re-packs finds out block by block. Nor is an offset often a whole multiple of its scale, which is what the
way back asks for.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from attar.checkpoints.convert.source import Stored
from attar.checkpoints.convert.targets import as_half, grid_of
from attar.formats import affine, ggml_blocks
from attar.formats.forms import GgmlBlocks
from attar.formats.ggml import TYPES, GgmlType
from attar.formats.ggml_blocks import Blocks
from attar.formats.packed import PackedTensor
from attar.formats.packing import row_slices
from attar.formats.scheme import Scheme

GGUF = "gguf"  # what users call the format

DENSE: Mapping[str, str] = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
"""Types by the dtype of what they hold."""

SYMMETRIC, ASYMMETRIC = ((4, "Q4_0"), (5, "Q5_0"), (8, "Q8_0")), ((4, "Q4_1"), (5, "Q5_1"))
"""Types by the bits of their grids."""

WITH_OFFSETS: Mapping[str, Scheme] = {
    name: Scheme.parse(scheme).with_scale_dtype("float16")
    for name, scheme in {"Q4_1": "w4g32-asym", "Q5_1": "w5g32-asym"}.items()
}
"""The grids of types with an offset, where every offset is a whole number of scales (`as_grid`)."""


def kind_for(each: Stored) -> GgmlType | str:
    """The smallest type that can hold a linear, or why none does, as the end of a sentence."""
    if isinstance(each.scheme.weight, GgmlBlocks):
        return each.scheme.weight.type
    grid, columns = grid_of(each), each.shape[1]
    if grid is None:
        return f"GGML has types for weights as integers and for its own blocks, not for {each.scheme.name}"
    if each.permuted:
        return "GGML has no field for columns that are out of their order (desc_act)"
    size = grid.group_size or columns
    if size % 32:
        return f"GGML has blocks of 32, and a scale here is of {size}"
    known = SYMMETRIC if grid.symmetric else ASYMMETRIC
    found = next((name for bits, name in known if grid.bits <= bits), None)
    return f"GGML has no type of {grid.bits} bits with zero points" if found is None else TYPES[found]


def blocks(packed: PackedTensor, kind: GgmlType) -> Tensor:
    """A weight [O, I] as rows of blocks, uint8 [O, bytes of a row]. Raises ValueError where a number is not exact."""
    if isinstance(packed.scheme.weight, GgmlBlocks):
        assert packed.scheme.weight.type is kind, f"{packed.scheme.name} was planned as {kind.name}"
        return packed.parts["blocks"]
    codes, scale, zero = affine.decode(packed)
    rows, columns = packed.shape
    half = as_half(scale)
    m = None
    if zero is not None:
        middle = 1 << (packed.scheme.grid.bits - 1)
        codes = codes.to(torch.int16) + middle
        wanted = -(half.float() * (zero.float() + middle))
        m = _each(wanted.half(), columns)
        if not torch.equal(m.float(), _each(wanted, columns)):
            raise ValueError(f"{kind.name} has an offset in float16, and a scale times its zero point is none")
    found = Blocks(codes.to(torch.int16).reshape(-1, kind.elements), _each(half, columns), m)
    return ggml_blocks.pack(kind, found).view(rows, -1)


def as_grid(kind: GgmlType, raw: Tensor) -> PackedTensor:
    """Rows of blocks [O, bytes of a row] of one of `WITH_OFFSETS` as a weight on its grid: the same values.

    Raises ValueError where an offset is not its scale times a zero point that the grid has.
    """
    scheme = WITH_OFFSETS[kind.name]
    rows, columns = raw.shape[0], raw.shape[1] // kind.block_bytes * kind.elements
    middle = 1 << (scheme.grid.bits - 1)
    codes = torch.empty((rows, columns), dtype=torch.int8)
    scale = torch.empty((rows, columns // kind.elements), dtype=torch.float16)
    zero = torch.empty(scale.shape, dtype=torch.int8)
    for part in row_slices(rows, columns):
        found = ggml_blocks.unpack(kind, raw[part].reshape(-1, kind.block_bytes))
        assert found.m is not None
        d, m = found.d.float(), found.m.float()
        times = torch.where(m == 0, 0.0, (-m / d).round())
        if not ((times >= 0) & (times < 2 * middle) & (times * d == -m)).all():  # also where one is not finite
            raise ValueError(f"{kind.name} has an offset that is no whole number of its scales, as zero points are")
        codes[part] = (found.codes - middle).to(torch.int8).view(-1, columns)
        scale[part] = found.d.view(-1, scale.shape[1])
        zero[part] = (times - middle).to(torch.int8).view(-1, scale.shape[1])
    return affine.encode(codes, scale, zero, scheme, (rows, columns))


def _each(groups: Tensor, columns: int) -> Tensor:
    """Numbers of groups [O, G] for each block: [O * I / 32, 1]."""
    return groups.repeat_interleave(columns // 32 // groups.shape[1], 1).reshape(-1, 1).contiguous()
