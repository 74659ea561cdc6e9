"""Shapes of published models, for measuring speed without their weights. Torch-free.

Each follows its config.json, as far as speed depends on it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attar.errors import UserError
from attar.model.config import ModelConfig
from attar.model.families import SIZES, read_config
from attar.model.fields import nearest

_LLAMA: Mapping[str, Any] = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
_LLAMA3: Mapping[str, Any] = {
    **_LLAMA,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}
_QWEN: Mapping[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "rms_norm_eps": 1e-6, "rope_theta": 1000000.0
}  # fmt: skip


def _sized(base: Mapping[str, Any], sizes: Sequence[int], tied: bool, **more: int) -> Mapping[str, Any]:
    return {**base, **dict(zip(SIZES, sizes, strict=True)), **more, "tie_word_embeddings": tied}


SHAPES: Mapping[str, Mapping[str, Any]] = {
    "llama-3.2-1b": _sized(_LLAMA3, (128256, 2048, 8192, 16, 32, 8, 131072), tied=True, head_dim=64),
    "llama-3.1-8b": _sized(_LLAMA3, (128256, 4096, 14336, 32, 32, 8, 131072), tied=False, head_dim=128),
    "qwen2.5-0.5b": _sized(_QWEN, (151936, 896, 4864, 24, 14, 2, 32768), tied=True),
    "tiny": _sized(_LLAMA, (2048, 256, 512, 2, 4, 2, 4096), tied=True),
}


def shape(name: str) -> ModelConfig:
    """Return the configuration of a shape. Raises ValueError on one that is not in the table."""
    if name not in SHAPES:
        raise UserError("name_unknown", f"unknown shape {name!r}: known are {', '.join(SHAPES)}{nearest(name, SHAPES)}")
    return read_config(dict(SHAPES[name]))
