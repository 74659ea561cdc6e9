"""Patterns of configs: those of published files pass, and what could take long to match does not."""

from __future__ import annotations

import time

import pytest

from attar.checkpoints.patterns import LONGEST, MAX_PATTERNS, Patterns
from tests.errors import user_error


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
        (r".*q_proj", "model.layers.0.self_attn.q_proj"),
        (r"model\.layers\.\d+$", "model.layers.31"),
        (r".*\.(q|k|v)_proj$", "model.layers.0.self_attn.v_proj"),
        (r".*(gate|up|down)_proj$", "model.layers.0.mlp.up_proj"),
        (r".*layers\.\d+\.(self_attn|mlp)\..*(q|k|v|o|gate|up|down)_proj$", "model.layers.9.mlp.down_proj"),
        (r".*layers.*mlp.*proj", "model.layers.9.mlp.down_proj"),
        (r"^(?!.*lm_head).*$", "model.layers.0.mlp.up_proj"),
        (r"^lm_head$|.*embed_tokens$|.*norm.*", "model.norm"),
        (r"model\.decoder\.layers\.\d+\.self_attn\.q_proj", "model.decoder.layers.1.self_attn.q_proj"),
        ("model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.q_proj"),
        (".*" * 60, "lm_head"),
    ],
)
def test_patterns_of_real_files_are_accepted(text: str, name: str) -> None:
    assert Patterns().compile(text, "here").match(name)


@pytest.mark.parametrize(
    "text, words",
    [
        (r"(a+)+$", "quantization_unsupported"),
        (r"(a|a)*$", "quantization_unsupported"),
        (r"(?:a|a){2,50}$", "quantization_unsupported"),
        (r".*.*.*.*.*=x", "quantization_unsupported"),
        (".?" * 60 + "Z", "quantization_unsupported"),
        ("(?:a|a)" * 30 + "Z", "quantization_unsupported"),
        ("(?:|a|(?:a|a?))" * 10 + "Z", "quantization_unsupported"),
        ("a{0,9}" * 8 + "Z", "quantization_unsupported"),
        (".*?" * 9 + "Z", "quantization_unsupported"),
        ("{*" * 9 + "Z", "quantization_unsupported"),
        (r"\d+\B" * 9, "quantization_unsupported"),  # no character follows, so each may end anywhere
        (".?" * 15 + "[]|]" * 3 + ".?" * 15 + "Z", "quantization_unsupported"),  # a class, no alternatives
        ("(?=" + ".*" * 9 + ")Z", "quantization_unsupported"),
        (r"\x41+A" * 9, "quantization_unsupported"),
        ("(?:.{1,2000}){2}", "quantization_unsupported"),
        ("a{99999999999}", "quantization_invalid"),
        (r"(a)\1", "quantization_unsupported"),
        (r"(?P<x>a)(?P=x)", "quantization_unsupported"),
        ("a" * 257, "checkpoint_too_large"),
        (r"*a", "quantization_invalid"),
    ],
)
def test_patterns_that_could_be_slow_are_refused(text: str, words: str) -> None:
    with user_error(words):
        Patterns().compile(text, "here")


@pytest.mark.parametrize(
    "text",
    [
        ".*.*.*[Z]",
        r"[\w.]*?[\w.]*?[\w.]*?Z",
        r"(.*)(.*)(.*)[Z]",
        r"\w+\w+\w+\w+\.Z",
        ".?" * 15 + "Z",
        ".*" + ".?" * 9 + "." * 20 + "Z",
        "(?:a|a)" * 15 + "Z",
    ],
)
def test_the_slowest_that_are_accepted_are_quick(text: str) -> None:
    compiled, name = Patterns().compile(text, "here"), "a" * LONGEST
    began = time.process_time()
    assert not compiled.match(name)
    assert not compiled.fullmatch(name)
    assert time.process_time() - began < 0.2


def test_the_patterns_of_a_config_are_limited_in_number() -> None:
    patterns = Patterns()
    for i in range(MAX_PATTERNS):
        patterns.compile(f".*layers.{i}.mlp", "here")
    with user_error("checkpoint_too_large"):
        patterns.compile("lm_head", "here")


def test_the_patterns_of_a_config_are_limited_in_all_that_they_try() -> None:
    patterns = Patterns()
    for end in "abcdefghij":
        patterns.compile(f".*layers.*mlp.*{end}", "here")
    with user_error("checkpoint_too_large"):
        patterns.compile(".*layers.*mlp.*k", "here")
