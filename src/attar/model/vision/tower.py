"""The one vision transformer: patches in, rows of hidden states out, in small fixed pieces.

Work goes forward in tiles of about `TILE` rows. A generator yields after each projection of a tile to queries, keys and
values, after the attention of some heads, and after each product of a tile behind that. These are always the same calls
of the same kernels on the same rows, so a row's bits do not depend on when the generator is resumed. A layer's keys and
values are complete before its queries read them.

Legend: N rows (patches), I hidden size, H heads, D head size.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from attar.kernels import ops
from attar.kernels.operands import Linear, Norm
from attar.model.vision.config import VisionConfig
from attar.model.vision.patches import Patches
from attar.model.vision.tiles import TILE, slices


@dataclass(eq=False)
class VisionLayer:
    """One layer: attention and a feed-forward, each behind a norm, each added to its input."""

    attention_norm: Norm
    qkv: tuple[Linear, ...]
    output: Linear
    feed_forward_norm: Norm
    up: tuple[Linear, ...]
    down: Linear

    def linears(self) -> Iterator[Linear]:
        yield from (*self.qkv, self.output, *self.up, self.down)

    def norms(self) -> Iterator[Norm]:
        yield from (self.attention_norm, self.feed_forward_norm)


@dataclass(frozen=True, eq=False)
class Segments:
    """Consecutive segments of `lengths` rows, which see each other. `rotation`: cos and sin [N, D / 2], or none."""

    lengths: tuple[int, ...]
    rotation: tuple[Tensor, Tensor] | None = None

    def bounds(self) -> Iterator[tuple[int, int]]:
        return pairwise(accumulate(self.lengths, initial=0))


def parts(heads: int, length: int) -> Iterator[tuple[slice, slice]]:
    """Yield the heads and the queries of a segment whose attention is computed together.

    Few heads with many queries are faster than many heads with few: keys are read less often.
    """
    at_once = min(length, TILE * heads)
    several = max(1, TILE * heads // at_once)
    for first in range(0, heads, several):
        for start in range(0, length, at_once):
            yield slice(first, min(first + several, heads)), slice(start, min(start + at_once, length))


def normed(x: Tensor, norm: Norm) -> Tensor:
    return ops.norm(x.contiguous(), None, norm)[1]


def layer_work(layer: VisionLayer, config: VisionConfig, x: Tensor, segments: Segments) -> Iterator[None]:
    """Replace rows x [N, I] by the layer's output, tile by tile."""
    heads, size = config.heads, config.head_dim
    q, k, v = (x.new_empty((heads, len(x), size)) for _ in range(3))
    for rows in slices(len(x)):
        own = ops.linear(normed(x[rows], layer.attention_norm), layer.qkv).view(-1, 3 * heads, size)
        queries, keys, values = own.split(heads, 1)
        if segments.rotation is not None:
            cos, sin = (each[rows] for each in segments.rotation)
            queries, keys = ops.rope(queries, cos, sin), ops.rope(keys, cos, sin)
        for whole, part in zip((q, k, v), (queries, keys, values), strict=True):
            whole[:, rows] = part.transpose(0, 1)
        yield
    mixed = x.new_empty((len(x), heads, size))
    for start, end in segments.bounds():
        for some, rows in parts(heads, end - start):
            at = slice(start + rows.start, start + rows.stop)
            found = F.scaled_dot_product_attention(
                q[None, some, at], k[None, some, start:end], v[None, some, start:end]
            )
            mixed[at, some] = found[0].transpose(0, 1)
            yield
    mixed = mixed.view(len(x), -1)
    for rows in slices(len(x)):
        own = x[rows] + ops.linear(mixed[rows], (layer.output,))
        yield
        wide = ops.linear(normed(own, layer.feed_forward_norm), layer.up)
        yield
        x[rows] = own + ops.linear(ops.activate(wide, config.activation, config.gated, layer.down), (layer.down,))
        yield


@dataclass(eq=False)
class Tower:
    """A vision transformer with its weights."""

    config: VisionConfig
    patch: Linear  # [I, 3 * frames * patch * patch]: columns by channel, frame, row, column
    positions: Tensor | None  # [N, I] of a tile's rows
    class_row: Tensor | None  # [I], with its position
    pre_norm: Norm | None
    layers: list[VisionLayer]
    post_norm: Norm | None

    def work(self, patches: Patches, segments: Segments, windowed: Segments | None) -> Generator[None, None, Tensor]:
        """Yield after each unit of work; return the hidden states [N, I] of the patches of one tile.

        Layers outside of `full_layers` see by `windowed` where it is given.
        """
        config, first = self.config, int(self.class_row is not None)
        x = torch.empty((first + len(patches), config.hidden), dtype=patches.values.dtype)
        if self.class_row is not None:
            x[0] = self.class_row
        for rows in slices(len(patches)):
            own = ops.linear(patches.rows(rows), (self.patch,))
            x[first + rows.start : first + rows.stop] = own if self.positions is None else own + self.positions[rows]
            yield
        if self.pre_norm is not None:
            for rows in slices(len(x)):
                x[rows] = normed(x[rows], self.pre_norm)
        for number, layer in enumerate(self.layers):
            full = windowed is None or number in config.full_layers
            yield from layer_work(layer, config, x, segments if full or windowed is None else windowed)
        x = x[first:]
        if self.post_norm is not None:
            for rows in slices(len(x)):
                x[rows] = normed(x[rows], self.post_norm)
        return x
