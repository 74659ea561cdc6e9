"""Semantic Kernel's chat service of OpenAI."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Literal

from checks import QUESTION, At, run
from openai import AsyncOpenAI
from pydantic import BaseModel
from semantic_kernel import Kernel
from semantic_kernel.connectors.ai import FunctionChoiceBehavior
from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion, OpenAIChatPromptExecutionSettings
from semantic_kernel.contents import ChatHistory
from semantic_kernel.functions import kernel_function


class Place(BaseModel):
    city: Literal["Paris", "Oslo"]


class Weather:
    @kernel_function(description="Tell the weather.")
    def weather(self, city: Annotated[str, "the city"]) -> str:
        return "rain"


def service(at: At) -> Any:
    client = AsyncOpenAI(base_url=at.v1, api_key="none", max_retries=0)
    return OpenAIChatCompletion(ai_model_id=at.model, async_client=client)


def said() -> ChatHistory:
    history = ChatHistory()
    history.add_user_message(QUESTION)
    return history


def chat(at: At) -> None:
    settings = OpenAIChatPromptExecutionSettings(max_tokens=100)
    assert str(asyncio.run(service(at).get_chat_message_content(said(), settings)))


def stream(at: At) -> None:
    async def ask() -> list[str]:
        settings = OpenAIChatPromptExecutionSettings(max_tokens=100)
        return [str(each) async for each in service(at).get_streaming_chat_message_content(said(), settings)]

    assert "".join(asyncio.run(ask()))


def structured(at: At) -> None:
    settings = OpenAIChatPromptExecutionSettings(max_tokens=100, response_format=Place)
    Place.model_validate_json(str(asyncio.run(service(at).get_chat_message_content(said(), settings))))


def tools(at: At) -> None:
    kernel = Kernel()
    kernel.add_plugin(Weather(), plugin_name="sky")
    choice = FunctionChoiceBehavior.Required(auto_invoke=False)
    settings = OpenAIChatPromptExecutionSettings(max_tokens=200, function_choice_behavior=choice)
    answer = asyncio.run(service(at).get_chat_message_content(said(), settings, kernel=kernel))
    assert any(type(each).__name__ == "FunctionCallContent" for each in answer.items)


if __name__ == "__main__":
    run("semantic-kernel", chat, stream, structured, tools)
