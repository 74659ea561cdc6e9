"""Answers of /v1/embeddings, in OpenAI's shape."""

from __future__ import annotations

import base64
import math
from array import array
from collections.abc import Iterator, Sequence

import msgspec

from attar.faults import point
from attar.protocol.messages import Embedding, Failed
from attar.server.request_handler import RequestHandler

encode = msgspec.json.encode


async def whole(request: RequestHandler, model: str, as_base64: bool) -> Iterator[bytes]:
    """Return the answer as one object, in pieces: one vector for each prompt, in order. Raises APIError."""
    found: dict[str, bytes] = {}
    async for events in request.events(whole=True):
        for event in events:
            if isinstance(event, Failed):
                raise request.refusal(event)
            if isinstance(event, Embedding):
                found[event.id] = event.vector
    point("embeddings.whole")
    return _vectors([found[each] for each in request.stream.prompts], model, request.prompt_tokens, as_base64)


def _unit(vector: bytes) -> array[float]:
    """Scale a float32 vector to length 1, as OpenAI's are: clients compare by dot products. Zeros stay as they are."""
    numbers = array("f", vector)
    length = math.hypot(*numbers)  # a double: no square of a float32 overflows it
    return array("f", [number / length for number in numbers]) if length else numbers


def _vectors(vectors: Sequence[bytes], model: str, tokens: int, as_base64: bool) -> Iterator[bytes]:
    """Yield the answer a vector at a time: text is several times as long, and thousands would block the event loop."""
    yield b'{"object":"list","model":%b,"data":[' % encode(model)
    for at, vector in enumerate(vectors):
        numbers = _unit(vector)
        shown = base64.b64encode(numbers).decode() if as_base64 else numbers.tolist()
        yield b'%b{"object":"embedding","index":%d,"embedding":%b}' % (b"," if at else b"", at, encode(shown))
    yield b'],"usage":%b}' % encode({"prompt_tokens": tokens, "total_tokens": tokens})
