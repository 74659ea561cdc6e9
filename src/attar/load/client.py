"""A client for one streamed completion over HTTP, with the arrival time of each event.

It is a client of its own rather than a library's, because a general HTTP client spends more on an event than this one.
A slow load tool reports its own slowness as the server's (figures in `drive.py`). It supports the little of HTTP/1.1
that is needed: one POST a connection, a response that is chunked, counted or ends with the connection, and the `data`
lines of server-sent events. All input from a server is bounded before it is stored.

Kinds of failure: `refused` (no connection), `status 429` and the like, `not a stream` (a whole answer where events were
requested), `malformed` (not HTTP, not JSON, or past a bound), `error event`, `cut` (the connection ended in the
middle), `no terminal event` (it ended properly, but without `[DONE]`), `no finish reason`, `timeout`, and `client out
of files`, which is not the server's fault.
"""

from __future__ import annotations

import asyncio
import errno
import json
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from attar.errors import Code, UserError

MAX_HEAD = 64 << 10  # bytes of a response's status line and headers
MAX_LINE = 4 << 20  # of one line of events
MAX_ANSWER = 64 << 10  # bytes kept of an error response, to quote
QUOTED = 200  # characters quoted of it


@dataclass(frozen=True, slots=True)
class Server:
    """Address of a server. `prefix` is the part of the URL's path before /v1, mostly empty."""

    host: str
    port: int
    secure: bool = False
    prefix: str = ""
    key: str | None = None

    @property
    def netloc(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def address(self) -> str:
        """Return the URL up to /v1."""
        return f"{'https' if self.secure else 'http'}://{self.netloc}{self.prefix}"

    @staticmethod
    def parse(url: str, key: str | None = None) -> Server:
        """Parse an address such as http://127.0.0.1:8000, with or without /v1. Raises ValueError for others."""
        if any(ord(letter) <= 32 for letter in url + (key or "")):
            raise UserError("address_invalid", "an address and a key have no spaces or control characters")
        parts = urlsplit(url)
        try:
            port = parts.port
        except ValueError:
            port = -1
        if parts.scheme not in ("http", "https") or not parts.hostname or port == -1:
            raise UserError("address_invalid", f"{url!r} is not an address: write it like http://127.0.0.1:8000")
        secure = parts.scheme == "https"
        prefix = parts.path.rstrip("/").removesuffix("/v1")
        return Server(parts.hostname, port or (443 if secure else 80), secure, prefix, key)


@dataclass(slots=True)
class Answer:
    """Result of one request. Times are of `time.perf_counter`; `arrivals` has one for each event that held text."""

    sent: float
    ended: float = 0.0
    arrivals: list[float] = field(default_factory=list)
    prompt_tokens: int | None = None  # as counted by the server, where it does
    completion_tokens: int | None = None
    cached_tokens: int | None = None  # of the prompt, taken from the server's cache
    finish_reason: str | None = None
    error: str | None = None  # kind
    detail: str = ""


class Failed(Exception):
    """An error of a stream: (kind, detail)."""

    def __init__(self, kind: str, detail: str = "") -> None:
        super().__init__(kind, detail)
        self.kind, self.detail = kind, detail


async def complete(server: Server, post: bytes, timeout: float) -> Answer:
    """Send the bytes of a streaming `request`, and read the stream to its end. No behaviour of a server raises."""
    events = Events()
    answer = events.answer
    answer.sent = time.perf_counter()
    try:
        await _exchange(server, lambda: Reader(post, events.take, streamed=True), timeout)
        if not events.done:
            raise Failed("no terminal event")
        if answer.finish_reason is None:
            raise Failed("no finish reason")
    except Failed as failed:
        answer.error, answer.detail = failed.kind, failed.detail
    answer.ended = time.perf_counter()
    return answer


async def fetch(server: Server, path: str, timeout: float = 30.0) -> Any:
    """GET a JSON document. Raises ValueError where that fails."""
    pieces = bytearray()

    def keep(data: bytes, now: float) -> None:
        if len(pieces) + len(data) > MAX_LINE:
            raise Failed("malformed", "the answer is too long")
        pieces.extend(data)

    try:
        await _exchange(server, lambda: Reader(request(server, "GET", path), keep, streamed=False), timeout)
        return json.loads(pieces)
    except Failed as failed:
        code: Code = "server_unreachable" if failed.kind in ("refused", "timeout") else "answer_invalid"
        why = f"{failed.kind}{': ' + failed.detail if failed.detail else ''}"
        raise UserError(code, f"{server.address}{path}: {why}") from None
    except (ValueError, RecursionError):
        raise UserError("answer_invalid", f"{server.address}{path}: the answer is not JSON") from None


def request(server: Server, method: str, path: str, body: Mapping[str, Any] | None = None) -> bytes:
    """Return an HTTP request as bytes."""
    content = b"" if body is None else json.dumps(body, separators=(",", ":")).encode()
    lines = [
        f"{method} {server.prefix}{path} HTTP/1.1", f"Host: {server.netloc}", "Connection: close",
        "Accept: text/event-stream, application/json", "User-Agent: attar",
    ]  # fmt: skip
    if body is not None:
        lines += ["Content-Type: application/json", f"Content-Length: {len(content)}"]
    if server.key is not None:
        lines.append(f"Authorization: Bearer {server.key}")
    return "\r\n".join([*lines, "", ""]).encode() + content


def printable(text: str) -> str:
    """Return a server's text for a terminal: characters that could control one are escaped."""
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)


async def _exchange(server: Server, make: Callable[[], Reader], timeout: float) -> None:
    """Connect, send, and read to the end. Raises Failed."""
    context = ssl.create_default_context() if server.secure else None
    transport = None
    try:
        async with asyncio.timeout(timeout):
            loop = asyncio.get_running_loop()
            transport, reader = await loop.create_connection(make, server.host, server.port, ssl=context)
            await reader.finished
    except TimeoutError:
        raise Failed("timeout", f"not done after {timeout:g} s") from None
    except ConnectionRefusedError:
        raise Failed("refused", f"nothing listens at {server.address}") from None
    except OSError as error:
        kind = "client out of files" if error.errno in (errno.EMFILE, errno.ENFILE) else "refused"
        raise Failed(kind, error.strerror or str(error)) from None
    finally:
        if transport is not None:
            transport.abort()


class Reader(asyncio.Protocol):
    """Protocol that sends one request and reads its response; `take(data, now)` gets the content as it arrives.

    The content of a response other than 200 becomes the detail of the failure.
    """

    def __init__(self, request: bytes, take: Callable[[bytes, float], None], streamed: bool) -> None:
        self.finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._request, self._take, self._streamed = request, take, streamed
        self._held = bytearray()  # input that is incomplete so far
        self._status = 0
        self._refusal = bytearray()
        self._chunked = False
        self._left: int | None = None
        """Bytes to come: of the content, None until the connection ends; of a chunk, None before one, 0 behind one."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        if self.finished.done():
            return
        try:
            if self._status:
                self._content(data, now)
            else:
                self._held += data
                self._head(now)
        except Failed as failed:
            self.finished.set_exception(failed)

    def connection_lost(self, exc: Exception | None) -> None:
        if self.finished.done():
            return
        try:
            if exc is not None or not self._status or self._chunked or self._left:
                raise Failed("cut", "" if exc is None else str(exc))
            self._end()
        except Failed as failed:
            self.finished.set_exception(failed)

    def _head(self, now: float) -> None:
        head, found, rest = bytes(self._held).partition(b"\r\n\r\n")
        if not found:
            if len(head) > MAX_HEAD:
                raise Failed("malformed", "endless headers")
            return
        first, *lines = head.decode("latin-1").split("\r\n")
        words = first.split(" ", 2)
        if len(words) < 2 or not words[0].startswith("HTTP/1.") or not (words[1].isdecimal() and len(words[1]) == 3):
            raise Failed("malformed", f"not an HTTP response: {first[:QUOTED]!r}")
        headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        self._held.clear()
        if words[1].startswith("1"):  # an interim response: the real one follows
            self._held += rest
            return self._head(now)
        self._status = int(words[1])
        self._chunked = "chunked" in headers.get("transfer-encoding", "").lower()
        length = headers.get("content-length")
        if not self._chunked and length is not None:
            if not length.isdecimal() or len(length) > 15:
                raise Failed("malformed", f"a content length of {length[:QUOTED]!r}")
            self._left = int(length)
        if self._status == 200 and self._streamed and "text/event-stream" not in headers.get("content-type", ""):
            raise Failed("not a stream", f"the answer is {headers.get('content-type', 'of no type')[:QUOTED]!r}")
        self._content(rest, now)

    def _content(self, data: bytes, now: float) -> None:
        if self._chunked:
            self._chunks(data, now)
            return
        if self._left is not None:
            data = data[: self._left]
            self._left -= len(data)
        self._deliver(data, now)
        if self._left == 0:
            self._end()

    def _chunks(self, data: bytes, now: float) -> None:
        """Read chunks: a line with the size in hexadecimal, that many bytes, a line break."""
        if self._held:
            data = bytes(self._held) + data
            self._held.clear()
        at = 0
        while at < len(data):
            if self._left is None:
                end = data.find(b"\r\n", at)
                if end < 0:
                    if len(data) - at > MAX_HEAD:
                        raise Failed("malformed", "an endless chunk size")
                    break
                self._left = _chunk_size(data[at:end])
                at = end + 2
                if self._left == 0:
                    self._end()
                    return
            elif self._left == 0:
                if len(data) - at < 2:
                    break
                at += 2
                self._left = None
            else:
                piece = data[at : at + self._left]
                self._deliver(piece, now)
                self._left -= len(piece)
                at += len(piece)
        self._held += data[at:]

    def _deliver(self, data: bytes, now: float) -> None:
        if self._status == 200:
            if data:
                self._take(data, now)
        elif len(self._refusal) < MAX_ANSWER:
            self._refusal += data

    def _end(self) -> None:
        """End a complete response."""
        if self._status != 200:
            text = " ".join(self._refusal.decode("utf-8", "replace").split())
            raise Failed(f"status {self._status}", printable(text[:QUOTED])[:QUOTED])
        self.finished.set_result(None)


def _chunk_size(line: bytes) -> int:
    text = line.partition(b";")[0].strip()
    if not 1 <= len(text) <= 15 or text.strip(b"0123456789abcdefABCDEF"):
        raise Failed("malformed", f"a chunk size of {text[:QUOTED]!r}")
    return int(text, 16)


class Events:
    """Parser of a completion's server-sent events into an `Answer`."""

    def __init__(self) -> None:
        self.answer = Answer(0.0)
        self.done = False
        self._line = bytearray()
        self._data: list[bytes] = []

    def take(self, content: bytes, now: float) -> None:
        """Read content that arrived at `now`. Raises Failed."""
        *lines, rest = content.split(b"\n")
        for line in lines:
            if self._line:
                line, self._line = bytes(self._line) + line, bytearray()
            line = line.rstrip(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                self._event(b"\n".join(self._data), now)
                self._data.clear()
        self._line += rest
        if len(self._line) + sum(map(len, self._data)) > MAX_LINE:
            raise Failed("malformed", "an endless event")

    def _event(self, data: bytes, now: float) -> None:
        if data.strip() == b"[DONE]":
            self.done = True
            return
        try:
            self._chunk(json.loads(data), now)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise Failed("malformed", f"an event that is no completion: {data[:QUOTED]!r}") from None

    def _chunk(self, chunk: Any, now: float) -> None:
        """Read one event: text, a finish reason, usage, or an error."""
        answer = self.answer
        if chunk.get("error") is not None:
            raise Failed("error event", json.dumps(chunk["error"])[:QUOTED])
        for choice in chunk.get("choices") or ():
            text = choice.get("text")
            if text is None:
                delta = choice.get("delta") or {}
                text = delta.get("content") or delta.get("reasoning_content")
            if text:
                answer.arrivals.append(now)
            if choice.get("finish_reason") is not None:
                answer.finish_reason = str(choice["finish_reason"])
        usage = chunk.get("usage")
        if usage is not None:
            answer.prompt_tokens = int(usage["prompt_tokens"])
            answer.completion_tokens = int(usage["completion_tokens"])
            cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
            answer.cached_tokens = None if cached is None else int(cached)
