"""Fields of tools in OpenAI's shape: functions that a model may call, the choice among them, and calls in messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple

from msgspec import Meta, Struct

from attar.server.api.body import Ignored
from attar.server.api.constraints import Asked
from attar.server.errors import APIError
from attar.text.tools.tool import MAX_TOOLS, NAME, Tool, ToolChoice, ToolError, check

MAX_CALLS = 128  # in one message
MAX_ID = 256  # characters of a call's id

_STRICT = "Arguments satisfy the schema, or the request is refused. Otherwise they may only be a JSON object."
FunctionName = Annotated[str, Meta(pattern=f"^{NAME}$", title="FunctionName")]
CallId = Annotated[str, Meta(min_length=1, max_length=MAX_ID)]
ParametersSchema = Annotated[dict[str, Any], Meta(title="ParametersSchema", description="A JSON schema of an object.")]
Arguments = Annotated[str, Meta(title="Arguments", description="A JSON object as text; empty: one without keys.")]


class Function(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A function that the model may call."""

    name: FunctionName
    description: str | None = None
    parameters: ParametersSchema | None = None
    strict: Annotated[bool | None, Meta(description=_STRICT)] = None


class FunctionTool(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A tool of a request."""

    type: Literal["function"]
    function: Function
    cache_control: Ignored = None


class NamedFunction(Struct, frozen=True, forbid_unknown_fields=True):
    name: FunctionName


class NamedTool(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="function"):
    """The function that must be called."""

    function: NamedFunction


class AllowedFunctions(Struct, frozen=True, forbid_unknown_fields=True):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Meta(min_length=1, max_length=MAX_TOOLS)]


class AllowedTools(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="allowed_tools"):
    """Functions that may be called, of those that the prompt shows."""

    allowed_tools: AllowedFunctions


Tools = Annotated[list[FunctionTool], Meta(max_length=MAX_TOOLS)]
Choice = Annotated[
    Literal["none", "auto", "required"] | NamedTool | AllowedTools, Meta(description="`auto` where there are tools.")
]


class CalledFunction(Struct, frozen=True, forbid_unknown_fields=True):
    name: FunctionName
    arguments: Arguments


class Call(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A call in an assistant's message."""

    id: CallId
    function: CalledFunction
    type: Literal["function"] = "function"
    index: Ignored = None

    def for_template(self) -> dict[str, Any]:
        """Return the call as chat templates expect it, with its arguments as text."""
        function = {"name": self.function.name, "arguments": self.function.arguments}
        return {"id": self.id, "type": "function", "function": function}


Calls = Annotated[list[Call], Meta(max_length=MAX_CALLS)]


class ToolUse(NamedTuple):
    """The tools of a request, and the choice among them."""

    tools: tuple[Tool, ...]
    choice: ToolChoice

    @property
    def may_call(self) -> bool:
        """Whether an answer may call a tool."""
        return self.choice.mode != "none"

    @classmethod
    def read(
        cls, tools: Sequence[FunctionTool] | None, choice: str | NamedTool | AllowedTools | None, parallel: bool | None
    ) -> ToolUse:
        """Read the fields of a request. Raises APIError for tools that are refused, and for a choice that they do not
        allow."""
        found = tuple(
            Tool(each.function.name, each.function.description, each.function.parameters, bool(each.function.strict))
            for each in tools or ()
        )
        if isinstance(choice, NamedTool):
            return cls.checked(found, ToolChoice("named", choice.function.name, parallel is not False))
        if isinstance(choice, AllowedTools):
            allowed = choice.allowed_tools
            names = frozenset(each.function.name for each in allowed.tools)
            return cls.checked(found, ToolChoice(allowed.mode, parallel=parallel is not False, allowed=names))
        mode: Any = choice or "auto"
        return cls.checked(found, ToolChoice(mode, parallel=parallel is not False))

    @classmethod
    def checked(cls, tools: Sequence[Tool], choice: ToolChoice) -> ToolUse:
        """Return tools and choice once they are checked. Raises APIError."""
        try:
            check(tools, choice)
        except ToolError as error:
            raise refused(error) from error
        return cls(tuple(tools), choice if tools else ToolChoice("none"))


def refused(error: ToolError) -> APIError:
    """Make the refusal of tools, or of calls in a conversation."""
    return APIError("invalid_value", f"{error.param}: {error}", error.param)


def check_alone(asked: Asked | None, ends: Sequence[str]) -> None:
    """Raise APIError for what contradicts the grammar of calls: a constraint to other texts than JSON, or a field that
    decides on the end."""
    if asked is not None and asked.grammar.kind not in ("json_object", "json_schema"):
        message = f"{asked.field}: not with tools, unless tool_choice is none"
        raise APIError("invalid_value", message, asked.field.partition(".")[0])
    for name in ends:
        message = f"{name}: not with tools, unless tool_choice is none: the grammar of calls decides on the end"
        raise APIError("invalid_value", message, name)
