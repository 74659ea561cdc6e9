"""KVQuant's code (Hooper et al. 2024) as published: per vector, with levels of a layer and outliers apart.

Keys are rounded before they are rotated, when each channel keeps to a range of its own. Calibration gives each channel
the quantiles between which all but a hundredth of its numbers lie. What lies outside is an outlier, stored in 16 bits.
The rest is mapped to -1 .. 1 and rounded to the nearest of 2^b levels. Values are rounded token by token, over all
heads of the layer: quantiles, centre and range are those of the token itself.

Levels minimise squared errors weighted by squared gradients of the loss (the diagonal of the Fisher information), over
a calibration text. With 2 bits, levels are then read shifted and scaled, so that mean and spread stay (Q-Norm).

The first token of a sequence, an attention sink, stays in 16 bits and is not calibrated on.

Legend: N rows, G key-value heads, D head size, b bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attar.formats.codecs import kmeans
from attar.kv.published import ONE_SIDE, PublishedFormat

NORMED_BITS = 2  # and fewer are read by Q-Norm
SOME = 1 << 19  # numbers that levels are found from


@dataclass(eq=False)
class Levels:
    """The 2^b levels of one layer's keys or values, ascending, and what they are read as."""

    chosen: Tensor  # [2^b] float32
    read: Tensor

    def round(self, x: Tensor) -> Tensor:
        """Round normalised numbers to what their nearest level is read as."""
        return self.read[torch.bucketize(x, (self.chosen[1:] + self.chosen[:-1]) / 2)]


@dataclass(eq=False)
class ChannelRanges:
    """The quantiles of each channel of a layer's keys, [G, D] float32."""

    low: Tensor
    high: Tensor


@dataclass(eq=False)
class PublishedCode:
    """How one layer's keys and values are rounded in a format as published. KIVI needs no calibration: None each.

    `outliers` of `numbers` in keys were stored apart so far.
    """

    format: PublishedFormat
    ranges: ChannelRanges | None = None
    keys: Levels | None = None
    values: Levels | None = None
    outliers: int = 0
    numbers: int = 0

    def round_keys(self, k: Tensor, first: Tensor) -> Tensor:
        """Round unrotated keys [N, G, D]; rows where `first` [N] is true stay in 16 bits."""
        assert self.ranges is not None
        assert self.keys is not None
        rounded, apart = round_by_channel(k.float(), self.ranges, self.keys)
        self.outliers, self.numbers = self.outliers + int(apart[~first].sum()), self.numbers + apart[~first].numel()
        return torch.where(first[:, None, None], k.half().float(), rounded)

    def round_values(self, v: Tensor, first: Tensor) -> Tensor:
        """Round values [N, G, D]; rows where `first` [N] is true stay in 16 bits."""
        assert self.values is not None
        rounded = round_by_token(v.float().flatten(1), self.values).view(v.shape)
        return torch.where(first[:, None, None], v.half().float(), rounded)


def round_by_channel(k: Tensor, ranges: ChannelRanges, levels: Levels) -> tuple[Tensor, Tensor]:
    """Round keys [N, G, D] by their channels' ranges; return them with which of them are outliers."""
    apart = (k < ranges.low) | (k > ranges.high)
    normalised, centre, half = _normalised(k, ranges.low, ranges.high)
    return torch.where(apart, k.half().float(), levels.round(normalised) * half + centre), apart


def round_by_token(v: Tensor, levels: Levels) -> Tensor:
    """Round values [N, G * D] by the ranges of their tokens."""
    apart, low, high = token_ranges(v)
    normalised, centre, half = _normalised(v, low, high)
    return torch.where(apart, v.half().float(), levels.round(normalised) * half + centre)


def token_ranges(v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return which values [N, G * D] are outliers of their tokens, and least and greatest of the others, [N, 1] each.
    The median takes the place of outliers."""
    quantiles = torch.tensor([ONE_SIDE, 1 - ONE_SIDE], dtype=v.dtype)
    low, high = torch.quantile(v, quantiles, dim=1)[..., None]
    apart = (v <= low) | (v >= high)
    inside = torch.where(apart, v.median(1, keepdim=True).values, v)
    return apart, inside.amin(1, keepdim=True), inside.amax(1, keepdim=True)


def _normalised(x: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return numbers mapped so that low .. high is -1 .. 1, with centre and half of the range as stored."""
    centre, half = ((high + low) / 2).half().float(), ((high - low) / 2).half().float()
    return (x - centre) / torch.where(half > 0, half, 1.0), centre, half


def calibrate(k: Tensor, v: Tensor, k_weights: Tensor, v_weights: Tensor, published: PublishedFormat) -> PublishedCode:
    """Return the code of a layer from its unrotated keys and its values, [N, G, D] float32, and the weight of each
    number's error, of the same shapes."""
    flat = k.flatten(1)
    bounds = torch.tensor([ONE_SIDE, 1 - ONE_SIDE])
    low, high = torch.quantile(flat, bounds, dim=0).unflatten(1, k.shape[1:])
    normalised, _, _ = _normalised(k, low, high)
    keys = _levels(normalised, (k >= low) & (k <= high), k_weights, published.bits)
    apart, least, most = token_ranges(v.flatten(1))
    normalised, _, _ = _normalised(v.flatten(1), least, most)
    values = _levels(normalised, ~apart, v_weights.flatten(1), published.bits)
    return PublishedCode(published, ChannelRanges(low, high), keys, values)


def _levels(x: Tensor, kept: Tensor, weights: Tensor, bits: int) -> Levels:
    """Return levels of the normalised numbers x that are `kept`, with the weights of their errors."""
    inside, counts = x[kept], weights[kept]
    some = slice(None, None, -(-inside.numel() // SOME))
    chosen = kmeans.centres(inside[None, some], counts[None, some], 1 << bits)[0].float()
    found = Levels(chosen, chosen)
    if bits > NORMED_BITS:
        return found
    rounded = found.round(inside)
    scale = inside.std() / rounded.std().clamp(min=1e-6)
    return Levels(chosen, (chosen - rounded.mean()) * scale + inside.mean())
