"""An image in tiles, as a vision tower takes it: its rows in the prompt, and the work of the tower. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from attar.errors import UserError
from attar.images.geometry import unpadded_rows
from attar.model.vision.config import VisionConfig
from attar.model.vision.tensors import tensors

TILE = 128  # rows that a tower computes at once, about: each time it reads a layer's weights


def slices(length: int) -> list[slice]:
    """Return the slices of `length` rows that are computed together, about `TILE` rows each.

    They have equal lengths, or lengths that differ by one: a small rest would read all weights for little work.
    """
    count = max(1, (length + TILE // 2) // TILE)
    bounds = [length * each // count for each in range(count + 1)]
    return [slice(start, end) for start, end in pairwise(bounds)]


@dataclass(frozen=True, slots=True)
class Tiles:
    """Tiles of one image: `shape` is their number, height and width in pixels. `grid` counts rows and columns of tiles
    without one of the whole image; for Qwen2-VL it counts patches. `size` is the image's height and width."""

    shape: tuple[int, int, int]
    grid: tuple[int, int]
    size: tuple[int, int]


def rows_of(config: VisionConfig, tiles: Tiles) -> int:
    """Return the rows that stand for an image in a prompt. Raises ValueError where the tower does not take its
    sizes."""
    count, height, width = tiles.shape
    if not config.image_size:
        unit = config.unit
        patches = height // config.patch, width // config.patch
        if count != 1 or height % unit or width % unit or tiles.grid != patches:
            said = f"{count} tiles of {height} x {width}: needed is one, of multiples of {unit}"
            raise UserError("image_invalid", said)
        return (height // unit) * (width // unit)
    if (height, width) != (config.image_size, config.image_size):
        said = f"tiles of {height} x {width} pixels: the tower takes {config.image_size} x {config.image_size}"
        raise UserError("image_invalid", said)
    side = config.rows_side
    if not config.newline:
        return count * side * side
    if count == 1:
        return side * side + 1
    if count != 1 + tiles.grid[0] * tiles.grid[1] or min(tiles.size) < 1:
        raise UserError("image_invalid", f"{count} tiles are no grid of {tiles.grid[0]} x {tiles.grid[1]} and one")
    return side * side + unpadded_rows(side, tiles.grid, tiles.size)


@dataclass(frozen=True, slots=True)
class Product:
    """Products of one tile with one weight [outputs, columns]: `part` and `name` are those of `tensors`."""

    part: str
    name: str
    outputs: int
    columns: int
    rows: int

    @property
    def multiply_adds(self) -> int:
        return self.outputs * self.columns * self.rows


def products(config: VisionConfig, tiles: Tiles) -> Iterator[Product]:
    """Yield the products of one tile, in the order of the weights in the files."""
    _, height, width = tiles.shape
    high, wide = height // config.patch, width // config.patch
    merged = -(-high // config.factor) * -(-wide // config.factor)
    names = config.names
    for part, name, shape in tensors(config):
        if len(shape) < 2 or (part, name) == ("tower", f"{names.positions}.weight"):
            continue
        outputs, columns = shape[0], 1
        for each in shape[1:]:
            columns *= each
        if name == "mm_input_projection_weight":  # stored [in, out]
            outputs, columns = columns, outputs
        rows = high * wide if name == f"{names.patch}.weight" else tower_rows(config, tiles)
        yield Product(part, name, outputs, columns, merged if part == "projector" else rows)


def tower_rows(config: VisionConfig, tiles: Tiles) -> int:
    """Return the rows of one tile in the layers: its patches, and the class row where there is one."""
    _, height, width = tiles.shape
    return (height // config.patch) * (width // config.patch) + int(config.class_token)


def attention_multiply_adds(config: VisionConfig, tiles: Tiles) -> int:
    """Return the multiply-adds of one tile's attention in all layers: scores, and sums of values."""
    _, height, width = tiles.shape
    whole = tower_rows(config, tiles) ** 2
    if not config.window:
        return 2 * config.hidden * config.layers * whole
    high, wide, step = (
        each // config.factor for each in (height // config.patch, width // config.patch, config.window)
    )
    within = sum(
        (min(step, high - top) * min(step, wide - left) * config.factor**2) ** 2
        for top in range(0, high, step)
        for left in range(0, wide, step)
    )
    full = sum(layer in config.full_layers for layer in range(config.layers))
    return 2 * config.hidden * (full * whole + (config.layers - full) * within)
