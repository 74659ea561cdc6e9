"""The images of an engine's requests: their ids, their tiles while they may be needed, and their features.

A request's image tokens become negative ids (`scheduling/image_ids.py`), so prefix cache and sequences treat an image
like any other tokens. The tower works only for running sequences, and only for images that the prefix cache does not
have whole: `advance` holds features of the first sequence that needs some, and the tower computes those that are not in
the store. A sequence lets its features go when its last image is computed. One that is preempted lets them go too, and
finds them in the store, or has them computed again.

The tower works before each step. While others wait for that step, it takes a share of the time of the last steps.
"""

from __future__ import annotations

import itertools
import logging
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from attar.engine.images.store import FeatureStore
from attar.engine.images.tower import Encoding, VisionTower
from attar.protocol.image_limits import MAX_ROWS
from attar.protocol.images import ImageInput, check_images
from attar.protocol.messages import Submit
from attar.protocol.scheduler_config import TOWER_SHARE
from attar.scheduling.admission import Refused
from attar.scheduling.image_ids import (
    ImageIds,
    ImagesExhausted,
    ImageSpan,
    number_of,
    row_ids,
    row_of,
)
from attar.scheduling.sequence import Sequence as Tokens

MAX_TILES = 256 << 20  # bytes of the tiles of all open requests
ALONE_SECONDS = 0.05  # for the tower at a time, where no step waits: commands are read in between

logger = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class Prompt:
    """A prompt with the ids of its images' rows, and the images; `spans` are made anew for each choice.

    `positions` and `shift` are those of `Sequence`.
    """

    ids: Sequence[int]
    spans: tuple[ImageSpan, ...] = ()
    positions: tuple[array[int], ...] = ()
    shift: int = 0

    def own_spans(self) -> tuple[ImageSpan, ...]:
        """Return spans for one sequence."""
        return tuple(ImageSpan(span.number, span.start, span.end, whole=span.whole) for span in self.spans)


class Images:
    """Images of one engine, whose features take at most `limit` bytes, as rows of `dtype`. `room` frees the ids that
    only the prefix cache holds. A step has `step_rows` rows for one prompt at least."""

    def __init__(
        self, tower: VisionTower, limit: int, dtype: torch.dtype, ids: ImageIds, room: Callable[[], None],
        step_rows: int,
    ) -> None:  # fmt: skip
        self.tower, self.dtype, self.ids, self.store = tower, dtype, ids, FeatureStore(limit)
        self.encoded = 0  # images that the tower computed
        self.seconds = 0.0  # of the tower
        self._step_rows = step_rows
        self._row_bytes = dtype.itemsize * tower.hidden
        self._room = room
        self._tiles: dict[int, ImageInput] = {}  # by number, while a sequence has the image
        self._open: Counter[int] = Counter()  # sequences that have it
        self._holding: dict[Tokens, tuple[bytes, ...]] = {}  # keys of the features that it holds
        self._encoding: Encoding | None = None
        self._key = b""  # of the image under way
        self._steps: list[float] = []  # seconds of the last steps

    # ---- requests

    def take(self, ask: Submit) -> Prompt:
        """Return the prompt of a request with ids for its images, which are held until `settle`. Raises Refused."""
        token = self.tower.image_token
        check_images(ask.images, ask.prompt.count(token))
        self._refuse_too_much(ask)
        if not ask.images:
            return Prompt(ask.prompt)
        if any(self.tower.count(image) != image.rows for image in ask.images):
            raise Refused("invalid", "an image has another number of rows than the vision tower makes")
        positions, shift = self._positions(ask)
        numbers: list[int] = []
        try:
            for image in ask.images:
                numbers.append(self._number(len(ask.cache_salt).to_bytes(4, "little") + ask.cache_salt + image.digest))
        except BaseException:  # whatever ends the request here: numbers that it took are nobody's
            for number in numbers:
                self.ids.drop(number)
            raise
        rows = [row_ids(number, image.rows) for number, image in zip(numbers, ask.images, strict=True)]
        each = itertools.chain.from_iterable(rows)
        ids = array("i", (next(each) if id == token else id for id in ask.prompt))
        places = [at for at, id in enumerate(ids) if id < 0]
        ends = list(itertools.accumulate(image.rows for image in ask.images))
        starts = [0, *ends]
        spans = tuple(
            ImageSpan(number, places[first], places[end - 1] + 1, whole=self.tower.bidirectional)
            for number, first, end in zip(numbers, starts, ends, strict=False)
        )
        for number, image in zip(numbers, ask.images, strict=True):
            self._tiles.setdefault(number, image)
        return Prompt(ids, spans, positions, shift)

    def _positions(self, ask: Submit) -> tuple[tuple[array[int], ...], int]:
        """Return the positions of a prompt's tokens, and how much less than their indexes those of later tokens are."""
        if not self.tower.rotary:
            return (), 0
        found = self.tower.positions(ask.prompt, ask.images)
        axes = tuple(array("i", axis) for axis in found.tolist())
        return axes, max(map(max, axes)) + 1 - len(ask.prompt)

    def begin(self, sequences: Iterable[Tokens]) -> None:
        """Hold the images of sequences that were queued."""
        for sequence in sequences:
            for span in sequence.images:
                self.ids.hold_again(span.number)
                self._open[span.number] += 1

    def settle(self, prompt: Prompt) -> None:
        """Release what `take` held: from now on the images are those of their sequences."""
        for span in prompt.spans:
            self._let_go(span.number)

    def forget(self, sequence: Tokens) -> None:
        """Release the images of a sequence that has ended."""
        self._drop(sequence)
        for span in sequence.images:
            self._open[span.number] -= 1
            self._let_go(span.number)

    def _let_go(self, number: int) -> None:
        if self._open[number] <= 0:
            del self._open[number]
            self._tiles.pop(number, None)
        self.ids.drop(number)

    def _number(self, key: bytes) -> int:
        try:
            return self.ids.hold(key)
        except ImagesExhausted:
            self._room()
        try:
            return self.ids.hold(key)
        except ImagesExhausted as error:
            raise Refused("full", f"{error}: no more at a time") from None

    def _refuse_too_much(self, ask: Submit) -> None:
        """Raise Refused for images that can never be computed, or whose tiles have no room now."""
        if any(image.rows > MAX_ROWS for image in ask.images):
            raise Refused("too_long", f"an image has more than {MAX_ROWS} rows")
        sizes = {image.digest: image.rows * self._row_bytes for image in ask.images}
        if (needed := sum(sizes.values())) > self.store.limit:
            message = f"features of the images take {needed} bytes; --image-cache gives {self.store.limit}"
            raise Refused("too_long", message)
        if self.tower.bidirectional and any(image.rows > self._step_rows for image in ask.images):
            message = f"rows of an image are computed in one step, which has {self._step_rows} for them"
            raise Refused("too_long", f"{message}: raise --max-step-tokens, or lower --max-running")
        held = sum(len(image.tiles) for image in self._tiles.values())
        if ask.images and held + sum(len(image.tiles) for image in ask.images) > MAX_TILES:
            raise Refused("full", f"images of open requests take {held} bytes of {MAX_TILES}: no room for more")

    # ---- steps

    def rows(self, ids: Sequence[int]) -> Tensor:
        """Return the feature rows [M, I] of negative ids."""
        parts: list[Tensor] = []
        for number, run in itertools.groupby(ids, number_of):
            features = self.store.get(self.ids.key_of(number))
            parts.append(features[torch.tensor([row_of(id) for id in run])])
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def took(self, seconds: float) -> None:
        """Learn how long a step took, the tower's work apart."""
        self._steps = [*self._steps[-6:], seconds]

    def advance(self, running: Sequence[Tokens]) -> str | None:
        """Have the tower work before the next step; return the id of the sequence for which it raised."""
        self._hold(running)
        waits = any(sequence.pending and not sequence.gated for sequence in running)
        seconds = TOWER_SHARE * median(self._steps) if waits and self._steps else ALONE_SECONDS
        if self._encoding is None and not self._begin(running):
            return None
        encoding = self._encoding
        assert encoding is not None
        began = time.perf_counter()
        try:
            features = encoding.advance(seconds)
        except Exception:  # whatever it is, it ends this image's request alone
            logger.exception("the vision tower failed on an image of sequence %s", encoding.id)
            self._encoding = None
            return encoding.id
        finally:
            self.seconds += time.perf_counter() - began
        if features is not None:
            self._encoding = None
            self.encoded += 1
            self.store.put(self._key, features.to(self.dtype))
            self._mark(running)
        return None

    def _hold(self, running: Sequence[Tokens]) -> None:
        """Release features that are not needed any more, and hold those of the next sequences: in order, none is
        passed."""
        now = {sequence for sequence in running if sequence.images and sequence.computed < sequence.images[-1].end}
        for sequence in [each for each in self._holding if each not in now]:
            self._drop(sequence)
        if self._encoding is not None and not any(self._key in keys for keys in self._holding.values()):
            self._encoding = None  # whoever needed it has ended
        for sequence in running:
            if sequence in now and sequence not in self._holding:
                needed = {
                    self.ids.key_of(span.number): self._tiles[span.number].rows * self._row_bytes
                    for span in sequence.images
                    if span.end > sequence.computed
                }
                if not self.store.hold(needed):
                    break
                self._holding[sequence] = tuple(needed)
        self._mark(running)

    def _mark(self, running: Iterable[Tokens]) -> None:
        for sequence in running:
            if (keys := self._holding.get(sequence)) is not None:
                for span in sequence.images:
                    key = self.ids.key_of(span.number)
                    span.ready = key in keys and key in self.store

    def _drop(self, sequence: Tokens) -> None:
        for key in self._holding.pop(sequence, ()):
            self.store.drop(key)
        for span in sequence.images:
            span.ready = False

    def _begin(self, running: Iterable[Tokens]) -> bool:
        """Begin with the first image that a sequence waits for; return whether there is one."""
        for sequence in running:
            for span in sequence.images if sequence in self._holding else ():
                if not span.ready and span.end > sequence.computed:
                    self._key = self.ids.key_of(span.number)
                    self._encoding = Encoding(self.tower, self._tiles[span.number], sequence.id)
                    return True
        return False

    def check(self, sequences: Iterable[Tokens], tokens: Iterable[int]) -> None:
        """Assert that images are held by these sequences and tokens of the prefix tree alone. Linear: for tests."""
        own = list(sequences)
        holders = Counter(number_of(token) for token in tokens if token < 0)
        holders.update(span.number for sequence in own for span in sequence.images)
        self.ids.check(holders)
        self.store.check()
        assert +self._open == Counter(span.number for sequence in own for span in sequence.images), "other openers"
        assert self._tiles.keys() == (+self._open).keys(), "tiles of no sequence"
        assert set(self._holding) <= set(own), "features for a sequence that has ended"
