"""Answers of requests that the engine works for: whole or as a stream, and ended once the client has disconnected."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable

from fastapi import Request
from fastapi.responses import Response

from attar.server.http import sse
from attar.server.request_handler import RequestHandler


async def whole(request: Request, handler: RequestHandler, answer: Awaitable[Iterable[bytes | bytearray]]) -> Response:
    """Answer with one object, whose pieces `answer` makes. Raises what it raises."""
    try:
        async with sse.while_connected(request.receive, handler.leave):
            pieces = await answer
    finally:
        handler.close()
    return sse.whole(pieces)


async def stream(
    request: Request, handler: RequestHandler, pieces: AsyncIterator[bytes], failed: bytes | Callable[[], bytes],
    ping: bytes = sse.COMMENT, kind: type[sse.EventStream] = sse.EventStream,
) -> Response:  # fmt: skip
    """Answer with a stream once the engine has let the request in. Raises APIError where it does not."""
    try:
        async with sse.while_connected(request.receive, handler.leave):
            await handler.admitted()
        return kind(pieces, handler.leave, handler.close, failed, handler.caller.id, ping)
    except BaseException:
        handler.close()
        raise
