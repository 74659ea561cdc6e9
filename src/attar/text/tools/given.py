"""Tools and conversations as Python code gives them, checked like those of requests."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar

import msgspec

from attar.text.tools.functions import described
from attar.text.tools.openai import CallId, Calls, Choice, Function, FunctionTool, ToolUse
from attar.text.tools.tool import Tool, ToolError

ToolLike = Tool | Mapping[str, Any] | Callable[..., Any]
"""A tool, OpenAI's object of one, or a Python function."""
ChoiceLike = Literal["none", "auto", "required"] | Mapping[str, Any]
"""A choice among tools, as OpenAI's `tool_choice` has it."""

T = TypeVar("T")

_CHOICE: Any = Choice
_CALLS: Any = Calls | None
_ID: Any = CallId


def tool_use(tools: Sequence[ToolLike] | None, choice: ChoiceLike = "auto", parallel: bool = True) -> ToolUse:
    """Return tools and the choice among them. Arguments of Python functions are `strict`. Raises ToolError for tools
    that a request could not have either, for functions that no schema describes, and for a choice that the tools do
    not allow."""
    found = [_tool(each, f"tools[{at}]") for at, each in enumerate(tools or ())]
    return ToolUse.read(found, _converted(choice, _CHOICE, "tool_choice"), parallel)


def conversation(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages with their calls and results checked, as `history.for_template` expects them. An assistant's
    message with calls may have no content. Raises ToolError for what is malformed."""
    said = []
    for at, message in enumerate(messages):
        entry, where = dict(message), f"messages[{at}]"
        calls = _converted(entry.pop("tool_calls", None), _CALLS, f"{where}.tool_calls")
        if entry.get("role") == "tool":
            entry["tool_call_id"] = _converted(entry.get("tool_call_id"), _ID, f"{where}.tool_call_id")
        if calls and entry.get("role") != "assistant":
            raise ToolError("calls belong to a message of role assistant", f"{where}.tool_calls")
        if calls:
            entry |= {"content": entry.get("content") or "", "tool_calls": [call.for_template() for call in calls]}
        said.append(entry)
    return said


def _tool(given: ToolLike, where: str) -> FunctionTool:
    if isinstance(given, Tool):
        function = Function(
            name=given.name, description=given.description, parameters=given.parameters, strict=given.strict
        )
        return FunctionTool(type="function", function=function)
    if isinstance(given, Mapping):
        return _converted(dict(given), FunctionTool, where)
    if not (inspect.isfunction(given) or inspect.ismethod(given)):
        raise ToolError(f"a tool is an object like OpenAI's or a Python function, not {type(given).__name__}", where)
    try:
        found = {**described(given), "strict": True}
    except (NameError, TypeError, ValueError) as error:
        raise ToolError(str(error), where) from error
    return _converted({"type": "function", "function": found}, FunctionTool, where)


def _converted(value: Any, kind: type[T], where: str) -> T:
    """Return a value as the struct that requests have for it."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise ToolError(f"{where}: {error}", where) from error
