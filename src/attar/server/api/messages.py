"""The messages of a conversation as chat completions have them, with texts and images as content."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from attar.server.api.body import Ignored
from attar.server.api.images.parts import MARK, ImagePart, placed
from attar.server.errors import APIError
from attar.text.tools.openai import CallId, Calls

MAX_MESSAGES = 2048
MAX_PARTS = 256

Nothing = Annotated[list[Any], Meta(max_length=0)]


class TextPart(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="type", tag="text"):
    """A piece of text."""

    text: str
    cache_control: Ignored = None
    citations: Nothing | None = None


SeenContent = str | Annotated[list[TextPart | ImagePart], Meta(max_length=MAX_PARTS)]


def text_of(content: SeenContent | None) -> str:
    """Return the text of a message, with a mark for each image."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    return "".join(part.text if isinstance(part, TextPart) else MARK for part in content)


def images_of(content: SeenContent | None) -> list[ImagePart]:
    """Return the images of a message."""
    if content is None or isinstance(content, str):
        return []
    return [part for part in content if isinstance(part, ImagePart)]


_REASONED = "An assistant's reasoning; the chat template decides whether the model reads it again."
Reasoned = Annotated[str, Meta(description=_REASONED)]


class Message(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One message of a conversation. Clients that repeat an answer send the fields that must be null."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: SeenContent | None = None
    type: Annotated[Literal["text"], Meta(description="lm-eval sends it with every message; it changes nothing.")] = (
        "text"
    )
    name: Annotated[str, Meta(max_length=64)] | None = None
    refusal: None = None
    reasoning_content: Reasoned | None = None
    reasoning: Reasoned | None = None  # vLLM's and OpenRouter's name of it
    audio: None = None
    function_call: None = None
    tool_calls: Calls | None = None
    tool_call_id: CallId | None = None  # of a result, whose role is `tool`
    annotations: Nothing | None = None
    id: Ignored = None  # this and the others: a front end's own
    timestamp: Ignored = None
    created_at: Ignored = None
    model: Ignored = None
    metadata: Ignored = None
    cache_control: Ignored = None

    def __post_init__(self) -> None:
        if self.content is None and self.role != "assistant":
            raise APIError("missing_field", f"messages: a message of role {self.role} needs content", "messages")
        if self.role == "tool" and self.tool_call_id is None:
            raise APIError("missing_field", "messages: a message of role tool needs tool_call_id", "messages")
        if self.role != "user" and images_of(self.content):
            message = f"messages: an image belongs to a message of role user, not {self.role}"
            raise APIError("invalid_value", message, "messages")
        for name, role in (("tool_calls", "assistant"), ("tool_call_id", "tool")):
            if getattr(self, name) and self.role != role:
                message = f"messages: {name} belongs to a message of role {role}, not {self.role}"
                raise APIError("invalid_value", message, "messages")

    def for_template(self) -> dict[str, Any]:
        """Return the message as chat templates expect it, except arguments of calls, which stay text. `developer` is
        the newer name of `system`."""
        entry: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role}
        entry["content"] = text_of(self.content)
        if self.tool_calls:
            entry["tool_calls"] = [call.for_template() for call in self.tool_calls]
        if self.tool_call_id is not None:
            entry["tool_call_id"] = self.tool_call_id
        reasoned = self.reasoning_content or self.reasoning
        entry |= {} if reasoned is None else {"reasoning_content": reasoned}
        entry |= {} if self.name is None else {"name": self.name}
        return placed(entry, [part.source() for part in images_of(self.content)])


Messages = Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)]
