"""HTTP from a client's side, as cheaply as asyncio can: a load tool that is slow itself measures itself.

While an answer comes, only its pieces and their times are kept; it is read when it is complete. The end of a stream is
seen by its last bytes, which cannot be content: line breaks are escaped in JSON. One connection may carry one request
after another.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import time
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

LAST_CHUNK = b"\r\n0\r\n\r\n"
RECEIVE_BUFFER = 4096  # of clients that are to be slow: the kernel would read for them


@dataclass(frozen=True)
class Address:
    host: str
    port: int


@dataclass
class Reply:
    """What came back. `status` is 0 where nothing did, `complete` whether the answer was whole."""

    sent: float
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    pieces: list[tuple[float, int]] = field(default_factory=list)
    """(time, events) of every piece of a stream that held events."""
    ended: float = 0.0
    complete: bool = False

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        """Of a stream: its objects, and "[DONE]"."""
        lines = [line[6:] for line in self.body.split(b"\n") if line.startswith(b"data: ")]
        return ["[DONE]" if line == b"[DONE]" else json.loads(line) for line in lines]

    def gaps(self) -> list[float]:
        """Seconds between events; of those that came in one piece, zero."""
        found = [b - a for (a, _), (b, _) in pairwise(self.pieces)]
        return found + [0.0] * (sum(count for _, count in self.pieces) - len(self.pieces))


def request(method: str, path: str, body: Any = None, **headers: str) -> bytes:
    """A request as bytes; a body that is no bytes is sent as JSON."""
    content = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"{method} {path} HTTP/1.1", "Host: localhost", f"Content-Length: {len(content)}"]
    fields = {"Content-Type": "application/json"} | {name.replace("_", "-"): value for name, value in headers.items()}
    lines += [f"{name}: {value}" for name, value in fields.items()]
    return "\r\n".join([*lines, "", ""]).encode() + content


class Connection(asyncio.Protocol):
    """One connection, one request at a time."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport
        self.closed = False
        self.seen = 0
        """Events of the present answer that have arrived."""
        self._reply = Reply(0.0)
        self._raw: list[bytes] = []
        self._length: int | None = None  # of the whole answer, None where it is chunked
        self._size = 0
        self._tail = b""
        self._done: asyncio.Future[None] | None = None
        self._moved = asyncio.Event()

    @classmethod
    async def open(cls, address: Address, slow: bool = False) -> Connection:
        """Connect. `slow`: with a small buffer in the kernel."""
        loop = asyncio.get_running_loop()
        if not slow:
            return (await loop.create_connection(cls, address.host, address.port))[1]
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER)
        sock.setblocking(False)
        await loop.sock_connect(sock, (address.host, address.port))
        return (await loop.create_connection(cls, sock=sock))[1]

    def begin(self, data: bytes) -> None:
        """Send a request, or a part of one."""
        self._reply = Reply(time.perf_counter())
        self._raw, self._length, self._size, self._tail, self.seen = [], None, 0, b"", 0
        self._done = asyncio.get_running_loop().create_future()
        if self.closed:
            self._done.set_result(None)
        else:
            self.transport.write(data)

    async def end(self) -> Reply:
        """Wait for the whole answer, or for the end of the connection."""
        assert self._done is not None
        await self._done
        reply = self._reply
        reply.ended = time.perf_counter()
        raw = b"".join(self._raw).partition(b"\r\n\r\n")[2]
        reply.body = _unchunked(raw) if self._length is None else raw
        return reply

    async def ask(self, data: bytes) -> Reply:
        """A request and its answer."""
        self.begin(data)
        return await self.end()

    async def until(self, events: int) -> None:
        """Wait until so many events have arrived, or nothing more will."""
        assert self._done is not None
        while self.seen < events and not self._done.done():
            self._moved.clear()
            await self._moved.wait()

    def leave(self, rudely: bool) -> None:
        """Hang up: with a reset, or with an orderly end."""
        if rudely and not self.closed:
            sock = self.transport.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()
        self.closed = True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        self._raw.append(data)
        self._size += len(data)
        if events := data.count(b"data: "):
            self.seen += events
            self._reply.pieces.append((now, events))
        if not self._reply.status:
            self._head()
        self._tail = (self._tail + data)[-len(LAST_CHUNK) :]
        self._moved.set()
        over = self._tail == LAST_CHUNK if self._length is None else self._size >= self._length
        if self._reply.status and over:
            self._reply.complete = True
            self._finish()

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        self._finish()

    def _head(self) -> None:
        head, found, _ = b"".join(self._raw).partition(b"\r\n\r\n")
        if not found:
            return
        first, *lines = head.decode("latin-1").split("\r\n")
        self._reply.status = int(first.split(" ")[1])
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        self._reply.headers = headers
        if "content-length" in headers:
            self._length = len(head) + 4 + int(headers["content-length"])

    def _finish(self) -> None:
        self._moved.set()
        if self._done is not None and not self._done.done():
            self._done.set_result(None)


async def once(address: Address, data: bytes) -> Reply:
    """A request on a connection of its own."""
    connection = await Connection.open(address)
    try:
        return await connection.ask(data)
    finally:
        connection.transport.abort()


def _unchunked(data: bytes) -> bytes:
    pieces, at = [], 0
    while (end := data.find(b"\r\n", at)) >= 0:
        size = int(data[at:end] or b"0", 16)
        pieces.append(data[end + 2 : end + 2 + size])
        at = end + 4 + size
    return b"".join(pieces)


def percentile(values: list[float], share: float) -> float:
    """The value below which `share` of them lie; 0.0 of none."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else 0.0
