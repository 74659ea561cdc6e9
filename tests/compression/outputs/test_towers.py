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
from attar.checkpoints.sources.vision import load_vision
from attar.compression.request.request import CompressionRequest
from attar.compression.runs.pipeline import compress_request
from attar.formats.packed import PackedTensor
from attar.model.cache import ForwardBatch
from attar.model.vision.assembly import linears
from tests.errors import user_error
from tests.model.vision import seen, tiny

EQUAL = 1e-4
NEAR = 0.05  # of the norm
CROSSED = 0.015  # of the norm: inputs next to a border of their grid, which the last place sends to either side

TOGETHER = 0.1  # of the norm: compressed-tensors 0.20 rounds rows without a batch, those of Qwen's towers, by one scale


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


@pytest.mark.parametrize("scheme", ["w8", "w8a8"])
@pytest.mark.parametrize("kind", ["smolvlm", "llava", "qwen2_5_vl", "gemma3"])
def test_a_quantized_tower_is_near_the_original_and_equal_to_its_dequantized_weights(
    kind: str, scheme: str, tmp_path: Path
) -> None:
    """Weights alone: the rows are those of a dense tower of the decoded weights. With int8 inputs they are near."""
    out = tmp_path / "out"
    compress_request(CompressionRequest(tiny.folder(kind), out, recipe="rtn-w4g32", vision=scheme))
    found, dense = load_vision(Folder(out), torch.float32), load_vision(Folder(out), torch.float32)
    assert found is not None
    assert dense is not None
    packed = [each for each in found.linears() if isinstance(each.weight, PackedTensor)]
    assert {each.weight.scheme.name for each in packed if isinstance(each.weight, PackedTensor)} == {scheme}
    config = found.config
    assert len(packed) == len(list(linears(config)))
    for each in dense.linears():
        if isinstance(each.weight, PackedTensor):
            each.weight = each.weight.dequantize()
    for picture in seen.pictures(kind):
        rows, decoded, exact = found.encode(picture), dense.encode(picture), seen.vision(kind).encode(picture)
        assert (rows - decoded).norm() <= (NEAR if scheme == "w8a8" else EQUAL) * decoded.norm()
        assert 0 < (rows - exact).norm() <= NEAR * exact.norm()
    about = json.loads((out / "receipt.json").read_text())
    assert about["vision"]["scheme"] == scheme
    assert about["vision"]["linears"] >= len(packed)


@pytest.mark.parametrize("kind", ["smolvlm", "llava", "qwen2_5_vl"])
@pytest.mark.parametrize("scheme", ["w8", "w8a8"])
@pytest.mark.parametrize("recipe", ["rtn-w4g32", "rtn-w8a8"])
def test_transformers_reads_a_quantized_tower(kind: str, scheme: str, recipe: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    compress_request(CompressionRequest(tiny.folder(kind), out, recipe=recipe, vision=scheme))
    model = transformers.AutoModelForImageTextToText.from_pretrained(out).eval()
    with torch.inference_mode():
        model(input_ids=torch.arange(3, 20)[None])  # weights are decoded before the whole model's first call
    found = load_vision(Folder(out), torch.float32)
    assert found is not None
    for picture in seen.pictures(kind)[:1]:
        ours, theirs = found.encode(picture), seen.features(kind, picture, model)
        near = EQUAL if scheme == "w8" else TOGETHER if kind.startswith("qwen") else CROSSED
        assert (ours - theirs).norm() <= near * theirs.norm()


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
