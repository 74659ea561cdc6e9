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


_MISTRAL: Mapping[str, Any] = {
    "architectures": ["MistralForCausalLM"], "model_type": "mistral", "rms_norm_eps": 1e-5, "rope_theta": 1000000.0,
    "sliding_window": None,
}  # fmt: skip
_SMOLLM: Mapping[str, Any] = {**_LLAMA, "rms_norm_eps": 1e-5, "rope_theta": 100000.0}

SHAPES: Mapping[str, Mapping[str, Any]] = {
    "llama-2-7b": _sized(_LLAMA, (32000, 4096, 11008, 32, 32, 32, 4096), tied=False),
    "llama-2-13b": _sized(_LLAMA, (32000, 5120, 13824, 40, 40, 40, 4096), tied=False),
    "llama-2-70b": _sized(_LLAMA, (32000, 8192, 28672, 80, 64, 8, 4096), tied=False),
    "llama-3.2-3b": _sized(_LLAMA3, (128256, 3072, 8192, 28, 24, 8, 131072), tied=True, head_dim=128),
    "llama-3.1-70b": _sized(_LLAMA3, (128256, 8192, 28672, 80, 64, 8, 131072), tied=False, head_dim=128),
    "mistral-7b-v0.3": _sized(_MISTRAL, (32768, 4096, 14336, 32, 32, 8, 32768), tied=False),
    "qwen2.5-1.5b": _sized(_QWEN, (151936, 1536, 8960, 28, 12, 2, 32768), tied=True),
    "qwen2.5-7b": _sized(_QWEN, (152064, 3584, 18944, 28, 28, 4, 32768), tied=False),
    "qwen2.5-32b": _sized(_QWEN, (152064, 5120, 27648, 64, 40, 8, 32768), tied=False),
    "qwen2.5-72b": _sized(_QWEN, (152064, 8192, 29568, 80, 64, 8, 32768), tied=False),
    "smollm2-135m": _sized(_SMOLLM, (49152, 576, 1536, 30, 9, 3, 8192), tied=True),
    "llama-3.2-1b": _sized(_LLAMA3, (128256, 2048, 8192, 16, 32, 8, 131072), tied=True, head_dim=64),
    "llama-3.1-8b": _sized(_LLAMA3, (128256, 4096, 14336, 32, 32, 8, 131072), tied=False, head_dim=128),
    "qwen2.5-0.5b": _sized(_QWEN, (151936, 896, 4864, 24, 14, 2, 32768), tied=True),
    "tiny": _sized(_LLAMA, (2048, 256, 512, 2, 4, 2, 4096), tied=True),
}


def shape(name: str) -> ModelConfig:
    """Return the configuration of a shape. Raises ValueError on one that is not in the table."""
    if name not in SHAPES:
        raise UserError(
            "name_unknown", f"unknown shape {name!r}: known are {', '.join(sorted(SHAPES))}{nearest(name, SHAPES)}"
        )
    return read_config(dict(SHAPES[name]))
