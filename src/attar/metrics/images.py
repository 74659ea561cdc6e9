"""Figures of a model on texts behind images: those of `measure`, on the rows that have seen an image.

Each pair of an image and a text is one window, as long as its tokens. Only tokens of the text count. Each model sees
the image through its own vision tower. One image is held at a time. Where both towers have equal weights, the image is
computed once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from attar.errors import UserError
from attar.images.pairs import ImagePrompt, PairPrompts
from attar.kernels.ref_spans import spans_of
from attar.metrics.measure import Report
from attar.metrics.perplexity import Window
from attar.metrics.protocols import ImageProtocol
from attar.metrics.streaming import Logits, Measurement, decoder_logits, stream
from attar.model.cache import Features, ForwardBatch, KVCache
from attar.model.decoder import Decoder
from attar.model.vision.model import Image, VisionModel
from attar.progress import StageProgress


class Seeing(NamedTuple):
    """A decoder with its vision tower."""

    decoder: Decoder
    vision: VisionModel


def batch_of(
    vision: VisionModel, prompt: Sequence[int], images: Sequence[Image], features: Tensor, cache: KVCache | None = None,
    horizon: int | None = None,
) -> tuple[Tensor, ForwardBatch]:  # fmt: skip
    """Return the token ids of a prompt, with any id in place of the images', and the call that reads them.

    `features` are the rows of all images. With a `cache`, the prompt is at its beginning. `horizon` is that of
    `ForwardBatch`, by default the prompt's length.
    """
    at, length = [i for i, token in enumerate(prompt) if token == vision.image_token], len(prompt)
    ids = torch.tensor(prompt)
    ids[at] = 0
    seen = Features(torch.tensor(at), features)
    angles = vision.positions(prompt, images) if vision.rotary else None
    spans = None
    if vision.bidirectional:  # whose rows of an image lie together
        ends = list(accumulate((image.rows for image in images), initial=0))
        spans = spans_of([(at[first], at[end - 1] + 1) for first, end in pairwise(ends)], 0, length)
    return ids, ForwardBatch((length,), horizon or length, cache, features=seen, angles=angles, spans=spans)


def states(model: Seeing, prompt: ImagePrompt, features: Tensor) -> Tensor:
    """Return the outputs [N, I] of the last block for a prompt whose image has these rows."""
    kept: list[Tensor] = []
    last = model.decoder.last

    def watch(layer: int, hidden: Tensor) -> None:
        if layer == last:
            kept.append(hidden)

    ids, batch = batch_of(model.vision, prompt.ids, [prompt.image], features)
    model.decoder.forward(ids, batch, torch.tensor([len(ids) - 1]), watch)
    return kept[0]


def measure_images(
    model: Seeing, pairs: PairPrompts, base: Seeing | None = None, progress: StageProgress | None = None
) -> Report:
    """Measure the perplexity of `model` on texts behind images, and its divergence from `base`.

    The report's `notes` name the pairs that were left out. Raises ValueError where none can be used, and for models of
    different vocabularies or towers that make other rows of an image.
    """
    if base is not None and base.decoder.config.vocab_size != model.decoder.config.vocab_size:
        sizes = f"{model.decoder.config.vocab_size} and {base.decoder.config.vocab_size}"
        said = f"the models have vocabularies of {sizes} tokens: compare a model with the one it was made from"
        raise UserError("vocabulary_mismatch", said)
    same = base is not None and model.vision.equals(base.vision)
    parts: list[Measurement] = []
    rows, bos = 0, pairs.bos
    for done, prompt in enumerate(pairs, 1):
        window = Window(prompt.ids[:-1], prompt.ids[1:], prompt.behind - 1)
        features = model.vision.encode(prompt.image)
        theirs = features if same or base is None else base.vision.encode(prompt.image)
        other = None if base is None else _logits(base, prompt, theirs)
        try:
            parts.append(stream(_logits(model, prompt, features), [window], other))
        except UserError as error:
            raise UserError(error.code, f"{prompt.name}: {error}") from None
        rows += prompt.image.rows
        if progress is not None:
            progress(done, len(pairs))
    whole = joined(parts)
    figures = whole.figures()
    del figures["nll"]
    return Report(whole, figures, ImageProtocol(len(parts), rows, bos), None, notes=pairs.warnings)


def _logits(model: Seeing, prompt: ImagePrompt, features: Tensor) -> Logits:
    return decoder_logits(model.decoder, states=lambda ids: states(model, prompt, features)[: len(ids)])


def joined(parts: Iterable[Measurement]) -> Measurement:
    """Return measurements of one window each as one."""
    own = list(parts)
    number = np.repeat(np.arange(len(own), dtype=np.int64), [part.tokens for part in own])
    columns = []
    for name in ("nll", "base_nll", "kl", "agree", "accept"):
        found = [getattr(part, name) for part in own]
        columns.append(None if any(each is None for each in found) else np.concatenate(found))
    nll = columns[0]
    assert nll is not None
    return Measurement(number, nll, *columns[1:])
