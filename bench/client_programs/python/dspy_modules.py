"""DSPy's modules, with its JSON adapter, which asks for structured output."""

from __future__ import annotations

from typing import Any, Literal

import dspy
from checks import QUESTION, At, run


class Place(dspy.Signature):
    """Name the city."""

    question: str = dspy.InputField()
    city: Literal["Paris", "Oslo"] = dspy.OutputField()


def made(at: At, kind: str = "chat", provider: str = "openai", **more: Any) -> dspy.LM:
    options = {"api_base": at.v1, "api_key": "none", "cache": False, "max_tokens": 60} | more
    return dspy.LM(f"{provider}/{at.model}", model_type=kind, **options)


def chat(at: At) -> None:
    assert made(at)(messages=[{"role": "user", "content": QUESTION}])


def text(at: At) -> None:
    assert made(at, "text")(prompt="Once")


def responses(at: At) -> None:
    assert made(at, "responses")(messages=[{"role": "user", "content": QUESTION}])


def several(at: At) -> None:
    assert len(made(at, n=2, temperature=1.0)(messages=[{"role": "user", "content": QUESTION}])) == 2


def json_adapter(at: At) -> None:
    """The schema of the signature constrains the answer. DSPy sends one to providers that LiteLLM lists for it: LM
    Studio is one with OpenAI's API."""
    with dspy.context(lm=made(at, provider="lm_studio"), adapter=dspy.JSONAdapter()):
        assert dspy.Predict(Place)(question=QUESTION).city in {"Paris", "Oslo"}


def embeddings(at: At) -> None:
    found = dspy.Embedder(f"openai/{at.model}", api_base=at.v1, api_key="none", caching=False)(["a", "b"])
    assert len(found) == 2


if __name__ == "__main__":
    run("dspy", chat, text, responses, several, json_adapter, embeddings)
