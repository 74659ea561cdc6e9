"""What the rows of a step read, as tensors: token ids, features of images, positions, and what rows of images see."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from collections.abc import Sequence as List
from typing import NamedTuple

import torch
from torch import Tensor

from attar.faults import point
from attar.kernels.ref_spans import spans_of
from attar.model.cache import sent
from attar.scheduling.sequence import Sequence
from attar.scheduling.step_plan import ScheduledTokens


class InflightTokens(NamedTuple):
    """Tokens sampled by the step before, which the device may not have computed yet.

    They are int64 [n], on the device, with the index of each sequence's.
    """

    tokens: Tensor
    places: Mapping[Sequence, int]


class TokenRows(NamedTuple):
    """The token ids of a step's rows. Only the device knows those of the rows `late`, which are at these `places`."""

    ids: list[int]
    late: list[int]
    places: list[int]
    inflight_tokens: InflightTokens | None

    @classmethod
    def of(cls, chunks: List[ScheduledTokens], inflight_tokens: InflightTokens | None) -> TokenRows:
        made = cls([], [], [], inflight_tokens)
        for chunk in chunks:
            ids = chunk.ids
            made.ids.extend(ids)
            if len(ids) < chunk.rows:
                assert inflight_tokens is not None, "a token that nobody knows"
                made.late.append(len(made.ids))
                made.places.append(inflight_tokens.places[chunk.sequence])
                made.ids.append(0)
        return made

    def complete(self, ids: Tensor) -> None:
        """Write the late token ids into the ids [N], on their device."""
        if self.inflight_tokens is not None and self.late:
            late, places = sent(ids.device, torch.tensor(self.late), torch.tensor(self.places))
            ids[late] = self.inflight_tokens.tokens[places]


def features(
    chunks: List[ScheduledTokens], ids: list[int], features_of: Callable[[List[int]], Tensor] | None
) -> tuple[Tensor, Tensor] | None:
    """Return the rows of images among those of these ids, which become ids of the vocabulary: int64 [M], and their
    features [M, I] by `features_of`. None without any."""
    own = [chunk for chunk in chunks if of_image(chunk)]
    if not own:
        return None
    assert features_of is not None, "rows of images without features"
    for chunk in own:
        point("runner.features", chunk.sequence.id)
    rows = [row for row, token in enumerate(ids) if token < 0]
    values = features_of([ids[row] for row in rows])
    for row in rows:
        ids[row] = 0
    return torch.tensor(rows), values


def angles(chunks: List[ScheduledTokens]) -> Tensor | None:
    """Return the positions [3, N] of a step's rows; None where all have their indexes, moved by one number."""
    if not any(chunk.sequence.positions and chunk.start < chunk.sequence.prompt for chunk in chunks):
        return None
    rows = [chunk.sequence.axes(chunk.start, chunk.rows) for chunk in chunks]
    axes = [list(itertools.chain.from_iterable(axis)) for axis in zip(*rows, strict=True)]
    return torch.tensor(axes)


def of_image(chunk: ScheduledTokens) -> bool:
    """Return whether some row of a chunk is one of an image."""
    sequence = chunk.sequence
    if not sequence.images or chunk.start >= sequence.images[-1].end:
        return False
    return any(token < 0 for token in chunk.ids)


def spans(chunks: List[ScheduledTokens]) -> Tensor | None:
    """Return what rows of images see beside the rows before them (`ForwardBatch.spans`); None where it is nothing."""
    if not any(image.whole for chunk in chunks for image in chunk.sequence.images if of_image(chunk)):
        return None
    images = [[(image.start, image.end) for image in chunk.sequence.images if image.whole] for chunk in chunks]
    return torch.cat([spans_of(own, chunk.start, chunk.rows) for own, chunk in zip(images, chunks, strict=True)])
