"""Shapes of published models: the number of parameters that each is known for."""

from __future__ import annotations

import pytest

from attar.model.shapes import SHAPES, shape
from tests.errors import user_error

PARAMETERS = {"llama-3.2-1b": 1_235_814_400, "llama-3.1-8b": 8_030_261_248, "qwen2.5-0.5b": 494_032_768}


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters(name: str) -> None:
    c = shape(name)
    q, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
    block = c.hidden * (q + 2 * kv) + q * c.hidden + 3 * c.hidden * c.intermediate + 2 * c.hidden
    block += q + 2 * kv if c.qkv_bias else 0
    assert c.layers * block + c.hidden + c.vocab_size * c.hidden * (1 if c.tied else 2) == PARAMETERS[name]


def test_every_shape_is_a_configuration() -> None:
    assert all(shape(name).layers > 0 for name in SHAPES)
    with user_error("name_unknown"):
        shape("gpt5")
    with user_error("name_unknown", "did you mean llama-3.2-3b or llama-3.1-70b?"):
        shape("llama-3")
