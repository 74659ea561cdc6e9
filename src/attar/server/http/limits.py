"""HTTP/1.1 with the limits that uvicorn leaves out: size and time of a request, and the speed of reading.

uvicorn with h11 refuses headers that do not end within a buffer, and has no deadline but keep-alive: a client that
sends a byte now and then holds its connection for ever. Here a connection has RECEIPT_SECONDS for each request, headers
and body, from its first byte on (and as long for its first byte). Of an answer, some bytes must leave within
STALL_SECONDS, while any wait here. A stream waits with the connection, so that few bytes do. A stalled connection is
closed by a reset: after an orderly end the kernel would keep unsent bytes, and the connection, for as long as the other
side is there.

A body has a Content-Length, or comes in chunks, as stacks that stream what they send have it (`chunked.py`). A request
that has both is ambiguous, and refused. The limits sit in the parser, where a request's head is first known in full,
before any task is made for it.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import socket
import struct
import sys
import time
from collections.abc import Callable
from typing import Any

import h11
from h11._readers import ChunkedReader
from uvicorn.protocols.http.h11_impl import H11Protocol

from attar.server.errors import APIError
from attar.server.http.chunked import MAX_RUNS, ChunkedBody
from attar.server.http.sockets import MANY, Waiting

MAX_HEAD = 16 << 10  # bytes of a request's line and headers
MAX_HEADERS = 64
MAX_TARGET = 2 << 10
MAX_BODY = 4 << 20
MAX_IMAGE_BODY = 24 << 20  # on routes of conversations, of models that take images, once the request is let in
IMAGE_PATHS = frozenset((
    "/v1/chat/completions", "/chat/completions", "/chat/completions/input_tokens", "/v1/messages",
    "/v1/messages/count_tokens", "/v1/responses", "/api/chat", "/api/generate", "/tokenize", "/apply-template",
))  # fmt: skip
"""Routes whose bodies may have images."""
BODY_LIMIT = "attar.body_limit"
"""Key of the scope under which a request that was let in has the bytes that its body may have."""
MAX_BEHIND = 64 << 10  # bytes behind a request that is being answered
RECEIPT_SECONDS = 10.0
STALL_SECONDS = 30.0
SEND_BUFFER = 128 << 10  # in the kernel, which doubles it: with less than a segment of loopback each waits for its ACK
UNSENT = 32 << 10  # unsent part of it: the kernel goes on at half, so 1 KB/s moves it in time
KEEP_ALIVE_SECONDS = 75
ABSOLUTE = re.compile(rb"https?://([^/?#@]+)([/?].*|)", re.IGNORECASE)
WARNINGS = 10  # logged a minute about bad requests: each is answered, with the reason

_HINTS = {
    400: ("invalid_http", "this is not a valid HTTP/1.1 request"),
    408: ("receipt_timeout", f"the request did not arrive within {RECEIPT_SECONDS:g} s"),
    413: ("body_too_large", f"chunks of over {MAX_RUNS} sizes in turn: send larger ones, or a Content-Length"),
    414: ("target_too_long", f"the request's target is longer than {MAX_TARGET} bytes"),
    431: ("headers_too_large", f"more than {MAX_HEADERS} headers, or {MAX_HEAD} bytes of them"),
}


class Sparing(logging.Filter):
    """Limits warnings to a number a minute: any client of the port can cause one for every connection."""

    def __init__(self, most: int = WARNINGS, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._most, self._clock = most, clock
        self._ends = 0.0  # end of the minute
        self._seen = self._dropped = 0

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno != logging.WARNING:
            return True
        if (now := self._clock()) >= self._ends:
            self._ends, self._seen = now + 60, 0
        self._seen += 1
        if self._seen > self._most:
            self._dropped += 1
            return False
        if self._dropped:
            record.msg, record.args = f"{record.getMessage()} ({self._dropped} warnings before it were left out)", ()
            self._dropped = 0
        return True


logging.getLogger("uvicorn.error").addFilter(Sparing())


class LimitedProtocol(H11Protocol):
    """One connection of a server; all its connections share `waiting`, of those without a request in progress."""

    receipt_seconds = RECEIPT_SECONDS
    stall_seconds = STALL_SECONDS
    waiting = Waiting(MANY)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.conn = _Connection(h11.SERVER, MAX_HEAD)
        self._received = 0
        self._receipt: asyncio.TimerHandle | None = None
        self._stall: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)  # streams wait until the kernel takes their bytes
        sock = transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT)
        self._receipt = self.loop.call_later(self.receipt_seconds, self._too_slow)
        self.waiting.add(self.transport, len(self.connections))

    def connection_lost(self, exc: Exception | None) -> None:
        self.waiting.remove(self.transport)
        self._disarm()
        self._unstall()
        self._unset_keepalive_if_required()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._received += len(data)
        most = MAX_HEAD + self._body_limit() + MAX_BODY  # up to here too much is dropped, so that 413 arrives
        if self._received > most:
            self.transport.abort()
        elif not self.transport.is_closing():
            super().data_received(data)

    def _body_limit(self) -> int:
        """Return the bytes that the body of the present request may have, larger once it was let in."""
        cycle: Any = self.cycle  # None before the first request
        return MAX_BODY if cycle is None else int(cycle.scope.get(BODY_LIMIT, MAX_BODY))

    def on_response_complete(self) -> None:
        self.waiting.add(self.transport, len(self.connections))
        super().on_response_complete()  # which may begin the next request

    def handle_events(self) -> None:
        super().handle_events()
        if self.conn.our_state in (h11.SEND_RESPONSE, h11.SEND_BODY):
            self.waiting.remove(self.transport)
        state = self.conn.their_state
        if state is h11.SEND_BODY or (state is h11.IDLE and self.conn.trailing_data[0]):
            if self._receipt is None and not self.transport.is_closing():
                self._receipt = self.loop.call_later(self.receipt_seconds, self._too_slow)
        else:
            self._disarm()
            self._received = 0
            self._listen_on()

    def _listen_on(self) -> None:
        """Resume reading: uvicorn stops at a request behind the one being answered, and would see no disconnect."""
        if self.flow.read_paused and not self.transport.is_closing():
            if len(self.conn.trailing_data[0]) > MAX_BEHIND:
                self.transport.abort()
            else:
                self.flow.resume_reading()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_stall()

    def resume_writing(self) -> None:
        self._unstall()
        super().resume_writing()

    def _watch_stall(self) -> None:
        self._stall = self.loop.call_later(self.stall_seconds, self._see_stall, self.transport.get_write_buffer_size())

    def _see_stall(self, before: int) -> None:
        if self.transport.get_write_buffer_size() < before:
            self._watch_stall()
        else:
            linger = struct.pack("ii", 1, 0)
            self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            self.transport.abort()

    def send_400_response(self, msg: str) -> None:
        """Answer an error of the parser, whose exception is being handled and has the status."""
        error = sys.exc_info()[1]
        self._refuse(error.error_status_hint if isinstance(error, h11.RemoteProtocolError) else 400)

    def _too_slow(self) -> None:
        self._receipt = None
        if self.conn.our_state is h11.IDLE and not self.conn.trailing_data[0]:
            self.transport.close()  # no request was begun, so none is answered
        else:
            self._refuse(408)

    def _refuse(self, status: int) -> None:
        """Answer in place of the application, unless it has begun to, and close the connection."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            refusal = APIError(*_HINTS.get(status, _HINTS[400]))
            body = refusal.body()
            headers = [
                *self.server_state.default_headers, (b"content-type", b"application/json"),
                (b"content-length", b"%d" % len(body)), (b"connection", b"close"),
                (b"x-request-id", secrets.token_hex(16).encode()),
            ]  # fmt: skip
            response = h11.Response(status_code=refusal.kind.status, headers=headers)
            for event in (response, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _disarm(self) -> None:
        if self._receipt is not None:
            self._receipt.cancel()
            self._receipt = None

    def _unstall(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None


class _Connection(h11.Connection):
    """An h11 connection that refuses requests whose head exceeds the limits, and reads bodies in chunks its own way."""

    def next_event(self) -> Any:
        event = super().next_event()
        if not isinstance(event, h11.Request):
            return event
        if isinstance(self._reader, ChunkedReader):
            self._reader = ChunkedBody()
        return _checked(event)


def _checked(request: h11.Request) -> h11.Request:
    """Return the request with its target as a path; an absolute one replaces the Host header (RFC 9112, 3.2.2)."""
    headers = list(request.headers)
    size = len(request.target) + sum(len(name) + len(value) + 4 for name, value in headers)
    names = [name for name, _ in headers]
    if len(request.target) > MAX_TARGET:
        raise h11.RemoteProtocolError("long target", error_status_hint=414)
    if len(headers) > MAX_HEADERS or size > MAX_HEAD:
        raise h11.RemoteProtocolError("large headers", error_status_hint=431)
    if b"transfer-encoding" in names and (b"content-length" in names or request.http_version == b"1.0"):
        raise h11.RemoteProtocolError("two lengths", error_status_hint=400)
    if request.http_version not in (b"1.0", b"1.1"):
        raise h11.RemoteProtocolError("version", error_status_hint=400)
    if names.count(b"host") > 1 or (names.count(b"host") == 0 and request.http_version != b"1.0"):
        raise h11.RemoteProtocolError("host", error_status_hint=400)
    if request.target.startswith(b"/"):
        return request
    if (absolute := ABSOLUTE.fullmatch(request.target)) is None:
        raise h11.RemoteProtocolError("target", error_status_hint=400)
    headers = [(b"host", absolute[1]), *(each for each in headers if each[0] != b"host")]
    target = b"/" + absolute[2].removeprefix(b"/")
    return h11.Request(method=request.method, headers=headers, target=target, http_version=request.http_version)
