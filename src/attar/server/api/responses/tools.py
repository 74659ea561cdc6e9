"""Fields of tools in the Responses API: functions that a model may call, and the choice among them.

Hosted tools, such as `web_search` or `mcp`, are refused by their type.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from attar.server.api.body import Ignored
from attar.server.errors import APIError
from attar.text.tools.tool import MAX_TOOLS, NAME, Tool, ToolChoice, ToolError, check

_STRICT = "Arguments satisfy the schema, or the request is refused. Otherwise they may only be a JSON object."
ToolName = Annotated[str, Meta(pattern=f"^{NAME}$", title="FunctionName")]
Parameters = Annotated[dict[str, Any], Meta(title="ParametersSchema", description="A JSON schema of an object.")]


class ResponseFunction(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A function that the model may call."""

    type: Literal["function"]
    name: ToolName
    description: str | None = None
    parameters: Parameters | None = None
    strict: Annotated[bool | None, Meta(description=_STRICT)] = None
    output_schema: Ignored = None
    cache_control: Ignored = None

    def told(self) -> dict[str, Any]:
        """Return the tool as answers repeat it."""
        return {
            "type": "function", "name": self.name, "description": self.description, "parameters": self.parameters,
            "strict": bool(self.strict),
        }  # fmt: skip


class ChosenFunction(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The function that must be called."""

    type: Literal["function"]
    name: ToolName


ResponseTools = Annotated[list[ResponseFunction], Meta(max_length=MAX_TOOLS)]
ResponseChoice = Annotated[
    Literal["none", "auto", "required"] | ChosenFunction, Meta(description="`auto` where there are tools.")
]


def read_tools(
    tools: Sequence[ResponseFunction] | None, choice: str | ChosenFunction | None, parallel: bool | None
) -> tuple[tuple[Tool, ...], ToolChoice]:
    """Return the tools of a request and the choice among them. Raises APIError for tools that are refused, and for a
    choice that they do not allow."""
    read = tuple(Tool(each.name, each.description, each.parameters, bool(each.strict)) for each in tools or ())
    each = parallel is not False
    if isinstance(choice, ChosenFunction):
        made = ToolChoice("named", choice.name, each)
    else:
        mode: Any = choice or "auto"
        made = ToolChoice(mode, parallel=each)
    try:
        check(read, made)
    except ToolError as error:
        where = error.param.replace(".function", "")  # the fields of a function are the tool's own here
        raise APIError("invalid_value", f"{where}: {error}", where) from error
    return read, made if read else ToolChoice("none")


def told_choice(choice: str | ChosenFunction | None) -> str | dict[str, str]:
    """Return the choice as answers repeat it."""
    return {"type": "function", "name": choice.name} if isinstance(choice, ChosenFunction) else choice or "auto"
