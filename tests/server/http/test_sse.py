"""How answers are written: in parts, each when the reader has taken the one before, and none for nobody."""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import msgspec
import pytest
import uvicorn

from attar.server import request_handler, serve
from attar.server.api.response_types import anthropic as anthropic_types
from attar.server.http import sockets, sse
from attar.server.http.limits import LimitedProtocol
from attar.server.http.sse import PART
from tests.server.conftest import Reply, Running

LARGE = 16 << 20  # bytes
SECONDS = 3.0  # for those: a hundred times what they take, and a third of what they did


def test_parts_are_the_same_bytes_in_writes_of_bounded_size() -> None:
    pieces: list[bytes | bytearray] = [b"a", b"", bytearray(b"b" * 3 * PART), *[b"c" * 1000] * 200, b"d"]
    found = list(sse.parts(pieces))
    assert b"".join(found) == b"".join(pieces)
    assert all(PART <= len(part) < 2 * PART for part in found[:-1])
    assert not list(sse.parts([b""]))


def test_a_small_answer_says_how_long_it_is() -> None:
    made = sse.whole([b'{"a":', b"1}"])
    assert (made.body, made.headers["content-length"]) == (b'{"a":1}', "7")
    assert made.headers["content-type"] == "application/json"


async def written(made: int, leave_after: int | None = None) -> tuple[list[dict[str, Any]], int, list[int]]:
    """What is sent of an answer of so many parts, how many of them were made, and the loop's turn at each write."""
    count, turn = 0, 0
    sent: list[dict[str, Any]] = []
    at: list[int] = []
    left = asyncio.Event()

    def pieces() -> Iterator[bytes]:
        nonlocal count
        for _ in range(made):
            count += 1
            yield b"x" * PART

    async def receive() -> dict[str, str]:
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:  # as to a connection that takes all at once
        sent.append(message)
        at.append(turn)
        if len(sent) == leave_after:
            left.set()

    async def other() -> None:
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    task = asyncio.get_running_loop().create_task(other())
    await sse.whole(pieces())({"type": "http"}, receive, send)  # type: ignore[arg-type]
    task.cancel()
    return sent, count, at


def test_a_large_answer_is_made_and_written_part_by_part() -> None:
    sent, count, at = asyncio.run(written(10))
    start, *bodies = sent
    assert start["status"] == 200
    assert (b"content-type", b"application/json") in start["headers"]
    assert b"content-length" not in dict(start["headers"])
    assert b"".join(body["body"] for body in bodies) == b"x" * 10 * PART
    assert [body["more_body"] for body in bodies] == [True] * 10 + [False]
    assert count == 10
    assert len(set(at[1:])) == len(at) - 1, "two parts in one turn of the loop"


@pytest.mark.parametrize("after", [1, 4])
def test_nothing_more_is_made_for_a_reader_who_left(after: int) -> None:
    _, count, _ = asyncio.run(written(100, leave_after=after))
    assert count <= after + 3


def test_a_large_answer_arrives_as_fast_as_it_is_read() -> None:
    """Over loopback, whose segments are larger than some send buffers: each then waits 40 ms for what it is told."""
    listener = sockets.listen("127.0.0.1", 0)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await sse.whole(b"x" * PART for _ in range(LARGE // PART))(scope, receive, send)

    config = uvicorn.Config(app, http=LimitedProtocol, ws="none", lifespan="off", log_config=None, access_log=False)
    server = serve._Uvicorn(config)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])), daemon=True)
    thread.start()
    try:
        began = time.monotonic()
        connection = http.client.HTTPConnection(*listener.getsockname(), timeout=60)
        connection.request("GET", "/")
        assert len(connection.getresponse().read()) == LARGE
        assert time.monotonic() - began < SECONDS
        connection.close()
    finally:
        server.should_exit = True
        thread.join(20)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/messages"])
def test_a_stream_that_has_nothing_to_say_says_that(
    path: str, server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    silence = 0.05
    monkeypatch.setattr(sse, "SILENCE", silence)
    monkeypatch.setattr(request_handler, "PROMPT_ANSWER", 0.05)
    said = {"prompt": "a"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "a"}]}
    ping = b'event: ping\ndata: {"type":"ping"}\n\n' if path == "/v1/messages" else b": ping\n\n"
    server.engine.held = True
    began, body = time.monotonic(), b""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    try:
        connection.request(
            "POST", path, json.dumps(said | {"max_tokens": 5, "stream": True}), {"Content-Type": "application/json"}
        )
        answer = connection.getresponse()
        while body.count(ping) < 3:
            more = answer.read1(1 << 16)
            assert more, body
            body += more
        server.engine.held = False
        reply = Reply(answer.status, {}, body + answer.read())
    finally:
        server.engine.held = False
        connection.close()
    assert 3 <= reply.body.count(ping) <= (time.monotonic() - began) / silence
    rest = reply.body.replace(ping, b"")
    assert all(line.startswith((b"data: ", b"event: ")) for line in rest.split(b"\n") if line)
    assert (b"message_stop" in rest) or rest.endswith(b"data: [DONE]\n\n")
    if path == "/v1/messages":
        assert reply.events.count({"type": "ping"}) == reply.body.count(ping)
        msgspec.convert({"type": "ping"}, anthropic_types.Ping)
    monkeypatch.setattr(sse, "SILENCE", 60.0)
    assert ping not in server.post(path, said | {"max_tokens": 20, "stream": True}).body, "it is never silent"


def test_no_ping_gets_into_an_event_nor_behind_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the reader takes its time for."""
    monkeypatch.setattr(sse, "SILENCE", 0.02)
    sent: list[bytes] = []

    async def pieces() -> AsyncIterator[bytes]:
        yield b"half of "
        yield b"an event"  # which the reader takes later
        await asyncio.sleep(0.1)
        yield b"last"

    async def send(message: Any) -> None:
        if message.get("body") == b"an event":
            await asyncio.sleep(0.1)
        sent.append(message.get("body", b"start"))

    async def receive() -> Any:
        await asyncio.Event().wait()

    async def main() -> None:
        closed = asyncio.Event()
        stream = sse.EventStream(pieces(), lambda: None, closed.set, b"failed")
        await stream({"type": "http"}, receive, send)
        await asyncio.sleep(0.1)
        assert closed.is_set()

    asyncio.run(main())
    assert sent[:3] == [b"start", b"half of ", b"an event"]
    assert sent[-2:] == [b"last", b""]
    assert 1 <= sent[3:-2].count(sse.COMMENT) == len(sent) - 5
