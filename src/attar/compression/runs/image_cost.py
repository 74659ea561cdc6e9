"""The cost of an output on texts behind images, measured as `attar eval --images` does."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch

from attar.checkpoints import vocabulary
from attar.checkpoints.sources import hf, opening
from attar.checkpoints.sources.vision import image_settings, vision_of
from attar.images.pairs import PairPrompts, read_pairs
from attar.metrics.images import Seeing, measure_images
from attar.progress import Progress


def check(images: Path, source: Path) -> None:
    """Raise UserError, before hours of work, where the model takes no images, or the folder has no pairs."""
    image_settings(source)
    read_pairs(images)


def measure(images: Path, made: Path, source: hf.Checkpoint, report: Progress) -> dict[str, Any]:
    """Return the figures of the output `made` against its source, in float32 by the reference on a CPU,
    and warnings about pairs that were left out."""
    path = source.folder.path
    pairs = PairPrompts(images, image_settings(path), vocabulary.tokenizer(path), source.config.context)
    model = Seeing(opening.load(made, torch.float32), vision_of(made, torch.float32))
    base = Seeing(hf.load_again(source, torch.float32), vision_of(path, torch.float32))
    return measure_images(model, pairs, base, partial(report, "evaluating on images")).to_dict()
