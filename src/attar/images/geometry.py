"""Sizes of resized images and their tiles, by integers alone: no pixel is needed.

The formulas are those of transformers' image processors. Their order of rounding is kept, so that sizes are equal.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from attar.errors import UserError
from attar.images.settings import PixelSettings

MAX_ASPECT = 200  # of an image's sides, as Qwen2-VL has it; others would resize a line to gigapixels
_IDEFICS_SIDE = 4096  # MAX_IMAGE_SIZE of Idefics3's image processor


class Layout(NamedTuple):
    """How an image is resized: to `sizes` (height, width) one after another, then cut into tiles.

    shape: count, height and width of the tiles. grid: rows and columns of tiles, the global one apart; patches for
    Qwen2-VL.
    """

    sizes: tuple[tuple[int, int], ...]
    shape: tuple[int, int, int]
    grid: tuple[int, int]


def layout(settings: PixelSettings, height: int, width: int) -> Layout:
    """Return how an image of this size is resized and cut.

    Raises UserError (`image_too_large`) where one side is more than 200 times the other.
    """
    if max(height, width) > MAX_ASPECT * min(height, width):
        raise UserError(
            "image_too_large", f"an image of {width} x {height}: one side is at most {MAX_ASPECT} times the other"
        )
    match settings.family:
        case "idefics3":
            return _idefics3(settings, height, width)
        case "llava_next":
            return _llava_next(settings, height, width)
        case "qwen2_vl":
            resized = smart_resize(settings, height, width)
            grid = (resized[0] // settings.patch, resized[1] // settings.patch)
            return Layout((resized,), (1, *resized), grid)
        case _:
            return _single(settings, height, width)


def _single(settings: PixelSettings, height: int, width: int) -> Layout:
    if settings.square:
        height = width = max(height, width)
    resized = settings.size or shortest_edge(settings.edge, height, width)
    return Layout((resized,), (1, *(settings.crop or resized)), (1, 1))


def shortest_edge(edge: int, height: int, width: int) -> tuple[int, int]:
    """Return the size whose shorter side is `edge`."""
    short, long = min(height, width), max(height, width)
    other = int(edge * long / short)
    return (other, edge) if width <= height else (edge, other)


def _idefics3(settings: PixelSettings, height: int, width: int) -> Layout:
    """Return Idefics3's sizes: the longest side, multiples of a tile, and the global tile."""
    tile, aspect, longest = settings.tile, width / height, settings.edge
    if width >= height:
        width, height = longest, int(longest / aspect)
        height += height % 2
    else:
        height, width = longest, int(longest * aspect)
        width += width % 2
    height, width = max(height, 1), max(width, 1)
    aspect = width / height
    if width >= height and width > _IDEFICS_SIDE:
        width, height = _IDEFICS_SIDE, int(_IDEFICS_SIDE / aspect)
    elif height > width and height > _IDEFICS_SIDE:
        height, width = _IDEFICS_SIDE, int(_IDEFICS_SIDE * aspect)
    first = (max(height, 1), max(width, 1))
    if not settings.split:
        return Layout((first, (tile, tile)), (1, tile, tile), (0, 0))
    height, width = first
    aspect = width / height
    if width >= height:
        columns = math.ceil(width / tile)
        rows = math.ceil(int(columns * tile / aspect) / tile)
    else:
        rows = math.ceil(height / tile)
        columns = math.ceil(int(rows * tile * aspect) / tile)
    rows, columns = max(rows, 1), max(columns, 1)
    if rows == columns == 1:
        return Layout((first, (tile, tile)), (1, tile, tile), (0, 0))
    sizes = (first, (rows * tile, columns * tile), (tile, tile))
    return Layout(sizes, (rows * columns + 1, tile, tile), (rows, columns))


def _llava_next(settings: PixelSettings, height: int, width: int) -> Layout:
    """Return LLaVA-NeXT's sizes: within the best resolution, and the global tile."""
    tile = settings.tile
    best = best_resolution(settings.pinpoints, height, width)
    by_width, by_height = best[1] / width, best[0] / height
    if by_width < by_height:
        within = (min(math.ceil(height * by_width), best[0]), best[1])
    else:
        within = (best[0], min(math.ceil(width * by_height), best[1]))
    grid = (best[0] // tile, best[1] // tile)
    return Layout((within, best, (tile, tile)), (grid[0] * grid[1] + 1, tile, tile), grid)


def best_resolution(pinpoints: tuple[tuple[int, int], ...], height: int, width: int) -> tuple[int, int]:
    """Return the resolution (height, width) that keeps most pixels of an image, and wastes fewest."""

    def rank(each: tuple[int, int]) -> tuple[int, int]:
        scale = min(each[1] / width, each[0] / height)
        kept = min(int(width * scale) * int(height * scale), width * height)
        return kept, kept - each[0] * each[1]

    return max(pinpoints, key=rank)  # the first of equals


def smart_resize(settings: PixelSettings, height: int, width: int) -> tuple[int, int]:
    """Return Qwen2-VL's size: sides are multiples of merged patches, and the pixels within bounds."""
    factor = settings.patch * settings.merge
    high, wide = round(height / factor) * factor, round(width / factor) * factor
    if high * wide > settings.max_pixels:
        shrink = math.sqrt((height * width) / settings.max_pixels)
        high = max(factor, math.floor(height / shrink / factor) * factor)
        wide = max(factor, math.floor(width / shrink / factor) * factor)
    elif high * wide < settings.min_pixels:
        grow = math.sqrt(settings.min_pixels / (height * width))
        high = math.ceil(height * grow / factor) * factor
        wide = math.ceil(width * grow / factor) * factor
    return high, wide


def unpadded_rows(side: int, grid: tuple[int, int], size: tuple[int, int]) -> int:
    """Return LLaVA-NeXT's feature rows of a grid of tiles of `side` x `side` patches, the global tile apart: those of
    an image of `size` that are no padding, and a newline behind each line."""
    high, wide = side * grid[0], side * grid[1]
    top, left = margins((high, wide), size)
    return (high - 2 * top) * (wide - 2 * left + 1)


def margins(picture: tuple[int, ...], size: tuple[int, int]) -> tuple[int, int]:
    """Return how many rows at top and bottom, and columns at both sides, are margins of a picture of `picture` rows
    and columns that an image of `size` was fitted into (transformers' `unpad_image`)."""
    (height, width), (current_height, current_width) = size, picture
    if width / height > current_width / current_height:
        new_height = int(round(height * (current_width / width), 7))
        return (current_height - new_height) // 2, 0
    new_width = int(round(width * (current_height / height), 7))
    return 0, (current_width - new_width) // 2
