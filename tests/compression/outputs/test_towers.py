"""Compressed vision-language models: what stays as it is, and that transformers reads them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers

import attar
from attar.checkpoints.folder import Folder
from attar.checkpoints.sources import hf
from attar.model.cache import ForwardBatch
from tests.errors import user_error
from tests.model.vision import tiny

EQUAL = 1e-4


@pytest.mark.parametrize("kind", ["smolvlm", "llava", "qwen2_5_vl", "gemma3"])
def test_transformers_reads_the_output_with_the_tower_as_it_was(kind: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    attar.compress(str(tiny.folder(kind)), str(out), recipe="rtn-w4g32")
    ids = torch.arange(3, 40)
    with torch.inference_mode():
        theirs = transformers.AutoModelForImageTextToText.from_pretrained(out)(input_ids=ids[None]).logits[0]
    ours = hf.load(out).forward(ids, ForwardBatch((len(ids),), len(ids)))
    assert (ours - theirs).abs().max() <= EQUAL
    before, after = Folder(tiny.folder(kind)), Folder(out)
    tower = [name for name in before.names() if "vis" in name]
    assert tower
    assert all(torch.equal(before.read(name), after.read(name)) for name in tower)
    copied = json.loads((out / "receipt.json").read_text())["copied"]
    assert set(copied.values()) == {"float32"}


def test_rotations_are_refused(tmp_path: Path) -> None:
    with user_error("feature_unsupported", "LlavaForConditionalGeneration"):
        attar.compress(str(tiny.folder("llava")), str(tmp_path / "out"), recipe="rotate+rtn-w4g32")
