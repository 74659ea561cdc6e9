"""Fields of tools in the Responses API: what a model may call, and the choice among them.

Tools are functions, also in namespaces, and custom tools. A model knows a function of a namespace as
`NAMESPACE__NAME`. Hosted tools, such as `web_search` or `mcp`, are refused
by their type.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta, Struct

from attar.server.api.body import Ignored
from attar.server.api.responses.custom import MAX_GRAMMARS, ResponseCustom, TextByGrammar
from attar.server.api.tools.fields import ToolUse
from attar.server.errors import APIError
from attar.text.grammars import GrammarError
from attar.text.tools.tool import MAX_TOOLS, NAME, Tool, ToolChoice

_PLACE = re.compile(r"tools\[(\d+)\]\.function")
_STRICT = "Arguments satisfy the schema, or the request is refused. Otherwise they may only be a JSON object."
ToolName = Annotated[str, Meta(pattern=f"^{NAME}$", title="FunctionName")]
Parameters = Annotated[dict[str, Any], Meta(title="ParametersSchema", description="A JSON schema of an object.")]


class _Function(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
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


class ResponseFunction(_Function, frozen=True, kw_only=True, tag_field="type", tag="function"):
    """A function that the model may call."""


class NamespacedFunction(_Function, frozen=True, kw_only=True):
    """A function of a namespace."""

    type: Literal["function"]


class ResponseNamespace(
    Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="type", tag="namespace"
):
    """Functions with a name in common."""

    name: ToolName
    description: str | None = None
    tools: Annotated[list[NamespacedFunction], Meta(min_length=1, max_length=MAX_TOOLS)]

    def told(self) -> dict[str, Any]:
        """Return the tool as answers repeat it."""
        inner = [tool.told() for tool in self.tools]
        return {"type": "namespace", "name": self.name, "description": self.description or "", "tools": inner}


class ChosenFunction(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="function"):
    """The function that must be called."""

    name: ToolName


class ChosenCustom(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="custom"):
    """The custom tool that must be called."""

    name: ToolName


class AllowedOfTools(
    Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="type", tag="allowed_tools"
):
    """Tools that may be called, of those that the prompt shows."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[ChosenFunction | ChosenCustom], Meta(min_length=1, max_length=MAX_TOOLS)]


ResponseTool = ResponseFunction | ResponseNamespace | ResponseCustom
ResponseTools = Annotated[list[ResponseTool], Meta(max_length=MAX_TOOLS)]
Choice = Literal["none", "auto", "required"] | ChosenFunction | ChosenCustom | AllowedOfTools
ResponseChoice = Annotated[Choice, Meta(description="`auto` where there are tools.")]


class Toolset(NamedTuple):
    """Tools of a request, and the choice among them. `spaces` has namespace and name of tools that have one, by the
    names that the model knows; `custom` are the names of custom tools."""

    use: ToolUse
    spaces: dict[str, tuple[str, str]]
    custom: frozenset[str]


def joined(namespace: str | None, name: str) -> str:
    """Return the name by which the model knows a function."""
    return name if namespace is None else f"{namespace}__{name}"


def read_tools(tools: Sequence[ResponseTool] | None, choice: Choice | None, parallel: bool | None) -> Toolset:
    """Return the tools of a request and the choice among them. Raises APIError for tools that are refused, and for a
    choice that they do not allow."""
    found = list(_functions(tools or ()))
    formats = [each.format for _, _, each in found if isinstance(each, ResponseCustom)]
    size = sum(len(each.definition) for each in formats if isinstance(each, TextByGrammar) and each.syntax == "lark")
    if size > MAX_GRAMMARS:
        message = f"tools: grammars of {size} characters are more than {MAX_GRAMMARS}"
        raise APIError("invalid_length", message, "tools")
    read = tuple(
        Tool(joined(space, each.name), each.description, schema, bool(each.strict), grammar)
        for place, space, each in found
        for schema, grammar in (_arguments(place, each),)
    )
    made = ToolChoice(parallel=parallel is not False)
    match choice:
        case ChosenFunction(name=name) | ChosenCustom(name=name):
            made = replace(made, mode="named", name=name)
        case AllowedOfTools(mode=mode, tools=allowed):
            made = replace(made, mode=mode, allowed=frozenset(each.name for each in allowed))
        case "none" | "required":
            made = replace(made, mode=choice)
    with placing(tools or ()):
        use = ToolUse.checked(read, made)
    spaces = {joined(space, each.name): (space, each.name) for _, space, each in found if space is not None}
    return Toolset(use, spaces, frozenset(each.name for _, _, each in found if isinstance(each, ResponseCustom)))


def _arguments(place: str, tool: _Function | ResponseCustom) -> tuple[dict[str, Any] | None, str | None]:
    """Return the schema of a tool's arguments, and the grammar of its input where it has one. Raises APIError."""
    if not isinstance(tool, ResponseCustom):
        return tool.parameters, None
    try:
        return tool.arguments()
    except GrammarError as error:
        where = f"{place}.format.definition"
        raise APIError("invalid_value", f"{where}: {error}", where) from error


@contextlib.contextmanager
def placing(tools: Sequence[ResponseTool]) -> Iterator[None]:
    """Name the place of a refused tool as the request has it: a function's fields are the tool's own here."""
    try:
        yield
    except APIError as refusal:
        param = refusal.param or ""
        found = list(_functions(tools))
        place = _PLACE.sub(lambda at: found[int(at[1])][0], param)
        if (at := _PLACE.match(param)) and isinstance(found[int(at[1])][2], ResponseCustom):
            place = place.replace(".parameters", ".format")
        if place == param:
            raise
        raise APIError(refusal.code, refusal.message.replace(param, place, 1), place) from refusal


def _functions(tools: Sequence[ResponseTool]) -> Iterator[tuple[str, str | None, _Function | ResponseCustom]]:
    """Yield the place, the namespace and the fields of each tool that can be called."""
    for at, tool in enumerate(tools):
        if isinstance(tool, ResponseNamespace):
            for number, inner in enumerate(tool.tools):
                yield f"tools[{at}].tools[{number}]", tool.name, inner
        else:
            yield f"tools[{at}]", None, tool


def told_choice(choice: Choice | None) -> Any:
    """Return the choice as answers repeat it."""
    return msgspec.to_builtins(choice or "auto")
