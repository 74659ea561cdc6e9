"""KVQuant (Hooper et al. 2024): calibrated levels, with outliers and an attention sink stored apart.

Keys are rounded channel by channel: each is centred and divided by its spread, both calibrated, so keys have no stored
scale. Values have a scale of each token. Both are rounded to the nearest of 2^b levels, one table a layer, found by a
k-means weighted by the cost of errors (`model/kv_basis.py`).

A few numbers a head would stretch every grid. So the greatest coordinates of each token and head are stored apart, in
16 bits with their columns, and do not affect the scale: one of 64 or of 128, the whole numbers nearest to "1 %". The
first token of each block is stored apart unrounded. It includes the first of a sequence, an attention sink of trained
models; and blocks that begin one sequence and not another need no distinction.

Two points differ from the publication. Keys are rounded after they are rotated, where channels vary less evenly,
because this cache holds them so. The cost of an error is the mean square of queries, or of the output projection's
rows, instead of squared gradients, because models are loaded for serving without any.

Legend: N rows, G key-value heads, D head size, b bits, K outliers of a head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

PLANE = 8  # codes whose bits of one rank are a byte


@dataclass(eq=False)
class Channels:
    """The channel-wise coordinates of a layer's keys or values, and the levels that they are rounded to."""

    mean: Tensor  # [G, D] float32
    spread: Tensor  # [G, D]
    levels: Tensor  # [2^b], ascending
    scaled: bool  # whether each token has a scale of its own

    def turn(self, x: Tensor) -> Tensor:
        """Turn numbers x [N, G, D] into coordinates."""
        return (x.float() - self.mean) / self.spread

    def turn_queries(self, q: Tensor) -> Tensor:
        """Turn queries [N, H, D] for products with keys' coordinates."""
        turned: Tensor = q.float().unflatten(1, (self.mean.shape[0], -1)) * self.spread[:, None]
        return turned.flatten(1, 2).to(q.dtype)

    def turn_back(self, mixed: Tensor) -> Tensor:
        """Turn mixtures [N, H, D] of coordinates into mixtures of numbers."""
        spread, mean = self.spread[:, None].to(mixed.dtype), self.mean[:, None].to(mixed.dtype)
        turned: Tensor = mixed.unflatten(1, (self.mean.shape[0], -1)) * spread + mean
        return turned.flatten(1, 2)


@dataclass(eq=False)
class Coded:
    """Coordinates as stored in pages."""

    codes: Tensor  # [N, G, b, D / 8] uint8
    outliers: Tensor  # [N, G, K] bfloat16, the coordinates
    columns: Tensor  # [N, G, K] uint8
    scales: Tensor | None  # [N, G] bfloat16


def inliers(y: Tensor, outliers: int) -> Tensor:
    """Return which coordinates [..., D] are not among the greatest of their head: bool."""
    return torch.ones_like(y, dtype=torch.bool).scatter_(-1, y.abs().topk(outliers, -1).indices, False)


def sizes(y: Tensor, kept: Tensor) -> Tensor:
    """Return the root mean square of the coordinates [..., D] that are `kept`: [...]."""
    return ((y.square() * kept).sum(-1) / kept.sum(-1)).sqrt()


def quantize(y: Tensor, channels: Channels, outliers: int) -> Coded:
    """Quantize coordinates [N, G, D]. A head that is not finite, or too large for its scale, has a NaN among its
    outliers."""
    finite = y.isfinite().all(-1)
    y = torch.where(finite[..., None], y, 0.0)
    kept = inliers(y, outliers)
    columns = (~kept).nonzero()[:, -1].view(*y.shape[:-1], outliers)
    apart = y.gather(-1, columns).bfloat16()
    scales, inside = None, y
    if channels.scaled:
        scales = sizes(y, kept).bfloat16()
        finite = finite & scales.isfinite()
        inside = y / torch.where(scales == 0, 1.0, scales.float())[..., None]
    codes = torch.bucketize(inside, (channels.levels[1:] + channels.levels[:-1]) / 2).to(torch.uint8)
    bits = (len(channels.levels) - 1).bit_length()
    planes = codes[..., None, :] >> torch.arange(bits, device=y.device)[:, None].byte() & 1  # [N, G, b, D]
    packed = (planes.unflatten(-1, (-1, PLANE)) << torch.arange(PLANE, device=y.device).byte()).sum(-1)
    return Coded(packed.to(torch.uint8), torch.where(finite[..., None], apart, torch.nan), columns.byte(), scales)


def dequantize(coded: Coded, channels: Channels) -> Tensor:
    """Convert `Coded` back to coordinates [N, G, D], float32."""
    bits = (coded.codes[..., None] >> torch.arange(PLANE, device=coded.codes.device).byte() & 1).flatten(-2)
    codes = (bits.int() << torch.arange(bits.shape[-2], device=bits.device)[:, None]).sum(-2)
    y = channels.levels[codes]
    if coded.scales is not None:
        y = y * coded.scales.float()[..., None]
    return y.scatter(-1, coded.columns.long(), coded.outliers.float())
