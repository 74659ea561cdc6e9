"""Tools and choices within their limits, and refusals that name the place."""

from __future__ import annotations

from typing import Any

import pytest

from attar.text.tools.tool import MAX_SCHEMAS, MAX_TOOLS, Tool, ToolChoice, ToolError, check

LARGE = {"type": "object", "description": "x" * MAX_SCHEMAS}
DEEP: dict[str, Any] = {"type": "object"}
for _ in range(100_000):
    DEEP = {"not": DEEP}
DEEP["type"] = "object"


def test_what_clients_send_is_accepted() -> None:
    tools = [Tool("get_weather-2", "Weather.", {"properties": {"city": {"type": "string"}}}), Tool("a" * 64)]
    for choice in (ToolChoice("none"), ToolChoice(), ToolChoice("required"), ToolChoice("named", "a" * 64)):
        check(tools, choice)
    check([], ToolChoice())
    assert tools[0].schema["type"] == "object"
    assert tools[0].template_form()["function"]["description"] == "Weather."


@pytest.mark.parametrize(
    "tools, choice, param",
    [
        ([Tool("")], ToolChoice(), "tools[0].function.name"),
        ([Tool("a"), Tool("b<|im_end|>")], ToolChoice(), "tools[1].function.name"),
        ([Tool("é")], ToolChoice(), "tools[0].function.name"),
        ([Tool("a\n")], ToolChoice(), "tools[0].function.name"),
        ([Tool("a" * 65)], ToolChoice(), "tools[0].function.name"),
        ([Tool("a"), Tool("a")], ToolChoice(), "tools[1].function.name"),
        ([Tool("a", parameters={"type": "string"})], ToolChoice(), "tools[0].function.parameters"),
        ([Tool("a", parameters={"x": float("nan")})], ToolChoice(), "tools[0].function"),
        ([Tool("a", description="\ud800")], ToolChoice(), "tools[0].function"),
        ([Tool("a", parameters=DEEP)], ToolChoice(), "tools[0].function"),
        ([Tool("a", parameters=LARGE)], ToolChoice(), "tools"),
        ([Tool(f"t{at}") for at in range(MAX_TOOLS + 1)], ToolChoice(), "tools"),
        ([], ToolChoice("required"), "tool_choice"),
        ([Tool("a")], ToolChoice("named", "b"), "tool_choice"),
        ([Tool("a")], ToolChoice("named"), "tool_choice"),
    ],
)  # fmt: skip
def test_others_are_refused_with_their_place(tools: list[Tool], choice: ToolChoice, param: str) -> None:
    with pytest.raises(ToolError) as caught:
        check(tools, choice)
    assert (caught.value.code, caught.value.param) == ("tools_invalid", param)
