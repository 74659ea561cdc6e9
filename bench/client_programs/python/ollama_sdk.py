"""Ollama's Python library."""

from __future__ import annotations

from typing import Any

import ollama
from checks import QUESTION, SCHEMA, At, is_city, run

SAID: Any = [{"role": "user", "content": QUESTION}]
SHORT: Any = {"num_predict": 8, "temperature": 0}


def chat(at: At) -> None:
    answer = ollama.Client(host=at.url).chat(model=at.model, messages=SAID, options=SHORT)
    assert answer.message.content


def stream(at: At) -> None:
    client = ollama.Client(host=at.url)
    whole = client.chat(model=at.model, messages=SAID, options=SHORT).message.content
    pieces = list(client.chat(model=at.model, messages=SAID, options=SHORT, stream=True))
    assert "".join(each.message.content or "" for each in pieces) == whole
    assert pieces[-1].done


def generate(at: At) -> None:
    assert ollama.Client(host=at.url).generate(model=at.model, prompt="Once", options=SHORT).response


def embed(at: At) -> None:
    assert len(ollama.Client(host=at.url).embed(model=at.model, input=["a", "b"]).embeddings) == 2


def models(at: At) -> None:
    client = ollama.Client(host=at.url)
    assert at.model in [each.model for each in client.list().models]
    assert client.show(at.model).details


def structured(at: At) -> None:
    options: Any = {"num_predict": 100, "temperature": 0}
    answer = ollama.Client(host=at.url).chat(model=at.model, messages=SAID, format=SCHEMA, options=options)
    is_city(answer.message.content, at)


def tools(at: At) -> None:
    def weather(city: str) -> str:
        """Tell the weather.

        Args:
            city: Paris or Oslo
        """
        return city

    options: Any = {"num_predict": 100, "temperature": 0}
    answer = ollama.Client(host=at.url).chat(model=at.model, messages=SAID, tools=[weather], options=options)
    if at.sense:
        assert answer.message.tool_calls
        assert answer.message.tool_calls[0].function.name == "weather"


if __name__ == "__main__":
    run("ollama", chat, stream, generate, embed, models, structured, tools)
