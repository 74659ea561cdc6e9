"""Answers in the shape of Anthropic's /v1/messages, whole and as streams.

`input_tokens` are the prompt tokens that were not read from a cache. Their number is known only at the end, so a
stream's first event counts the whole prompt as input, and its last event has the final number.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import msgspec

from attar.faults import point
from attar.protocol.messages import Delta, Failed, Finished
from attar.server.api.choices import collect
from attar.server.errors import APIError
from attar.server.http import sse
from attar.server.request_handler import RequestHandler

encode = msgspec.json.encode

PING = b'event: ping\ndata: {"type":"ping"}\n\n'


def failed(refusal: APIError) -> bytes:
    """Return the last event of a stream that fails."""
    return sse.event(refusal.body(anthropic=True), "error")


def _usage(request: RequestHandler, generated: int) -> dict[str, int]:
    return {
        "input_tokens": request.prompt_tokens - request.reused,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": request.reused,
        "output_tokens": generated,
    }


def _reason(reason: str, stop: str | None) -> str:
    if stop is not None:
        return "stop_sequence"
    return "max_tokens" if reason == "length" else "end_turn"


def _message(
    request: RequestHandler, model: str, text: str | None, reason: str | None, stop: str | None, generated: int
) -> Any:
    return {
        "id": "msg_" + request.caller.id,
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": [] if text is None else [{"type": "text", "text": text}],
        "stop_reason": reason,
        "stop_sequence": stop,
        "usage": _usage(request, generated),
    }


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
                pieces.append(failed(APIError.of(event)))
        if pieces:
            yield b"".join(pieces)
