"""What the `openai` and `anthropic` packages make of the server: run by `test_clients.py`, with their own Python.

`python client_program.py URL MODEL`; says what it saw as one JSON object.
"""

from __future__ import annotations

import json
import math
import sys
from typing import Any

import anthropic
import openai

USER: Any = [{"role": "user", "content": "hello"}]
ON: Any = {"extra_body": {"ignore_eos": True}}  # an answer is as long as it may be


def completions(client: openai.OpenAI, model: str) -> dict[str, Any]:
    options: Any = {"model": model, "prompt": "Once", "max_tokens": 6, "seed": -1, **ON}
    whole = client.completions.create(**options, logprobs=2, n=2, echo=True)
    pieces = list(client.completions.create(**options, stream=True))
    several = client.completions.create(**options, n=4, logprobs=0)
    best = client.completions.create(**options, best_of=4)
    likely = [sum(choice.logprobs.token_logprobs) for choice in several.choices]
    assert whole.choices[0].logprobs is not None
    assert whole.usage is not None
    return {
        "texts": [choice.text for choice in whole.choices],
        "streamed": "".join(piece.choices[0].text for piece in pieces),
        "tokens": len(whole.choices[0].logprobs.tokens or ()),
        "usage": whole.usage.completion_tokens,
        "reason": pieces[-1].choices[0].finish_reason,
        "best": [best.choices[0].text, several.choices[likely.index(max(likely))].text, best.usage.completion_tokens],
    }


def chat(client: openai.OpenAI, model: str) -> dict[str, Any]:
    options: Any = {"model": model, "messages": USER, "seed": 2, "max_completion_tokens": 7, **ON}
    whole = client.chat.completions.create(**options, n=2, logprobs=True, top_logprobs=3)
    stream = list(client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    text = whole.choices[0].message.content
    cut = client.chat.completions.create(**options, stop=text[5:8])
    again = [*USER, whole.choices[0].message, *USER]
    return {
        "choices": len(whole.choices),
        "text": text,
        "streamed": "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices),
        "usage": stream[-1].usage.completion_tokens,
        "logprobs": [len(each.top_logprobs) for each in whole.choices[0].logprobs.content],
        "cut": [cut.choices[0].message.content, cut.choices[0].finish_reason, text[: text.index(text[5:8])]],
        "again": client.chat.completions.create(**{**options, "messages": again}).object,
    }


def errors(client: openai.OpenAI, model: str) -> list[Any]:
    found: list[Any] = []
    for options in (
        {"n": 17},
        {"tools": [{"type": "function", "function": {"name": "f", "strict": True, "parameters": {"not": {}}}}]},
        {"model": "other"},
    ):
        try:
            client.chat.completions.create(**{"model": model, "messages": USER, **options})
        except openai.APIStatusError as error:
            found.append([type(error).__name__, error.code, error.param, error.request_id is not None])
    return found


def others(client: openai.OpenAI, model: str) -> dict[str, Any]:
    embedded = client.embeddings.create(model=model, input=["a", "b"])  # as base64, which is this client's way
    return {
        "models": [model.id for model in client.models.list()],
        "retrieved": client.models.retrieve(model).id,
        "embeddings": [len(each.embedding) for each in embedded.data],
        "lengths": [math.hypot(*each.embedding) for each in embedded.data],
    }


def messages(client: anthropic.Anthropic, model: str) -> dict[str, Any]:
    options: Any = {
        "model": model,
        "messages": USER,
        "max_tokens": 8,
        "system": "be brief",
        "extra_body": {"temperature": 0},
    }
    whole = client.messages.create(**options)
    with client.messages.stream(**options) as stream:
        streamed = "".join(stream.text_stream)
        final = stream.get_final_message()
    text = whole.content[0].text
    cut = client.messages.create(**options, stop_sequences=[text[5:8]])
    try:
        client.messages.create(**options, tools=[{"name": "f", "input_schema": {"type": "object"}}])
        refused, named = "", None
    except anthropic.BadRequestError as error:
        refused, named = error.body["error"]["message"], error.request_id
    return {
        "text": text,
        "streamed": streamed,
        "reasons": [whole.stop_reason, final.stop_reason, cut.stop_reason],
        "sequence": cut.stop_sequence == text[5:8],
        "counted": client.messages.count_tokens(
            **{key: options[key] for key in ("model", "messages", "system")}
        ).input_tokens,
        "read": whole.usage.input_tokens + whole.usage.cache_read_input_tokens,
        "named": [whole._request_id, named],
        "usage": final.usage.output_tokens,
        "refused": refused,
    }


def main(url: str, model: str) -> None:
    ours = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    theirs = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
    seen = {
        "completions": completions(ours, model),
        "chat": chat(ours, model),
        "errors": errors(ours, model),
        "others": others(ours, model),
        "messages": messages(theirs, model),
    }
    print(json.dumps(seen))


if __name__ == "__main__":
    main(*sys.argv[1:])
