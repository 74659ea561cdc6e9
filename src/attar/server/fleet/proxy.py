"""A request that is passed on to a host, and its answer on the way back.

Nothing is passed on that a client or a host need not know: of headers a short list in each direction, of paths the ones
of inference. A host that cannot be reached, or answers that it is busy, is followed by another, up to MAX_TRIES, as
long as the client has got nothing. Of a stream whole events are passed on. So when a host breaks off, the error event
behind them is read as one.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field

import httpx2

from attar.server.errors import ANTHROPIC, APIError
from attar.server.fleet.host_client import read_body, seconds_of
from attar.server.fleet.plain_host import BROKEN, HostFailed, PlainHost
from attar.server.http import sse

MAX_TRIES = 3
MAX_EVENT = 4 << 20  # bytes of one event
MAX_ANSWER = 16 << 20  # bytes of an answer that is no stream
MAX_HOPS = 4  # routers, one behind the other
HOPS = "x-attar-route"
PASSED = (
    b"authorization", b"x-api-key", b"content-type", b"accept", b"anthropic-version", b"anthropic-beta",
    b"openai-organization", b"openai-project", b"x-request-id",
)  # fmt: skip
"""Headers of a request that hosts get."""
RETURNED = ("content-type", "retry-after", "x-should-retry", "openai-processing-ms")
"""Headers of an answer that clients get."""
BUSY = (429, 502, 503, 504)  # statuses after which another host is asked
LAST = re.compile(rb"data: ?\[DONE\]|event: ?(message_stop|error)\n")
"""The last event of an answer, in the APIs that are passed on."""


def headers_for_host(headers: Mapping[bytes, bytes], own: str) -> dict[str, str]:
    """Return the headers that a host gets from the router called `own`. Raises APIError where the request has been here
    before, or has passed too many routers."""
    passed = [each for each in headers.get(HOPS.encode(), b"").decode("latin-1").split(",") if each]
    if own in passed or len(passed) >= MAX_HOPS:
        raise APIError("loop_detected", "the request came back to a router that it had passed: hosts list the router")
    told = {name.decode(): headers[name].decode("latin-1") for name in PASSED if name in headers}
    return told | {HOPS: ",".join((*passed, own)), "accept-encoding": "identity"}


def name() -> str:
    """Return a router's name in the headers that tell loops."""
    return secrets.token_hex(8)


@dataclass
class Answer:
    """The answer of a host: its status, its headers, and the rest, which `pieces` yields. `close` must follow."""

    host: PlainHost
    reply: httpx2.Response
    first: bytes = b""
    pieces: AsyncIterator[bytes] = field(default_factory=lambda: _nothing())
    sent: float = 0.0  # monotonic, as `began`, which is when the first byte came
    began: float = 0.0
    events: int = 0
    learn: Callable[[Answer], None] = lambda answer: None

    @property
    def streams(self) -> bool:
        """Whether these are server-sent events."""
        return self.reply.headers.get("content-type", "").partition(";")[0].strip().lower() == "text/event-stream"

    @property
    def headers(self) -> dict[str, str]:
        """The headers that the client gets."""
        found = {name: self.reply.headers[name] for name in RETURNED if name in self.reply.headers}
        return {name: value for name, value in found.items() if value.isascii() and value.isprintable()}

    async def close(self) -> None:
        """Hang up."""
        await self.reply.aclose()


async def _nothing() -> AsyncIterator[bytes]:
    return
    yield b""


async def ask(http: httpx2.AsyncClient, host: PlainHost, request: httpx2.Request, seconds: float) -> Answer:
    """Send a request to a host, and wait for the first byte of its answer. Raises HostFailed where another host may be
    asked; the host's state says what was wrong with this one."""
    sent = time.monotonic()
    try:
        async with asyncio.timeout(seconds):
            reply = await http.send(request, stream=True)
    except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
        host.become("down")
        raise HostFailed from error
    except BROKEN as error:
        raise HostFailed from error
    answer = Answer(host, reply, sent=sent)
    try:
        if reply.status_code in BUSY:
            if reply.status_code == 429:
                host.full(seconds_of(reply.headers.get("retry-after", "1")))
            else:
                host.become("busy")
            raise HostFailed
        if 300 <= reply.status_code < 400:  # hosts are those that were listed, and no others
            host.become("down")
            raise HostFailed
        async with asyncio.timeout(seconds):
            await _begin(answer)
        answer.began = time.monotonic()
        return answer
    except BaseException as error:
        await answer.close()
        if isinstance(error, BROKEN):
            raise HostFailed from error
        raise


async def _begin(answer: Answer) -> None:
    """Read the first event of a stream, or all of another answer. Raises ValueError for one that is too long."""
    if answer.streams:
        answer.pieces = whole_events(answer.reply.aiter_raw())
        answer.first = await anext(answer.pieces, b"")
        answer.events = answer.first.count(b"data: ")
        return
    answer.first = await read_body(answer.reply, MAX_ANSWER)


async def whole_events(raw: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield the whole events of a stream, all that have arrived together. Raises ValueError for an event of more than
    MAX_EVENT bytes, and for a stream that ends within one."""
    waiting = bytearray()
    async for data in raw:
        waiting += data
        ends = [at + len(line) for line in (b"\n\n", b"\n\r\n") if (at := waiting.rfind(line)) >= 0]
        if ends:
            end = max(ends)
            yield bytes(waiting[:end])
            del waiting[:end]
        if len(waiting) > MAX_EVENT:
            raise ValueError("an event is too long")
    if waiting.strip():
        raise ValueError("the stream ended within an event")


def ends(events: bytes) -> bool:
    """Return whether the last of these whole events is the last of its answer."""
    return LAST.match(events.rstrip().replace(b"\r\n", b"\n").rpartition(b"\n\n")[2]) is not None


def broken(path: str) -> bytes:
    """Return the event that ends a stream whose host has failed."""
    error = APIError("engine_down", "the host that made this answer is gone: the request was ended")
    if path.startswith(ANTHROPIC):
        return sse.event(error.body(anthropic=True), "error")
    return sse.event(error.body())


def retry_after(hosts: Sequence[PlainHost]) -> int:
    """Return the seconds until the first of some hosts may have room, at least one."""
    now = time.monotonic()
    waits = [max(0.0, each.full_until - now) for each in hosts if each.state in ("ready", "busy")]
    return max(1, round(min(waits, default=1.0)))
