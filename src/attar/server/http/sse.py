"""Answers over HTTP that end when their client disconnects: server-sent events, and the task that watches.

Starlette cancels no handler whose client has disconnected unless it streams, and uvicorn silently drops what is sent
then; an engine would go on for minutes. So while an answer is made, one task waits for the connection's end, and then
cancels the answer. A stream's events are written as they come, all that have arrived in one write. The connection makes
the writer wait when its buffer is full (`limits.py`), and the queue behind it is bounded (`response_stream.py`).

A stream may be silent for minutes: its request waits in the queue, or has a long prompt. Proxies and clients take such
a silence for the end, so it is broken by a comment or event that every reader of streams skips.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from itertools import chain
from typing import TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from attar.faults import point
from attar.server.errors import CANCELLED, APIError

PART = 64 << 10  # bytes of a write, at least, except the last
SILENCE = 15.0  # seconds after which a stream sends a keep-alive
COMMENT = b": ping\n\n"  # skipped by readers, by the standard
Value = TypeVar("Value")
STREAM_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}


@contextlib.asynccontextmanager
async def while_connected(receive: Receive, gone: Callable[[], None]) -> AsyncIterator[None]:
    """Call `gone` when the client disconnects within. The request's body must have been read."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        gone()

    task = asyncio.get_running_loop().create_task(watch())
    try:
        yield
    finally:
        task.cancel()


async def while_wanted(receive: Receive, work: Awaitable[Value]) -> Value:
    """Return the result of work that precedes the engine's, such as a prompt's making. It is cancelled once the client
    has disconnected. Raises APIError then."""
    task, gone = asyncio.current_task(), False
    assert task is not None

    def leave() -> None:
        nonlocal gone
        gone = True
        task.cancel()

    async with while_connected(receive, leave):
        try:
            return await work
        except asyncio.CancelledError:
            if gone and not task.uncancel():  # else the server is ending as well
                raise APIError("cancelled", CANCELLED) from None
            raise


def parts(pieces: Iterable[bytes | bytearray]) -> Iterator[bytes]:
    """Join pieces to writes of about `PART` bytes."""
    waiting = bytearray()
    for piece in pieces:
        for at in range(0, len(piece), PART):
            waiting += piece if len(piece) <= PART else piece[at : at + PART]
            if len(waiting) >= PART:
                yield bytes(waiting)
                waiting.clear()
    if waiting:
        yield bytes(waiting)


def whole(pieces: Iterable[bytes | bytearray]) -> Response:
    """Make a JSON response. A large one is written part by part, each when the client has taken the one before."""
    found = parts(pieces)
    first, second = next(found), next(found, None)
    if second is None:
        return Response(first, media_type=_Parts.media_type)
    return _Parts(chain((first, second), found))


class _Parts(Response):
    media_type = "application/json"

    def __init__(self, found: Iterator[bytes]) -> None:
        super().__init__()
        del self.headers["content-length"]
        self._parts = found

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gone = asyncio.Event()
        async with while_connected(receive, gone.set):
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            for part in self._parts:
                if gone.is_set():
                    return
                await send({"type": "http.response.body", "body": part, "more_body": True})
                await asyncio.sleep(0)  # a fast connection never waits: let other tasks run
            await send({"type": "http.response.body", "body": b"", "more_body": False})


class EventStream(Response):
    """A response of server-sent events.

    `pieces` yields encoded events. `gone` is called when the client disconnects, and `closed` at the end in any case.
    `failed` is the last event where `pieces` raises, or makes it, so that no stream ends without one; `ping` is written
    after a silence.
    """

    media_type = "text/event-stream"
    charset = "utf-8"

    def __init__(
        self, pieces: AsyncIterator[bytes], gone: Callable[[], None], closed: Callable[[], None],
        failed: bytes | Callable[[], bytes], name: str = "", ping: bytes = COMMENT,
    ) -> None:  # fmt: skip
        super().__init__(headers=STREAM_HEADERS)
        del self.headers["content-length"]
        self._pieces, self._gone, self._closed, self._failed, self._name = pieces, gone, closed, failed, name
        self._ping, self._written, self._writing = ping, 0.0, False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        loop = asyncio.get_running_loop()
        try:
            async with while_connected(receive, self._gone):
                point("sse.start", self._name)
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                self._written = loop.time()
                pings = loop.create_task(self._break_silence(send))
                try:
                    async for piece in self._pieces:
                        point("sse.write", self._name)
                        self._writing = True
                        await send({"type": "http.response.body", "body": piece, "more_body": True})
                        self._written, self._writing = loop.time(), False
                except Exception:
                    pings.cancel()  # nothing follows the last event
                    last = self._failed if isinstance(self._failed, bytes) else self._failed()
                    await send({"type": "http.response.body", "body": last, "more_body": False})
                    raise
                finally:
                    pings.cancel()
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._closed()

    async def _break_silence(self, send: Send) -> None:
        """Send keep-alives during silences. Each piece is one write, so nothing gets into the middle of it, and needs
        no timer of its own. While a piece waits for the client there is no silence."""
        loop = asyncio.get_running_loop()
        while True:
            left = SILENCE if self._writing else self._written + SILENCE - loop.time()
            if left > 0:
                await asyncio.sleep(left)
            else:
                self._written = loop.time()
                await send({"type": "http.response.body", "body": self._ping, "more_body": True})


class LineStream(EventStream):
    """A response of lines of JSON."""

    media_type = "application/x-ndjson"


def event(data: bytes, name: str | None = None) -> bytes:
    """Encode one server-sent event of JSON, which has no line breaks."""
    point("sse.format")
    return b"data: " + data + b"\n\n" if name is None else b"event: " + name.encode() + b"\ndata: " + data + b"\n\n"
