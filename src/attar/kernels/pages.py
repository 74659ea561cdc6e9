"""Keys and values in blocks: how they lie, and which rows of a call belong where.

A *slot* is one token's place, number `slot % block` of block `slot // block`; a sequence's slots are listed by its row
of a block table, so that sequences grow without moving and may share what they have in common. The layout is the
kernels' (drawn in `csrc/attention.h`), and every backend uses it: a cache written by one can be read by another.

Shapes: N rows, one sequence after another; B sequences; H query heads, G key-value heads, D head size. J neighbours
stand together, as many as a dot product of the type takes at once: 1 for floats, 4 for int8.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attar.kernels.native import extension

RUN = 16  # slots that stand side by side in the keys, and columns in the values
DTYPES = (torch.float32, torch.bfloat16, torch.int8)


@dataclass(eq=False)
class Pages:
    """The blocks of one layer. int8 codes have a scale per token and head: value = code * scale."""

    head_dim: int
    keys: Tensor  # [blocks, G, block / 16, ceil(D / J), 16, J]
    values: Tensor  # [blocks, G, block / J, D rounded up to 16, J]
    key_scales: Tensor | None = None  # [blocks, G, block] float32
    value_scales: Tensor | None = None

    @classmethod
    def zeros(
        cls, blocks: int, block: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: str = "cpu"
    ) -> Pages:
        """Blocks of `block` slots. Raises ValueError where that is no multiple of 16 or `dtype` cannot be stored."""
        if block < RUN or block % RUN:
            raise ValueError(f"a block holds a multiple of {RUN} slots, not {block}")
        if dtype not in DTYPES:
            raise ValueError(f"keys and values are kept as float32, bfloat16 or int8, not {dtype}")
        keys, values = shapes(blocks, block, kv_heads, head_dim, dtype)
        scales = (
            torch.zeros((2, blocks, kv_heads, block), device=device).unbind() if dtype == torch.int8 else (None, None)
        )
        zeros = [torch.zeros(shape, dtype=dtype, device=device) for shape in (keys, values)]
        for each in zeros:  # a head's blocks lie apart, one to a small page: walking those costs a third of the speed
            extension.prefer_huge_pages(each)
        return cls(head_dim, *zeros, *scales)

    @property
    def blocks(self) -> int:
        return self.keys.shape[0]

    @property
    def block(self) -> int:
        return self.keys.shape[2] * RUN

    @property
    def kv_heads(self) -> int:
        return self.keys.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        return self.keys.dtype

    @property
    def nbytes(self) -> int:
        parts = (self.keys, self.values, self.key_scales, self.value_scales)
        return sum(part.nbytes for part in parts if part is not None)


def shapes(
    blocks: int, block: int, kv_heads: int, head_dim: int, dtype: torch.dtype
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of keys and of values."""
    together = 4 if dtype == torch.int8 else 1
    padded = -(-head_dim // RUN) * RUN
    keys = (blocks, kv_heads, block // RUN, -(-head_dim // together), RUN, together)
    return keys, (blocks, kv_heads, block // together, padded, together)


@dataclass(eq=False)
class Placement:
    """Which rows of a call belong to which sequence, where their keys and values go, and what is there already.

    Everything is a tensor, read when a kernel runs: a recorded step is replayed by writing new numbers into them.

    The position of a key is its slot's index in the sequence, unless `key_positions` says otherwise, as an evicting
    cache must: there, a negative number marks an empty slot. With `tree`, each sequence's own rows (its last slots) see
    of one another only what the mask allows, and their keys are at the rows' positions, which may branch.
    """

    row_starts: Tensor  # [B + 1] int32: the rows of sequence b are row_starts[b] .. row_starts[b + 1]
    lengths: Tensor  # [B] int32: slots filled, once this call's rows are written
    tables: Tensor  # [B, width] int32: block numbers; those past the length are not looked at
    positions: Tensor  # [N] int32
    slots: Tensor  # [N] int64: block number * block + place in the block
    key_positions: Tensor | None = None  # [blocks, block] int32
    tree: Tensor | None = None  # bool [sum of T * T]: each sequence's mask [queries, keys] of its T rows, one by one


@dataclass(eq=False)
class Rotation:
    """Rotary angles: row n turns by cos[rows[n]] and sin[rows[n]], each [R / 2] for the first R columns of a head."""

    cos: Tensor  # [angles, R / 2] float32
    sin: Tensor
    rows: Tensor  # [N] int32
