"""Prompts with images through the whole model against transformers: merge, positions and logits, in float32."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from attar.checkpoints.sources import hf
from attar.kernels.ref_spans import spans_of
from attar.model.cache import Features, ForwardBatch
from attar.model.decoder import Decoder
from tests.model.vision import seen, tiny

EQUAL = 1e-4  # max |difference| of logits, float32


@functools.cache
def decoder(kind: str) -> Decoder:
    return hf.load(tiny.folder(kind))


def prompt(pictures: list[seen.Picture], marks: bool = True) -> tuple[list[int], list[tuple[int, int]]]:
    """Return ids with text around each image, and where the rows of images lie."""
    draw = torch.Generator().manual_seed(len(pictures))

    def text(count: int) -> list[int]:
        return torch.randint(3, 110, (count,), generator=draw).tolist()  # type: ignore[no-any-return]

    ids, places = text(7), []
    for picture in pictures:
        ids += [117] if marks else []
        places.append((len(ids), len(ids) + picture.rows))
        ids += [tiny.IMAGE] * picture.rows + ([116] if marks else []) + text(3)
    return ids + text(5), places


@torch.inference_mode()
def theirs(kind: str, ids: list[int], pictures: list[seen.Picture]) -> Tensor:
    model, more = tiny.model(kind), dict[str, Any]()
    tokens = torch.tensor([ids])
    if pictures:
        values = [seen.pixels(kind, each) for each in pictures]
        if kind.startswith("qwen"):
            flat, grids = zip(*(seen.qwen_patches(p, v) for p, v in zip(pictures, values, strict=True)), strict=True)
            more = {"pixel_values": torch.cat(flat), "image_grid_thw": torch.cat(grids)}
        elif kind in ("smolvlm", "idefics3"):
            more = {"pixel_values": torch.cat(values)[None]}
        elif kind == "llava_next":
            most = max(len(each) for each in values)
            padded = [torch.cat((each, each.new_zeros(most - len(each), *each.shape[1:]))) for each in values]
            more = {"pixel_values": torch.stack(padded), "image_sizes": torch.tensor([each.size for each in pictures])}
        else:
            more = {"pixel_values": torch.cat(values)}
    if kind == "gemma3":
        more["token_type_ids"] = (tokens == tiny.IMAGE).long()
    if kind.startswith("qwen"):
        more["mm_token_type_ids"] = (tokens == tiny.IMAGE).int()
    return model(input_ids=tokens, use_cache=False, **more).logits[0]  # type: ignore[no-any-return]


def ours(kind: str, ids: list[int], pictures: list[seen.Picture], places: list[tuple[int, int]], *cuts: int) -> Tensor:
    """Return logits of a prompt that goes through a cache, cut at some tokens."""
    vision, model = seen.vision(kind), decoder(kind)
    at = torch.tensor([row for place in places for row in range(*place)], dtype=torch.int64)
    values = torch.cat([vision.encode(each) for each in pictures]) if pictures else torch.empty(0, vision.hidden)
    angles = vision.positions(ids, pictures) if vision.rotary else None
    tokens, cache, found = torch.tensor(ids), model.cache(len(ids)), []
    for first, end in zip((0, *cuts), (*cuts, len(ids)), strict=True):
        within = (at >= first) & (at < end)
        step = ForwardBatch(
            (end - first,), len(ids), cache,
            features=Features(at[within] - first, values[within]) if within.any() else None,
            angles=None if angles is None else angles[:, first:end],
            spans=spans_of(places, first, end - first) if vision.bidirectional else None,
        )  # fmt: skip
        found.append(model.forward(tokens[first:end], step))
    return torch.cat(found)


@pytest.mark.parametrize("count", [0, 1, 3])
@pytest.mark.parametrize("kind", tiny.MODELS)
def test_logits_equal_transformers(kind: str, count: int) -> None:
    pictures = seen.pictures(kind)[-count:] if count else []
    ids, places = prompt(pictures)
    expected = theirs(kind, ids, pictures)
    found = ours(kind, ids, pictures, places)
    assert expected.std() >= 0.5
    assert (found - expected).abs().max() <= EQUAL
    if count:
        cut = places[0][0]
        assert (ours(kind, ids, pictures, places, 3, cut, places[0][1] + 2) - expected).abs().max() <= EQUAL


def test_rows_that_see_each_other_need_no_cache() -> None:
    """Two sequences of one call, as in calibration; images are as wide as the window of most layers."""
    pictures = seen.pictures("gemma3")
    prompts = [prompt(pictures), prompt(pictures[::-1])]
    rows = [torch.cat([torch.arange(*place) for place in places]) for _, places in prompts]
    length = len(prompts[0][0])
    values = torch.cat([seen.vision("gemma3").encode(each) for each in (*pictures, *pictures[::-1])])
    step = ForwardBatch(
        (length, length), length, features=Features(torch.cat((rows[0], rows[1] + length)), values),
        spans=torch.cat([spans_of(places, 0, length) for _, places in prompts]),
    )  # fmt: skip
    found = decoder("gemma3").forward(torch.tensor([each for ids, _ in prompts for each in ids]), step)
    for own, (ids, places), shown in zip(found.split(length), prompts, (pictures, pictures[::-1]), strict=True):
        assert (own - theirs("gemma3", ids, shown)).abs().max() <= EQUAL
        assert (own - ours("gemma3", ids, shown, places)).abs().max() <= EQUAL


@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen2_5_vl"])
def test_positions_equal_transformers(kind: str) -> None:
    pictures = seen.pictures(kind)
    ids, _ = prompt(pictures)
    tokens = torch.tensor([ids])
    grids = torch.tensor([[1, *each.grid] for each in pictures])
    expected, delta = tiny.model(kind).model.get_rope_index(tokens, (tokens == tiny.IMAGE).int(), grids)
    found = seen.vision(kind).positions(ids, pictures)
    assert torch.equal(found, expected[:, 0])
    assert int(found[:, -1].max()) + 1 - len(ids) == int(delta[0, 0]) < 0
