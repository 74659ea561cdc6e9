"""Conversations with calls and results, as templates take them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attar.text.tools.history import for_template, has_calls
from attar.text.tools.tool import ToolError

USER = {"role": "user", "content": "Hi."}
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)


def called(*ids: str, arguments: str = "{}") -> dict[str, Any]:
    calls = [{"id": id, "type": "function", "function": {"name": f"f{id}", "arguments": arguments}} for id in ids]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def result(id: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": id, "content": "x"}


@given(st.lists(st.text("abc1", min_size=1, max_size=12), min_size=1, max_size=4, unique=True), st.randoms())
def test_results_in_any_order_get_their_names_and_ids(ids: list[str], random: Any) -> None:
    answered = random.sample(ids, len(ids))
    said = [USER, called(*ids), *map(result, answered), USER]
    assert has_calls(said)
    assert [each.get("name") for each in for_template(said)[2:-1]] == [f"f{id}" for id in answered]
    short = for_template(said, 9)
    made = [call["id"] for call in short[1]["tool_calls"]]
    assert all(len(id) == 9 and id.isalnum() for id in made)
    assert len(set(made)) == len(ids)
    assert [each["tool_call_id"] for each in short[2:-1]] == [made[ids.index(id)] for id in answered]
    assert for_template(short_again(short), 9) == short  # such ids stay


def short_again(said: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The conversation with its arguments as text again."""
    calls = [
        {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
        for call in said[1]["tool_calls"]
    ]
    return [said[0], {**said[1], "tool_calls": calls}, *said[2:]]


@given(st.dictionaries(TEXTS, TEXTS, max_size=3))
def test_arguments_are_objects_or_stay_text(arguments: dict[str, str]) -> None:
    text = json.dumps(arguments)
    said = [called("a", arguments=text), result("a")]
    assert for_template(said)[0]["tool_calls"][0]["function"]["arguments"] == arguments
    assert for_template(said, arguments_as_text=True)[0]["tool_calls"][0]["function"]["arguments"] == text
    assert said[0]["tool_calls"][0]["function"]["arguments"] == text  # what was given is not changed


def test_a_conversation_without_calls_stays_as_it_is() -> None:
    said = [USER, {"role": "assistant", "content": "Hello."}]
    assert not has_calls(said)
    assert for_template(said) == said
    assert for_template([called("a", arguments=" "), result("a")])[0]["tool_calls"][0]["function"]["arguments"] == {}


@pytest.mark.parametrize(
    ("said", "param"),
    [
        ([result("a")], "messages[0].tool_call_id"),
        ([called("a"), result("b")], "messages[1].tool_call_id"),
        ([called("a"), result("a"), result("a")], "messages[2].tool_call_id"),
        ([called("a"), result("a"), USER, result("a")], "messages[3].tool_call_id"),
        ([called("a", "b"), result("a")], "messages[0].tool_calls"),
        ([USER, called("a"), USER, result("a")], "messages[1].tool_calls"),
        ([called("a", "a")], "messages[0].tool_calls[1].id"),
        ([called("a", arguments="[]")], "messages[0].tool_calls[0].function.arguments"),
        ([called("a", arguments='{"a": 1, "a": 2}')], "messages[0].tool_calls[0].function.arguments"),
        ([called("a", arguments="{" * 1000)], "messages[0].tool_calls[0].function.arguments"),
    ],
)
def test_what_does_not_belong_together_is_refused(said: list[dict[str, Any]], param: str) -> None:
    with pytest.raises(ToolError) as error:
        for_template(said)
    assert error.value.param == param
