"""A vision tower and its projector, ready to turn images into rows of the language model."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from attar.errors import UserError
from attar.formats.packed import PackedTensor
from attar.kernels.operands import Linear, Norm
from attar.model.vision.config import VisionConfig
from attar.model.vision.patches import Patches
from attar.model.vision.positions import axial_angles, mrope, windows
from attar.model.vision.projector import Projector, joined
from attar.model.vision.tiles import Tiles, rows_of
from attar.model.vision.tower import Segments, Tower

Work = Generator[None, None, Tensor]


class Image(Protocol):
    """An image as tiles of equal size; `protocol.images.ImageInput` is one."""

    @property
    def tiles(self) -> bytes:
        """Bytes of RGB, uint8 [T, H, W, 3]."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """Number, height and width of the tiles."""

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of tiles, without one of the whole image; for Qwen2-VL patches of height and width."""

    @property
    def size(self) -> tuple[int, int]:
        """Height and width before resizing."""

    @property
    def rows(self) -> int:
        """Rows that stand for the image in a prompt."""


@dataclass(eq=False)
class VisionModel:
    """A tower, a projector, and what the engine reads of them."""

    config: VisionConfig
    tower: Tower
    projector: Projector
    dtype: torch.dtype  # of the arithmetic
    rows_dtype: torch.dtype  # of the language model

    @property
    def image_token(self) -> int:
        """Id that stands in a prompt once for each row of an image."""
        return self.config.image_token

    @property
    def hidden(self) -> int:
        """Columns of a row: the language model's hidden size."""
        return self.config.out

    @property
    def rotary(self) -> bool:
        """Return whether tokens have positions by time, height and width (`positions`)."""
        return self.config.sections

    @property
    def bidirectional(self) -> bool:
        """Return whether rows of an image see each other in the language model."""
        return self.config.bidirectional

    @property
    def nbytes(self) -> int:
        """Bytes of all weights."""
        return sum(_bytes(each) for each in self._tensors())

    def linears(self) -> Iterator[Linear]:
        yield self.tower.patch
        for layer in self.tower.layers:
            yield from layer.linears()
        yield from self.projector.linears

    def norms(self) -> Iterator[Norm]:
        found = [self.tower.pre_norm, self.tower.post_norm, self.projector.norm]
        yield from (norm for norm in found if norm is not None)
        for layer in self.tower.layers:
            yield from layer.norms()

    def equals(self, other: VisionModel) -> bool:
        """Return whether another model makes the same rows: equal settings, and the same numbers as weights.

        Weights that a backend has laid out count as different."""
        if (self.config, self.dtype, self.rows_dtype) != (other.config, other.dtype, other.rows_dtype):
            return False
        return all(_same(a, b) for a, b in zip(self._tensors(), other._tensors(), strict=True))

    def _tensors(self) -> list[object]:
        weights: list[object] = [each for linear in self.linears() for each in (linear.weight, linear.bias)]
        vectors = [each for norm in self.norms() for each in (norm.weight, norm.bias)]
        return [*weights, *vectors, self.tower.positions, self.tower.class_row, self.projector.newline]

    def count(self, image: Image) -> int:
        """Return the rows of an image, by its sizes. Raises ValueError where the tower does not take these sizes."""
        tiles, height, width = image.shape
        if len(image.tiles) != 3 * tiles * height * width or min(image.shape) < 1:
            raise UserError("image_invalid", f"{len(image.tiles)} bytes are no {tiles} tiles of {height} x {width}")
        return rows_of(self.config, Tiles(image.shape, image.grid, image.size))

    def encode(self, image: Image) -> Tensor:
        """Return the rows of an image, [rows, hidden] in the model's dtype. Raises ValueError as `count`."""
        work = self.units(image)
        while True:
            try:
                next(work)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]

    def units(self, image: Image) -> Work:
        """Yield after each unit of the work on an image, a few milliseconds long; return its rows, [rows, hidden].

        Raises ValueError as `count`.
        """
        if (count := self.count(image)) != image.rows:
            raise UserError("image_invalid", f"the image has {count} rows, not {image.rows}")
        found, size = [], len(image.tiles) // image.shape[0]
        for start in range(0, len(image.tiles), size):
            tile = torch.frombuffer(bytearray(image.tiles[start : start + size]), dtype=torch.uint8)
            tile = tile.view(*image.shape[1:], 3)
            found.append((yield from _without_gradients(self._tile(tile))))
        if self.projector.newline is not None:
            whole = joined(self.projector.newline, torch.stack(found), image.grid, image.size)
        else:
            whole = torch.cat(found)
        return whole.to(self.rows_dtype)

    def positions(self, ids: Sequence[int], images: Sequence[Image]) -> Tensor:
        """Return the positions of a prompt by time, height and width, int64 [3, N]; see `positions.mrope`."""
        assert self.rotary, "a token of this model has one position"
        return mrope(ids, self.image_token, images, self.config.factor)

    def _tile(self, tile: Tensor) -> Work:
        """Yield after each unit; return the rows of one tile [H, W, 3] uint8."""
        config = self.config
        high, wide = tile.shape[0] // config.patch, tile.shape[1] // config.patch
        patches = Patches.of(tile, config, self.dtype)
        lengths = (len(patches) + int(config.class_token),)
        segments, windowed, back = Segments(lengths), None, None
        if config.rope_theta is not None:
            angles = axial_angles(high, wide, config.factor, config.head_dim, config.rope_theta)
            if config.window:
                block = config.factor**2
                order, sizes = windows(high, wide, config.factor, config.window)
                within = torch.arange(len(patches)).view(-1, block)[order].flatten()
                patches, angles, back = patches.ordered(within), angles[within], order.argsort()
                windowed = tuple(size * block for size in sizes)
            segments = Segments(lengths, (angles.cos(), angles.sin()))
        apart = None if windowed is None else Segments(windowed, segments.rotation)
        hidden = yield from self.tower.work(patches, segments, apart)
        rows = yield from self.projector.work(hidden)
        return rows if back is None else rows[back]


def _without_gradients(work: Work) -> Work:
    """Do the work, and record no gradients."""
    while True:
        with torch.inference_mode():  # entered anew for each unit: a generator must not hold it while it waits
            try:
                next(work)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]
        yield


def _same(a: object, b: object) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, PackedTensor) and isinstance(b, PackedTensor):
        alike = (a.scheme, a.shape) == (b.scheme, b.shape)
        return alike and all(torch.equal(part, b.parts[name]) for name, part in a.parts.items())
    return a is None and b is None


def _bytes(weight: object) -> int:
    if isinstance(weight, Tensor):
        return weight.nbytes
    return int(getattr(weight, "read_bytes", 0)) or int(getattr(weight, "bytes", 0))
