"""Tools of a request, and the choice among them, as values with limits.

A tool's name stands unquoted in some models' calls and within JSON in others', so it has few characters. Schemas are
printed into the prompt and compiled into a grammar, so their size is bounded.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from attar.errors import UserError

MAX_TOOLS = 128
MAX_SCHEMAS = 256 << 10  # bytes of UTF-8 of all tools of a request, as JSON

ToolMode = Literal["none", "auto", "required", "named"]

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
NAME = _NAME.pattern
"""Names of tools, as a regular expression."""
_SHOWN = 80  # characters of a refused name


class ToolError(UserError):
    """Refused tools. `param` is the place in the request, such as `tools[2].function.name`."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__("tools_invalid", message)
        self.param = param


@dataclass(frozen=True)
class Tool:
    """A function that the model may call.

    `parameters` is a JSON schema of an object; None for a function without arguments. With `strict` the arguments of
    every call satisfy it, or the request is refused. `grammar` is one in Lark's format, with recursion, of the only
    argument `input`, which is text.
    """

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool = False
    grammar: str | None = None

    @property
    def schema(self) -> dict[str, Any]:
        """The JSON schema of the arguments: always that of an object."""
        if self.parameters is None:
            return {"type": "object", "properties": {}, "additionalProperties": False}
        return {"type": "object", **self.parameters}

    def template_form(self) -> dict[str, Any]:
        """Return the tool as chat templates expect it: `{"type": "function", "function": {...}}`."""
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        function["parameters"] = (
            self.parameters if self.parameters is not None else {"type": "object", "properties": {}}
        )
        return {"type": "function", "function": function}


@dataclass(frozen=True)
class ToolChoice:
    """How an answer may use the tools.

    `none`: not at all. `auto`: as the model decides. `required`: with at least one call, and no text. `named`: with
    calls of the tool `name`, and no text. Without `parallel` an answer has one call at most. `allowed` are the names of
    the tools that may be called, of those that the prompt shows; None for all.
    """

    mode: ToolMode = "auto"
    name: str | None = None
    parallel: bool = True
    allowed: frozenset[str] | None = None

    def of(self, tools: Sequence[Tool]) -> list[Tool]:
        """Return the tools that may be called."""
        if self.mode == "named":
            return [tool for tool in tools if tool.name == self.name]
        return [tool for tool in tools if self.allowed is None or tool.name in self.allowed]


def check(tools: Sequence[Tool], choice: ToolChoice) -> None:
    """Raise ToolError for tools that are too many, too large, misnamed or named twice, for parameters that are not the
    schema of an object, and for a choice of a tool that is not among them."""
    if len(tools) > MAX_TOOLS:
        raise ToolError(f"{len(tools)} tools are more than {MAX_TOOLS}", "tools")
    seen: set[str] = set()
    size = 0
    for at, tool in enumerate(tools):
        where = f"tools[{at}].function"
        if not _NAME.fullmatch(tool.name):
            message = f"a tool's name has 1 to 64 letters, digits, _ or -, unlike {tool.name[:_SHOWN]!r}"
            raise ToolError(message, f"{where}.name")
        if tool.name in seen:
            raise ToolError(f"two tools are named {tool.name!r}", f"{where}.name")
        seen.add(tool.name)
        if tool.schema.get("type") != "object":
            raise ToolError("the parameters of a tool are the schema of an object", f"{where}.parameters")
        size += _size(tool, where)
        if size > MAX_SCHEMAS:
            raise ToolError(f"the tools have more than {MAX_SCHEMAS} bytes as JSON", "tools")
    if choice.mode != "none" and choice.mode != "auto" and not tools:
        raise ToolError("a call is required, and there are no tools", "tool_choice")
    if choice.mode == "named" and choice.name not in seen:
        raise ToolError(f"no tool is named {(choice.name or '')[:_SHOWN]!r}", "tool_choice")
    for name in sorted((choice.allowed or frozenset()) - seen):
        raise ToolError(f"no tool is named {name[:_SHOWN]!r}", "tool_choice")


def _size(tool: Tool, where: str) -> int:
    """Return the bytes of a tool as JSON. Raises ToolError for what is none."""
    try:
        return len(json.dumps(tool.template_form(), ensure_ascii=False, allow_nan=False).encode())
    except (TypeError, ValueError, RecursionError) as error:
        raise ToolError("a tool must be plain JSON, in Unicode and not nested too deeply", where) from error
