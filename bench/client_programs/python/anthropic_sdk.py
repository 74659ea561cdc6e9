"""Anthropic's Python library."""

from __future__ import annotations

from typing import Any

import anthropic
from checks import QUESTION, SCHEMA, At, is_city, run

SAID: Any = [{"role": "user", "content": QUESTION}]
TOOLS: Any = [{"name": "weather", "description": "Tell the weather.", "input_schema": SCHEMA}]


def made(at: At) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=at.url, api_key="none", max_retries=0)


def chat(at: At) -> None:
    answer: Any = made(at).messages.create(model=at.model, messages=SAID, max_tokens=8, system="Be brief.")
    assert answer.content[0].text
    assert answer.usage.output_tokens <= 8


def stream(at: At) -> None:
    with made(at).messages.stream(model=at.model, messages=SAID, max_tokens=8) as events:
        text = "".join(events.text_stream)
        final: Any = events.get_final_message()
    assert text == final.content[0].text


def counting(at: At) -> None:
    assert made(at).messages.count_tokens(model=at.model, messages=SAID).input_tokens


def prefill(at: At) -> None:
    begun: Any = {"role": "assistant", "content": "The weather in"}
    assert made(at).messages.create(model=at.model, messages=[*SAID, begun], max_tokens=8).content


def tools(at: At) -> None:
    greedy = {"temperature": 0}  # a field of the API that this version has no argument for
    options: Any = {"model": at.model, "tools": TOOLS, "max_tokens": 100, "extra_body": greedy}
    answer: Any = made(at).messages.create(
        messages=SAID, tool_choice={"type": "any", "disable_parallel_tool_use": True}, **options
    )
    use = next(each for each in answer.content if each.type == "tool_use")
    is_city(use.input, at)
    result: Any = {"type": "tool_result", "tool_use_id": use.id, "content": "rain"}
    history = [*SAID, {"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
    assert made(at).messages.create(messages=history, **options).stop_reason


def tools_streamed(at: At) -> None:
    with made(at).messages.stream(
        model=at.model, messages=SAID, tools=TOOLS, tool_choice={"type": "tool", "name": "weather"}, max_tokens=100
    ) as events:
        final: Any = events.get_final_message()
    is_city(next(each.input for each in final.content if each.type == "tool_use"))


if __name__ == "__main__":
    run("anthropic", chat, stream, counting, prefill, tools, tools_streamed)
