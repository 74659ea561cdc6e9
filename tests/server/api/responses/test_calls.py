"""Calls of functions in /v1/responses: made, streamed, sent back with outputs, and beside a format of the text."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from attar.server.options import ServerOptions
from tests.server.api.responses.test_routes import PATH, events, types
from tests.server.conftest import Running
from tests.server.test_tools_served import (
    CALLS,
    CHAT,
    FIRST,
    MADE,
    NOW,
    SCHEMA,
    UNKEPT,
    USER,
    WEATHER,
    Saying,
    asked,
    caller,
    saying,
    server,
)  # fmt: skip

__all__ = ["caller", "saying", "server"]  # fixtures

TOOLS: list[dict[str, Any]] = [
    {"type": "function", "name": "weather", "description": "The weather.", "parameters": SCHEMA},
    {"type": "function", "name": "now"},
]
BODY: dict[str, Any] = {"input": USER, "max_output_tokens": 300, "tools": TOOLS}


def ask(server: Running, **more: Any) -> Any:
    reply = server.post(PATH, BODY | more)
    assert reply.status == 200, reply.body
    return reply.json


def called(answer: Any) -> list[tuple[str, str]]:
    return [(item["name"], item["arguments"]) for item in answer["output"] if item["type"] == "function_call"]


def test_an_answer_calls(server: Running, saying: Saying) -> None:
    saying(CALLS)
    one = ask(server)
    assert one["status"] == "completed"
    assert [item["type"] for item in one["output"]] == ["message", "function_call", "function_call"]
    assert one["output"][0]["content"][0]["text"] == "Let me see."
    assert called(one) == MADE
    assert all(re.fullmatch(r"call_[A-Za-z0-9]{24}", item["call_id"]) for item in one["output"][1:])
    assert (one["tools"][1]["name"], one["tool_choice"], one["parallel_tool_calls"]) == ("now", "auto", True)

    read = events(server.post(PATH, BODY | {"stream": True}))
    assert types(read)[-1] == "completed"
    ended = [event.arguments for event in read if types([event]) == ["function_call_arguments.done"]]
    assert ended == [arguments for _, arguments in MADE]
    for at, arguments in enumerate(ended, 1):
        pieces = [
            event.delta
            for event in read
            if types([event]) == ["function_call_arguments.delta"] and event.output_index == at
        ]
        assert "".join(pieces) == arguments
    saying(CALLS.removeprefix("Let me see.\n"))
    assert [item["type"] for item in ask(server)["output"]] == ["function_call", "function_call"]


def test_the_engine_is_asked_as_by_a_chat(server: Running, saying: Saying) -> None:
    """Tools, the choice among them, calls and their outputs: the same prompt and the same grammar."""
    saying(CALLS)
    output = ask(server)["output"]
    results = [
        {"type": "function_call_output", "call_id": item["call_id"], "output": f"seen {at}"}
        for at, item in enumerate(output[1:])
    ]
    made = [
        {"id": item["call_id"], "type": "function", "function": {"name": item["name"], "arguments": item["arguments"]}}
        for item in output[1:]
    ]
    said = [
        *USER,
        {"role": "assistant", "content": "Let me see.", "tool_calls": made},
        *({"role": "tool", "tool_call_id": each["call_id"], "content": each["output"]} for each in results),
    ]
    name, function = {"type": "function", "name": "now"}, {"type": "function", "function": {"name": "now"}}
    allowed = [
        (
            {"type": "allowed_tools", "mode": mode, "tools": [name]},
            {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [function]}},
        )
        for mode in ("auto", "required")
    ]
    for choice, theirs in (("auto",) * 2, ("none",) * 2, ("required",) * 2, (name, function), *allowed):
        for parallel in (True, False):
            more = {"parallel_tool_calls": parallel}
            told = ask(server, input=[*USER, *output, *results], tool_choice=choice, **more)
            assert told["tool_choice"] == choice
            mine = asked(server)
            reply = server.post(CHAT, {
                "messages": said, "tools": [WEATHER, NOW], "tool_choice": theirs, "max_tokens": 300, **more,
            })  # fmt: skip
            assert reply.status == 200, reply.body
            assert (mine.prompt, mine.grammar) == (asked(server).prompt, asked(server).grammar)
            assert mine.params.visible_token_ids == asked(server).params.visible_token_ids


def test_functions_of_a_namespace(server: Running, saying: Saying) -> None:
    text = f'<tool_call>\n{{"name": "sky__weather", "arguments": {FIRST}}}\n</tool_call>'
    saying(text)
    space = {"type": "namespace", "name": "sky", "description": "Above.", "tools": TOOLS}
    answer = ask(server, tools=[space])
    [item] = answer["output"]
    assert (item["namespace"], item["name"], item["arguments"]) == ("sky", "weather", FIRST)
    assert answer["tools"][0]["tools"][0]["name"] == "weather"
    result = {"type": "function_call_output", "call_id": item["call_id"], "output": "Rain."}
    ask(server, tools=[space], input=[*USER, item, result])
    mine = server.server.prompts.tokenizer.decode(list(asked(server).prompt), skip_special_tokens=False)
    assert '"sky__weather"' in mine.partition("Rain.")[0].rpartition("<tool_call>")[2]


def test_a_format_of_the_text_beside_tools(server: Running, saying: Saying) -> None:
    """Clients send both with every request of a typed agent: the answer is calls, or text of the format."""
    schema = {"type": "object", "properties": {"sure": {"type": "boolean"}}, "required": ["sure"]}
    text = {"format": {"type": "json_schema", "name": "n", "schema": schema}}
    saying('{"sure": true}')
    assert ask(server, text=text)["output"][0]["content"][0]["text"] == '{"sure": true}'
    grammar = asked(server).grammar
    assert grammar is not None
    saying(CALLS.removeprefix("Let me see.\n"))
    assert called(ask(server, text=text)) == MADE
    ask(server, text=text, tool_choice="required")
    assert asked(server).grammar != grammar
    ask(server, text=text, tool_choice="none")
    assert asked(server).grammar != grammar


def test_loosened_tools_are_named_in_a_header(server: Running, saying: Saying) -> None:
    saying("No.")
    odd = {"type": "function", "name": "odd", "parameters": UNKEPT}
    assert server.post(PATH, BODY | {"tools": [odd]}).headers["x-attar-loosened-tools"] == "odd"
    strict = [*TOOLS, odd | {"strict": True}]
    spaced = [{"type": "namespace", "name": "n", "tools": strict}]
    for tools, place in ((strict, "tools[2].parameters"), (spaced, "tools[0].tools[2].parameters")):
        reply = server.post(PATH, BODY | {"tools": tools})
        assert (reply.status, reply.json["error"]["param"]) == (400, place)
        assert place in reply.json["error"]["message"]


@pytest.mark.parametrize(
    "items",
    [
        [{"type": "function_call_output", "call_id": "call_1", "output": "x"}],
        [{"type": "function_call", "call_id": "call_1", "name": "now", "arguments": "{"}],
        [{"type": "function_call", "call_id": "call_1", "name": "now", "arguments": "[]"}],
        [{"type": "function_call", "call_id": "call_1", "name": "now", "arguments": "{}"}, *USER],
    ],
)
def test_calls_and_outputs_that_do_not_belong_together_are_refused(server: Running, items: list[Any]) -> None:
    reply = server.post(PATH, BODY | {"input": [*USER, *items]})
    assert (reply.status, reply.code, reply.json["error"]["param"]) == (400, "invalid_value", "input")
    assert "messages[" not in reply.json["error"]["message"]


def test_a_stored_answer_with_calls_goes_on(caller: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    running = Running(tmp_path_factory.mktemp("engine"), caller, ServerOptions(port=0, response_store=1 << 20))
    try:
        running.engine.script = (*caller.encode(CALLS, add_special_tokens=False), caller.eos_id)
        first = ask(running)
        results = [
            {"type": "function_call_output", "call_id": item["call_id"], "output": "seen"}
            for item in first["output"][1:]
        ]
        ask(running, input=results, previous_response_id=first["id"])
        mine = asked(running).prompt
        ask(running, input=[*USER, *first["output"], *results])
        assert mine == asked(running).prompt
        references = [{"type": "item_reference", "id": item["id"]} for item in first["output"]]
        ask(running, input=[*USER, *references, *results])
        assert mine == asked(running).prompt
        assert json.loads(running.get(f"{PATH}/{first['id']}").body) == first
    finally:
        assert running.stop()
