"""/v1/responses over HTTP, against the fake engine: whole answers, streams, and what they have in common."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from attar.protocol.messages import Submit
from attar.server.api.responses.types import RESPONSE_EVENTS, ResponseEvent, ResponseObject, SaidMessage
from tests.server.bad_requests import USER
from tests.server.conftest import Reply, Running

PATH = "/v1/responses"
BODY: dict[str, Any] = {"input": "hello", "max_output_tokens": 6, "seed": 3}


def whole(server: Running, **more: Any) -> ResponseObject:
    reply = server.post(PATH, BODY | more)
    assert reply.status == 200, reply.body
    return msgspec.json.decode(reply.body, type=ResponseObject)


def events(reply: Reply) -> list[Any]:
    """The events of a stream: each is named as its type, and numbered."""
    assert reply.status == 200, reply.body
    names, found = [], []
    for block in reply.body.decode().split("\n\n")[:-1]:
        if block.startswith(":"):
            continue
        first, second = block.split("\n")
        names.append(first.removeprefix("event: "))
        found.append(second.removeprefix("data: "))
    kinds = {kind.__struct_config__.tag: kind for kind in RESPONSE_EVENTS}
    read: list[ResponseEvent] = []
    for name, text in zip(names, found, strict=True):
        assert json.loads(text)["type"] == name
        read.append(msgspec.json.decode(text, type=kinds[name]))
    assert [event.sequence_number for event in read] == list(range(len(read)))
    return read


def types(read: list[Any]) -> list[str]:
    return [str(event.__struct_config__.tag).removeprefix("response.") for event in read]


def prompt(server: Running) -> tuple[int, ...]:
    command = server.engine.commands[-1]
    assert isinstance(command, Submit)
    return command.prompt


def text_of(answer: ResponseObject) -> str:
    return "".join(part.text for item in answer.output if isinstance(item, SaidMessage) for part in item.content)


def test_a_stream_says_what_the_whole_answer_says(server: Running) -> None:
    one = whole(server)
    read = events(server.post(PATH, BODY | {"stream": True}))
    kinds = types(read)
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
    assert set(kinds[4:-4]) == {"output_text.delta"}
    last = read[-1].response
    assert "".join(event.delta for event in read[4:-4]) == read[-4].text == text_of(last) == text_of(one) != ""
    assert read[-2].item == last.output[0]
    for each in (one, last):
        assert (each.status, each.usage and each.usage.output_tokens) == ("incomplete", 6)
        assert each.incomplete_details is not None
    assert [event.response.status for event in read[:2]] == ["in_progress"] * 2
    assert len({event.response.id for event in (*read[:2], read[-1])}) == 1


def test_items_and_instructions_are_messages(server: Running) -> None:
    chat = {"max_tokens": 2, "messages": [{"role": "system", "content": "Be brief."}, *USER]}
    server.post("/v1/chat/completions", chat)
    wanted = prompt(server)
    parts = [{"type": "input_text", "text": "hel"}, {"type": "input_text", "text": "lo"}]
    for items in (
        "hello",
        USER,
        [{"type": "message", "role": "user", "content": parts, "id": "x", "status": "completed"}],
    ):
        whole(server, input=items, instructions="Be brief.")
        assert prompt(server) == wanted
    developer = [{"role": "developer", "content": "Be brief."}, *USER]
    whole(server, input=developer)
    assert prompt(server) == wanted
    whole(server, input=[{"role": "system", "content": "B"}, *USER], instructions="A")
    server.post("/v1/chat/completions", {"max_tokens": 2, "messages": [{"role": "system", "content": "A\n\nB"}, *USER]})
    assert prompt(server) == server.engine.commands[-2].prompt


def test_an_answer_can_be_sent_back(server: Running) -> None:
    answer = server.post(PATH, BODY).json
    said = text_of(msgspec.convert(answer, ResponseObject))
    whole(server, input=[*USER, *answer["output"], *USER])
    mine = prompt(server)
    server.post(
        "/v1/chat/completions",
        {"max_tokens": 2, "messages": [*USER, {"role": "assistant", "content": said}, *USER]},
    )
    assert mine == prompt(server)


def test_fields_become_parameters(server: Running) -> None:
    answer = whole(
        server, temperature=0.3, top_p=0.9, top_k=7, min_p=0.1, seed=9, metadata={"a": "b"}, store=False,
        include=["reasoning.encrypted_content"], client_metadata={"x": 1}, prompt_cache_key="k", user="u",
    )  # fmt: skip
    params = server.engine.commands[-1].params  # type: ignore[union-attr]
    assert (params.temperature, params.top_p, params.top_k, params.min_p, params.seed) == (0.3, 0.9, 7, 0.1, 9)
    assert (answer.temperature, answer.top_p, answer.metadata, answer.max_output_tokens) == (0.3, 0.9, {"a": "b"}, 6)
    whole(server, stop="zzz", ignore_eos=True)
    params = server.engine.commands[-1].params  # type: ignore[union-attr]
    assert (params.stop, params.ignore_eos) == (("zzz",), True)
    without = server.post(PATH, {"input": "hello", "seed": 1}).json
    assert without["usage"]["total_tokens"] == 512  # as many as fit


@pytest.mark.parametrize("strict", [None, True])
def test_a_format_is_a_constraint(server: Running, strict: bool | None) -> None:
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer"}},
        "required": ["n"],
        "additionalProperties": False,
    }
    given = {"format": {"type": "json_schema", "name": "number", "schema": schema, "strict": strict}}
    answer = whole(server, text=given)
    mine = server.engine.commands[-1].grammar  # type: ignore[union-attr]
    chat = {
        "messages": USER,
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}},
    }
    server.post("/v1/chat/completions", chat)
    assert mine is not None
    assert mine == server.engine.commands[-1].grammar  # type: ignore[union-attr]
    assert answer.text["format"]["schema"] == schema
    whole(server, text={"format": {"type": "json_object"}})
    assert server.engine.commands[-1].grammar is not None  # type: ignore[union-attr]
    whole(server, text={"format": {"type": "text"}})
    assert server.engine.commands[-1].grammar is None  # type: ignore[union-attr]


@pytest.mark.parametrize("code, told", [("bad_logits", "server_error"), ("invalid", "invalid_prompt")])
def test_a_failure_within_a_stream_is_its_last_event(start: Any, code: str, told: str) -> None:
    server = start()
    server.engine.fail = (code, 3)
    read = events(server.post(PATH, BODY | {"stream": True}))
    assert types(read)[-1] == "failed"
    assert types(read).count("failed") == 1
    last = read[-1].response
    assert (last.status, last.error.code) == ("failed", told)
    assert server.post(PATH, BODY).status >= 400


def test_why_knows_the_answer(server: Running) -> None:
    reply = server.post(PATH, BODY)
    told = server.get(f"/v1/requests/{reply.json['id']}/why").json
    assert (told["outcome"], told["generated_tokens"]) == ("length", 6)
    assert told["id"] == reply.headers["x-request-id"]
    assert len(reply.json["id"]) - len("resp_") - len(told["id"]) == 32  # 128 bits that no log has


TOOL = {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}}
SPACE = {"type": "namespace", "name": "eyes", "description": "Sight.", "tools": [TOOL]}
ALLOWED = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "other"}]}
PADDED = {"include_obfuscation": True}

REGEX = {"type": "grammar", "syntax": "regex", "definition": "a"}
SYNTAX = ("invalid_value", "tools[0].format.syntax")


def custom(format: Any) -> dict[str, Any]:
    return {"type": "custom", "name": "f", "format": format}


def schema(given: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"text": {"format": {"type": "json_schema", "name": "n", "schema": given, **more}}}


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"input": []}, "invalid_length", "input"),
    ({"input": 1}, "invalid_type", "input"),
    ({"input": [1]}, "invalid_type", "input[0]"),
    ({"input": [{"role": "user"}]}, "missing_field", "input[0].content"),
    ({"input": [{"role": "user", "content": "a", "x": 1}]}, "unknown_field", "input[0].x"),
    ({"input": [{"type": "web_search_call", "id": "ws"}]}, "invalid_value", "input[0].type"),
    ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "invalid_value", "input[0].content[0].type"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "missing_field",
     "input[0].content[0].image_url"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "file:/a"}]}]}, "invalid_value",
     "input"),
    ({"background": True}, "unsupported_field", "background"),
    ({"conversation": "conv_1"}, "unsupported_field", "conversation"),
    ({"prompt": {"id": "p"}}, "unsupported_field", "prompt"),
    ({"truncation": "auto"}, "unsupported_field", "truncation"),
    ({"include": ["web_search_call.results"]}, "invalid_value", "include[0]"),
    ({"top_logprobs": 2}, "invalid_value", "top_logprobs"),
    ({"top_logprobs": 21, "include": ["message.output_text.logprobs"]}, "out_of_range", "top_logprobs"),
    ({"max_output_tokens": 0}, "out_of_range", "max_output_tokens"),
    ({"metadata": {"a": 1}}, "invalid_type", "metadata[...]"),
    ({"metadata": {"a" * 65: "1"}}, "invalid_length", "metadata"),
    ({"metadata": {str(key): "" for key in range(17)}}, "invalid_length", "metadata"),
    ({"stream_options": {}}, "invalid_value", "stream_options"),
    ({"stream": True, "stream_options": PADDED}, "unsupported_field", "stream_options.include_obfuscation"),
    ({"text": {"format": {"type": "grammar"}}}, "invalid_value", "text.format.type"),
    ({"text": {"verbosity": "low"}}, "invalid_value", "text.verbosity"),
    (schema({"type": "x"}), "invalid_value", "text.format.schema"),
    (schema({"type": "object"}, strict=True), "invalid_value", "text.format.schema"),
    ({"text": {"format": {"type": "json_object"}}, "ignore_eos": True}, "invalid_value", "ignore_eos"),
    ({"stop": "é" * 129}, "invalid_length", "stop"),
    ({"tools": [{"type": "web_search"}]}, "invalid_value", "tools[0].type"),
    ({"tools": [{"type": "mcp", "server_label": "x"}]}, "invalid_value", "tools[0].type"),
    ({"tools": [custom({"type": "grammar", "syntax": "ebnf", "definition": "start: /a/"})]}, *SYNTAX),
    ({"tools": [custom({"type": "grammar", "syntax": "regex"})]}, "missing_field", "tools[0].format.definition"),
    ({"tools": [custom(REGEX | {"definition": "("})]}, "invalid_value", "tools[0].format"),
    ({"tools": [TOOL, custom(None) | {"name": "look"}]}, "invalid_value", "tools[1].name"),
    ({"tools": [TOOL, TOOL]}, "invalid_value", "tools[1].name"),
    ({"tools": [TOOL | {"name": "a b"}]}, "invalid_value", "tools[0].name"),
    ({"tools": [TOOL | {"parameters": {"type": "string"}}]}, "invalid_value", "tools[0].parameters"),
    ({"tools": [TOOL] * 129}, "invalid_length", "tools"),
    ({"tools": [TOOL, SPACE, SPACE]}, "invalid_value", "tools[2].tools[0].name"),
    ({"tools": [{**SPACE, "tools": [TOOL, {"type": "custom"}]}]}, "invalid_value", "tools[0].tools[1].type"),
    ({"tool_choice": "required"}, "invalid_value", "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "other"}}, "invalid_value", "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools"}}, "missing_field", "tool_choice.mode"),
    ({"tools": [TOOL], "tool_choice": ALLOWED | {"tools": []}}, "invalid_length", "tool_choice.tools"),
    ({"tools": [TOOL], "tool_choice": ALLOWED}, "invalid_value", "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "hosted_tool"}}, "invalid_value", "tool_choice.type"),
    ({"messages": USER}, "unknown_field", "messages"),
]  # fmt: skip


@pytest.mark.parametrize("more, code, param", REFUSED)
def test_what_is_refused_is_named(server: Running, more: dict[str, Any], code: str, param: str) -> None:
    before = len(server.engine.commands)
    reply = server.post(PATH, BODY | more)
    assert (reply.status, reply.code, reply.json["error"]["param"]) == (400, code, param)
    assert len(server.engine.commands) == before


def test_a_refusal_of_the_prompt_names_the_input(server: Running) -> None:
    reply = server.post(PATH, BODY | {"input": "word " * 2000})
    assert (reply.status, reply.code, reply.json["error"]["param"]) == (400, "context_length_exceeded", "input")
    assert "input" in reply.json["error"]["message"]
    assert "messages" not in reply.json["error"]["message"]


def test_log_probabilities_are_those_of_a_chat(server: Running) -> None:
    asked = BODY | {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    one = server.post(PATH, asked).json
    chat = {"messages": USER, "max_tokens": 6, "seed": 3, "logprobs": True, "top_logprobs": 2}
    wanted = server.post("/v1/chat/completions", chat).json["choices"][0]["logprobs"]["content"]
    assert one["output"][0]["content"][0]["logprobs"] == wanted
    assert one["top_logprobs"] == 2
    read = events(server.post(PATH, asked | {"stream": True}))
    deltas = [each for event in read if types([event]) == ["output_text.delta"] for each in event.logprobs]
    assert deltas == read[-4].logprobs == wanted  # each token here has text
