"""Compressed vision-language models: what stays as it is, and that transformers reads them."""

from __future__ import annotations

import json
from dataclasses import replace
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
from attar.kernels import dispatch, ops
from attar.kernels.native.linear import PackedWeight
from attar.kernels.native.store import CpuWeights
from attar.model.cache import ForwardBatch
from attar.model.vision.tensors import linears
from tests.errors import user_error
from tests.model.vision import seen, tiny

EQUAL = 1e-4
NEAR = 0.05  # of the norm; 0.03 are reached by moving pixels in the last place, which sends inputs over borders

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
        near = EQUAL if scheme == "w8" else TOGETHER if kind.startswith("qwen") else NEAR
        assert (ours - theirs).norm() <= near * theirs.norm()


@pytest.mark.parametrize("kind", ["smolvlm", "llava_next", "qwen2_5_vl"])
@pytest.mark.parametrize("scheme", ["w8", "w8a8"])
def test_native_kernels_run_a_quantized_tower(kind: str, scheme: str, tmp_path: Path) -> None:
    store = dispatch.store("exact")
    if not isinstance(store, CpuWeights):
        pytest.skip("the native kernels are off or do not load")
    compress_request(CompressionRequest(tiny.folder(kind), tmp_path / "out", recipe="rtn-w4g32", vision=scheme))
    plain = load_vision(Folder(tmp_path / "out"), torch.float32)
    ours = load_vision(Folder(tmp_path / "out"), torch.float32, store)
    assert ours is not None
    assert plain is not None
    assert not store.refused
    forms = [each.weight.scheme for each in ours.linears() if isinstance(each.weight, PackedWeight)]
    assert [form.name for form in forms if form is not None] == [scheme] * len(list(linears(ours.config)))
    for one, other in zip(ours.linears(), plain.linears(), strict=True):
        x = torch.randn(70, one.shape[1])
        theirs = ops.linear(x, (other,))
        assert (ops.linear(x, (one,)) - theirs).norm() <= EQUAL * theirs.norm()
    for picture in seen.pictures(kind):
        rows, theirs = ours.encode(picture), plain.encode(picture)
        assert (rows - theirs).norm() <= (NEAR if scheme == "w8a8" else EQUAL) * theirs.norm()
        assert torch.equal(ours.encode(picture), rows)


def test_what_cannot_have_a_quantized_tower_is_refused(demo: Path, tmp_path: Path) -> None:
    for source, recipe, code in (
        (demo, "rtn-w4g32", "feature_unsupported"),
        (tiny.folder("llava"), "rtn-llm-int8", "option_conflict"),
        (tiny.folder("llava"), "rtn-q4_0", "option_conflict"),
    ):
        with user_error(code, "--vision"):
            compress_request(CompressionRequest(source, tmp_path / "out", recipe=recipe, vision="w8a8"))
    assert not (tmp_path / "out").exists()


def test_a_tower_with_a_nan_is_named(tmp_path: Path) -> None:
    name = "visual.blocks.1.mlp.fc2.weight"
    source = tiny.folder("qwen2_vl")
    tensors = load_file(source / "model.safetensors")
    tensors[name][0, 0] = float("nan")
    (tmp_path / "in").mkdir()
    save_file(tensors, tmp_path / "in" / "model.safetensors")
    (tmp_path / "in" / "config.json").write_text((source / "config.json").read_text())
    with user_error("not_finite", name.removesuffix(".weight")):
        compress_request(CompressionRequest(tmp_path / "in", tmp_path / "out", recipe="rtn-w4g32", vision="w8"))
    assert not (tmp_path / "out").exists()
    done = compress_request(CompressionRequest(tmp_path / "in", tmp_path / "plain", recipe="rtn-w4g32"))
    assert done.vision is None
    assert any("NaN" in sentence for sentence in done.warnings)


def test_a_quantized_tower_is_neither_converted_nor_decoded(tmp_path: Path) -> None:
    out = tmp_path / "out"
    compress_request(CompressionRequest(tiny.folder("smolvlm"), out, recipe="rtn-w4g32", vision="w8"))
    for to in ("gptq", "awq", "dense"):
        with user_error("quantization_unsupported", "connector"):
            convert(out, tmp_path / "other", to=to)
    with user_error("quantization_unsupported", "connector"):
        compress_request(CompressionRequest(out, tmp_path / "other", recipe="rtn-w8", requantize=True))


def test_an_output_with_another_tower_does_not_resume(tmp_path: Path) -> None:
    class Killed(Exception):
        pass

    def kill(stage: str, done: int, total: int) -> None:
        if stage == "blocks" and done == 1:
            raise Killed

    request = CompressionRequest(tiny.folder("llava"), tmp_path / "out", recipe="rtn-w4g32", vision="w8a8")
    with pytest.raises(Killed):
        compress_request(request, kill)
    with user_error("resume_mismatch"):
        compress_request(replace(request, vision="w8"))
    compress_request(request)
    again = replace(request, dst=tmp_path / "again")
    compress_request(again)
    one, two = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("out", "again"))
    assert one == two


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
