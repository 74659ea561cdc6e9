"""LiteLLM's library, with OpenAI's API."""

from __future__ import annotations

from typing import Any

import litellm
from checks import QUESTION, SCHEMA, At, is_city, run

SAID: Any = [{"role": "user", "content": QUESTION}]


def options(at: At) -> dict[str, Any]:
    return {"model": f"openai/{at.model}", "api_base": at.v1, "api_key": "none", "messages": SAID, "max_tokens": 100}


def chat(at: At) -> None:
    assert litellm.completion(**options(at)).choices[0].message.content


def stream(at: At) -> None:
    chunks = litellm.completion(**options(at), stream=True)
    assert "".join(each.choices[0].delta.content or "" for each in chunks)


def structured(at: At) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA, "strict": True}}
    is_city(litellm.completion(**options(at), response_format=form).choices[0].message.content)


def tools(at: At) -> None:
    declared = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}]
    named = {"type": "function", "function": {"name": "weather"}}
    answer: Any = litellm.completion(**options(at), tools=declared, tool_choice=named)
    is_city(answer.choices[0].message.tool_calls[0].function.arguments)


def long_prompt(at: At) -> None:
    """Too long a prompt is the error by which fallbacks start."""
    said = [{"role": "user", "content": "word " * 10000}]
    try:
        litellm.completion(**options(at) | {"messages": said})
    except litellm.ContextWindowExceededError:
        return
    raise AssertionError("the prompt was taken")


if __name__ == "__main__":
    run("litellm", chat, stream, structured, tools, long_prompt)
