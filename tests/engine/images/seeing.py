"""A vision tower of the tests, images for it, and a decoder whose token table has the features: the oracle."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from attar.model.cache import ForwardBatch
from attar.model.decoder import Decoder
from attar.protocol.images import ImageInput, digest_of
from attar.protocol.messages import Submit
from attar.protocol.request import SamplingParams

TOKEN = 96  # the last of the tiny decoder's vocabulary
GREEDY = SamplingParams(max_tokens=12, temperature=0, seed=0)


UNIT = 64  # rows


class SeededTower:
    """Three layers over the bytes of an image. A row depends on its own bytes, and behind the first layer on all."""

    def __init__(self, hidden: int = 64, image_token: int = TOKEN) -> None:
        self.hidden, self.image_token = hidden, image_token
        self.rotary = self.bidirectional = False
        self.units_done = 0
        self.seen: list[bytes] = []

    def units(self, image: ImageInput) -> Generator[None, None, Tensor]:
        self.seen.append(image.digest)
        seed = int.from_bytes(image.digest[:7], "little")
        state = torch.rand((image.rows, self.hidden), generator=torch.Generator().manual_seed(seed)) * 4 - 2
        for _ in range(3):
            mean, out = state.mean(0), torch.empty_like(state)
            for first in range(0, image.rows, UNIT):
                self.units_done += 1
                out[first : first + UNIT] = torch.sin(state[first : first + UNIT] + mean)
                yield
            state = out
        return state

    def count(self, image: ImageInput) -> int:
        return image.rows

    def positions(self, ids: Sequence[int], images: Sequence[ImageInput]) -> Tensor:
        """Each image's rows stand in two lines, side by side; text goes on behind the wider side."""
        axes, at, start = [[], [], []], 0, 0
        left = iter(images)
        while at < len(ids):
            if ids[at] != self.image_token:
                for axis in axes:
                    axis.append(start)
                at, start = at + 1, start + 1
                continue
            wide = -(-(rows := next(left).rows) // 2)
            axes[0] += [start] * rows
            axes[1] += [start + row // wide for row in range(rows)]
            axes[2] += [start + row % wide for row in range(rows)]
            at, start = at + rows, start + max(2, wide)
        return torch.tensor(axes)

    def encode(self, image: ImageInput) -> Tensor:
        """All at once."""
        features = all_of(self.units(image))
        self.seen.pop()
        return features


def all_of(work: Generator[None, None, Tensor]) -> Tensor:
    """The features in the end."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            return end.value


def image(number: int, rows: int = 8) -> ImageInput:
    """An image that differs from those of other numbers."""
    shape, size = (1, 2, rows), (2, rows)
    tiles = bytes((number * 37 + place) % 251 for place in range(2 * rows * 3))
    return ImageInput(digest_of(b"test", shape, size, tiles), tiles, shape, (1, 1), size, rows)


def prompt(*parts: int | ImageInput) -> tuple[int, ...]:
    """Token ids, with the image token once for each row of an image."""
    return tuple(id for part in parts for id in ([part] if isinstance(part, int) else [TOKEN] * part.rows))


def submit(id: str, *parts: int | ImageInput, params: SamplingParams = GREEDY, **more: object) -> Submit:
    images = tuple(part for part in parts if isinstance(part, ImageInput))
    return Submit(id, prompt(*parts), params, images=images, **more)


def alone(decoder: Decoder, tower: SeededTower, ask: Submit) -> list[int]:
    """Greedy tokens behind a prompt, by a decoder whose token table has a row for each row of its images."""
    vocab = decoder.config.vocab_size
    table = decoder.embedding.forward(torch.arange(vocab), torch.zeros(vocab, dtype=torch.int64))
    features = [tower.encode(image) for image in ask.images]
    seeing = replace(decoder, embedding=replace(decoder.embedding, table=torch.cat([table, *features]), scale=1.0))
    rows = iter(range(vocab, vocab + sum(map(len, features))))
    ids = [next(rows) if id == TOKEN else id for id in ask.prompt]
    cache, found = seeing.cache(len(ids) + ask.params.max_tokens), list[int]()
    horizon = len(ids) + ask.params.max_tokens
    while len(found) < ask.params.max_tokens:
        logits = seeing.forward(torch.tensor(ids), ForwardBatch((len(ids),), horizon, cache))
        ids = [int(logits[-1].argmax())]
        found += ids
    return found
