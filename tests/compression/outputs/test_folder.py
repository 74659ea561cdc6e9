"""What an output says of itself: who reads it, and how its codes are stored. The sentences are held to the readers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from attar.checkpoints.sources import hf
from attar.compression.outputs.folder import FolderOutput
from attar.compression.recipe.recipe_file import load_recipe, recipe_from_dict
from attar.compression.runs.pipeline import compress
from attar.model.cache import ForwardBatch

BOTH = "attar and transformers read it."
ROUNDED_INPUTS = 2e-2  # of the logit range: an input on the edge between two of 16 codes may fall either way


def output(source: Path, recipe: str) -> FolderOutput:
    return FolderOutput(hf.Checkpoint.open(source), load_recipe(recipe))


@pytest.mark.parametrize(
    ("recipe", "form"),
    [
        ("rtn-w4g128", "W4A16 of integers"),
        ("gptq-w8", "W8A16 of integers"),
        ("rtn-w8a8", "W8A8 of INT8"),
        ("rtn-w8a8-static", "W8A8 of INT8"),
        ("rtn-fp8", "W8A8 of FP8"),
        ("rtn-fp8-block", "FP8 in blocks"),
    ],
)
def test_vllm_is_named_where_its_documentation_names_the_form(recipe: str, form: str, tiny: Path) -> None:
    said = output(tiny, recipe).readers
    assert said == f"{BOTH} vLLM was not tried; its documentation lists {form} in this format."


@pytest.mark.parametrize(
    "recipe",
    [
        "rtn-w4a4", "rtn-w4a8", "rtn-w3g64", "rtn-w4g16", "rtn-w4-tensor", "rtn-w8a8-atensor", "rtn-fp8-weight",
        "rtn-fp8-block-weight", "rtn-nvfp4", "rtn-mxfp4-weight",
    ],
)  # fmt: skip
def test_vllm_is_not_named_for_other_forms(recipe: str, tiny: Path) -> None:
    assert output(tiny, recipe).readers == BOTH


def test_what_notes_say_is_not_said_otherwise(tiny: Path, demo: Path) -> None:
    asymmetric = output(tiny, "rtn-w4g128-asym")
    assert asymmetric.readers == ""
    assert "vLLM" not in " ".join(asymmetric.notes)
    assert output(tiny, "rtn-lut4").readers == "", "a note says that attar alone reads it"
    head = FolderOutput(hf.Checkpoint.open(tiny), recipe_from_dict({"recipe": "rtn-w4g128", "head": "int8"}))
    assert head.readers == BOTH, "vLLM's documentation says nothing of compressed output matrices"


@pytest.mark.parametrize("scheme", ["w4a4", "w4a8"])
def test_codes_in_wide_places_are_told_of(scheme: str, tiny: Path, tmp_path: Path) -> None:
    done = compress(tiny, tmp_path / "out", recipe=f"rtn-{scheme}")
    assert done.bits_per_weight > 8
    (note,) = done.notes
    assert note == f"Codes of {scheme} are stored in 8 bits each, as the format has them beside rounded inputs."
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"format of compressed-tensors. {BOTH} {note}\n" in card
    assert "vLLM" not in card
    ids = torch.arange(1, 32)
    ours = hf.load(tmp_path / "out", torch.float32).forward(ids, ForwardBatch((len(ids),), len(ids)))
    reader, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    with torch.inference_mode():
        theirs = reader(ids[None]).logits[0]
    assert (ours - theirs).abs().max() <= ROUNDED_INPUTS * (theirs.max() - theirs.min())


def test_the_card_of_a_rotated_model_does_not_promise_what_its_note_denies(tiny: Path, tmp_path: Path) -> None:
    compress(tiny, tmp_path / "out", recipe="quarot-w8a8")
    card = (tmp_path / "out" / "README.md").read_text()
    assert "attar reads it. Inputs of some linears are rotated at run time" in card
    assert "\ntags: [attar, compressed-tensors]\n" in card
    assert "attar and transformers" not in card
