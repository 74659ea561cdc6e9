"""The toy that sees: its pictures and questions, its checkpoint, and that its answers come from the pictures."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from toy_vision import checkpoint, measure, scenes

from attar import LLM

ASKED = 100
LEAST_RIGHT = 0.90  # of so many; `toy_vision.measure` asks 5,000
MOST_SHUFFLED = 0.30  # chance is 0.18, and three deviations of so many are 0.12
MOST_BYTES = 8_000_000


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("toy")
    checkpoint.write(folder)
    return folder


@pytest.fixture
def llm(toy: Path) -> Iterator[LLM]:
    made = LLM(toy)
    yield made
    made.close()


def test_no_picture_of_training_has_a_reserved_combination() -> None:
    assert not any(each.reserved for scene in islice(scenes.scenes("training", 5), 500) for each in scene.objects)
    assert all(scene.objects[0].reserved for scene, _ in scenes.held_out(100, 5))


def test_each_pair_of_attributes_is_in_training() -> None:
    every = [scenes.Object(shape, colour, cell) for shape in range(5) for colour in range(6) for cell in range(9)]
    kept = [each for each in every if not each.reserved]
    assert len(every) - len(kept) == 54
    for first, second in ((0, 1), (0, 2), (1, 2)):
        assert len({(each[first], each[second]) for each in kept}) == len({(e[first], e[second]) for e in every})


def test_pictures_are_a_function_of_the_seed() -> None:
    (one, two, other) = (next(scenes.scenes("held out", seed)) for seed in (1, 1, 2))
    assert np.array_equal(one.pixels, two.pixels)
    assert not np.array_equal(one.pixels, other.pixels)


@pytest.mark.parametrize("kind", scenes.KINDS)
def test_a_question_is_asked_of_what_its_words_single_out(kind: str) -> None:
    for scene in islice(scenes.scenes("training", 3), 200):
        one = scenes.question(scene, kind)
        if one is None or kind == "count":
            continue
        told = [
            scenes.Question(kind, text, answer)
            for each in scene.objects
            for text, answer in [_told(each, kind)]
            if text == one.text
        ]
        assert told == [one]


def _told(each: scenes.Object, kind: str) -> tuple[str, str]:
    shape, colour = scenes.SHAPES[each.shape], tuple(scenes.COLOURS)[each.colour]
    return {
        "shape": (f"What shape is the {colour} object?", shape),
        "colour": (f"What colour is the {shape}?", colour),
        "position": (f"Where is the {colour} {shape}?", scenes.CELLS[each.cell]),
    }[kind]


def test_its_trained_part_is_small() -> None:
    assert checkpoint.WEIGHTS.stat().st_size <= MOST_BYTES


@pytest.mark.slow
def test_its_answers_are_right_and_come_from_the_pictures(llm: LLM) -> None:
    items = scenes.held_out(ASKED, seed=7)
    pictures, questions = [scene for scene, _ in items], [one for _, one in items]
    assert measure.right(llm, questions, pictures).mean() >= LEAST_RIGHT
    assert measure.right(llm, questions, pictures[1:] + pictures[:1]).mean() <= MOST_SHUFFLED


def test_the_chat_template_asks_as_training_did(toy: Path, llm: LLM) -> None:
    (scene, one), *_ = scenes.held_out(1, seed=3)
    content: list[dict[str, Any]] = [{"type": "image", "image": measure.png(scene)}, {"type": "text", "text": one.text}]
    answer = llm.chat([{"role": "user", "content": content}], measure.GREEDY)
    assert answer.text == llm.generate(measure.prompt(one), measure.GREEDY, images=[measure.png(scene)])[0].text


@torch.inference_mode()
def test_transformers_answers_alike(toy: Path, llm: LLM) -> None:
    import transformers

    model = transformers.SmolVLMForConditionalGeneration.from_pretrained(toy, dtype=torch.float32)
    for scene, one in scenes.held_out(8, seed=11):
        answer = llm.generate(measure.prompt(one), measure.GREEDY, images=[measure.png(scene)])[0]
        run = f"<fake_token_around_image><global-img>{'<image>' * checkpoint.ROWS}<fake_token_around_image>"
        ids = torch.tensor([llm.tokenizer.encode(measure.prompt(one).replace("<image>", run))])
        pixels = torch.from_numpy(scene.pixels).permute(2, 0, 1)[None, None].float() / 255
        out = model.generate(
            input_ids=ids, pixel_values=(pixels - 0.5) / 0.5, attention_mask=torch.ones_like(ids), max_new_tokens=8,
            do_sample=False, pad_token_id=0,
        )  # fmt: skip
        assert tuple(out[0, ids.shape[1] :].tolist()) == (*answer.token_ids, *((0,) if answer.token_ids[-1] else ()))
