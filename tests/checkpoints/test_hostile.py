"""A share of what `bench/hostile.py` opens: kinds with a name, and models that are damaged by chance."""

from __future__ import annotations

import gc
import json
import random
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load, save

from attar.checkpoints.inspect import inspect
from attar.compression.recipe.recipe_file import load_recipe
from attar.formats.weight_formats import WEIGHT_FORMATS, GgmlBlocks
from tests.checkpoints.hostile_files import (
    COSTLY,
    DAMAGE,
    FEW,
    FOLDERS,
    GGUF_TYPES,
    SEARCHED,
    TENSOR,
    WEIGHTS,
    Case,
    Corpus,
    examine,
)
from tests.checkpoints.test_safetensors import many
from tests.errors import user_error

SEED, DAMAGED, EVERY, TENSORS = 11, 60, 9, 40
BYTES = 32 << 20  # and four times the header
SECONDS = 0.4  # of the processor; what is held to is 0.2, and this machine may be busy


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return Corpus.make(tmp_path_factory.mktemp("sound"), all_kinds=False)


def numbers(corpus: Corpus) -> list[int]:
    return [*range(0, len(corpus.named), EVERY), *range(len(corpus.named), len(corpus.named) + DAMAGED)]


def test_a_case_is_the_same_wherever_it_is_made(corpus: Corpus) -> None:
    i = len(corpus.named) + 5
    assert corpus.case(SEED, i) == corpus.case(SEED, i) != corpus.case(SEED + 1, i)


def test_every_kind_of_weights_is_damaged(corpus: Corpus) -> None:
    made = [load_recipe(recipe).scheme for recipe in FOLDERS.values() if recipe]
    assert {form.kind for form in WEIGHT_FORMATS.values()} | {"int", "e5m2"} <= {
        each.weight.kind for each in made if each is not None
    }
    blocks = {form.type.name for form in WEIGHT_FORMATS.values() if isinstance(form, GgmlBlocks)}
    assert blocks <= {*GGUF_TYPES, *SEARCHED}
    assert "GGUF, Q4_K" in corpus.sound


def test_hostile_files_are_refused_in_our_words_or_read_correctly(corpus: Corpus, tmp_path: Path) -> None:
    refused = 0
    for i in numbers(corpus):
        case = corpus.case(SEED, i)
        outcome = examine(case.write(tmp_path / "model"))
        assert not outcome.wrong, f"case {i}, {case.kind}: {outcome.wrong}"
        assert outcome.bytes <= BYTES + outcome.allowance, f"case {i}, {case.kind}: {outcome.bytes} bytes"
        refused += outcome.refused is not None
    assert 0.6 * len(numbers(corpus)) < refused < len(numbers(corpus))


def pace() -> float:
    """Return how long Python's own JSON takes for a plain header of 90,000 tensors, in seconds of the processor."""
    header, found = many(90_000)[8:], []
    gc.disable()
    try:
        for _ in range(3):
            began = time.process_time()
            json.loads(header)
            found.append(time.process_time() - began)
    finally:
        gc.enable()
    return min(found)


def test_headers_that_are_made_to_cost_much_do_not(corpus: Corpus, tmp_path: Path) -> None:
    """Slower processors get twice the time of Python's JSON, which a reader that is not linear exceeds as well."""
    allowed = max(SECONDS, 2 * pace())
    costly = [case for case in corpus.named if case.family == COSTLY]
    assert len(costly) > 10
    for case in costly:
        outcome = examine(case.write(tmp_path / "model"))
        assert outcome.refused is not None, case.kind
        seconds = outcome.seconds
        for _ in range(4):  # what the system did meanwhile is booked as ours
            if seconds >= allowed:
                seconds = min(seconds, examine(case.write(tmp_path / "model")).seconds)
        assert seconds < allowed, f"{case.kind}: {seconds} s"
        assert outcome.bytes <= BYTES + outcome.allowance, f"{case.kind}: {outcome.bytes} bytes"


@pytest.mark.parametrize("kind", FEW)
def test_tensors_that_are_not_what_they_should_be(kind: str, corpus: Corpus, tmp_path: Path) -> None:
    """Sound files, but for one tensor of a packed model: what a shape or a scale is, is found before it is used."""
    files = corpus.sound[f"safetensors, {kind}"]
    for i in range(TENSORS):
        damaged = {**files, WEIGHTS: DAMAGE[TENSOR](files[WEIGHTS], random.Random(f"{SEED}/{i}"))}
        outcome = examine(Case("tensor", f"{kind} {i}", damaged).write(tmp_path / "model"))
        assert not outcome.wrong, f"{i}: {outcome.wrong}"


@pytest.mark.parametrize(
    "shape, words",
    [
        (torch.tensor(64), "quantization_invalid"),
        (torch.zeros(100_000, dtype=torch.int64), "quantization_invalid"),
        (torch.ones(2), "quantization_invalid"),
        (torch.tensor([-64, 64]), "quantization_invalid"),
        (torch.tensor([1 << 62, 64]), "quantization_invalid"),
    ],
)
def test_shapes_of_packed_weights_are_bounded(shape: torch.Tensor, words: str, corpus: Corpus, tmp_path: Path) -> None:
    files = corpus.sound["safetensors, 4 bits"]
    tensors = load(files[WEIGHTS]) | {"model.layers.0.mlp.up_proj.weight_shape": shape}
    path = Case("shape", "", {**files, WEIGHTS: save(tensors)}).write(tmp_path / "model")
    with user_error(words):
        inspect(path)


def test_sound_models_are_read_and_run(corpus: Corpus, tmp_path: Path) -> None:
    for files in corpus.sound.values():
        (tmp_path / "model").mkdir(exist_ok=True)
        for name, content in files.items():
            (tmp_path / "model" / name).write_bytes(content)
        opened = tmp_path / "model" / next((name for name in files if name.endswith(".gguf")), "")
        outcome = examine(opened)
        assert outcome.refused is None
        assert not outcome.wrong
