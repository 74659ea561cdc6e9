"""Tools in Anthropic's shape: fields of /v1/messages, blocks of calls and results, and their place in a conversation.

A user's results become messages of role `tool`, as chat templates know them; text around them stays the user's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from attar.server.api.body import Ignored
from attar.server.api.tools.fields import ToolUse
from attar.server.errors import APIError
from attar.text.tools.openai import CallId, FunctionName, ParametersSchema
from attar.text.tools.tool import MAX_TOOLS, Tool, ToolChoice, ToolMode

MAX_PARTS = 256


class AnthropicTool(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A function that the model may call."""

    name: FunctionName
    input_schema: ParametersSchema
    description: str | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = None
    cache_control: Ignored = None
    input_examples: Ignored = None
    defer_loading: Ignored = None
    eager_input_streaming: Ignored = None
    allowed_callers: Ignored = None


AnthropicTools = Annotated[list[AnthropicTool], Meta(max_length=MAX_TOOLS)]


class AutoChoice(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="type", tag="auto"):
    """The model decides."""

    disable_parallel_tool_use: bool = False


class AnyChoice(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="type", tag="any"):
    """Some tool must be called."""

    disable_parallel_tool_use: bool = False


class OneChoice(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="type", tag="tool"):
    """This tool must be called."""

    name: FunctionName
    disable_parallel_tool_use: bool = False


class NoChoice(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="type", tag="none"):
    """No tool may be called."""


AnthropicChoice = AutoChoice | AnyChoice | OneChoice | NoChoice


class ResultText(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A piece of a result's text."""

    type: Literal["text"]
    text: str
    cache_control: Ignored = None
    citations: Ignored = None


class ToolUseBlock(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="type", tag="tool_use"):
    """A call of an earlier answer."""

    id: CallId
    name: FunctionName
    input: dict[str, Any]
    caller: Ignored = None
    cache_control: Ignored = None

    def for_template(self) -> dict[str, Any]:
        """Return the call in OpenAI's shape."""
        arguments = msgspec.json.encode(self.input).decode()
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": arguments}}


class ToolResultBlock(
    Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="type", tag="tool_result"
):
    """The result of a call."""

    tool_use_id: CallId
    content: str | Annotated[list[ResultText], Meta(max_length=MAX_PARTS)] | None = None
    is_error: bool | None = None
    cache_control: Ignored = None

    def for_template(self) -> dict[str, Any]:
        """Return the result in OpenAI's shape. An error has no field there: its text says so."""
        text = self.content if isinstance(self.content, str) else "".join(each.text for each in self.content or ())
        text = f"Error: {text}" if self.is_error else text
        return {"role": "tool", "tool_call_id": self.tool_use_id, "content": text}


_MODES: dict[type[AnthropicChoice], ToolMode] = {
    AutoChoice: "auto", AnyChoice: "required", OneChoice: "named", NoChoice: "none",
}  # fmt: skip


def read(tools: Sequence[AnthropicTool] | None, choice: AnthropicChoice | None) -> ToolUse:
    """Return the tools of a request and the choice among them. Raises APIError for tools that are refused."""
    found = [Tool(each.name, each.description, each.input_schema, bool(each.strict)) for each in tools or ()]
    chosen = choice or AutoChoice()
    name = chosen.name if isinstance(chosen, OneChoice) else None
    parallel = isinstance(chosen, NoChoice) or not chosen.disable_parallel_tool_use
    try:
        return ToolUse.checked(found, ToolChoice(_MODES[type(chosen)], name, parallel))
    except APIError as error:
        raise anthropic_refusal(error) from error


def anthropic_refusal(error: APIError) -> APIError:
    """Return a refusal of tools with the names of Anthropic's fields."""
    if error.param is None or not error.param.startswith("tools"):
        return error
    param = error.param.replace(".function.parameters", ".input_schema").replace(".function", "")
    return APIError(error.code, error.message.replace(error.param, param, 1), param)
