"""Tools in OpenAI's shape: functions that a model may call, the choice among them, and calls in messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple, Self

from msgspec import Meta, Struct

from attar.text.tools.tool import MAX_TOOLS, NAME, Tool, ToolChoice, check

Ignored = Annotated[Any, Meta(description="It changes no token: any value is accepted and ignored.")]
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


class AllowedFunction(Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["function"]
    function: NamedFunction


class AllowedFunctions(Struct, frozen=True, forbid_unknown_fields=True):
    mode: Literal["auto", "required"]
    tools: Annotated[list[AllowedFunction], Meta(min_length=1, max_length=MAX_TOOLS)]


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
    ) -> Self:
        """Read the fields of a request. Raises ToolError for tools that are refused, and for a choice that they do not
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
    def checked(cls, tools: Sequence[Tool], choice: ToolChoice) -> Self:
        """Return tools and choice once they are checked. Raises ToolError."""
        check(tools, choice)
        return cls(tuple(tools), choice if tools else ToolChoice("none"))
