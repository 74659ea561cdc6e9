"""From a tower's hidden states to rows of the language model: the projectors of all families.

Rows are merged in blocks of factor x factor patches by what a family calls pixel shuffle, patch merger or average
pooling, and then multiplied. LLaVA-NeXT puts its tiles together to one picture, cuts off the margins that made it fit,
and ends each row of it with a learned one.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from attar.images.geometry import margins
from attar.kernels import ops
from attar.kernels.operands import Linear, Norm
from attar.model.vision.config import VisionConfig
from attar.model.vision.tiles import slices
from attar.model.vision.tower import normed


@dataclass(eq=False)
class Projector:
    """Weights of a projector: linear layers one after another, an activation between them, a norm before."""

    config: VisionConfig
    linears: tuple[Linear, ...]
    norm: Norm | None = None
    newline: Tensor | None = None  # [out]

    def merged(self, x: Tensor) -> Tensor:
        """Merge hidden states [N, I] of one tile, or of one image with patches in blocks, to rows [M, columns]."""
        config = self.config
        if config.connector == "shuffle":
            side = config.side // config.factor
            blocks = x.view(side, config.factor, side, config.factor, -1).transpose(1, 2)
            return blocks.reshape(side * side, -1)
        if config.connector == "downsample":  # the patches that lack at the right and below count as zeros
            assert self.norm is not None
            side, lacking = config.rows_side, -config.side % config.factor
            grid = F.pad(x.view(config.side, config.side, -1), (0, 0, 0, lacking, 0, lacking))
            blocks = grid.view(side, config.factor, side, config.factor, -1).transpose(1, 2).reshape(side * side, -1)
            for rows in slices(len(blocks)):
                blocks[rows] = normed(blocks[rows], self.norm)
            return blocks
        if config.connector == "merge":  # the norm is of single patches
            assert self.norm is not None
            for rows in slices(len(x)):
                x[rows] = normed(x[rows], self.norm)
            return x.view(len(x) // config.factor**2, -1)
        if config.connector == "pool":
            assert self.norm is not None
            picture = x.T.reshape(1, -1, config.side, config.side)
            means = F.avg_pool2d(picture, config.factor).flatten(2)[0].T.contiguous()
            return normed(means, self.norm)
        return x

    def work(self, x: Tensor) -> Generator[None, None, Tensor]:
        """Yield after each unit of work; return the rows [M, out] of hidden states [N, I]."""
        rows = self.merged(x)
        out = rows.new_empty((len(rows), self.config.out))
        for part in slices(len(rows)):
            own = rows[part]
            for number, linear in enumerate(self.linears):
                if number:
                    own = ops.activate(own, self.config.projector_activation, False, linear)
                own = ops.linear(own, (linear,))
            out[part] = own
            yield
        return out


def joined(newline: Tensor, rows: Tensor, grid: tuple[int, int], size: tuple[int, int]) -> Tensor:
    """Put the tiles' rows [T, side * side, out] of a LLaVA-NeXT image together: [M, out].

    The first tile is the whole image. `grid` counts rows and columns of the others, `size` is the image's height and
    width before it was resized.
    """
    whole, parts = rows[0], rows[1:]
    if not len(parts):
        return torch.cat((whole, newline[None].to(whole.dtype)))
    side = round(len(whole) ** 0.5)
    picture = parts.view(*grid, side, side, -1).transpose(1, 2).reshape(grid[0] * side, grid[1] * side, -1)
    top, left = margins(picture.shape[:2], size)
    picture = picture[top : len(picture) - top, left : picture.shape[1] - left]
    ends = newline.to(picture.dtype).expand(len(picture), 1, -1)
    return torch.cat((whole, torch.cat((picture, ends), 1).flatten(0, 1)))
