"""Patterns of configs: those of published files pass, and what could take long to match does not."""

from __future__ import annotations

import pytest

from attar.checkpoints.patterns import pattern
from attar.checkpoints.safetensors import CheckpointError


@pytest.mark.parametrize(
    "text, name",
    [
        (r".*lm_head", "lm_head"),
        (r".*mlp.gate$", "model.layers.3.mlp.gate"),
        (r"visual.*", "visual.blocks.0.attn.qkv"),
        (r"model\.layers\.(0|1|2)\..*(q|k|v)_proj", "model.layers.2.self_attn.q_proj"),
        (r"(?:.*\.)?lm_head", "model.lm_head"),
        (r".*layers\.\d+\.mlp\.experts\.\d+\.(gate|up)_proj.*$", "model.layers.0.mlp.experts.7.up_proj"),
        (r"[^)]+\)*x", "abc)x"),
    ],
)
def test_patterns_of_real_files_are_accepted(text: str, name: str) -> None:
    assert pattern(text, "here").match(name)


@pytest.mark.parametrize(
    "text, words",
    [
        (r"(a+)+$", "repeats a group"),
        (r"(a|a)*$", "repeats a group"),
        (r"(?:a|a){2,50}$", "repeats a group"),
        (r".*.*.*.*.*=x", "more than 4 repetitions"),
        (r"(a)\1", "refers back"),
        (r"(?P<x>a)(?P=x)", "groups that begin with"),
        ("a" * 257, "longer than 256"),
        (r"*a", "not a regular expression"),
    ],
)
def test_patterns_that_could_be_slow_are_refused(text: str, words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        pattern(text, "here")
