"""The vision tower's work, in slices that fit between two steps of the engine.

An image takes as long as many steps. So the tower does a slice of one layer at a time, over as many rows as the time
allows, and the engine has its steps in between. How an image is sliced changes no bit of its features.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from typing import Protocol

from torch import Tensor

from attar.faults import point
from attar.protocol.images import ImageInput

FEWEST, MOST = 64, 4096  # rows of a slice
SLICE_SECONDS = 0.02  # of a slice, where nobody waits for the next step


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

    def units(self, image: ImageInput, rows: Callable[[], int]) -> Generator[None, None, Tensor]:
        """Compute the features of an image, [image.rows, hidden]: a generator that returns them.

        Between two of its steps it asks `rows` how many rows the next one may have. The answers change no bit.
        """


class Encoding:
    """One image on its way through the tower, for the sequence `id`."""

    def __init__(self, tower: VisionTower, image: ImageInput, id: str, pace: TowerPace) -> None:
        self.id, self.image, self._pace = id, image, pace
        self._units = tower.units(image, pace.rows)

    def advance(self, seconds: float) -> Tensor | None:
        """Work for about so many seconds, at least a slice; return the features once they are complete."""
        clock = self._pace.clock
        began = last = clock()
        self._pace.aim(seconds)
        while True:
            point("images.encode", self.id)
            try:
                next(self._units)
            except StopIteration as end:
                features: Tensor = end.value
                assert len(features) == self.image.rows, "another number of rows than the prompt has"
                return features
            now = clock()
            self._pace.took(now - last)
            if now - began + (now - last) > seconds:  # another slice would take too long
                return None
            last = now


class TowerPace:
    """Rows of a slice, so that it takes the time that there is: doubled where it is shorter than half, else halved."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock, self._rows, self._seconds = clock, FEWEST, SLICE_SECONDS

    def rows(self) -> int:
        """Return the rows of the next slice."""
        return self._rows

    def aim(self, seconds: float) -> None:
        """Set the time for all slices until the next call."""
        self._seconds = min(seconds, SLICE_SECONDS)

    def took(self, seconds: float) -> None:
        """Learn how long a slice took."""
        if seconds > self._seconds:
            self._rows = max(FEWEST, self._rows // 2)
        elif seconds < self._seconds / 2:
            self._rows = min(MOST, self._rows * 2)
