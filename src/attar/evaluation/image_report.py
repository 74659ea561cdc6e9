"""`attar eval --images`: from a model and a folder of images with texts to the figures of `metrics.images`."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from attar.checkpoints import vocabulary
from attar.checkpoints.sources import hf, hub
from attar.checkpoints.sources.vision import image_settings, vision_of
from attar.evaluation.report import load
from attar.images.pairs import PairPrompts
from attar.metrics.images import Seeing, measure_images
from attar.metrics.measure import Report
from attar.progress import Progress


def evaluate_images(
    model: str | Path,
    images: Path,
    *,
    against: str | Path | None = None,
    limit: int | None = None,
    dtype: str | None = None,
    adapter: Path | None = None,
    progress: Progress | None = None,
) -> Report:
    """Measure a vision-language model on texts behind images; with `against`, also its divergence from that model.

    `images` is a folder with `metadata.jsonl` (`images.pairs`), of which at most `limit` pairs are used, evenly spread.
    Both models compute by the reference on a CPU, in float32 by default, each with the vision tower of its own folder.
    Images are resized as `model` says. `adapter` is a low-rank adapter that `model` alone computes with.

    Raises ValueError for models without vision, a folder without pairs, where no pair can be used, and as `evaluate`.
    """
    told = progress or (lambda stage, done, total: None)
    path = hub.resolve(model)
    settings = image_settings(path)
    computed = hf.compute_dtype(dtype, "cpu")
    other = None if against is None else hub.resolve(against)
    if other is not None:
        image_settings(other)
    pairs = PairPrompts(images, settings, vocabulary.tokenizer(path), hf.Checkpoint.open(path).config.context, limit)
    decoder = load(str(path), path, computed, told, adapter)
    seeing, base = Seeing(decoder, vision_of(path, decoder.dtype)), None
    if other is not None:
        decoder = load(str(other), other, computed, told)
        base = Seeing(decoder, vision_of(other, decoder.dtype))
    return measure_images(seeing, pairs, base, partial(told, "evaluating"))
