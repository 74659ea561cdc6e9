"""Sampling parameters: what is accepted, what is refused and how it is said."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from typing import Any

import pytest

from attar.protocol.request import (
    MAX_LOGPROBS,
    MAX_SEED,
    MAX_STOP_BYTES,
    MAX_STOPS,
    MAX_VISIBLE,
    SamplingParams,
)

NAN, INF = float("nan"), float("inf")

ACCEPTED: list[dict[str, Any]] = [
    {},
    {"max_tokens": 0},
    {"max_tokens": 1},
    {"temperature": 0},
    {"temperature": 1e-300},
    {"top_k": 10**9},
    {"top_p": 1},
    {"top_p": 1e-9},
    {"min_p": 0},
    {"min_p": 1},
    {"repetition_penalty": 0.1},
    {"presence_penalty": -2},
    {"frequency_penalty": 2.0},
    {"stop": "\n"},
    {"stop": ["a"] * MAX_STOPS},
    {"stop": "é" * (MAX_STOP_BYTES // 2)},
    {"stop_token_ids": [0, 5]},
    {"seed": 0},
    {"seed": MAX_SEED},
    {"logprobs": 0},
    {"logprobs": MAX_LOGPROBS},
]

NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
INTEGERS = ("max_tokens", "top_k", "seed", "logprobs")

REFUSED: list[dict[str, Any]] = [
    *({name: value} for name in NUMBERS for value in (NAN, INF, -INF, "1", True, None, [1.0])),
    *({name: value} for name in INTEGERS for value in (1.0, "1", True, NAN, -1)),
    {"max_tokens": None},
    {"logit_bias": {-1: 1.0}},
    {"logit_bias": {1: 101.0}},
    {"logit_bias": {1: NAN}},
    {"logit_bias": [1]},
    {"logit_bias": dict.fromkeys(range(1025), 0.0)},
    {"prompt_logprobs": 21},
    {"temperature": -1e-9},
    {"top_p": 0},
    {"top_p": 1.0000001},
    {"min_p": 1.1},
    {"min_p": -0.1},
    {"repetition_penalty": 0},
    {"repetition_penalty": -1},
    {"presence_penalty": 2.1},
    {"presence_penalty": -2.1},
    {"frequency_penalty": -2.1},
    {"stop": ""},
    {"stop": ["a", ""]},
    {"stop": ["a"] * (MAX_STOPS + 1)},
    {"stop": "x" * (MAX_STOP_BYTES + 1)},
    {"stop": [1]},
    {"stop": None},
    {"stop_token_ids": [-1]},
    {"stop_token_ids": [True]},
    {"stop_token_ids": "12"},
    {"stop_token_ids": 5},
    {"ignore_eos": 1},
    {"seed": MAX_SEED + 1},
    {"logprobs": MAX_LOGPROBS + 1},
    {"visible_token_ids": [-1]},
    {"visible_token_ids": range(MAX_VISIBLE + 1)},
]


@pytest.mark.parametrize("values", ACCEPTED, ids=repr)
def test_accepts(values: dict[str, Any]) -> None:
    params = SamplingParams(**values)
    for name, value in values.items():
        if name not in ("stop", "stop_token_ids"):
            assert getattr(params, name) == value


@pytest.mark.parametrize("values", REFUSED, ids=repr)
def test_refuses_and_names_the_field(values: dict[str, Any]) -> None:
    (name,) = values
    word = {"stop": "stop", "stop_token_ids": "stop"}.get(name, name)
    with pytest.raises(ValueError, match=word):
        SamplingParams(**values)


def test_lists_are_copied_to_tuples() -> None:
    stops = ["a"]
    params = SamplingParams(stop=stops, stop_token_ids=[1])
    stops.append("b")
    assert params.stop == ("a",)
    assert SamplingParams(stop="ab").stop == ("ab",)
    assert params.stop_token_ids == (1,)
    assert hash(params) == hash(SamplingParams(stop=("a",), stop_token_ids=(1,)))
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.seed = 1  # type: ignore[misc]


def test_seeded_keeps_a_seed_and_draws_a_missing_one() -> None:
    assert SamplingParams(seed=7).seeded().seed == 7
    drawn = {SamplingParams().seeded().seed for _ in range(8)}
    assert None not in drawn
    assert len(drawn) == 8
    assert SamplingParams(top_k=3).seeded().top_k == 3


def test_loads_no_torch() -> None:
    code = "import sys, attar.protocol.request; raise SystemExit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
