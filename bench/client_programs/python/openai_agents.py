"""OpenAI's agents, by their default API, Responses, and by chat completions."""

from __future__ import annotations

from typing import Any, Literal

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from checks import QUESTION, At, run
from openai import AsyncOpenAI
from pydantic import BaseModel

SHORT: Any = {"max_tokens": 100}
set_tracing_disabled(True)


class Place(BaseModel):
    city: Literal["Paris", "Oslo"]


def model(at: At, kind: Any = OpenAIResponsesModel) -> Any:
    return kind(model=at.model, openai_client=AsyncOpenAI(base_url=at.v1, api_key="none", max_retries=0))


def default(at: At) -> None:
    # An answer that is cut off is an error of the library; the embedded model goes on unless it is stopped.
    settings = ModelSettings(**SHORT, extra_body={"stop": ["e"]})
    agent = Agent(name="a", model=model(at), model_settings=settings)
    assert Runner.run_sync(agent, QUESTION).final_output


def structured(at: At) -> None:
    agent = Agent(name="a", model=model(at), output_type=Place, model_settings=ModelSettings(**SHORT))
    assert isinstance(Runner.run_sync(agent, QUESTION).final_output, Place)


def tools(at: At) -> None:
    seen: list[str] = []

    @function_tool
    def weather(city: Literal["Paris", "Oslo"]) -> str:
        """Tell the weather."""
        seen.append(city)
        return "rain"

    settings = ModelSettings(**SHORT, tool_choice="required", parallel_tool_calls=False)
    agent = Agent(
        name="a", model=model(at), tools=[weather], model_settings=settings, tool_use_behavior="stop_on_first_tool"
    )
    assert Runner.run_sync(agent, QUESTION).final_output == "rain"
    assert seen


def chat_completions(at: At) -> None:
    agent = Agent(name="a", model=model(at, OpenAIChatCompletionsModel), model_settings=ModelSettings(**SHORT))
    assert Runner.run_sync(agent, QUESTION).final_output


if __name__ == "__main__":
    run("openai-agents", default, structured, tools, chat_completions)
