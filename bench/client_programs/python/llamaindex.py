"""LlamaIndex's model of OpenAI-like servers. It reads annotations as types, so that they are not deferred here."""

from typing import Any, Literal

from checks import QUESTION, At, is_city, run
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel


class Place(BaseModel):
    """A place."""

    city: Literal["Paris", "Oslo"]


def weather(city: Literal["Paris", "Oslo"]) -> str:
    """Tell the weather."""
    return city


def made(at: At) -> Any:
    return OpenAILike(
        model=at.model, api_base=at.v1, api_key="none", is_chat_model=True, is_function_calling_model=True,
        max_tokens=100, max_retries=0, context_window=512,
    )  # fmt: skip


def chat(at: At) -> None:
    assert made(at).chat([ChatMessage(role="user", content=QUESTION)]).message.content


def stream(at: At) -> None:
    assert "".join(each.delta or "" for each in made(at).stream_chat([ChatMessage(role="user", content=QUESTION)]))


def structured(at: At) -> None:
    found = made(at).structured_predict(Place, PromptTemplate("{question}"), question=QUESTION)
    assert isinstance(found, Place), found


def tools(at: At) -> None:
    model = made(at)
    answer = model.chat_with_tools([FunctionTool.from_defaults(fn=weather)], user_msg=QUESTION, tool_required=True)
    is_city(model.get_tool_calls_from_response(answer)[0].tool_kwargs)


if __name__ == "__main__":
    run("llama-index-llms-openai-like", chat, stream, structured, tools)
