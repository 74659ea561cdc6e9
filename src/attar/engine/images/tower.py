"""The vision tower's work, in slices that fit between two steps of the engine.

Encoding an image takes as long as many decode steps. So the tower runs as many small units of work as a time limit
allows, and then the engine runs a step. How the work is divided changes no bit of the features.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from typing import Protocol

from torch import Tensor

from attar.faults import point
from attar.protocol.images import ImageInput


class VisionTower(Protocol):
    """A vision tower with its projector, as the engine sees it: `model.vision.model.VisionModel` is one."""

    @property
    def image_token(self) -> int:
        """Return the token that stands in a prompt once for each row of an image."""

    @property
    def hidden(self) -> int:
        """Return the numbers of a row, those of the decoder's rows."""

    @property
    def rotary(self) -> bool:
        """Return whether tokens have positions by time, height and width."""

    @property
    def bidirectional(self) -> bool:
        """Return whether rows of an image see each other in the decoder."""

    def count(self, image: ImageInput) -> int:
        """Return the rows of an image, by its sizes. Raises ValueError where the tower does not take these sizes."""

    def positions(self, ids: Sequence[int], images: Sequence[ImageInput]) -> Tensor:
        """Return the positions of a prompt by time, height and width, int64 [3, N], where there are such."""

    def units(self, image: ImageInput) -> Generator[None, None, Tensor]:
        """Compute the features of an image, [image.rows, hidden]: a generator that yields after each unit of the work,
        a few milliseconds long, and returns them."""


class Encoding:
    """One image on its way through the tower, for the sequence `id`."""

    def __init__(self, tower: VisionTower, image: ImageInput, id: str) -> None:
        self.id, self.image = id, image
        self._units = tower.units(image)

    def advance(self, seconds: float) -> Tensor | None:
        """Work for about so many seconds, at least a unit; return the features once they are complete."""
        began = last = time.perf_counter()
        while True:
            point("images.encode", self.id)
            try:
                next(self._units)
            except StopIteration as end:
                features: Tensor = end.value
                assert len(features) == self.image.rows, "another number of rows than the prompt has"
                return features
            now = time.perf_counter()
            if now - began + (now - last) / 2 > seconds:  # another unit would end further from it
                return None
            last = now
