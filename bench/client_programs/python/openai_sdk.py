"""OpenAI's Python library."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import openai
import pydantic
from checks import QUESTION, SCHEMA, At, is_city, run

SAID: Any = [{"role": "user", "content": QUESTION}]
TOOLS: Any = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA, "strict": True}}]


class Place(pydantic.BaseModel):
    city: Literal["Paris", "Oslo"]


def made(at: At) -> openai.OpenAI:
    return openai.OpenAI(base_url=at.v1, api_key="none", max_retries=0)


def chat(at: At) -> None:
    answer = made(at).chat.completions.create(model=at.model, messages=SAID, max_tokens=8)
    assert answer.choices[0].message.content
    assert answer.usage.completion_tokens <= 8


def stream(at: At) -> None:
    options: Any = {"model": at.model, "messages": SAID, "max_tokens": 8, "temperature": 0}
    whole = made(at).chat.completions.create(**options).choices[0].message.content
    chunks = made(at).chat.completions.create(**options, stream=True)
    assert "".join(each.choices[0].delta.content or "" for each in chunks if each.choices) == whole


def asynchronous(at: At) -> None:
    async def ask() -> None:
        async with openai.AsyncOpenAI(base_url=at.v1, api_key="none") as client:
            stream = await client.chat.completions.create(model=at.model, messages=SAID, max_tokens=8, stream=True)
            assert [chunk async for chunk in stream]

    asyncio.run(ask())


def completion(at: At) -> None:
    answer = made(at).completions.create(model=at.model, prompt="Once", max_tokens=8, logprobs=2, echo=True)
    assert answer.choices[0].text.startswith("Once")


def embeddings(at: At) -> None:
    found = made(at).embeddings.create(model=at.model, input=["a", "b"])
    assert len(found.data) == 2


def structured(at: At) -> None:
    answer = made(at).chat.completions.parse(model=at.model, messages=SAID, max_tokens=100, response_format=Place)
    assert isinstance(answer.choices[0].message.parsed, Place)


def tools(at: At) -> None:
    options: Any = {
        "model": at.model, "tools": TOOLS, "max_tokens": 100, "parallel_tool_calls": False, "temperature": 0
    }  # fmt: skip
    answer = made(at).chat.completions.create(messages=SAID, tool_choice="required", **options)
    message: Any = answer.choices[0].message
    is_city(message.tool_calls[0].function.arguments, at)
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "rain"}
    again = made(at).chat.completions.create(messages=[*SAID, message, result], **options)
    assert again.choices[0].finish_reason in ("stop", "length", "tool_calls")


def tools_streamed(at: At) -> None:
    with made(at).chat.completions.stream(
        model=at.model, messages=SAID, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, max_tokens=100,
        temperature=0,
    ) as events:  # fmt: skip
        message: Any = events.get_final_completion().choices[0].message
    is_city(message.tool_calls[0].function.arguments, at)


def responses(at: At) -> None:
    options: Any = {"model": at.model, "input": QUESTION, "max_output_tokens": 100}
    assert made(at).responses.create(**options).output_text
    assert isinstance(made(at).responses.parse(**options, text_format=Place).output_parsed, Place)
    with made(at).responses.stream(**options) as events:
        assert [event.type for event in events][-1] in ("response.completed", "response.incomplete")


if __name__ == "__main__":
    run(
        "openai", chat, stream, asynchronous, completion, embeddings, structured, tools, tools_streamed, responses,
    )  # fmt: skip
