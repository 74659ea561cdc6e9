"""Images for tiny vision-language models, and what transformers makes of them."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attar.checkpoints.folder import Folder
from attar.checkpoints.sources.vision import load_vision
from attar.model.vision.config import CLIP_MEAN, CLIP_STD, HALF
from attar.model.vision.model import VisionModel, Work
from tests.model.vision import tiny


@dataclass(frozen=True)
class Picture:
    """An `ImageInput` without its digest."""

    tiles: bytes
    shape: tuple[int, int, int]
    grid: tuple[int, int]
    size: tuple[int, int]
    rows: int


SHAPES: dict[str, list[tuple[tuple[int, int, int], tuple[int, int], tuple[int, int]]]] = {
    "idefics3": [((1, 32, 32), (0, 0), (32, 32)), ((7, 32, 32), (2, 3), (60, 91)), ((5, 32, 32), (4, 1), (200, 33))],
    "llava": [((1, 24, 24), (1, 1), (24, 24)), ((1, 24, 24), (1, 1), (7, 100)), ((1, 24, 24), (1, 1), (1, 1))],
    "llava_next": [
        ((5, 24, 24), (2, 2), (61, 47)),
        ((4, 24, 24), (1, 3), (20, 51)),
        ((4, 24, 24), (3, 1), (101, 13)),
        ((5, 24, 24), (2, 2), (48, 48)),
    ],
    "qwen2_vl": [((1, 16, 24), (4, 6), (17, 25)), ((1, 8, 8), (2, 2), (3, 3)), ((1, 40, 72), (10, 18), (41, 70))],
    "gemma3": [((1, 32, 32), (1, 1), (32, 32)), ((1, 32, 32), (1, 1), (999, 3)), ((1, 32, 32), (1, 1), (5, 6))],
}
"""Shape of the tiles, grid and size before resizing of each family's images, odd sizes among them."""
SAME = {"smolvlm": "idefics3", "llava-qwen2": "llava", "qwen2_5_vl": "qwen2_vl"}


@functools.cache
def vision(kind: str, old_names: bool = True) -> VisionModel:
    found = load_vision(Folder(tiny.folder(kind, old_names)), torch.float32)
    assert found is not None
    return found


@functools.cache
def pictures(kind: str) -> list[Picture]:
    generator, found = torch.Generator().manual_seed(5), []
    for shape, grid, size in SHAPES[SAME.get(kind, kind)]:
        tiles = torch.randint(0, 256, (*shape, 3), generator=generator, dtype=torch.uint8).numpy().tobytes()
        image = Picture(tiles, shape, grid, size, 0)
        found.append(Picture(tiles, shape, grid, size, vision(kind).count(image)))
    return found


def pixels(kind: str, picture: Picture) -> Tensor:
    """Return normalised pixels [T, 3, H, W] as transformers' processors make them."""
    tiles = torch.frombuffer(bytearray(picture.tiles), dtype=torch.uint8).view(*picture.shape, 3)
    clip = kind.startswith(("llava", "qwen"))
    mean, std = (torch.tensor(each) for each in ((CLIP_MEAN, CLIP_STD) if clip else (HALF, HALF)))
    return ((tiles.float() / 255 - mean) / std).permute(0, 3, 1, 2)


def qwen_patches(picture: Picture, values: Tensor, patch: int = 4, merge: int = 2) -> tuple[Tensor, Tensor]:
    """Return `hidden_states` and `grid_thw` of Qwen2-VL's processor, written as in transformers'
    `Qwen2VLImageProcessor._preprocess`."""
    high, wide = picture.grid
    frames = values.repeat(2, 1, 1, 1)
    grid = frames.reshape(1, 2, 3, high // merge, merge, patch, wide // merge, merge, patch)
    flat = grid.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(high * wide, 3 * 2 * patch * patch)
    return flat, torch.tensor([[1, high, wide]])


@torch.inference_mode()
def tower(kind: str, picture: Picture) -> Tensor:
    """Return the hidden states that transformers' projector reads, one tile after another."""
    model, values = tiny.model(kind).model, pixels(kind, picture)
    if kind.startswith("qwen"):
        flat, grid = qwen_patches(picture, values)
        return model.visual(flat, grid_thw=grid, return_dict=True).last_hidden_state  # type: ignore[no-any-return]
    if kind.startswith("llava"):
        return model.vision_tower(values, output_hidden_states=True).hidden_states[-2][:, 1:].flatten(0, 1)  # type: ignore[no-any-return]
    own = model.vision_model if kind in ("smolvlm", "idefics3") else model.vision_tower
    return own(values).last_hidden_state.flatten(0, 1)  # type: ignore[no-any-return]


@torch.inference_mode()
def features(kind: str, picture: Picture, whole: Any = None) -> Tensor:
    """Return transformers' rows [rows, hidden] of an image, by the model `whole`, by default the tiny one."""
    model, values = (tiny.model(kind) if whole is None else whole).model, pixels(kind, picture)
    if kind.startswith("qwen"):
        flat, grid = qwen_patches(picture, values)
        found: Any = model.get_image_features(flat, grid, return_dict=True).pooler_output
    elif kind == "llava_next":
        sizes = torch.tensor([picture.size])
        found = model.get_image_features(values[None], sizes, return_dict=True).pooler_output
    elif kind in ("smolvlm", "idefics3"):
        found = model.get_image_features(values[None], return_dict=True).pooler_output
    else:
        found = model.get_image_features(values, return_dict=True).pooler_output
    return torch.cat([each.reshape(-1, each.shape[-1]) for each in found])


def finished(work: Work) -> tuple[Tensor, int]:
    """Return the rows of an image, and the number of units that were left."""
    units = 0
    while True:
        try:
            next(work)
        except StopIteration as end:
            return end.value, units
        units += 1
