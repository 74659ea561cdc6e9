"""Tools and conversations from Python code: read like those of requests, and refused like them."""

from __future__ import annotations

import functools
from typing import Annotated, Any, Literal

import pytest

from attar.text.tools.given import conversation, tool_use
from attar.text.tools.tool import Tool, ToolChoice, ToolError


def weather(city: Annotated[str, "Its name."], unit: Literal["C", "F"] = "C") -> str:
    """Return the weather of a city."""
    return city + unit


def untyped(city) -> str:  # type: ignore[no-untyped-def]
    return str(city)


class Station:
    def rain(self, days: int) -> None: ...


SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "description": "Its name."}, "unit": {"enum": ["C", "F"]}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = Tool("weather", "Return the weather of a city.", SCHEMA, strict=True)
AS_OBJECT = {"type": "function", "function": {**WEATHER.template_form()["function"], "strict": True}}
CALL = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": "{}"}}


def test_a_tool_is_the_same_in_each_form() -> None:
    for given in (weather, AS_OBJECT, WEATHER):
        assert tool_use([given]).tools == (WEATHER,)
    assert tool_use(None) == tool_use([]), "clients pass None where they have no tools"
    [rain] = tool_use([Station().rain]).tools
    assert rain.schema["properties"] == {"days": {"type": "integer"}}


def test_choices_are_openais() -> None:
    named = {"type": "function", "function": {"name": "weather"}}
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [named]}}
    assert tool_use([weather]).choice == ToolChoice()
    assert tool_use([weather], "none").choice == ToolChoice("none")
    assert tool_use([weather], named, parallel=False).choice == ToolChoice("named", "weather", parallel=False)
    assert tool_use([weather], allowed).choice == ToolChoice("required", allowed=frozenset(["weather"]))
    assert not tool_use([]).may_call


@pytest.mark.parametrize(
    ("tools", "choice", "param"),
    [
        ([untyped], "auto", "tools[0]"),
        ([weather, lambda: None], "auto", "tools[1]"),
        ([functools.partial(weather, "Oslo")], "auto", "tools[0]"),
        ([3], "auto", "tools[0]"),
        ([{"type": "function"}], "auto", "tools[0]"),
        ([weather, weather], "auto", "tools[1].function.name"),
        ([weather], "maybe", "tool_choice"),
        ([weather], {"type": "function", "function": {"name": "other"}}, "tool_choice"),
        ([], "required", "tool_choice"),
    ],
)
def test_refused_tools_have_their_place(tools: Any, choice: Any, param: str) -> None:
    with pytest.raises(ToolError) as error:
        tool_use(tools, choice)
    assert (error.value.code, error.value.param) == ("tools_invalid", param)


def test_calls_and_results_are_as_templates_take_them() -> None:
    said = [{"role": "assistant", "content": None, "tool_calls": [CALL | {"index": 0}]}, {"role": "user"}]
    assert conversation(said) == [{"role": "assistant", "content": "", "tool_calls": [CALL]}, {"role": "user"}]
    result = {"role": "tool", "tool_call_id": "a", "content": "warm"}
    assert conversation([result]) == [result]


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ({"role": "assistant", "tool_calls": [{"id": "a"}]}, "tool_calls"),
        ({"role": "assistant", "tool_calls": "weather"}, "tool_calls"),
        ({"role": "user", "content": "", "tool_calls": [CALL]}, "tool_calls"),
        ({"role": "tool", "content": "warm"}, "tool_call_id"),
    ],
)
def test_malformed_calls_are_refused(message: dict[str, Any], field: str) -> None:
    with pytest.raises(ToolError) as error:
        conversation([{"role": "user", "content": "Hi."}, message])
    assert error.value.param == f"messages[1].{field}"
