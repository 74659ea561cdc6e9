"""KV cache blocks in the layout of Triton's kernels: rows of D numbers, nothing interleaved.

The CPU kernels' layout (`kv.pages`) puts 16 slots side by side for dot products of one vector register. Tensor cores
take matrices whose rows lie together, of keys and of values alike, and a token's key is then one piece of memory to
write. Tables, slots and placements are the same. Plain torch: the class of a cache tells its reader.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch

from attar.errors import UserError
from attar.kv.bit_planes import rotation
from attar.kv.pages import RUN, Bases, PagedKV
from attar.kv.schemes import KvScheme

SCALED_DTYPES = (torch.int8, torch.float8_e4m3fn)
PLAIN_DTYPES = (torch.float32, torch.float16, torch.bfloat16, *SCALED_DTYPES)


@dataclass(eq=False)
class PlainPages(PagedKV):
    """The blocks of one layer: keys and values [blocks, G, block, D]; with 8-bit codes also scales [blocks, G,
    block]."""

    @classmethod
    def make(
        cls, blocks: int, block: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: str = "cpu"
    ) -> Self:
        """Make blocks of `block` slots, all zeros. Raises ValueError where the slots are no multiple of 16, or numbers
        of `dtype` cannot be stored."""
        if block < RUN or block % RUN:
            raise ValueError(f"a block holds a multiple of {RUN} slots, not {block}")
        if dtype not in PLAIN_DTYPES:
            raise ValueError(
                f"the KV cache is kept as float32, float16, bfloat16, int8 or fp8 on this device, not {dtype}"
            )
        shape = (blocks, kv_heads, block, head_dim)
        keys, values = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))
        if dtype not in SCALED_DTYPES:
            return cls(head_dim, keys, values)
        key_scales, value_scales = torch.zeros((2, *shape[:3]), device=device).unbind()
        return cls(head_dim, keys, values, key_scales, value_scales)

    @property
    def block(self) -> int:
        return self.keys.shape[2]


@dataclass(eq=False)
class NibblePages(PlainPages):
    """Pages in 4 bits (`nibbles.py`): keys and values uint8 [blocks, G, block, D / 2], scales [blocks, G, block]."""

    @classmethod
    def rotated(
        cls, blocks: int, block: int, kv_heads: int, head_dim: int, scheme: KvScheme, device: str = "cpu"
    ) -> Self:
        """Make blocks of `block` slots, all zeros, of heads in the coordinates of `bit_planes.rotation`. Raises
        ValueError where the slots are no multiple of 16, or the columns no power of two from 32 on."""
        scheme.check(head_dim, block)
        if head_dim < 32 or head_dim & (head_dim - 1):
            raise UserError(
                "kv_unsupported", f"{scheme.name} keeps heads of 32, 64, 128 .. columns on this device, not {head_dim}"
            )
        shape = (blocks, kv_heads, block, head_dim // 2)
        keys, values = (torch.zeros(shape, dtype=torch.uint8, device=device) for _ in range(2))
        key_scales, value_scales = torch.zeros((2, *shape[:3]), device=device).unbind()
        turn = rotation(kv_heads, head_dim, scheme.units(head_dim), device)
        return cls(head_dim, keys, values, key_scales, value_scales, scheme=scheme, bases=Bases(turn, turn))
