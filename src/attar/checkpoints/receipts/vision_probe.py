"""The probe of a vision tower: a generated image with rows that tower and projector made of it.

The image's pixels come from a counter, as the prompts of the other probes do (`probes.py`). Of its rows 8 are kept,
each as 16 random projections. `attar verify` encodes the image again on this machine's kernels.

How far two sound machines may be apart is measured here as well. For exact products it is the difference to a copy
whose pixels are moved by a few units in the last place. Where inputs are rounded, by a scheme or by the kernels, a
value next to a border of its grid moves by a whole step, or by chance none does. The floor is then the largest
difference of several such copies, and of one in the layout of the native kernels with their coarsest rounding.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attar.checkpoints.receipts.probes import (
    EXACT,
    LEAST,
    MARGIN,
    PROJECTIONS,
    PROMPTS,
    ROUNDED,
    SHAKE,
    project,
    rounds_activations,
)
from attar.checkpoints.strict_io import CheckpointError
from attar.model.vision.config import VisionConfig
from attar.model.vision.model import VisionModel

ROWS = PROMPTS
UNITS = (6, 10)  # height and width of an image of any size, in merged patches: windows of Qwen2.5-VL are whole and cut
BLOCK = 16  # pixels of a side that share a colour, but for noise
MOVES = (1, -1, 2, -2)  # of pixels, in `SHAKE`
KEY = 0x1A6E  # of the pixels' random words


@dataclass(frozen=True)
class GeneratedImage:
    """An image whose pixels come from a counter, of one tile."""

    tiles: bytes
    shape: tuple[int, int, int]
    grid: tuple[int, int]
    size: tuple[int, int]
    rows: int


def generated(vision: VisionModel) -> GeneratedImage:
    """Return the image of a tower's probe."""
    config = vision.config
    high, wide = (config.image_size,) * 2 if config.image_size else (UNITS[0] * config.unit, UNITS[1] * config.unit)
    grid = (1, 1) if config.image_size else (high // config.patch, wide // config.patch)
    made = GeneratedImage(_pixels(high, wide), (1, high, wide), grid, (high, wide), 0)
    return replace(made, rows=vision.count(made))


def _pixels(high: int, wide: int) -> bytes:
    blocks = (-(-high // BLOCK), -(-wide // BLOCK), 3)
    colours, noise = _bytes(0, math.prod(blocks)).reshape(blocks), _bytes(1, high * wide * 3).reshape(high, wide, 3)
    coarse = colours.repeat(BLOCK, 0).repeat(BLOCK, 1)[:high, :wide]
    return (coarse // 8 * 7 + noise // 8).tobytes()


def _bytes(stream: int, count: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    words = np.random.Philox(key=np.array([KEY, stream], dtype=np.uint64), counter=0).random_raw(-(-count // 8))
    return np.asarray(words, dtype="<u8").view(np.uint8)[:count]


def relative_error(rows: Tensor, exact: Tensor) -> float:
    """Return the mean, over rows [N, I], of the norm of a row's difference over the norm of the row in `exact`."""
    return float(((rows - exact).norm(dim=-1) / exact.norm(dim=-1).clamp_min(1e-30)).mean())


def measure(vision: VisionModel, image: GeneratedImage, rows: Tensor, native: VisionModel | None) -> dict[str, Any]:
    """Return the probe of a tower in float32 by the reference, of which `rows` are those of its generated `image`.

    `native` is the same one in the layout of the native kernels, if they round inputs of its linears; else None.
    """
    calm = _projected(rows)
    path = ROUNDED if rounds_activations(vision.linears()) else EXACT
    copies = [replace(vision, config=_moved(vision.config, by)) for by in (MOVES if path == ROUNDED else MOVES[:1])]
    noise: dict[str, float | None] = {EXACT: None, ROUNDED: None}
    noise[path] = floor = max(_difference(_projected(each.encode(image)), calm) for each in copies)
    if native is not None:
        noise[ROUNDED] = max(floor, _difference(_projected(native.encode(image)), calm))
    return {"rows": [[float(f"{value:.9g}") for value in row] for row in calm.tolist()], "noise": noise}


def _moved(config: VisionConfig, by: float) -> VisionConfig:
    return replace(config, rescale=config.rescale * (1 + by * SHAKE))


def _projected(rows: Tensor) -> Tensor:
    """Return the projections of some rows of an image, evenly spread: float64 [R, M]."""
    chosen = torch.arange(min(ROWS, len(rows))) * len(rows) // min(ROWS, len(rows))
    return project(0, rows[chosen])


def _difference(found: Tensor, stored: Tensor) -> float:
    if not found.isfinite().all():
        return math.inf
    return float(((found - stored).norm(dim=-1) / stored.norm(dim=-1).clamp_min(1e-30)).max())


def replay(probe: object, vision: VisionModel, where: str) -> tuple[bool | None, str]:
    """Return whether a tower makes the rows of the probe, None where that has no noise floor for its kernels, and a
    sentence. `where` names the receipt. Raises CheckpointError where the probe is damaged or of another model."""
    path = ROUNDED if rounds_activations(vision.linears()) else EXACT
    stored, floor = _parse(probe, path, where)
    if floor is None:
        return None, f"the receipt has no noise floor of an image for the {path} kernels"
    found = _projected(vision.encode(generated(vision)))
    if found.shape != stored.shape:
        raise CheckpointError("receipt_invalid", f"{where}: its probe of an image is of another vision tower")
    allowed = max(MARGIN[path] * floor, LEAST[vision.dtype])
    difference = _difference(found, stored)
    if difference > allowed:
        return False, f"an image's rows differ by {difference:.3g} of their norm: {allowed:.3g} is noise"
    return True, "an image replayed within the noise"


def _parse(probe: object, path: str, where: str) -> tuple[Tensor, float | None]:
    damaged = CheckpointError("receipt_invalid", f"{where}: the receipt is damaged: its probe of an image")
    if not isinstance(probe, Mapping) or not isinstance(probe.get("noise"), Mapping):
        raise damaged
    rows, floor = probe.get("rows"), probe["noise"].get(path)
    if not isinstance(rows, list) or not 0 < len(rows) <= ROWS:
        raise damaged
    if any(not isinstance(row, list) or len(row) != PROJECTIONS for row in rows):
        raise damaged
    values = [value for row in rows for value in row] + ([] if floor is None else [floor])
    if any(type(value) not in (int, float) or not math.isfinite(value) for value in values):
        raise damaged
    return torch.tensor(rows, dtype=torch.float64), floor
