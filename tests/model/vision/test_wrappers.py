"""The language models within checkpoints of vision-language models, against transformers' logits for text."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from attar.checkpoints.sources import hf
from attar.model.cache import ForwardBatch
from attar.model.families import read_config
from attar.model.vision.wrappers import REFUSED, WRAPPERS
from tests.errors import user_error
from tests.model.vision import tiny

EQUAL = 1e-4  # max |difference| of logits, float32


def _theirs(kind: str, ids: Tensor) -> Tensor:
    with torch.inference_mode():
        return tiny.model(kind)(input_ids=ids[None], use_cache=False).logits[0]


@pytest.mark.parametrize("old_names", [True, False])
@pytest.mark.parametrize("kind", tiny.MODELS)
def test_logits_for_text_equal_transformers(kind: str, old_names: bool) -> None:
    ids = torch.randint(3, 110, (40,), generator=torch.Generator().manual_seed(2))
    decoder = hf.load(tiny.folder(kind, old_names))
    ours, theirs = decoder.forward(ids, ForwardBatch((40,), 40)), _theirs(kind, ids)
    assert theirs.std() >= 0.5
    assert (ours - theirs).abs().max() <= EQUAL


def _changed(kind: str, tmp_path: Path, **changes: Any) -> Path:
    shutil.copytree(tiny.folder(kind), tmp_path / kind)
    path = tmp_path / kind / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return tmp_path / kind


def _raw(kind: str) -> dict[str, Any]:
    return json.loads((tiny.folder(kind) / "config.json").read_text())  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen2_5_vl"])
def test_the_flat_config_of_published_files_is_the_nested_one(kind: str) -> None:
    raw = _raw(kind)
    text = {k: v for k, v in raw.pop("text_config").items() if k not in ("model_type", "rope_parameters")}
    flat = {**text, **raw, "rope_scaling": tiny.MROPE["rope_scaling"], "rope_theta": tiny.MROPE["rope_theta"]}
    assert read_config(flat) == read_config(_raw(kind))
    assert read_config(flat).ropes[0].sections == (2, 3, 3)  # type: ignore[union-attr]


def test_defaults_of_llava_are_those_of_the_text_model() -> None:
    """LLaVA-1.5's published text_config states no sizes."""
    text = {"model_type": "llama", "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "vocab_size": 32064}
    config = read_config({"architectures": ["LlavaForConditionalGeneration"], "text_config": text})
    assert (config.hidden, config.intermediate, config.layers, config.vocab_size) == (4096, 11008, 32, 32064)


@pytest.mark.parametrize("kind, tied", [("llava", True), ("qwen2_vl", True), ("idefics3", False)])
def test_tying_within_the_text_config(kind: str, tied: bool) -> None:
    raw = _raw(kind)
    raw["text_config"]["tie_word_embeddings"] = True
    assert read_config(raw).tied is tied


def test_every_architecture_has_a_model_type_and_a_case() -> None:
    found = {_raw(kind)["architectures"][0] for kind in tiny.MODELS}
    found.add("LlavaDownsampleForConditionalGeneration")  # attar's own: tests/checkpoints/convert/test_vila.py
    assert found == WRAPPERS.keys() | {"Gemma3ForConditionalGeneration"}
    for kind in tiny.MODELS:
        raw = _raw(kind)
        architecture = raw.pop("architectures")[0]
        assert read_config(raw).architecture == architecture


def _sections(*sections: int) -> dict[str, Any]:
    return {**_raw("qwen2_vl")["text_config"], "rope_parameters": {"rope_type": "mrope", "mrope_section": sections}}


@pytest.mark.parametrize(
    "kind, changes, code",
    [
        *(("llava", {"architectures": [name]}, "architecture_unsupported") for name in REFUSED),
        ("llava", {"text_config": {"model_type": "gemma"}}, "feature_unsupported"),
        ("llava", {"text_config": 3}, "config_invalid"),
        ("qwen2_vl", {"text_config": _sections(2, 3)}, "config_invalid"),
        ("qwen2_vl", {"text_config": _sections(2, 3, 4)}, "config_invalid"),
        ("qwen2_vl", {"text_config": _sections()}, "config_invalid"),
    ],
)
def test_other_configs_are_refused(kind: str, changes: dict[str, Any], code: Any) -> None:
    with user_error(code):
        read_config(_raw(kind) | changes)


def test_a_missing_tensor_of_the_text_is_named(tmp_path: Path) -> None:
    folder = _changed("idefics3", tmp_path, text_config={**_raw("idefics3")["text_config"], "num_hidden_layers": 3})
    with user_error("checkpoint_incomplete"):
        hf.load(folder)
