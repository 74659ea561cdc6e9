"""Vision tower and projector of an output for its receipt: what quantizing them costs, and the probe of an image."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from attar.checkpoints.receipts import vision_probe
from attar.checkpoints.sources.hf import Checkpoint
from attar.checkpoints.sources.vision import load_vision
from attar.compression.outputs.tower_schemes import UNCHANGED
from attar.compression.outputs.towers import QuantizedTower
from attar.errors import UserError
from attar.formats.packed import PackedTensor
from attar.kernels import dispatch
from attar.kernels.native.store import CpuWeights
from attar.model.vision.model import VisionModel


def measure(made: Path, source: Checkpoint, tower: QuantizedTower | None) -> tuple[dict[str, Any] | None, str]:
    """Return what the receipt says of the tower of `made`, and a warning or "".

    It has the scheme, the probe, and of a quantized tower the mean relative error of the rows of a generated image, in
    float32 by the reference. None for a model without a tower, for one that attar does not read and so copies without
    looking, and with a warning for one whose rows are not finite.
    """
    try:
        vision = load_vision(made, torch.float32)
    except UserError:
        if tower is not None:
            raise
        return None, ""  # such a model is used as a language model
    if vision is None:
        return None, ""
    image = vision_probe.generated(vision)
    rows = vision.encode(image)
    if not rows.isfinite().all():
        return None, "The vision tower makes a NaN or an infinity of a generated image: it has no probe."
    about: dict[str, Any] = {"scheme": UNCHANGED}
    if tower is not None:
        original = load_vision(source.folder, torch.float32)
        assert original is not None, "its output has a tower"
        about = tower.to_dict() | {"relative_error": vision_probe.relative_error(rows, original.encode(image))}
        del original
    return about | {"probe": vision_probe.measure(vision, image, rows, _native(made, vision))}, ""


def _native(made: Path, vision: VisionModel) -> VisionModel | None:
    """Return the tower in the layout of the native kernels, with their coarsest rounding, where it has quantized
    linears and there are such kernels."""
    store = dispatch.store("int8")
    if not isinstance(store, CpuWeights) or not any(isinstance(each.weight, PackedTensor) for each in vision.linears()):
        return None
    return load_vision(made, torch.float32, store)
