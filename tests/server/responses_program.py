"""What the `openai` package makes of /v1/responses: run by `test_clients.py`, with the clients' own Python.

`python responses_program.py URL MODEL`; says what it saw as one JSON object. Each event and each answer is held to the
package's own models, which it does not do by itself.
"""

from __future__ import annotations

import json
import sys
from typing import Any, Literal

import openai
import pydantic
from openai.types.responses import Response, ResponseStreamEvent
from openai.types.responses.response_item_list import ResponseItemList

EVENTS: Any = pydantic.TypeAdapter(ResponseStreamEvent)
SAID: Any = [{"role": "user", "content": "hello"}]


def raw(client: openai.OpenAI, **options: Any) -> list[dict[str, Any]]:
    """The events of a stream, each of which fits the package's models."""
    with client.responses.with_streaming_response.create(**options, stream=True) as reply:
        lines = [line.removeprefix("data: ") for line in reply.iter_lines() if line.startswith("data: ")]
    events = [json.loads(line) for line in lines]
    for event in events:
        EVENTS.validate_python(event)
    return events


def whole(client: openai.OpenAI, **options: Any) -> Any:
    reply = client.responses.with_raw_response.create(**options)
    Response.model_validate_json(reply.http_response.content)
    return reply.parse()


def text(client: openai.OpenAI, model: str) -> dict[str, Any]:
    options: Any = {"model": model, "input": "hello", "max_output_tokens": 6, "temperature": 0, "instructions": "Say."}
    one = whole(client, **options, metadata={"a": "b"})
    events = raw(client, **options)
    scored = whole(client, **options, include=["message.output_text.logprobs"], top_logprobs=3)
    raw(client, **options, include=["message.output_text.logprobs"], top_logprobs=3)
    with client.responses.stream(**options) as stream:
        helped = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
    again = [*SAID, *(item.model_dump(exclude_none=True) for item in one.output), *SAID]
    return {
        "text": one.output_text,
        "streamed": "".join(event["delta"] for event in events if event["type"].endswith("text.delta")),
        "helped": helped,
        "status": [one.status, one.incomplete_details.reason, events[-1]["type"]],
        "usage": [one.usage.output_tokens, one.usage.total_tokens - one.usage.input_tokens],
        "logprobs": [len(each.top_logprobs) for each in scored.output[0].content[0].logprobs],
        "metadata": one.metadata,
        "again": whole(client, **{**options, "input": again}).object,
    }


class Answer(pydantic.BaseModel):
    word: Literal["yes", "no"]
    sure: bool


def parsed(client: openai.OpenAI, model: str) -> dict[str, Any]:
    """Structured output, as the package asks for it; an answer that is long enough fits."""
    options: Any = {"model": model, "input": "hello", "max_output_tokens": 300, "temperature": 0, "text_format": Answer}
    one = client.responses.parse(**options)
    with client.responses.stream(**options) as stream:
        last = stream.get_final_response()
    return {
        "status": one.status,
        "same": one.output_parsed == last.output_parsed,
        "parsed": None if one.output_parsed is None else sorted(one.output_parsed.model_dump()),
    }


def calls(client: openai.OpenAI, model: str) -> dict[str, Any]:
    """An answer with reasoning and calls, whole, as events, and as the stream helper puts it together."""
    options: Any = {"model": model, "input": "hello", "max_output_tokens": 6, "temperature": 0}
    one = whole(client, **options)
    events = raw(client, **options)
    with client.responses.stream(**options) as stream:
        snapshots = {event.output_index: event.snapshot for event in stream if event.type.endswith("arguments.delta")}
    items = [item.model_dump(exclude_none=True) for item in one.output]
    outputs = [
        {"type": "function_call_output", "call_id": item["call_id"], "output": "seen"}
        for item in items
        if item["type"] == "function_call"
    ]
    return {
        "types": [item["type"] for item in items],
        "done": [event["item"]["type"] for event in events if event["type"] == "response.output_item.done"],
        "arguments": [item["arguments"] for item in items if item["type"] == "function_call"],
        "snapshots": [snapshots[at] for at in sorted(snapshots)],
        "ids": len({item["call_id"] for item in items if item["type"] == "function_call"}),
        "again": whole(client, **{**options, "input": [*SAID, *items, *outputs]}).object,
    }


def custom(client: openai.OpenAI, model: str) -> dict[str, Any]:
    """An answer that calls a custom tool, whole and as events, sent back with the tool's output."""
    tool: Any = {"type": "custom", "name": "run", "format": {"type": "grammar", "syntax": "regex", "definition": "a+"}}
    options: Any = {"model": model, "input": "hello", "max_output_tokens": 6, "tools": [tool]}
    one = whole(client, **options)
    events = raw(client, **options)
    items = [item.model_dump(exclude_none=True) for item in one.output]
    [call] = [item for item in items if item["type"] == "custom_tool_call"]
    result = {"type": "custom_tool_call_output", "call_id": call["call_id"], "output": "seen"}
    again = whole(client, **{**options, "input": [*SAID, *items, result]})
    reply = client.responses.input_items.with_raw_response.list(again.id)
    ResponseItemList.model_validate_json(reply.http_response.content)
    deltas = [event["delta"] for event in events if event["type"] == "response.custom_tool_call_input.delta"]
    return {"inputs": [call["input"], "".join(deltas)], "listed": [item.type for item in reply.parse().data][:2]}


def listed(client: openai.OpenAI, model: str) -> dict[str, Any]:
    """The input items of a stored answer, each of which fits the package's models, in pages of two."""
    said: Any = [
        *SAID,
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"role": "assistant", "content": "I look."},
        {"type": "function_call", "call_id": "call_1", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "call_1", "output": "seen"},
    ]
    one = whole(client, model=model, input=said, max_output_tokens=6)
    reply = client.responses.input_items.with_raw_response.list(one.id)
    ResponseItemList.model_validate_json(reply.http_response.content)
    pages = list(client.responses.input_items.list(one.id, order="asc", limit=2))
    return {
        "types": [item.type for item in pages],
        "newest": [item.id for item in reply.parse().data] == [item.id for item in reversed(pages)],
    }


def refused(client: openai.OpenAI, model: str) -> list[Any]:
    found: list[Any] = []
    for options in ({"tools": [{"type": "web_search"}]}, {"background": True}, {"conversation": "conv_1"}):
        try:
            client.responses.create(**{"model": model, "input": "hello", **options})
        except openai.BadRequestError as error:
            found.append(error.param)
    return found


def main(url: str, model: str, *parts: str) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    known: dict[str, Any] = {
        "text": text,
        "parsed": parsed,
        "calls": calls,
        "refused": refused,
        "listed": listed,
        "custom": custom,
    }
    print(json.dumps({part: known[part](client, model) for part in parts}))


if __name__ == "__main__":
    main(*sys.argv[1:])
