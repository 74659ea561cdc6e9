"""Towers and projectors of every family against transformers, stage by stage, in float32."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from attar.model.vision.model import VisionModel
from attar.model.vision.tiles import TILE, slices
from attar.model.vision.tower import parts
from tests.errors import user_error
from tests.model.vision import seen, tiny

EQUAL = 1e-4  # max |difference|, float32; values vary by about 1


def _hidden(vision: VisionModel, picture: seen.Picture) -> Tensor:
    """Return the tower's hidden states of all tiles, as the projector gets them."""
    taken = []
    work = vision.projector.work

    def watched(x: Tensor) -> Any:
        taken.append(x.clone())
        return work(x)

    vision.projector.work = watched  # type: ignore[method-assign]
    try:
        vision.encode(picture)
    finally:
        del vision.projector.work
    return torch.cat(taken)


@pytest.mark.parametrize("kind", tiny.MODELS)
def test_the_tower_equals_transformers(kind: str) -> None:
    vision = seen.vision(kind)
    for picture in seen.pictures(kind):
        theirs = seen.tower(kind, picture)
        assert theirs.std() >= 0.3
        assert (_hidden(vision, picture) - theirs).abs().max() <= EQUAL


@pytest.mark.parametrize("old_names", [True, False])
@pytest.mark.parametrize("kind", tiny.MODELS)
def test_rows_equal_transformers(kind: str, old_names: bool) -> None:
    vision = seen.vision(kind, old_names)
    for picture in seen.pictures(kind):
        ours, theirs = vision.encode(picture), seen.features(kind, picture)
        assert ours.shape == theirs.shape == (picture.rows, vision.hidden)
        assert theirs.std() >= 0.2
        assert (ours - theirs).abs().max() <= EQUAL


@pytest.mark.parametrize("kind", tiny.MODELS)
def test_bits_do_not_depend_on_the_slicing(kind: str) -> None:
    vision, pictures = seen.vision(kind), seen.pictures(kind)
    whole = [vision.encode(picture) for picture in pictures]
    draw, under_way = random.Random(3), [vision.units(picture) for picture in pictures]
    found: dict[int, Tensor] = {}
    while len(found) < len(pictures):  # in turns of units that belong to other images
        number = draw.choice([each for each in range(len(pictures)) if each not in found])
        try:
            for _ in range(draw.choice([1, 2, 30])):
                next(under_way[number])
        except StopIteration as end:
            found[number] = end.value
    assert all(torch.equal(found[number], rows) for number, rows in enumerate(whole))


def test_images_do_not_change_each_other() -> None:
    vision, (first, second, *_) = seen.vision("qwen2_5_vl"), seen.pictures("qwen2_5_vl")
    work = vision.units(first)
    for _ in range(3):
        next(work)
    other = vision.encode(second)
    rest = seen.finished(work)[0]
    assert torch.equal(rest, vision.encode(first))
    assert torch.equal(other, vision.encode(second))


OTHER: list[dict[str, Any]] = [
    {"rows": 1},
    {"tiles": b"123"},
    {"shape": (1, 30, 31)},
    {"shape": (0, 0, 0), "tiles": b""},
    {"grid": (9, 9), "shape": (1, 4, 4), "tiles": bytes(48)},
]


@pytest.mark.parametrize("kind", ["smolvlm", "llava_next", "qwen2_vl"])
@pytest.mark.parametrize("changes", OTHER)
def test_images_of_other_sizes_are_refused(kind: str, changes: dict[str, Any]) -> None:
    with user_error("image_invalid"):
        seen.vision(kind).encode(replace(seen.pictures(kind)[0], **changes))


@pytest.mark.parametrize("kind", ["gemma3", "llava", "qwen2_5_vl"])
def test_a_unit_is_one_product_of_a_tile_or_some_heads_at_most(kind: str) -> None:
    vision, picture = seen.vision(kind), seen.pictures(kind)[-1]
    config, (count, high, wide) = vision.config, picture.shape
    patches = (high // config.patch) * (wide // config.patch)
    tiles = len(slices(patches))
    attention = len(list(parts(config.heads, patches)))
    units = count * (tiles + len(vision.tower.layers) * (4 * tiles + attention)) + picture.rows // TILE
    assert seen.finished(vision.units(picture))[1] >= units


@pytest.mark.parametrize("length", [1, 2, 63, 127, 128, 191, 192, 577, 729, 1024, 5000])
def test_slices_are_every_row_once_and_even(length: int) -> None:
    found = slices(length)
    assert [row for each in found for row in range(length)[each]] == list(range(length))
    sizes = {each.stop - each.start for each in found}
    assert max(sizes) - min(sizes) <= 1
    assert max(sizes) <= 1.5 * TILE
    assert len(found) == 1 or min(sizes) >= 0.75 * TILE


@pytest.mark.parametrize(("heads", "length"), [(1, 1), (2, 16), (3, 700), (12, 1024), (16, 64), (16, 5000)])
def test_parts_of_attention_are_every_query_of_every_head_once(heads: int, length: int) -> None:
    seen = torch.zeros(heads, length)
    for some, rows in parts(heads, length):
        part = seen[some, rows]
        assert 0 < part.numel() <= max(TILE * heads, 1)
        part += 1
    assert bool((seen == 1).all())


@pytest.mark.parametrize("kind", ["llava", "gemma3", "qwen2_vl"])
def test_bytes_are_those_of_the_weights(kind: str) -> None:
    """LLaVA does without the last layer, and adds the class row's position to it; the last norm of CLIP and SigLIP's
    head are for other uses."""
    beside = ["language_model", "lm_head", ".head."]
    beside += ["layers.2.", "post_", "class_"] if kind == "llava" else []
    own = [p.numel() for name, p in tiny.model(kind).named_parameters() if not any(part in name for part in beside)]
    assert seen.vision(kind).nbytes == 4 * sum(own)
