"""Shapes of answers and events in Anthropic's API."""

from __future__ import annotations

from typing import Any, Literal

from attar.server.api.response_types.answer import Answer


class AnthropicUsage(Answer, frozen=True):
    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class TextBlock(Answer, frozen=True, tag_field="type", tag="text"):
    text: str


class ThinkingBlock(Answer, frozen=True, tag_field="type", tag="thinking"):
    """Reasoning. Its signature is a checksum, which clients send back; nothing reads it."""

    thinking: str
    signature: str


class CallBlock(Answer, frozen=True, tag_field="type", tag="tool_use"):
    """A call; in the first event of a stream's block its input is empty."""

    id: str
    name: str
    input: dict[str, Any]


ContentBlock = TextBlock | ThinkingBlock | CallBlock
StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class AnthropicReply(Answer, frozen=True, tag_field="type", tag="message"):
    id: str
    role: Literal["assistant"]
    model: str
    content: list[ContentBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: AnthropicUsage


class TokenCount(Answer, frozen=True):
    input_tokens: int


class MessageStart(Answer, frozen=True, tag_field="type", tag="message_start"):
    message: AnthropicReply


class ContentBlockStart(Answer, frozen=True, tag_field="type", tag="content_block_start"):
    index: int
    content_block: ContentBlock


class TextDelta(Answer, frozen=True, tag_field="type", tag="text_delta"):
    text: str


class ThinkingDelta(Answer, frozen=True, tag_field="type", tag="thinking_delta"):
    thinking: str


class SignatureDelta(Answer, frozen=True, tag_field="type", tag="signature_delta"):
    signature: str


class InputDelta(Answer, frozen=True, tag_field="type", tag="input_json_delta"):
    """A piece of the JSON text of a call's input."""

    partial_json: str


class ContentBlockDelta(Answer, frozen=True, tag_field="type", tag="content_block_delta"):
    index: int
    delta: TextDelta | ThinkingDelta | SignatureDelta | InputDelta


class ContentBlockStop(Answer, frozen=True, tag_field="type", tag="content_block_stop"):
    index: int


class MessageEnd(Answer, frozen=True):
    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(Answer, frozen=True, tag_field="type", tag="message_delta"):
    delta: MessageEnd
    usage: AnthropicUsage


class Ping(Answer, frozen=True, tag_field="type", tag="ping"):
    """A keep-alive event in a stream that has been silent for a while."""


class MessageStop(Answer, frozen=True, tag_field="type", tag="message_stop"):
    pass


class AnthropicErrorDetail(Answer, frozen=True):
    type: str
    message: str


class AnthropicError(Answer, frozen=True, tag_field="type", tag="error"):
    """An error in Anthropic's shape."""

    error: AnthropicErrorDetail


ANTHROPIC_EVENTS: tuple[type[Answer], ...] = (
    MessageStart, ContentBlockStart, ContentBlockDelta, ContentBlockStop, MessageDelta, MessageStop, Ping,
    AnthropicError,
)  # fmt: skip
