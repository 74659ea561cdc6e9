"""Weights of folders as GGML blocks, where a type has their very values.

A type has blocks of 32 with a scale in float16. So groups must be whole blocks (a longer one becomes several, whose
scales are the same), and scales numbers of float16; a grid with fewer bits than a type is a part of its grid. With zero
points a value is scale * code - scale * zero, and the type's offset must be that product in float16, which it seldom
is: whoever re-packs finds out block by block.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from attar.checkpoints.convert_source import Stored
from attar.checkpoints.convert_targets import as_half, grid_of
from attar.formats import affine, ggml_blocks
from attar.formats.ggml import TYPES, GgmlType
from attar.formats.ggml_blocks import Blocks
from attar.formats.packed import PackedTensor

GGUF = "gguf"  # what users call the format

DENSE: Mapping[str, str] = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
"""Types by the dtype of what they hold."""

SYMMETRIC, ASYMMETRIC = ((4, "Q4_0"), (5, "Q5_0"), (8, "Q8_0")), ((4, "Q4_1"), (5, "Q5_1"))
"""Types by the bits of their grids."""


def kind_for(each: Stored) -> GgmlType | str:
    """The smallest type that can hold a linear, or why none does, as the end of a sentence."""
    grid, columns = grid_of(each), each.shape[1]
    if grid is None:
        return f"GGML has types for weights as integers, not for {each.scheme.name}"
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


def _each(groups: Tensor, columns: int) -> Tensor:
    """Numbers of groups [O, G] for each block: [O * I / 32, 1]."""
    return groups.repeat_interleave(columns // 32 // groups.shape[1], 1).reshape(-1, 1).contiguous()
