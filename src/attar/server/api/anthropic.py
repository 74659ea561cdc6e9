"""Anthropic's /v1/messages: bodies of requests, and answers, whole and as streams.

`input_tokens` are the prompt tokens that were not read from a cache. Their number is known only at the end, so a
stream's first event counts the whole prompt as input, and its last event has the final number.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta, Struct

from attar.faults import point
from attar.protocol.messages import Delta, Failed, Finished
from attar.server.api import schemas
from attar.server.api.body import Body, Ignored
from attar.server.api.openai import collect
from attar.server.api.reasoning import Thinking, Wish
from attar.server.api.schemas import MAX_PARTS, Content, Fraction, Length, Nothing, StopStrings, TopP, text_of
from attar.server.errors import INTERNAL, APIError
from attar.server.http import sse
from attar.server.prompts import Turn
from attar.server.request_handler import RequestHandler

encode = msgspec.json.encode

_LAST = "An assistant's message at the end is continued by the answer."
PING = b'event: ping\ndata: {"type":"ping"}\n\n'
FAILED = sse.event(APIError("internal", INTERNAL).body(anthropic=True), "error")
"""The last event of a stream that an exception ends."""


class TextBlock(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="type", tag="text"):
    """A piece of text."""

    text: str
    cache_control: Ignored = None
    citations: Nothing | None = None


class ThinkingBlock(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="type", tag="thinking"):
    """Reasoning of an earlier answer; its signature is not read."""

    thinking: str
    signature: Ignored = None
    cache_control: Ignored = None


class RedactedBlock(
    Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="type", tag="redacted_thinking"
):
    """Reasoning of another server, which no one can read here: it is left out."""

    data: Ignored = None


Blocks = Annotated[list[TextBlock | ThinkingBlock | RedactedBlock], Meta(max_length=MAX_PARTS)]


class AnthropicMessage(Struct, frozen=True, forbid_unknown_fields=True):
    """One message of a conversation."""

    role: Literal["user", "assistant"]
    content: str | Blocks

    def for_template(self) -> dict[str, str]:
        """Return the message as chat templates expect it."""
        if isinstance(self.content, str):
            return {"role": self.role, "content": self.content}
        said = "".join(each.text for each in self.content if isinstance(each, TextBlock))
        reasoned = "".join(each.thinking for each in self.content if isinstance(each, ThinkingBlock))
        return {"role": self.role, "content": said} | ({"reasoning_content": reasoned} if reasoned else {})


class AnthropicPrompt(Body, frozen=True, kw_only=True):
    """Body of /v1/messages/count_tokens, and the prompt's part of /v1/messages."""

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "tools": ([],), "tool_choice": ({"type": "none"}, {"type": "auto"}), "mcp_servers": ([],),
        "context_management": (), "output_config": (), "output_format": (),
    }  # fmt: skip

    messages: Annotated[list[AnthropicMessage], Meta(min_length=1, max_length=schemas.MAX_MESSAGES, description=_LAST)]
    system: Content | None = None
    thinking: Thinking | None = None

    @property
    def turn(self) -> Turn:
        """Return what the conversation ends with: an assistant's message at the end is continued."""
        return Turn.CONTINUED if self.messages[-1].role == "assistant" else Turn.OPENED

    def conversation(self) -> list[dict[str, str]]:
        """Return the system prompt and the messages as chat templates expect them."""
        system = text_of(self.system)
        head = [{"role": "system", "content": system}] if system else []
        return head + [message.for_template() for message in self.messages]

    def wish(self) -> Wish:
        """Return what the request asks of the model's reasoning."""
        return Wish.of(None, thinking=self.thinking)


class AnthropicBody(AnthropicPrompt, frozen=True, kw_only=True):
    """Body of /v1/messages."""

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **AnthropicPrompt.neutral,
        "stop_sequences": ([""],),
        "container": (),
    }

    max_tokens: Length
    temperature: Fraction | None = None
    top_p: TopP | None = None
    top_k: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    stop_sequences: StopStrings | None = None
    stream: bool | None = None

    def __post_init__(self) -> None:
        schemas.check_stops(self.stop_sequences, "stop_sequences")


def _usage(request: RequestHandler, generated: int) -> dict[str, int]:
    return {
        "input_tokens": request.prompt_tokens - request.reused, "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": request.reused, "output_tokens": generated,
    }  # fmt: skip


def _reason(reason: str, stop: str | None) -> str:
    if stop is not None:
        return "stop_sequence"
    return "max_tokens" if reason == "length" else "end_turn"


def _message(
    request: RequestHandler, model: str, text: str | None, reason: str | None, stop: str | None, generated: int
) -> Any:
    return {
        "id": "msg_" + request.caller.id, "type": "message", "role": "assistant", "model": model,
        "content": [] if text is None else [{"type": "text", "text": text}],
        "stop_reason": reason, "stop_sequence": stop, "usage": _usage(request, generated),
    }  # fmt: skip


async def whole(request: RequestHandler, model: str) -> list[bytes]:
    """Return the answer as one object, in pieces. Raises APIError."""
    [choice] = await collect(request)
    point("anthropic.whole", request.caller.id)
    reason = _reason(choice.reason, choice.stop)
    return [encode(_message(request, model, choice.text, reason, choice.stop, choice.tokens))]


async def stream(request: RequestHandler, model: str) -> AsyncIterator[bytes]:
    """Yield the answer as server-sent events; the last is `message_stop`, or `error`."""
    start = {"type": "message_start", "message": _message(request, model, None, None, None, 0)}
    block = {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
    yield sse.event(encode(start), "message_start") + sse.event(encode(block), "content_block_start")
    async for events in request.events():
        pieces = []
        for event in events:
            if isinstance(event, Delta):
                point("anthropic.delta", event.id)
                if event.text:
                    pieces.append(
                        b"event: content_block_delta\n"
                        b'data: {"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":%b}}\n\n'
                        % encode(event.text)
                    )
            elif isinstance(event, Finished):
                delta = {"stop_reason": _reason(event.reason, event.stop), "stop_sequence": event.stop}
                end = {"type": "message_delta", "delta": delta, "usage": _usage(request, event.completion_tokens)}
                pieces.append(sse.event(b'{"type":"content_block_stop","index":0}', "content_block_stop"))
                pieces.append(sse.event(encode(end), "message_delta"))
                pieces.append(sse.event(b'{"type":"message_stop"}', "message_stop"))
            elif isinstance(event, Failed):
                pieces.append(sse.event(APIError.of(event).body(anthropic=True), "error"))
        if pieces:
            yield b"".join(pieces)
