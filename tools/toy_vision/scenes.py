"""Pictures of coloured shapes, and questions about them whose answers are known: the task of the toy that sees.

A scene has one to four objects. Each has a shape, a colour, and a cell of a grid of 3 x 3, on a light background, in a
picture of 64 x 64 pixels. A fifth of all combinations of shape, colour and cell is *reserved*: no picture of training
has one, and each question of the held-out pictures is about an object that has one. All is a function of the seed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

SIDE = 64  # pixels
REACH = 12  # pixels from an object's middle
SHAPES = ("circle", "square", "triangle", "cross", "ring")
COLOURS = {
    "red": (205, 40, 40), "green": (40, 160, 60), "blue": (45, 75, 205), "yellow": (235, 205, 35),
    "purple": (150, 50, 170), "black": (25, 25, 25),
}  # fmt: skip
CELLS = ("top left", "top", "top right", "left", "centre", "right", "bottom left", "bottom", "bottom right")
NUMBERS = ("one", "two", "three", "four")
KINDS = ("shape", "colour", "count", "position")
"""Kinds of questions."""

Split = Literal["training", "held out"]


class Object(NamedTuple):
    """A shape, a colour and a cell, by their indexes."""

    shape: int
    colour: int
    cell: int

    @property
    def reserved(self) -> bool:
        """Whether the combination is kept for held-out pictures. Each pair of attributes occurs in training as well."""
        return (3 * self.shape + self.colour + 2 * self.cell) % 5 == 0


class Question(NamedTuple):
    """A question about a scene, and its answer."""

    kind: str
    text: str
    answer: str


class Scene(NamedTuple):
    """Objects of a picture, the one asked about first, and the picture [SIDE, SIDE, 3]."""

    objects: tuple[Object, ...]
    pixels: NDArray[np.uint8]


def scenes(split: Split, seed: int) -> Iterator[Scene]:
    """Yield scenes without end. The first object of a held-out scene has a reserved combination."""
    random = np.random.default_rng((seed, split == "training"))
    while True:
        wanted = int(random.integers(1, len(NUMBERS) + 1))
        cells = random.permutation(len(CELLS))[:wanted]
        found = []
        for number, cell in enumerate(cells):
            while True:
                shape, colour = random.integers(len(SHAPES)), random.integers(len(COLOURS))
                each = Object(int(shape), int(colour), int(cell))
                if (split == "training" and each.reserved) or (
                    split == "held out" and not number and not each.reserved
                ):
                    continue
                break
            found.append(each)
        yield Scene(tuple(found), _drawn(found, random))


def question(scene: Scene, kind: str, about: int = 0) -> Question | None:
    """Return a question of a kind about an object; None where the object's attributes do not single it out."""
    own = scene.objects[about]
    others = [each for number, each in enumerate(scene.objects) if number != about]
    shape, colour = SHAPES[own.shape], tuple(COLOURS)[own.colour]
    if kind == "count":
        return Question(kind, "How many objects are there?", NUMBERS[len(scene.objects) - 1])
    if kind == "shape":
        if any(each.colour == own.colour for each in others):
            return None
        return Question(kind, f"What shape is the {colour} object?", shape)
    if kind == "colour":
        if any(each.shape == own.shape for each in others):
            return None
        return Question(kind, f"What colour is the {shape}?", colour)
    if any(each[:2] == own[:2] for each in others):
        return None
    return Question(kind, f"Where is the {colour} {shape}?", CELLS[own.cell])


def held_out(count: int, seed: int) -> list[tuple[Scene, Question]]:
    """Return held-out scenes, each with one question about its reserved object, the kinds in turn."""
    items: list[tuple[Scene, Question]] = []
    for scene in scenes("held out", seed):
        if len(items) == count:
            break
        asked = question(scene, KINDS[len(items) % len(KINDS)])
        if asked is not None:
            items.append((scene, asked))
    return items


_Y, _X = np.mgrid[0:SIDE, 0:SIDE].astype(np.float32)


def _drawn(objects: list[Object], random: np.random.Generator) -> NDArray[np.uint8]:
    """Return a picture: background, objects with soft edges, noise."""
    canvas = np.empty((SIDE, SIDE, 3), np.float32)
    canvas[:] = random.uniform(205, 245) + random.uniform(-8, 8, 3)
    for each in objects:
        row, column = divmod(each.cell, 3)
        y, x = ((row, column) + random.uniform(-0.08, 0.08, 2) + 0.5) * (SIDE / 3)
        top, left = max(0, int(y) - REACH), max(0, int(x) - REACH)
        near = (slice(top, int(y) + REACH), slice(left, int(x) + REACH))  # no object reaches farther
        inside = _inside(SHAPES[each.shape], _X[near] - x + 0.5, _Y[near] - y + 0.5, random.uniform(6.5, 9))
        colour = np.array(tuple(COLOURS.values())[each.colour], np.float32) + random.uniform(-18, 18, 3)
        canvas[near] += inside[..., None] * (colour - canvas[near])
    canvas += 4 * random.standard_normal(canvas.shape, np.float32)
    return np.clip(np.rint(canvas), 0, 255).astype(np.uint8)


def _inside(shape: str, x: NDArray[np.float32], y: NDArray[np.float32], radius: float) -> NDArray[np.float32]:
    """Return how much of each pixel a shape covers, about 0 to 1. x and y are from its middle."""
    if shape == "circle":
        distance = np.hypot(x, y) - radius
    elif shape == "ring":
        distance = np.abs(np.hypot(x, y) - 0.78 * radius) - 0.22 * radius
    elif shape == "square":
        distance = np.maximum(np.abs(x), np.abs(y)) - 0.85 * radius
    elif shape == "triangle":
        distance = np.maximum(0.87 * np.abs(x) - 0.5 * y, y) - 0.6 * radius
    else:
        long, short = np.maximum(np.abs(x), np.abs(y)), np.minimum(np.abs(x), np.abs(y))
        distance = np.maximum(long - radius, short - 0.33 * radius)
    return np.clip(0.5 - distance, 0, 1)
