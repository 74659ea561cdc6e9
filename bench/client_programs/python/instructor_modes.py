"""Instructor, in its modes for OpenAI's API; none retries."""

from __future__ import annotations

from typing import Any, Literal

import instructor
from checks import QUESTION, At, run
from openai import OpenAI
from pydantic import BaseModel, ConfigDict


class Place(BaseModel):
    model_config = ConfigDict(extra="forbid")  # without it a model that follows nothing adds properties for ever

    city: Literal["Paris", "Oslo"]


def asked(at: At, mode: Any) -> None:
    client = instructor.from_openai(OpenAI(base_url=at.v1, api_key="none"), mode=mode)
    said: Any = [{"role": "user", "content": QUESTION}]
    found = client.chat.completions.create(
        model=at.model, messages=said, response_model=Place, max_tokens=100, max_retries=0
    )
    assert isinstance(found, Place)


def tools(at: At) -> None:
    asked(at, instructor.Mode.TOOLS)


def tools_strict(at: At) -> None:
    asked(at, instructor.Mode.TOOLS_STRICT)


def json_schema(at: At) -> None:
    asked(at, instructor.Mode.JSON_SCHEMA)


if __name__ == "__main__":
    run("instructor", tools, tools_strict, json_schema)
