"""Calls of tools by a trained model: its own template, its own tokenizer, constrained and read back."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from attar.engine.llm.llm import LLM
from attar.protocol.request import SamplingParams
from attar.text.answers.events import CallArguments, CallEnd, CallStart, TextDelta
from attar.text.grammar_proof import Prover
from attar.text.grammars import Vocabulary
from attar.text.tools.constraints import constraint
from attar.text.tools.formats import detect
from attar.text.tools.parsers import parser
from attar.text.tools.tool import Tool, ToolChoice

pytestmark = pytest.mark.real

WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "unit": {"enum": ["celsius", "fahrenheit"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
TOOLS = [
    Tool("get_weather", "Get the current weather of a city.", WEATHER, strict=True),
    Tool("get_time", "Get the current time.", {"type": "object", "properties": {"zone": {"type": "string"}}}),
]


@pytest.mark.parametrize(
    "choice, tool",
    [
        (ToolChoice(), None),
        (ToolChoice("required"), "get_weather"),
        (ToolChoice("named", "get_time"), "get_time"),
    ],
    ids=["auto", "required", "named"],
)
def test_a_trained_model_calls_tools(real_model: Callable[[str], Path], choice: ToolChoice, tool: str | None) -> None:
    llm = LLM(real_model("qwen2.5-coder-0.5b"))
    tokenizer = llm.tokenizer
    form = detect(tokenizer, tokenizer.chat_template(tools=True))
    assert (form.name, form.opening, form.parallel) == ("hermes", "<tool_call>", True)
    prover = Prover(Vocabulary.of(tokenizer, tokenizer.vocab_size, tokenizer.eos_ids))
    made = constraint(form, TOOLS, choice, prover.prove)
    prover.close()
    assert made is not None
    assert made.loosened == ()
    messages: list[dict[str, Any]] = [{"role": "user", "content": "What is the weather in Paris, in celsius?"}]
    ids = llm.encode_chat(messages, tools=[each.template_form() for each in TOOLS])
    [answer] = llm.generate([ids], SamplingParams(max_tokens=64, temperature=0), constraint=made.grammar)
    reader = parser(form, TOOLS, choice)
    events = [*reader.feed(answer.text), *reader.close()]
    if tool is None:  # what it says is its own affair
        assert any(isinstance(event, CallEnd | TextDelta) for event in events)
        return
    assert answer.finish_reason == "stop"
    assert isinstance(events[0], CallStart)
    assert events[0].name == tool
    assert isinstance(events[-1], CallEnd)
    arguments = json.loads("".join(event.text for event in events if isinstance(event, CallArguments)))
    if tool == "get_weather":
        assert arguments == {"city": "Paris", "unit": "celsius"}
