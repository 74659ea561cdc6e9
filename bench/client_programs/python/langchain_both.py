"""LangChain's chat models of OpenAI and Anthropic."""

from __future__ import annotations

from typing import Any

from checks import QUESTION, SCHEMA, At, is_city, run
from langchain_anthropic import ChatAnthropic
from langchain_openai import ChatOpenAI

PLACE = {"title": "place", "description": "A place.", **SCHEMA}
WEATHER = {"title": "weather", "description": "Tell the weather.", **SCHEMA}


def openai(at: At, **more: Any) -> Any:
    return ChatOpenAI(base_url=at.v1, api_key="none", model=at.model, max_tokens=100, max_retries=0, **more)


def anthropic(at: At) -> Any:
    return ChatAnthropic(base_url=at.url, api_key="none", model=at.model, max_tokens=100, max_retries=0)


def openai_chat(at: At) -> None:
    assert openai(at).invoke(QUESTION).content


def openai_stream(at: At) -> None:
    assert "".join(each.content for each in openai(at).stream(QUESTION))


def openai_structured(at: At) -> None:
    is_city(openai(at).with_structured_output(PLACE, method="json_schema", strict=True).invoke(QUESTION))


def openai_structured_by_call(at: At) -> None:
    is_city(openai(at).with_structured_output(PLACE, method="function_calling").invoke(QUESTION))


def openai_tools(at: At) -> None:
    is_city(openai(at).bind_tools([WEATHER], tool_choice="weather").invoke(QUESTION).tool_calls[0]["args"])


def openai_responses(at: At) -> None:
    assert openai(at, use_responses_api=True).invoke(QUESTION).content


def anthropic_chat(at: At) -> None:
    assert anthropic(at).invoke(QUESTION).content


def anthropic_stream(at: At) -> None:
    assert list(anthropic(at).stream(QUESTION))


def anthropic_structured(at: At) -> None:
    is_city(anthropic(at).with_structured_output(PLACE).invoke(QUESTION))


def anthropic_tools(at: At) -> None:
    is_city(anthropic(at).bind_tools([WEATHER], tool_choice="weather").invoke(QUESTION).tool_calls[0]["args"])


if __name__ == "__main__":
    run(
        "langchain-openai", openai_chat, openai_stream, openai_structured, openai_structured_by_call, openai_tools,
        openai_responses, anthropic_chat, anthropic_stream, anthropic_structured, anthropic_tools,
    )  # fmt: skip
