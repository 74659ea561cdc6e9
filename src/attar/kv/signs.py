"""One-bit keys: the signs of each key's columns after rotation, kept beside a layer's cache.

A key k at position p becomes the signs of c = k - m(p) and one scale s: c is about s * spread * sign. The mean m(p) is
that of the layer's keys before rotation, one a head and column, rotated to p. Spreads are constants of head and column.
The scale has the least squared error: sum(spread |c|) / sum(spread^2).

A ranking adds the query's product with m(p), which costs no memory. Models with large biases of keys need it: behind a
constant mean after rotation the bias, which turns with p, would take the signs. Heads of 64 columns take 10 bytes a
token. Related work calls such reading progressive quantization (SpAtten, Wang et al. 2021).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from attar.kv.schemes import RUN
from attar.kv.sparse import SparseAttention

WEIGHTS = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8)


@dataclass(eq=False)
class Signs:
    """The one-bit keys of a layer's blocks, and the settings by which rows choose among them."""

    bits: Tensor  # uint8 [blocks, G, block / 16, ceil(D / 8), 16]: bit j of byte c is the sign of column 8 c + j
    scales: Tensor  # bfloat16 [blocks, G, block]
    means: Tensor  # float32 [G, D], of keys before rotation
    spreads: Tensor  # float32 [G, D], equal in both columns of a rotated pair
    settings: SparseAttention
    angles: tuple[Tensor, Tensor] | None = None  # cos and sin of every position, float32 [positions, R / 2] each

    @classmethod
    def zeros(
        cls,
        blocks: int,
        block: int,
        means: Tensor,
        spreads: Tensor,
        settings: SparseAttention,
        angles: tuple[Tensor, Tensor] | None = None,
    ) -> Signs:
        """Make one-bit keys of `blocks` blocks of `block` slots for heads with these means and spreads [G, D]."""
        heads, size = means.shape
        bits = torch.zeros((blocks, heads, block // RUN, -(-size // 8), RUN), dtype=torch.uint8)
        scales = torch.zeros((blocks, heads, block), dtype=torch.bfloat16)
        return cls(bits, scales, means.float().contiguous(), spreads.float().contiguous(), settings, angles)

    def means_at(self, positions: Tensor) -> Tensor:
        """Return the means rotated to positions [N]: float32 [N, G, D]."""
        if self.angles is None:
            return self.means.expand(len(positions), -1, -1)
        cos, sin = (table[positions.long()][:, None] for table in self.angles)
        half = cos.shape[-1]
        a, b, rest = self.means.split((half, half, self.means.shape[1] - 2 * half), 1)
        turned = a * cos - b * sin, b * cos + a * sin, rest.expand(len(positions), -1, -1)
        return torch.cat(turned, -1)

    def write(self, k: Tensor, slots: Tensor, positions: Tensor) -> None:
        """Write the signs of rotated keys [N, G, D] at positions [N] to their slots [N].

        A key that is not finite gets a scale that is not.
        """
        block, place = slots // self.scales.shape[2], slots % self.scales.shape[2]
        centred = k.float() - self.means_at(positions)
        signs = F.pad(centred > 0, (0, -centred.shape[-1] % 8)).unflatten(-1, (-1, 8))
        packed = (signs * WEIGHTS.to(k.device)).sum(-1).to(torch.uint8)
        self.bits[block, :, place // RUN, :, place % RUN] = packed
        squares = self.spreads.square().sum(-1).clamp_min(1e-30)
        self.scales[block, :, place] = ((centred.abs() * self.spreads).sum(-1) / squares).bfloat16()

    def read(self, table: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Return signs, bool [S, G, D], and scales, float32 [S, G], of a sequence's first `length` slots."""
        blocks = table[: -(-length // self.scales.shape[2])].long()
        packed = self.bits[blocks].movedim((1, 4), (3, 2)).flatten(0, 2)[:length]  # [S, G, ceil(D / 8)]
        signs = (packed[..., None] & WEIGHTS.to(packed.device)) > 0
        scales = self.scales[blocks].transpose(1, 2).flatten(0, 1)[:length].float()
        return signs.flatten(-2)[..., : self.means.shape[1]], scales
