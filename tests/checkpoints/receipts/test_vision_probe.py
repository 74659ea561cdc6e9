"""The probe of a vision tower: sound copies replay it, changed ones do not."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from attar.checkpoints.receipts import vision_probe
from attar.checkpoints.receipts.receipt import read_receipt
from attar.checkpoints.receipts.verify import verify
from attar.compression.request.request import CompressionRequest
from attar.compression.runs.pipeline import compress_request
from attar.kernels import dispatch
from attar.model.vision.model import VisionModel
from tests.errors import user_error
from tests.model.vision import seen, tiny


def _compressed(kind: str, scheme: str, out: Path) -> Path:
    compress_request(CompressionRequest(tiny.folder(kind), out, recipe="rtn-w4g32", vision=scheme))
    return out


def _alter(out: Path, part: str, by: float) -> None:
    path = out / "model.safetensors"
    tensors = load_file(path)
    name = next(name for name in tensors if part in name)
    changed = tensors[name].float()
    changed.view(-1)[:16] += by
    save_file(tensors | {name: changed.to(tensors[name].dtype)}, path, metadata={"format": "pt"})


@pytest.mark.parametrize("kind", ["smolvlm", "qwen2_5_vl"])
@pytest.mark.parametrize("scheme", ["16bit", "w8", "w8a8"])
def test_a_sound_copy_replays_it_and_a_changed_tower_does_not(kind: str, scheme: str, tmp_path: Path) -> None:
    out = _compressed(kind, scheme, tmp_path / "out")
    verdict = verify(out)
    assert verdict.ok, verdict.detail
    assert "vision tower" in verdict.detail
    part = {"smolvlm": "vision_model.encoder.layers.1.mlp.fc1.bias", "qwen2_5_vl": "visual.blocks.1.attn.proj.bias"}
    _alter(out, part[kind], 3.0)
    changed = verify(out, hashes=False)
    assert not changed.ok
    assert changed.first_divergence == "vision tower"


def test_the_receipt_has_the_error_of_a_quantized_tower(tmp_path: Path) -> None:
    found = {}
    for scheme in ("16bit", "w8", "w8a8"):
        receipt = read_receipt(_compressed("llava", scheme, tmp_path / scheme))
        assert receipt is not None
        found[scheme] = receipt.value["vision"]
        assert found[scheme]["scheme"] == scheme
    assert "relative_error" not in found["16bit"]
    assert 0 < found["w8"]["relative_error"] < found["w8a8"]["relative_error"] < 0.1
    assert found["w8"]["bytes"] > 0


@pytest.mark.parametrize(("scheme", "encoded"), [("16bit", 2), ("w8a8", 1 + len(vision_probe.MOVES) + 1 + 1)])
def test_each_tower_encodes_an_image_once(
    scheme: str, encoded: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The towers are the output's, its copies of moved pixels, and of a quantized one the source's and the native."""
    if dispatch.store("int8") is None:
        encoded -= scheme != "16bit"
    seen_by, encode = list[VisionModel](), VisionModel.encode

    def counted(vision: VisionModel, image: Any) -> torch.Tensor:
        seen_by.append(vision)
        return encode(vision, image)

    monkeypatch.setattr(VisionModel, "encode", counted)
    out = _compressed("smolvlm", scheme, tmp_path / "out")
    assert len(seen_by) == len({id(each) for each in seen_by}) == encoded
    seen_by.clear()
    assert verify(out).ok
    assert len(seen_by) == 1


def test_images_are_the_same_everywhere_and_of_any_tower() -> None:
    for kind in ("smolvlm", "llava_next", "qwen2_vl", "gemma3"):
        vision = seen.vision(kind)
        image = vision_probe.generated(vision)
        assert image == vision_probe.generated(vision)
        assert len(vision.encode(image)) == image.rows
    pixels = torch.frombuffer(bytearray(image.tiles), dtype=torch.uint8).float()
    assert pixels.std() > 50


def test_errors_are_those_of_a_loop() -> None:
    rows, exact = torch.randn(5, 8), torch.randn(5, 8)
    each = [float((a - b).norm() / b.norm()) for a, b in zip(rows, exact, strict=True)]
    assert vision_probe.relative_error(rows, exact) == pytest.approx(sum(each) / 5)


def test_damaged_probes_and_those_of_other_towers_are_refused() -> None:
    vision = seen.vision("smolvlm")
    image = vision_probe.generated(vision)
    probe = vision_probe.measure(vision, image, vision.encode(image), None)
    assert vision_probe.replay(probe, vision, "x") == (True, "an image replayed within the noise")
    damages: list[Any] = [None, {}, {"rows": [], "noise": {}}, probe | {"rows": [[1.0]]}, probe | {"noise": 1}]
    text = copy.deepcopy(probe)
    text["rows"][0][0] = "1"
    for damaged in (*damages, text, json.loads(json.dumps(probe)) | {"noise": {"exact": True}}):
        with user_error("receipt_invalid"):
            vision_probe.replay(damaged, vision, "x")
    with user_error("receipt_invalid"):
        vision_probe.replay(probe | {"rows": probe["rows"][:3]}, vision, "x")
    assert vision_probe.replay(probe | {"noise": {"exact": None}}, vision, "x")[0] is None
