"""Items of a conversation, and what chat templates are given for them.

An item is a message, a call of a tool, its output, or a model's reasoning. Clients send back what they got, so
fields of output items are accepted in input items.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from attar.images.decoding import ImageSource
from attar.server.api.body import Ignored
from attar.server.api.images.parts import MARK, InputImage, placed
from attar.server.api.messages import MAX_PARTS
from attar.server.api.responses.custom import arguments
from attar.server.api.responses.tools import ToolName, joined
from attar.server.errors import APIError

MAX_ITEMS = 2048

Status = Literal["in_progress", "completed", "incomplete"]
ItemId = Annotated[str, Meta(max_length=256)]
CallId = Annotated[str, Meta(min_length=1, max_length=256)]
Arguments = Annotated[str, Meta(title="Arguments", description="A JSON object as text; empty: one without keys.")]


class InputText(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="type", tag="input_text"):
    """A piece of what the user or the system says."""

    text: str
    prompt_cache_breakpoint: Ignored = None


class OutputText(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="type", tag="output_text"):
    """A piece of what the model has said."""

    text: str
    annotations: Ignored = None
    logprobs: Ignored = None


class Refusal(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="type", tag="refusal"):
    """A model's refusal."""

    refusal: str


Part = InputText | InputImage | OutputText | Refusal
TextPart = InputText | OutputText | Refusal
TextContent = str | Annotated[list[TextPart], Meta(max_length=MAX_PARTS)]
ItemContent = str | Annotated[list[Part], Meta(max_length=MAX_PARTS)]


def _text(content: ItemContent | TextContent) -> str:
    if isinstance(content, str):
        return content
    return "".join(map(_said, content))


def _said(part: Part) -> str:
    if isinstance(part, InputImage):
        return MARK
    return part.refusal if isinstance(part, Refusal) else part.text


def _shows(content: ItemContent) -> bool:
    """Return whether a message has images."""
    return not isinstance(content, str) and any(isinstance(part, InputImage) for part in content)


def _images(content: ItemContent) -> list[ImageSource]:
    """Return the images of a message. Raises APIError."""
    return [] if isinstance(content, str) else [part.source() for part in content if isinstance(part, InputImage)]


class MessageItem(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="type", tag="message"):
    """A message. Its `type` may be left out."""

    role: Literal["system", "developer", "user", "assistant"]
    content: ItemContent
    id: ItemId | None = None
    status: Status | None = None
    phase: Ignored = None
    end_turn: Ignored = None
    created_by: Ignored = None

    def __post_init__(self) -> None:
        if self.role != "user" and _shows(self.content):
            message = f"input: an image belongs to a message of role user, not {self.role}"
            raise APIError("invalid_value", message, "input")

    @property
    def text(self) -> str:
        """The message's text, its parts joined, with a mark for each image."""
        return _text(self.content)


class FunctionCall(
    Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="type", tag="function_call"
):
    """A call that the model has made. `arguments` is a JSON object as text."""

    call_id: CallId
    name: ToolName
    arguments: Arguments
    id: ItemId | None = None
    status: Status | None = None
    namespace: ToolName | None = None
    created_by: Ignored = None


class FunctionCallOutput(
    Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="type", tag="function_call_output"
):
    """What a called function has returned."""

    call_id: CallId
    output: TextContent
    id: ItemId | None = None
    status: Status | None = None
    name: Ignored = None
    created_by: Ignored = None

    @property
    def text(self) -> str:
        """The output's text, its parts joined."""
        return _text(self.output)


class CustomToolCall(
    Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="type", tag="custom_tool_call"
):
    """A call of a custom tool that the model has made."""

    call_id: CallId
    name: ToolName
    input: str
    id: ItemId | None = None
    status: Status | None = None
    created_by: Ignored = None


class CustomToolCallOutput(FunctionCallOutput, frozen=True, kw_only=True, tag="custom_tool_call_output"):
    """What a called custom tool has returned."""


class ReasoningPart(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A piece of reasoning."""

    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="type", tag="reasoning"):
    """What the model said before an answer; the chat template decides whether the model reads it again."""

    id: ItemId | None = None
    status: Status | None = None
    summary: Ignored = None
    content: Annotated[list[ReasoningPart], Meta(max_length=MAX_PARTS)] | None = None
    encrypted_content: Ignored = None
    created_by: Ignored = None


class ItemReference(
    Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="type", tag="item_reference"
):
    """An item of an answer that the server has stored."""

    id: ItemId


Item = MessageItem | FunctionCall | FunctionCallOutput | CustomToolCall | CustomToolCallOutput | ReasoningItem
InputItem = Item | ItemReference


def completed(items: Any) -> Any:
    """Return items, as JSON, with the type that a message need not have."""
    if not isinstance(items, list):
        return items
    return [{**item, "type": "message"} if _untyped(item) else item for item in items]


def _untyped(item: Any) -> bool:
    return isinstance(item, dict) and "type" not in item


def conversation(instructions: str | None, items: Iterable[Item]) -> list[dict[str, Any]]:
    """Return the messages of items, as OpenAI's chats have them.

    Instructions and the system messages that follow them at once are one message: many templates take one system
    message, and only as the first. Calls, and the text behind them or behind reasoning, belong to one assistant's
    message with what is before them.
    """
    found: list[dict[str, Any]] = []
    if instructions:
        found.append({"role": "system", "content": instructions})
    for item in items:
        last = found[-1] if found else {}
        match item:
            case MessageItem():
                role = "system" if item.role == "developer" else item.role
                if role == "system" and len(found) == 1 and last["role"] == "system":
                    found[0] = {"role": "system", "content": last["content"] + "\n\n" + item.text}
                elif role == "assistant" and _goes_on(last):
                    last["content"] += item.text
                else:
                    found.append(placed({"role": role, "content": item.text}, _images(item.content)))
            case ReasoningItem():
                if text := "".join(part.text for part in item.content or ()):
                    if last.get("role") != "assistant":
                        found.append(last := {"role": "assistant", "content": ""})
                    last["reasoning_content"] = last.get("reasoning_content", "") + text
            case FunctionCall() | CustomToolCall():
                if last.get("role") != "assistant":
                    found.append(last := {"role": "assistant", "content": ""})
                if isinstance(item, CustomToolCall):
                    function = {"name": item.name, "arguments": arguments(item.input)}
                else:
                    function = {"name": joined(item.namespace, item.name), "arguments": item.arguments}
                call = {"id": item.call_id, "type": "function", "function": function}
                last.setdefault("tool_calls", []).append(call)
            case FunctionCallOutput():
                found.append({"role": "tool", "tool_call_id": item.call_id, "content": item.text})
    return found


def _goes_on(last: dict[str, Any]) -> bool:
    """Return whether a message of the assistant goes on with its text: behind a call, or behind reasoning alone."""
    return "tool_calls" in last or ("reasoning_content" in last and not last["content"])
