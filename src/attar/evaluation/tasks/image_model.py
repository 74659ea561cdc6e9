"""A decoder with its vision tower as a model of the harness: answers to items that have images.

Such an item's text has `<image>` for each image. The harness hands the images beside the text, under `visual`. Each
item is computed alone, because its images have sizes of their own; rows of the last images are kept, so the choices of
an item share them. Nothing is cut off an item: what is longer than the context is an error.

Images of items come from files that others made. They are decoded by the limited process of `images.decoding`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from lm_eval.api.instance import Instance
from torch import Tensor

from attar.engine.llm.images import source_of
from attar.errors import UserError
from attar.evaluation.tasks.harness_model import HarnessModel, ends_of, scored
from attar.images.decoding import ImageSource, decode
from attar.images.placeholders import Placeholders
from attar.images.settings import ImageSettings
from attar.kernels import ops
from attar.metrics.images import Seeing, batch_of
from attar.model.cache import ForwardBatch
from attar.progress import Progress
from attar.protocol.image_limits import MAX_IMAGES
from attar.protocol.images import ImageInput
from attar.text.tokenizer import Tokenizer

PLACE = "<image>"  # in texts of the harness, whatever a model's own token is
KEPT = 8  # images whose rows are kept: those of an item


Sources = tuple[ImageSource, ...]
"""Images of an item."""


class ImageHarnessModel(HarnessModel):
    """The harness's view of a vision-language model. Items without images go as in `HarnessModel`."""

    MULTIMODAL = True  # which the harness asks for

    def __init__(
        self, model: Seeing, settings: ImageSettings, tokenizer: Tokenizer, context: int, progress: Progress
    ) -> None:
        super().__init__(model.decoder, tokenizer, context, progress)
        self.vision, self._settings, self._places = model.vision, settings, Placeholders(settings, tokenizer)
        self._rows: OrderedDict[bytes, Tensor] = OrderedDict()  # of the last images, by digest

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        """Return as `HarnessModel` does. Raises UserError for an item whose images and text do not fit together, or
        that is longer than the context."""
        found = iter(super().loglikelihood([each for each in requests if not _has_images(each)]))
        images = self._images([each for each in requests if _has_images(each)])
        done: list[tuple[float, bool]] = []
        for request in requests:
            own = _has_images(request)
            done.append(self._likelihood(request.args[0], request.args[1], next(images)) if own else next(found))
            self.told("evaluating", len(done), len(requests))
        return done

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return as `HarnessModel` does. Raises UserError as `loglikelihood`."""
        found = iter(super().generate_until([each for each in requests if not _has_images(each)]))
        images = self._images([each for each in requests if _has_images(each)])
        done: list[str] = []
        for request in requests:
            own = _has_images(request)
            done.append(self._continuation(request.args[0], request.args[1], next(images)) if own else next(found))
            self.told("generating", len(done), len(requests))
        return done

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Return as `HarnessModel` does. Raises UserError for items with images: an image has no likelihood."""
        if any(map(_has_images, requests)):
            raise UserError("task_malformed", "the likelihood of a whole text is not defined for one with images")
        return super().loglikelihood_rolling(requests)

    def _likelihood(self, context: str, continuation: str, images: tuple[ImageInput, ...]) -> tuple[float, bool]:
        continuation = context[len(context.rstrip()) :] + continuation  # as the harness does with texts
        text = self.shown(context.rstrip(), images)
        front, back = self.cut(self.tok_encode(text), self.tok_encode(text + continuation))
        ids = self._checked([*front, *back], images)[:-1]
        fed, step = batch_of(self.vision, ids, images, self._features(images))
        rows = torch.arange(len(ids) - len(back), len(ids))
        return scored(self.decoder.forward(fed, step, rows), back)

    def _continuation(self, context: str, settings: Mapping[str, Any], images: tuple[ImageInput, ...]) -> str:
        stops, most = ends_of(settings)
        ids = self._checked(self.tok_encode(self.shown(context, images)), images)
        most = min(most, self.context - len(ids) + 1)  # the last token is not fed again
        length = len(ids) + most - 1
        cache = self.decoder.cache(length)
        fed, step = batch_of(self.vision, ids, images, self._features(images), cache, length)
        following = None if step.angles is None else int(step.angles.max()) + 1
        made: list[int] = []
        while True:
            logits = self.decoder.forward(fed, step, torch.tensor([len(fed) - 1]))
            fed = ops.argmax(logits)
            made.append(int(fed))
            if (found := self.ended(made, stops, most)) is not None:
                return found
            angles = None if following is None else torch.full((3, 1), following + len(made) - 1)
            step = ForwardBatch((1,), length, cache, angles=angles)

    def shown(self, text: str, images: Sequence[ImageInput]) -> str:
        """Return a text of the harness with the tokens of its images in their places."""
        pieces = iter(text.split(PLACE))
        return next(pieces) + "".join(
            self._places.of(image) + piece for image, piece in zip(images, pieces, strict=True)
        )

    def _images(self, requests: Sequence[Instance]) -> Iterator[tuple[ImageInput, ...]]:
        """Yield the decoded images of each request."""
        given = [_sources(request.args[0], request.args[2]) for request in requests]
        known: dict[Sources, tuple[ImageInput, ...]] = {}
        for at, sources in enumerate(given):
            if sources not in known:
                known = self._decoded(islice(given, at, None))
            yield known[sources]

    def _decoded(self, following: Iterator[Sources]) -> dict[Sources, tuple[ImageInput, ...]]:
        """Decode the images of the next items, as many as one process takes: it starts anew each time."""
        some: dict[Sources, None] = {next(following): None}
        for sources in following:
            if sum(map(len, some)) + len(sources) > MAX_IMAGES:
                break
            some[sources] = None
        try:
            images = iter(decode(self._settings, [each for sources in some for each in sources]))
        except UserError as error:
            if len(some) == 1 or error.code != "image_too_large":
                raise
            first = next(iter(some))  # those of all may be too many pixels for one process
            return {first: decode(self._settings, first)}
        return {sources: tuple(islice(images, len(sources))) for sources in some}

    def _checked(self, ids: list[int], images: Sequence[ImageInput]) -> list[int]:
        rows = sum(image.rows for image in images)
        if ids.count(self.vision.image_token) != rows:
            raise UserError("task_malformed", f"an item's text spells the image token {self._places.image}")
        if len(ids) > self.context:
            said = f"an item has {len(ids)} tokens, {rows} of them of images"
            raise UserError("context_exceeded", f"{said}: at most {self.context} fit, and none is cut off")
        return ids

    def _features(self, images: Sequence[ImageInput]) -> Tensor:
        found = []
        for image in images:
            rows = self._rows.pop(image.digest, None)
            self._rows[image.digest] = rows = self.vision.encode(image) if rows is None else rows
            found.append(rows)
        while len(self._rows) > KEPT:
            self._rows.popitem(last=False)
        return torch.cat(found)


def _has_images(request: Instance) -> bool:
    return len(request.args) > 2 and "visual" in request.args[2]


def _sources(text: str, beside: Mapping[str, Any]) -> Sources:
    """Return the images of an item. Raises UserError where its text has places for other than these."""
    given = beside["visual"]
    given = given if isinstance(given, list | tuple) else [given]
    if (places := text.count(PLACE)) != len(given) or not given:
        said = f"an item has {len(given)} images, and its text {places} times {PLACE}"
        raise UserError("task_malformed", f"{said}: examples in front of an item have no images (--shots 0)")
    return tuple(map(_source, given))


def _source(given: Any) -> ImageSource:
    """Return an item's image: bytes as `datasets` has them, a data URL, or a PIL image. Paths are not opened."""
    if isinstance(given, Mapping) and isinstance(given.get("bytes"), bytes):
        return ImageSource.of_bytes(given["bytes"])
    if isinstance(given, str):
        return ImageSource.of_url(given)
    if isinstance(given, bytes) or type(given).__module__.partition(".")[0] == "PIL":
        return source_of(given)
    raise UserError("task_malformed", "an item's image is its bytes, or data:image/png;base64,... in a .jsonl file")
