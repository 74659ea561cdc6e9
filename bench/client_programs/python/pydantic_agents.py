"""Pydantic AI's agents with OpenAI's two APIs and Anthropic's."""

from __future__ import annotations

from typing import Any, Literal

from checks import QUESTION, At, run
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

SHORT: Any = {"max_tokens": 100, "parallel_tool_calls": False}


class Place(BaseModel):
    """A place."""

    city: Literal["Paris", "Oslo"]


def openai(at: At) -> Any:
    return OpenAIChatModel(at.model, provider=OpenAIProvider(base_url=at.v1, api_key="none"))


def chat(at: At) -> None:
    assert Agent(openai(at), model_settings=SHORT).run_sync(QUESTION).output


def structured(at: At) -> None:
    agent = Agent(openai(at), output_type=NativeOutput(Place), model_settings=SHORT)
    assert isinstance(agent.run_sync(QUESTION).output, Place)


def tools(at: At) -> None:
    agent = Agent(openai(at), output_type=ToolOutput(Place), model_settings=SHORT)
    assert isinstance(agent.run_sync(QUESTION).output, Place)


def responses(at: At) -> None:
    model: Any = OpenAIResponsesModel(at.model, provider=OpenAIProvider(base_url=at.v1, api_key="none"))
    assert Agent(model, model_settings={"max_tokens": 100}).run_sync(QUESTION).output


def anthropic(at: At) -> None:
    model: Any = AnthropicModel(at.model, provider=AnthropicProvider(base_url=at.url, api_key="none"))
    assert Agent(model, model_settings={"max_tokens": 100}).run_sync(QUESTION).output


if __name__ == "__main__":
    run("pydantic-ai-slim", chat, structured, tools, responses, anthropic)
