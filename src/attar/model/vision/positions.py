"""Where the patches of an image lie: rows of learned positions, angles, windows, and the positions of M-RoPE.

An image of h x w patches is read in rows, or, where patches are merged by a factor, block by block of factor x factor
patches, so that the patches of one merged row lie together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from attar.errors import UserError


class Placed(Protocol):
    """What M-RoPE reads of an image."""

    @property
    def grid(self) -> tuple[int, int]:
        """Patches of height and width."""

    @property
    def rows(self) -> int:
        """Rows in the prompt."""


def buckets(side: int) -> Tensor:
    """Return the learned position [side * side] of each patch of a full tile, as Idefics3 finds it.

    A patch's place is a fraction of the side in float32, and its position the bucket of the fraction (transformers'
    `Idefics3VisionEmbeddings`): not always the patch's own number, because fractions are rounded.
    """
    bounds = torch.arange(1 / side, 1.0, 1 / side)
    places = torch.bucketize(
        (torch.arange(side).float() * (1.0 / torch.tensor(side))).clamp(max=1 - 1e-6), bounds, right=True
    )
    return (places[:, None] * side + places).flatten()


def merged_order(height: int, width: int, factor: int) -> Tensor:
    """Return the numbers of the patches, counted in rows, in the order of merged blocks: int64 [height * width]."""
    numbers = torch.arange(height * width).view(height // factor, factor, width // factor, factor)
    return numbers.transpose(1, 2).flatten()


def axial_angles(height: int, width: int, factor: int, head_dim: int, theta: float) -> Tensor:
    """Return the angles of patches in the order of merged blocks, float32 [height * width, head_dim / 2].

    The first half of the pairs turns by the patch's row, the other by its column (Qwen2-VL, Wang et al. 2024).
    """
    order = merged_order(height, width, factor)
    speeds = 1.0 / theta ** (torch.arange(0, head_dim // 2, 2, dtype=torch.float32) / (head_dim // 2))
    at = torch.stack((order // width, order % width), 1).float()
    return (at[:, :, None] * speeds).flatten(1)


def windows(height: int, width: int, factor: int, window: int) -> tuple[Tensor, list[int]]:
    """Return an order of the merged rows, int64 [rows], in which each window's lie together, and the windows' lengths.

    Height, width and the window's side are in patches, the lengths in rows after merging. Windows at the lower and
    right edge may be smaller.
    """
    high, wide, step = height // factor, width // factor, window // factor
    numbers = torch.arange(high * wide).view(high, wide)
    pieces = [
        numbers[top : top + step, left : left + step].flatten()
        for top in range(0, high, step)
        for left in range(0, wide, step)
    ]
    return torch.cat(pieces), [len(piece) for piece in pieces]


def mrope(ids: Sequence[int], image_token: int, images: Sequence[Placed], factor: int) -> Tensor:
    """Return the positions of a prompt by time, height and width: int64 [3, N] (Qwen2-VL, section 2.1).

    The prompt has `image_token` once for each row of each image. A text token has three equal positions. Rows of an
    image share the time, and count merged rows and columns from it. Text goes on after the larger side. Raises
    ValueError where tokens and images do not fit together.
    """
    found, at, start = torch.empty((3, len(ids)), dtype=torch.int64), 0, 0
    left = iter(images)
    while at < len(ids):
        if ids[at] != image_token:
            end = at + 1
            while end < len(ids) and ids[end] != image_token:
                end += 1
            found[:, at:end] = torch.arange(start, start + end - at)
            start += end - at
        else:
            image = next(left, None)
            if (
                image is None
                or any(each != image_token for each in ids[at : at + image.rows])
                or at + image.rows > len(ids)
            ):
                raise UserError("image_invalid", "the prompt has other image tokens than its images have rows")
            high, wide = (side // factor for side in image.grid)
            if high * wide != image.rows:
                raise UserError("image_invalid", f"an image of {high} x {wide} rows has {image.rows}")
            end = at + image.rows
            found[0, at:end] = start
            found[1, at:end] = start + torch.arange(high).repeat_interleave(wide)
            found[2, at:end] = start + torch.arange(wide).repeat(high)
            start += max(high, wide)
        at = end
    if next(left, None) is not None:
        raise UserError("image_invalid", "the prompt has fewer image tokens than its images have rows")
    return found
