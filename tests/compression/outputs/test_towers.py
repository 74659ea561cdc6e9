"""Compressed vision-language models: what stays as it is, and that transformers reads them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import attar
from attar.checkpoints.convert.run import convert
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


def test_conversions_name_what_stays_uncompressed(tmp_path: Path) -> None:
    source = tiny.folder("llava")
    (tmp_path / "half").mkdir()
    halves = {name: tensor.half() for name, tensor in load_file(source / "model.safetensors").items()}
    save_file(halves, tmp_path / "half" / "model.safetensors")
    (tmp_path / "half" / "config.json").write_text((source / "config.json").read_text())
    attar.compress(str(tmp_path / "half"), str(tmp_path / "first"), recipe="rtn-w4g32")
    convert(tmp_path / "first", tmp_path / "gptq", to="gptq")
    convert(tmp_path / "gptq", tmp_path / "back", to="compressed-tensors")
    one, two = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("first", "back"))
    tower = {name for name in one["quantization_config"]["ignore"] if name.startswith("re:")}
    assert len(tower) == 2
    assert tower <= set(two["quantization_config"]["ignore"])
