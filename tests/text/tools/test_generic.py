"""Tools for templates without any: messages of system, user and assistant alone."""

from __future__ import annotations

import json
from typing import Any

from attar.text.tools.generic import plain
from attar.text.tools.tool import Tool
from tests.text.tools.families import call

TOOLS = [Tool("get", "Gets.", {"type": "object", "properties": {"a": {}}})]
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello."},
    {"role": "assistant", "content": "Hi."},
    {"role": "user", "content": "Get."},
    {"role": "assistant", "content": None, "tool_calls": [call("get", '{"a": 1}', "x"), call("get", {"a": 2}, "y")]},
    {"role": "tool", "tool_call_id": "x", "content": "one"},
    {"role": "tool", "tool_call_id": "y", "content": [{"type": "text", "text": "two"}]},
    {"role": "user", "content": "And?"},
]


def test_a_conversation_of_turns_that_alternate() -> None:
    made = plain(MESSAGES, TOOLS)
    assert [message["role"] for message in made] == ["system", "user", "assistant", "user", "assistant", "user"]
    assert made[0]["content"].startswith("Be brief.")
    assert '"name": "get"' in made[0]["content"]
    assert json.loads(made[2]["content"]) == {"response": "Hi."}
    arguments = [each["arguments"] for each in json.loads(made[4]["content"])["tool_calls"]]
    assert arguments == [{"a": 1}, {"a": 2}]
    assert made[5]["content"] == "Result of get:\none\n\nResult of get:\ntwo\n\nAnd?"


def test_without_tools_there_are_no_instructions() -> None:
    assert plain(MESSAGES[:3], []) == MESSAGES[:3]
    assert plain(MESSAGES[1:2], TOOLS)[0]["role"] == "system"
