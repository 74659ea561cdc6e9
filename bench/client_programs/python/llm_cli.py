"""The command line `llm`, with models named in its `extra-openai-models.yaml`."""

from __future__ import annotations

import json
from pathlib import Path

from checks import QUESTION, SCHEMA, At, command, is_city, run

FUNCTION = 'def weather() -> str:\n    "Tell the weather."\n    return "sunny"\n'
KINDS = {"chat": "", "completion": "completion: true", "responses": "responses: true"}


def asked(at: At, kind: str, *more: str) -> str:
    """Return what `llm` prints; its models are named first."""
    place = Path.home() / ".config" / "io.datasette.llm"
    place.mkdir(parents=True, exist_ok=True)
    named = "".join(
        f"- model_id: {name}\n  model_name: {at.model}\n  api_base: {at.v1}\n"
        f"  supports_schema: true\n  supports_tools: true\n  {setting}\n"
        for name, setting in KINDS.items()
    )
    (place / "extra-openai-models.yaml").write_text(named)
    return command("llm", "prompt", "--model", kind, *more, "--option", "max_tokens", "100", QUESTION)


def chat(at: At) -> None:
    assert asked(at, "chat", "--no-stream").strip()


def stream(at: At) -> None:
    assert asked(at, "chat").strip()


def completion(at: At) -> None:
    assert asked(at, "completion").strip()


def structured(at: At) -> None:
    is_city(asked(at, "chat", "--schema", json.dumps(SCHEMA)))


def json_object(at: At) -> None:
    text = asked(at, "chat", "--no-stream", "--option", "json_object", "true")
    assert not at.sense or isinstance(json.loads(text), dict), text  # the embedded model does not come to an end


def tools(at: At) -> None:
    # By a seed: a call that is cut off, as the embedded model draws some, is an error of `llm`'s, as with OpenAI's API.
    asked(at, "chat", "--functions", FUNCTION, "--option", "seed", "1")


def conversation(at: At) -> None:
    asked(at, "chat")
    assert asked(at, "chat", "--continue").strip()


def responses(at: At) -> None:
    assert asked(at, "responses").strip()


if __name__ == "__main__":
    run("llm", chat, stream, completion, structured, json_object, tools, conversation, responses)
