"""The patches of an image as a tower reads them: bytes until their turn comes, so that an image stays small."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attar.model.vision.config import VisionConfig
from attar.model.vision.positions import merged_order

SHADES = 256  # of a byte


@dataclass(frozen=True, eq=False)
class Patches:
    """Patches of one tile in the order of the tower's rows."""

    shades: Tensor  # uint8 [N, 3, patch, patch]
    values: Tensor  # [3, 256]: what each shade of each channel becomes
    frames: int

    @classmethod
    def of(cls, tile: Tensor, config: VisionConfig, dtype: torch.dtype) -> Patches:
        """Cut a tile [H, W, 3] uint8 into patches, row by row; those that are merged lie together.

        Pixels that fill no patch are left out.
        """
        size = config.patch
        high, wide = tile.shape[0] // size, tile.shape[1] // size
        grid = tile[: high * size, : wide * size].view(high, size, wide, size, 3)
        shades = grid.permute(0, 2, 4, 1, 3).reshape(high * wide, 3, size, size)
        if config.connector == "merge":
            shades = shades[merged_order(high, wide, config.factor)]
        means, deviations = (torch.tensor(each, dtype=torch.float64)[:, None] for each in (config.mean, config.std))
        values = (torch.arange(SHADES, dtype=torch.float64) * config.rescale - means) / deviations
        return cls(shades, values.to(dtype), config.frames)

    def __len__(self) -> int:
        return len(self.shades)

    def ordered(self, rows: Tensor) -> Patches:
        """Return these patches in another order, int64 [N]."""
        return replace(self, shades=self.shades[rows])

    def rows(self, rows: slice) -> Tensor:
        """Return normalised patches, [n, 3 * frames * patch * patch]: columns by channel, frame, row and column."""
        own = self.shades[rows].long()
        values = torch.stack([table[own[:, channel]] for channel, table in enumerate(self.values)], 1)
        return values[:, :, None].expand(-1, -1, self.frames, -1, -1).reshape(len(own), -1)
