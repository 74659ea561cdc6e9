"""Rotary angles against transformers' own, at the sizes of real models."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from attar.model.config import Rope
from attar.model.families import read_config
from attar.model.rope import frequencies, rotation

RELATIVE = 1e-6  # float32 rounding of frequencies that span five decades
CONTEXT, ORIGINAL = 131072, 8192

KINDS: list[dict[str, Any]] = [
    {"rope_type": "linear", "factor": 8.0},
    {"rope_type": "dynamic", "factor": 4.0},
    {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 0.5, "high_freq_factor": 16.0},
    {"rope_type": "yarn", "factor": 4.0},
    {"rope_type": "yarn", "factor": 40.0, "mscale": 0.707, "mscale_all_dim": 1.2, "truncate": False},
    {"rope_type": "yarn", "factor": 16.0, "beta_fast": 64, "beta_slow": 2, "attention_factor": 1.5},
    {"rope_type": "longrope", "short_factor": [1.5] * 32, "long_factor": [1.0 + i for i in range(32)]},
    {"rope_type": "longrope", "factor": 2.0, "short_factor": [1.5] * 32, "long_factor": [2.5] * 32},
]


@pytest.mark.parametrize("length", [100, ORIGINAL, ORIGINAL + 1, CONTEXT, CONTEXT + 1, 3 * CONTEXT])
@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k["rope_type"])
def test_frequencies_equal_transformers(kind: dict[str, Any], length: int) -> None:
    parameters = {**kind, "rope_theta": 500000.0}
    if kind["rope_type"] in ("llama3", "yarn", "longrope"):
        parameters["original_max_position_embeddings"] = ORIGINAL
    common = {"hidden_size": 2048, "num_attention_heads": 32, "max_position_embeddings": CONTEXT}
    theirs = LlamaConfig(**common, rope_parameters=dict(parameters))
    expected, factor = ROPE_INIT_FUNCTIONS[kind["rope_type"]](theirs, seq_len=length)
    rope = read_config({"architectures": ["LlamaForCausalLM"], **common, "rope_parameters": parameters}).ropes[0]
    assert rope is not None
    torch.testing.assert_close(frequencies(rope, length), expected, rtol=RELATIVE, atol=0)
    assert rope.attention_factor == pytest.approx(factor)
    assert rope.grows == (kind["rope_type"] in ("dynamic", "longrope"))


def test_the_attention_factor_multiplies_cos_and_sin() -> None:
    rope, at = Rope(100.0, 8), torch.tensor([0, 3, 11])
    cos, sin = rotation(rope, at, 12)
    assert cos.shape == sin.shape == (3, 4)
    torch.testing.assert_close(cos.square() + sin.square(), torch.ones(3, 4))
    louder = rotation(replace(rope, kind="yarn", factor=1.0, original_context=64, attention_factor=1.5), at, 12)
    torch.testing.assert_close(louder[0], cos * 1.5)
    torch.testing.assert_close(louder[1], sin * 1.5)
