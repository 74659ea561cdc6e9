"""Filling in the middle with a model that was trained for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from attar.engine.llm.llm import LLM
from attar.protocol.request import SamplingParams
from attar.text.forms.infill import Infill
from attar.text.literal import LiteralChat

pytestmark = pytest.mark.real


def test_a_trained_model_fills_a_gap(real_model: Callable[[str], Path]) -> None:
    llm = LLM(real_model("qwen2.5-coder-0.5b"))
    tokenizer = llm.tokenizer
    infill = Infill.of(tokenizer, LiteralChat(tokenizer).text_ids)
    assert infill is not None
    assert tokenizer.token_to_id("<|file_sep|>") in infill.ends
    ids = infill.ids("def add(a, b):\n    return ", "\n\nprint(add(1, 2))\n")
    shown = tokenizer.decode(ids, skip_special_tokens=False)
    wanted = "<|fim_prefix|>def add(a, b):\n    return <|fim_suffix|>\n\nprint(add(1, 2))\n<|fim_middle|>"
    assert shown == wanted
    params = SamplingParams(max_tokens=16, temperature=0, stop_token_ids=infill.ends)
    [answer] = llm.generate([ids], params)
    assert answer.text.startswith("a + b\n")
    assert answer.finish_reason == "stop"
