"""Configs of vision towers, and towers whose tensors are missing, of another shape or compressed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from attar.checkpoints.folder import Folder
from attar.checkpoints.sources import vision as vision_source
from attar.checkpoints.sources.vision import load_vision
from attar.kernels import dispatch
from attar.kernels.native.store import CpuWeights
from attar.model.vision.config import CLIP_MEAN, VisionConfig, read_vision
from attar.model.vision.model import VisionModel
from attar.model.vision.tensors import tensors
from tests.errors import user_error
from tests.model.vision import seen, tiny


def _raw(kind: str) -> dict[str, Any]:
    return json.loads((tiny.folder(kind) / "config.json").read_text())  # type: ignore[no-any-return]


def _read(kind: str, **vision: Any) -> VisionConfig:
    raw = _raw(kind)
    found = read_vision(raw | {"vision_config": raw["vision_config"] | vision}, 64)
    assert found is not None
    return found


def test_published_configs() -> None:
    """The sizes that the published files state, or leave to defaults."""
    qwen = {
        "architectures": ["Qwen2VLForConditionalGeneration"], "image_token_id": 151655, "vision_config": {
            "depth": 32, "embed_dim": 1280, "mlp_ratio": 4, "num_heads": 16, "in_chans": 3, "hidden_size": 1536,
            "patch_size": 14, "spatial_merge_size": 2, "spatial_patch_size": 14, "temporal_patch_size": 2,
        },
    }  # fmt: skip
    found = read_vision(qwen, 1536)
    assert found is not None
    assert (found.hidden, found.intermediate, found.layers, found.unit, found.frames) == (1280, 5120, 32, 28, 2)
    llava = {
        "architectures": ["LlavaForConditionalGeneration"], "vision_feature_layer": -2, "vision_config": {
            "hidden_size": 1024, "image_size": 336, "intermediate_size": 4096, "model_type": "clip_vision_model",
            "num_attention_heads": 16, "num_hidden_layers": 24, "patch_size": 14, "projection_dim": 768,
        },
    }  # fmt: skip
    found = read_vision(llava, 4096)
    assert found is not None
    assert (found.layers, found.activation, found.norm_eps, found.image_token) == (23, "quick_gelu", 1e-5, 32000)
    assert found.mean == CLIP_MEAN
    gemma = {
        "architectures": ["Gemma3ForConditionalGeneration"], "mm_tokens_per_image": 256, "vision_config": {
            "hidden_size": 1152, "image_size": 896, "intermediate_size": 4304, "model_type": "siglip_vision_model",
            "num_attention_heads": 16, "num_hidden_layers": 27, "patch_size": 14, "vision_use_head": False,
        },
    }  # fmt: skip
    found = read_vision(gemma, 2560)
    assert found is not None
    assert (found.factor, found.side, found.image_token, found.bidirectional) == (4, 64, 262144, True)


def test_pixels_are_normalised_as_the_preprocessor_says() -> None:
    given = {"image_mean": [0.0, 0.25, 0.5], "image_std": [0.5, 1.0, 2.0], "rescale_factor": 0.01}
    found = read_vision(_raw("llava"), 64, given)
    assert found is not None
    assert (found.mean, found.std, found.rescale) == ((0.0, 0.25, 0.5), (0.5, 1.0, 2.0), 0.01)
    found = read_vision(_raw("llava"), 64, {"do_normalize": False})
    assert found is not None
    assert (found.mean, found.std) == ((0.0,) * 3, (1.0,) * 3)


def test_models_without_a_tower_have_none() -> None:
    assert read_vision({"architectures": ["LlamaForCausalLM"]}, 64) is None
    assert read_vision({"architectures": ["Gemma3ForConditionalGeneration"]}, 64) is None


@pytest.mark.parametrize(
    "kind, changes, code",
    [
        ("smolvlm", {"num_attention_heads": 3}, "config_invalid"),
        ("smolvlm", {"hidden_size": 1 << 30}, "config_invalid"),
        ("smolvlm", {"image_size": 33}, "config_invalid"),
        ("smolvlm", {"patch_size": [4, 4]}, "config_invalid"),
        ("smolvlm", {"hidden_act": "mish"}, "feature_unsupported"),
        ("smolvlm", {"num_channels": 4}, "feature_unsupported"),
        ("llava", {"model_type": "pixtral"}, "feature_unsupported"),
        ("qwen2_vl", {"hidden_size": 65}, "config_invalid"),
        ("qwen2_5_vl", {"window_size": 3}, "config_invalid"),
        ("qwen2_5_vl", {"out_hidden_size": 65}, "config_invalid"),
        ("qwen2_5_vl", {"fullatt_block_indexes": "all"}, "config_invalid"),
        ("gemma3", {"image_size": 36}, "config_invalid"),
    ],
)
def test_other_towers_are_refused(kind: str, changes: dict[str, Any], code: Any) -> None:
    with user_error(code):
        _read(kind, **changes)


def _changed(kind: str, at: Path, names: dict[str, torch.Tensor | None]) -> Folder:
    source = tiny.folder(kind)
    tensors = load_file(source / "model.safetensors")
    for name, tensor in names.items():
        tensors.pop(name)
        tensors |= {} if tensor is None else {name: tensor}
    at.mkdir()
    save_file(tensors, at / "model.safetensors")
    (at / "config.json").write_text((source / "config.json").read_text())
    return Folder(at)


def test_missing_tensors_are_named(tmp_path: Path) -> None:
    first, second = "visual.blocks.1.mlp.fc2.bias", "visual.merger.mlp.0.weight"
    with user_error("checkpoint_incomplete", first, second):
        load_vision(_changed("qwen2_vl", tmp_path / "out", {first: None, second: None}), torch.float32)


def test_tensors_of_another_shape_or_compressed_are_named(tmp_path: Path) -> None:
    name = "visual.blocks.1.mlp.fc2.weight"
    with user_error("checkpoint_mismatch", name):
        load_vision(_changed("qwen2_vl", tmp_path / "a", {name: torch.zeros(32, 127)}), torch.float32)
    with user_error("quantization_unsupported", name):
        load_vision(_changed("qwen2_vl", tmp_path / "b", {name: torch.zeros(32, 128, dtype=torch.int8)}), torch.float32)


@pytest.mark.parametrize("kind", tiny.MODELS)
def test_every_listed_tensor_is_read_once(kind: str) -> None:
    """Nothing of the tower is read that is not listed, so every size is checked first."""
    folder = Folder(tiny.folder(kind))
    read, seen_names = folder.read, []
    folder.read = lambda name, out=None: seen_names.append(name) or read(name, out)  # type: ignore[method-assign,func-returns-value]
    vision = load_vision(folder, torch.float32)
    assert vision is not None
    assert len(seen_names) == len(set(seen_names)) == len(list(tensors(vision.config)))


def _halves(kind: str, at: Path) -> Folder:
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(tiny.folder(kind) / "model.safetensors").items()}
    save_file(tensors, at / "model.safetensors")
    (at / "config.json").write_text((tiny.folder(kind) / "config.json").read_text())
    return Folder(at)


@pytest.mark.parametrize("kind", ["smolvlm", "qwen2_5_vl", "gemma3"])
def test_native_kernels_keep_the_stored_dtype_and_give_the_same_rows(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = dispatch.store()
    if store is None:
        pytest.skip("the native kernels are off or do not load")
    monkeypatch.setattr(vision_source, "faster", lambda: False)
    folder = _halves(kind, tmp_path)
    ours, plain = load_vision(folder, torch.float32, store), load_vision(folder, torch.float32)
    assert isinstance(store, CpuWeights)
    assert ours is not None
    assert plain is not None
    assert not store.refused
    assert ours.nbytes < 0.75 * plain.nbytes
    for picture in seen.pictures(kind):
        assert (ours.encode(picture) - plain.encode(picture)).abs().max() <= 1e-3


def _near(vision: VisionModel, kind: str, exact: VisionModel) -> None:
    for picture in seen.pictures(kind):
        rows, theirs = vision.encode(picture), exact.encode(picture)
        assert rows.dtype == vision.rows_dtype
        assert (rows - theirs).norm() <= 0.05 * theirs.norm()
        assert torch.equal(vision.encode(picture), rows)


def test_tiles_compute_a_tower_in_bfloat16(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = dispatch.store()
    if store is None:
        pytest.skip("the native kernels are off or do not load")
    monkeypatch.setattr(vision_source, "faster", lambda: True)
    found = load_vision(_halves("qwen2_5_vl", tmp_path), torch.float32, store)
    assert found is not None
    assert (found.dtype, found.rows_dtype) == (torch.bfloat16, torch.float32)
    _near(found, "qwen2_5_vl", seen.vision("qwen2_5_vl"))
    wide = load_vision(Folder(tiny.folder("smolvlm")), torch.float32, store)
    assert wide is not None
    assert wide.dtype == torch.float32, "what is stored in float32 stays exact"


@pytest.mark.parametrize("kind", ["llava_next", "qwen2_5_vl", "gemma3"])
def test_a_tower_in_bfloat16_takes_half_and_gives_nearly_the_same_rows(kind: str) -> None:
    ours, exact = load_vision(Folder(tiny.folder(kind)), torch.bfloat16), seen.vision(kind)
    assert ours is not None
    assert 2 * ours.nbytes == exact.nbytes
    _near(ours, kind, exact)
