"""Items as messages: what belongs together is one message, and nothing that was said is lost."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from attar.server.api.responses.items import Item, conversation
from attar.server.api.responses.schemas import ResponsesBody
from attar.server.api.validation import read


def items(*given: Any) -> list[Item]:
    return [item for item in read(ResponsesBody, json.dumps({"input": given}).encode()).items if isinstance(item, Item)]


def said(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "content": text}


def call(id: str) -> dict[str, Any]:
    return {
        "type": "function_call",
        "call_id": id,
        "name": "look",
        "arguments": "{}",
        "id": "fc_" + id,
        "status": "completed",
    }


def output(id: str, text: Any = "seen") -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": id, "output": text}


def made(id: str) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": "look", "arguments": "{}"}}


def test_calls_belong_to_the_message_before_them() -> None:
    thought = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}
    parts = [{"type": "input_text", "text": "se"}, {"type": "input_text", "text": "en"}]
    given = [
        said("user", "a"),
        thought,
        said("assistant", "I look."),
        call("1"),
        call("2"),
        output("1"),
        output("2", parts),
    ]
    assert conversation(None, items(*given, thought, call("3"), output("3"), said("assistant", "b"))) == [
        said("user", "a"),
        {**said("assistant", "I look."), "reasoning_content": "Hm.", "tool_calls": [made("1"), made("2")]},
        {**said("tool", "seen"), "tool_call_id": "1"},
        {**said("tool", "seen"), "tool_call_id": "2"},
        {**said("assistant", ""), "reasoning_content": "Hm.", "tool_calls": [made("3")]},
        {**said("tool", "seen"), "tool_call_id": "3"},
        said("assistant", "b"),
    ]


def test_text_behind_a_call_belongs_to_the_message_with_the_call() -> None:
    given = [said("assistant", "a"), call("1"), said("assistant", "b"), output("1")]
    assert conversation(None, items(*given)) == [
        {**said("assistant", "ab"), "tool_calls": [made("1")]},
        {**said("tool", "seen"), "tool_call_id": "1"},
    ]


def test_instructions_and_the_first_system_messages_are_one() -> None:
    first = [said("developer", "b"), said("system", "c"), said("user", "d"), said("system", "e")]
    later = [said("user", "d"), said("system", "e")]
    assert conversation("a", items(*first)) == [said("system", "a\n\nb\n\nc"), *later]
    assert conversation(None, items(*first)) == [said("system", "b\n\nc"), *later]
    assert conversation("a", items(*later)) == [said("system", "a"), *later]


ITEMS = st.one_of(
    st.builds(
        said, st.sampled_from(["user", "assistant", "system", "developer"]), st.text("ab", min_size=1, max_size=3)
    ),
    st.builds(call, st.sampled_from("12")),
    st.builds(output, st.sampled_from("12"), st.text("cd", min_size=1, max_size=3)),
)


@given(st.lists(ITEMS, min_size=1, max_size=8))
def test_nothing_is_lost(given: list[dict[str, Any]]) -> None:
    messages = conversation(None, items(*given))
    assert "".join(
        message["content"].replace("\n\n", "") for message in messages if message["role"] != "tool"
    ) == "".join(item["content"] for item in given if "content" in item)
    assert [each["id"] for message in messages for each in message.get("tool_calls", ())] == [
        item["call_id"] for item in given if item.get("type") == "function_call"
    ]
    assert [message["content"] for message in messages if message["role"] == "tool"] == [
        item["output"] for item in given if "output" in item
    ]
