"""Transformers' own image processors and processors, with small settings, as oracles of ours."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

VISION = {"model_type": "siglip_vision_model", "image_size": 32, "patch_size": 8}
CLIP = {"model_type": "clip_vision_model", "image_size": 32, "patch_size": 8}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "idefics3": (
        "idefics3.image_processing_pil_idefics3.Idefics3ImageProcessorPil",
        {"size": {"longest_edge": 128}, "max_image_size": {"longest_edge": 32}},
        {"vision_config": VISION, "scale_factor": 2, "image_token_id": 5},
    ),
    "smolvlm": (
        "smolvlm.image_processing_pil_smolvlm.SmolVLMImageProcessorPil",
        {"size": {"longest_edge": 96}, "max_image_size": {"longest_edge": 64}},
        {"vision_config": {**VISION, "image_size": 64}, "scale_factor": 2, "image_token_id": 5},
    ),
    "smolvlm_unsplit": (
        "smolvlm.image_processing_pil_smolvlm.SmolVLMImageProcessorPil",
        {"size": {"longest_edge": 96}, "max_image_size": {"longest_edge": 32}, "do_image_splitting": False},
        {"vision_config": VISION, "scale_factor": 2, "image_token_id": 5},
    ),
    "llava": (
        "clip.image_processing_pil_clip.CLIPImageProcessorPil",
        {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}, "resample": 3},
        {"vision_config": CLIP, "image_token_index": 5},
    ),
    "llava_padded": (
        "llava.image_processing_pil_llava.LlavaImageProcessorPil",
        {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}, "do_pad": True},
        {"vision_config": CLIP, "image_token_index": 5},
    ),
    "llava_siglip": (
        "siglip.image_processing_pil_siglip.SiglipImageProcessorPil",
        {"size": {"height": 32, "width": 40}, "resample": 3},
        {"vision_config": VISION, "image_token_index": 5, "vision_feature_select_strategy": "full"},
    ),
    "llava_next": (
        "llava_next.image_processing_pil_llava_next.LlavaNextImageProcessorPil",
        {
            "size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32},
            "image_grid_pinpoints": [[32, 64], [64, 32], [64, 64], [96, 32], [32, 96]],
        },
        {"vision_config": CLIP, "image_token_index": 5},
    ),
    "qwen2_vl": (
        "qwen2_vl.image_processing_pil_qwen2_vl.Qwen2VLImageProcessorPil",
        {"min_pixels": 1024, "max_pixels": 8192, "patch_size": 8, "merge_size": 2, "temporal_patch_size": 2},
        {"vision_config": {"patch_size": 8}, "image_token_id": 5},
    ),
    "gemma3": (
        "gemma3.image_processing_pil_gemma3.Gemma3ImageProcessorPil",
        {"size": {"height": 48, "width": 48}},
        {"vision_config": VISION, "image_token_index": 5, "mm_tokens_per_image": 4, "boi_token_index": 6,
         "eoi_token_index": 7},
    ),
}  # fmt: skip
"""By case: the oracle's class, its settings, and a checkpoint's `config.json`."""


def model_type(case: str) -> str:
    """Return the `model_type` of a case."""
    known = ("idefics3", "smolvlm", "llava_next", "llava", "qwen2_vl", "gemma3")
    return next(each for each in known if case.startswith(each))


def processor(case: str) -> Any:
    """Return transformers' image processor of a case."""
    path, settings, _ = CASES[case]
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(f"transformers.models.{module}"), name)(**settings)


def write(case: str, folder: Path, **config: Any) -> Path:
    """Write the settings of a case as a checkpoint's files; return the folder."""
    _, settings, own = CASES[case]
    put(folder / "config.json", {"model_type": model_type(case), **own, **config})
    put(folder / "preprocessor_config.json", settings)
    return folder


def put(path: Path, value: Mapping[str, Any]) -> None:
    """Write JSON."""
    path.write_text(json.dumps(value))


def tiles(case: str, image: Any) -> np.ndarray[Any, Any]:
    """Return the oracle's pixels of one image before they are rescaled, as [T, H, W, 3] in tiles."""
    made = processor(case)(images=image, do_rescale=False, do_normalize=False, return_tensors=None)
    pixels = made["pixel_values"]
    if case == "qwen2_vl":
        return _whole(np.asarray(pixels), made["image_grid_thw"][0])
    pixels = np.asarray(pixels[0] if case.startswith(("idefics3", "smolvlm", "llava_next")) else pixels)
    return np.moveaxis(pixels, 1, -1)


def _whole(patches: np.ndarray[Any, Any], grid: Any, patch: int = 8, merge: int = 2) -> np.ndarray[Any, Any]:
    """Return Qwen2-VL's patches as the image that they were cut from."""
    _, high, wide = (int(each) for each in grid)
    shape = (high // merge, wide // merge, merge, merge, 3, 2, patch, patch)
    made = patches.reshape(shape)[:, :, :, :, :, 0].transpose(0, 2, 5, 1, 3, 6, 4)
    return made.reshape(1, high * patch, wide * patch, 3)
