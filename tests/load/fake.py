"""A small server on loopback that streams completions, well or badly."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Awaitable, Callable
from typing import Any

Behave = Callable[[dict[str, Any], asyncio.StreamWriter], Awaitable[None]]

CHUNKED = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def event(value: Any) -> bytes:
    return b"data: %s\n\n" % (value.encode() if isinstance(value, str) else json.dumps(value).encode())


def text(piece: str, finish: str | None = None) -> bytes:
    return event({"choices": [{"index": 0, "text": piece, "finish_reason": finish}]})


def usage(prompt: int, output: int) -> bytes:
    return event({"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": output}})


def answer(status: str, body: bytes) -> bytes:
    return b"HTTP/1.1 %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (
        status.encode(), len(body), body,
    )  # fmt: skip


class Fake:
    """Answers each POST by `behave(body, writer)`; remembers what was asked, and how many were in flight."""

    def __init__(self, behave: Behave) -> None:
        self.behave = behave
        self.asked: list[dict[str, Any]] = []
        self.heads: list[bytes] = []
        self.models: list[Any] = [{"id": "fake"}]
        self.alive = self.most = 0
        self.url = ""
        self.ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._serve(),), daemon=True)

    def __enter__(self) -> Fake:
        self._thread.start()
        assert self.ready.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)
        assert not self._thread.is_alive()

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._connection, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self.ready.set()
        await self._stop.wait()
        server.close()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = await reader.readuntil(b"\r\n\r\n")
            self.heads.append(head)
            if head.startswith(b"GET"):
                writer.write(answer("200 OK", json.dumps({"data": self.models}).encode()))
            else:
                lines = head.decode().lower().split("\r\n")
                length = next(int(line.partition(":")[2]) for line in lines if line.startswith("content-length"))
                body = json.loads(await reader.readexactly(length))
                self.asked.append(body)
                self.alive += 1
                self.most = max(self.most, self.alive)
                try:
                    await self.behave(body, writer)
                finally:
                    self.alive -= 1
            await writer.drain()
            writer.close()


async def well(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    """As many tokens as were asked for, one an event, then usage and the terminal event."""
    writer.write(CHUNKED)
    for i in range(body["max_tokens"]):
        writer.write(chunk(text(" a", "length" if i == body["max_tokens"] - 1 else None)))
        await writer.drain()
        await asyncio.sleep(0.001)
    prompt = body.get("prompt")
    writer.write(chunk(usage(len(prompt) if isinstance(prompt, list) else 7, body["max_tokens"])))
    writer.write(chunk(event("[DONE]")) + b"0\r\n\r\n")
