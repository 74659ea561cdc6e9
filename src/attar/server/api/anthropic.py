"""Anthropic's /v1/messages: bodies of requests, and answers, whole and as streams.

`input_tokens` are the prompt tokens that were not read from a cache. Their number is known only at the end, so a
stream's first event counts the whole prompt as input, and its last event has the final number.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta, Struct

from attar.faults import point
from attar.protocol.messages import Delta, Failed, Finished
from attar.server.api import schemas
from attar.server.api.answering import AnswerReader
from attar.server.api.body import Body, Ignored
from attar.server.api.constraints import Asked, SchemaObject, of_schema, only_one
from attar.server.api.images.parts import MARK, ImageBlock, placed
from attar.server.api.messages import MAX_MESSAGES, MAX_PARTS, Nothing
from attar.server.api.openai import collect
from attar.server.api.reasoning import Effort, ReasoningRequest, Thinking
from attar.server.api.schemas import Fraction, Length, StopStrings, TopP
from attar.server.api.tools.anthropic import AnthropicChoice, AnthropicTools, ToolResultBlock, ToolUseBlock
from attar.server.api.tools.anthropic import read as read_tools
from attar.server.api.tools.fields import ToolUse
from attar.server.errors import INTERNAL, APIError
from attar.server.http import sse
from attar.server.prompts import Turn
from attar.server.request_handler import RequestHandler
from attar.text.answers.events import AnswerEvent, CallArguments, CallEnd, CallStart, ReasoningDelta, TextDelta

encode = msgspec.json.encode

_LAST = "An assistant's message at the end is continued by the answer."
PREFIX = "toolu_"  # of a call's id
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


Blocks = Annotated[
    list[TextBlock | ImageBlock | ThinkingBlock | RedactedBlock | ToolUseBlock | ToolResultBlock],
    Meta(max_length=MAX_PARTS),
]


class AnthropicFormat(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """JSON by a schema."""

    type: Literal["json_schema"]
    schema: SchemaObject


class OutputConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What an answer is like: JSON by a schema, and how much effort its reasoning takes."""

    format: AnthropicFormat | None = None
    effort: Effort | None = None


class AnthropicMessage(Struct, frozen=True, forbid_unknown_fields=True):
    """One message of a conversation."""

    role: Literal["user", "assistant"]
    content: str | Blocks

    def __post_init__(self) -> None:
        theirs, name = (ToolResultBlock, "user") if self.role == "assistant" else (ToolUseBlock, "assistant")
        for other in (theirs, ImageBlock) if self.role == "assistant" else (theirs,):
            if not isinstance(self.content, str) and any(isinstance(each, other) for each in self.content):
                kind = other.__struct_config__.tag
                message = f"messages: a {kind} block belongs to a message of role {name}"
                raise APIError("invalid_value", message, "messages")

    def for_template(self) -> list[dict[str, Any]]:
        """Return the message as chat templates expect it: results of tools are messages of their own, before the text
        that is with them."""
        if isinstance(self.content, str):
            return [{"role": self.role, "content": self.content}]
        results = [each.for_template() for each in self.content if isinstance(each, ToolResultBlock)]
        seen = [each for each in self.content if isinstance(each, TextBlock | ImageBlock)]
        texts = [each.text if isinstance(each, TextBlock) else MARK for each in seen]
        if results and not texts:
            return results
        found: dict[str, Any] = {"role": self.role, "content": "".join(texts)}
        if reasoned := "".join(each.thinking for each in self.content if isinstance(each, ThinkingBlock)):
            found["reasoning_content"] = reasoned
        if calls := [each.for_template() for each in self.content if isinstance(each, ToolUseBlock)]:
            found["tool_calls"] = calls
        return [*results, placed(found, [each.image() for each in seen if isinstance(each, ImageBlock)])]


class SystemText(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A piece of a system prompt."""

    type: Literal["text"]
    text: str
    cache_control: Ignored = None
    citations: Nothing | None = None


class AnthropicPrompt(Body, frozen=True, kw_only=True):
    """Body of /v1/messages/count_tokens, and the prompt's part of /v1/messages."""

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "mcp_servers": ([],), "context_management": (),
    }  # fmt: skip

    messages: Annotated[list[AnthropicMessage], Meta(min_length=1, max_length=MAX_MESSAGES, description=_LAST)]
    system: str | Annotated[list[SystemText], Meta(max_length=MAX_PARTS)] | None = None
    thinking: Thinking | None = None
    tools: AnthropicTools | None = None
    tool_choice: AnthropicChoice | None = None
    output_config: OutputConfig | None = None
    output_format: AnthropicFormat | None = None  # its older name of output_config.format

    def __post_init__(self) -> None:
        self.tool_use()
        self.constraint()

    def tool_use(self) -> ToolUse:
        """Return the tools and the choice among them. Raises APIError for tools that are refused."""
        return read_tools(self.tools, self.tool_choice)

    def constraint(self) -> Asked | None:
        """Return the constraint of the answer; None where there is none. Raises APIError for two, and for a malformed
        one."""
        given = {
            "output_config.format": None if self.output_config is None else self.output_config.format,
            "output_format": self.output_format,
        }  # fmt: skip
        return only_one([
            of_schema(f"{name}.schema", each.schema, None) for name, each in given.items() if each is not None
        ])  # fmt: skip

    @property
    def turn(self) -> Turn:
        """Return what the conversation ends with: an assistant's message at the end is continued."""
        return Turn.CONTINUED if self.messages[-1].role == "assistant" else Turn.OPENED

    def conversation(self) -> list[dict[str, Any]]:
        """Return the system prompt and the messages as chat templates expect them."""
        system = self.system or ""
        if not isinstance(system, str):
            system = "".join(part.text for part in system)
        head: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        return head + [entry for message in self.messages for entry in message.for_template()]

    def reasoning_request(self) -> ReasoningRequest:
        """Return what the request asks of the model's reasoning."""
        effort = None if self.output_config is None else self.output_config.effort
        return ReasoningRequest.of(None, thinking=self.thinking, effort=effort)


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
        super().__post_init__()
        schemas.check_stops(self.stop_sequences, "stop_sequences")


def _usage(request: RequestHandler, generated: int) -> dict[str, int]:
    return {
        "input_tokens": request.prompt_tokens - request.reused, "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": request.reused, "output_tokens": generated,
    }  # fmt: skip


def _reason(reason: str, stop: str | None) -> str:
    if reason == "tool_calls":
        return "tool_use"
    if stop is not None:
        return "stop_sequence"
    return "max_tokens" if reason == "length" else "end_turn"


def _message(
    request: RequestHandler, model: str, content: list[Any], reason: str | None, stop: str | None, generated: int
) -> Any:
    return {
        "id": "msg_" + request.caller.id, "type": "message", "role": "assistant", "model": model, "content": content,
        "stop_reason": reason, "stop_sequence": stop, "usage": _usage(request, generated),
    }  # fmt: skip


def _signature(digest: Any) -> str:
    """Return the signature of a thinking block: clients drop blocks without one. It is a checksum, and proves
    nothing."""
    return base64.b64encode(digest.digest()).decode()


async def whole(request: RequestHandler, model: str, reader: AnswerReader) -> list[bytes]:
    """Return the answer as one object, in pieces. Raises APIError."""
    [choice] = await collect(request, reader=reader)
    point("anthropic.whole", request.caller.id)
    content: list[Any] = []
    if choice.reasoning:
        signature = _signature(hashlib.sha256(choice.reasoning.encode()))
        content.append({"type": "thinking", "thinking": choice.reasoning, "signature": signature})
    if choice.text or not (content or choice.calls):
        content.append({"type": "text", "text": choice.text})
    for call in choice.calls:
        if (given := call.input()) is None:
            content.append({"type": "text", "text": call.text})
        else:
            identity = reader.calling.new_id(PREFIX)
            content.append({"type": "tool_use", "id": identity, "name": call.name, "input": given})
    reason = _reason(choice.reason, choice.stop)
    return [encode(_message(request, model, content, reason, choice.stop, choice.tokens))]


class _Blocks:
    """The content blocks of a stream, of which one is open at a time."""

    def __init__(self, new_id: Callable[[str], str]) -> None:
        self._new_id = new_id
        self.open = ""  # type of the open block
        self._index = -1
        self._digest = hashlib.sha256()

    @property
    def any(self) -> bool:
        """Whether a block was begun."""
        return self._index >= 0

    def begin(self, kind: str) -> list[bytes]:
        """Return the events that open a block, and close another, unless one of this `kind` is open."""
        if self.open == kind:
            return []
        block: dict[str, Any] = {"type": "text", "text": ""}
        if kind == "thinking":
            block = {"type": "thinking", "thinking": "", "signature": ""}
        return self._begin(kind, block)

    def _begin(self, kind: str, block: dict[str, Any]) -> list[bytes]:
        found = self.end()
        self.open, self._index = kind, self._index + 1
        start = {"type": "content_block_start", "index": self._index, "content_block": block}
        return [*found, sse.event(encode(start), "content_block_start")]

    def add(self, events: Iterable[AnswerEvent]) -> list[bytes]:
        """Return the events of more reasoning, more text or calls."""
        found: list[bytes] = []
        for event in events:
            match event:
                case ReasoningDelta(text=text):
                    self._digest.update(text.encode())
                    found += [*self.begin("thinking"), self._delta(b'"thinking_delta","thinking"', text)]
                case TextDelta(text=text):
                    found += [*self.begin("text"), self._delta(b'"text_delta","text"', text)]
                case CallStart(name=name):
                    block = {"type": "tool_use", "id": self._new_id(PREFIX), "name": name, "input": {}}
                    found += self._begin("tool_use", block)
                case CallArguments(text=text):
                    found.append(self._delta(b'"input_json_delta","partial_json"', text))
                case CallEnd():
                    found += self.end()
        return found

    def end(self) -> list[bytes]:
        """Return the events that close the open block; none where none is."""
        found = [] if self.open != "thinking" else [
            self._delta(b'"signature_delta","signature"', _signature(self._digest))
        ]  # fmt: skip
        if self.open:
            found.append(sse.event(b'{"type":"content_block_stop","index":%d}' % self._index, "content_block_stop"))
        self.open = ""
        return found

    def _delta(self, kind: bytes, value: str) -> bytes:
        return (
            b"event: content_block_delta\n"
            b'data: {"type":"content_block_delta","index":%d,"delta":{"type":%b:%b}}\n\n'
            % (self._index, kind, encode(value))
        )


async def stream(request: RequestHandler, model: str, reader: AnswerReader) -> AsyncIterator[bytes]:
    """Yield the answer as server-sent events; the last is `message_stop`, or `error`."""
    start = {"type": "message_start", "message": _message(request, model, [], None, None, 0)}
    blocks = _Blocks(reader.calling.new_id)
    opening = [] if reader.reasons or reader.calling.tools else blocks.begin("text")
    yield b"".join([sse.event(encode(start), "message_start"), *opening])
    async for events in request.events():
        pieces = []
        for event in events:
            if isinstance(event, Delta):
                point("anthropic.delta", event.id)
                pieces += blocks.add(reader.read(0, event))
            elif isinstance(event, Finished):
                pieces += blocks.add(reader.close(0))
                if not blocks.any:
                    pieces += blocks.begin("text")
                why = reader.reason(0, event.reason)
                delta = {"stop_reason": _reason(why, event.stop), "stop_sequence": event.stop}
                end = {"type": "message_delta", "delta": delta, "usage": _usage(request, event.completion_tokens)}
                pieces += blocks.end()
                pieces.append(sse.event(encode(end), "message_delta"))
                pieces.append(sse.event(b'{"type":"message_stop"}', "message_stop"))
            elif isinstance(event, Failed):
                pieces.append(sse.event(APIError.of(event).body(anthropic=True), "error"))
        if pieces:
            yield b"".join(pieces)
