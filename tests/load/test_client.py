"""One stream: what is read of a good one, in whatever pieces it comes, and what each kind of bad one is called."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attar.load import client
from attar.load.client import Answer, Events, Failed, Reader, Server
from tests.errors import user_error
from tests.load.fake import CHUNKED, Behave, Fake, answer, chunk, event, text, usage

END = event("[DONE]")
GOOD = text(" a") + text(" b") + text(" c", "stop") + usage(5, 3) + END
TIMEOUT = 10.0


def ask(url: str, timeout: float = TIMEOUT) -> Answer:
    server = Server.parse(url)
    post = client.request(server, "POST", "/v1/completions", {"model": "m", "max_tokens": 3})
    return asyncio.run(client.complete(server, post, timeout))


def sends(*pieces: bytes) -> Behave:
    """A server that writes these bytes and hangs up."""

    async def behave(body: dict[str, Any], writer: Any) -> None:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()

    return behave


def test_a_good_stream(honest: Fake) -> None:
    got = ask(honest.url)
    assert (got.error, got.detail) == (None, "")
    assert len(got.arrivals) == 3
    assert got.sent < got.arrivals[0] <= got.arrivals[-1] <= got.ended
    assert (got.prompt_tokens, got.completion_tokens, got.finish_reason) == (7, 3, "length")


def test_what_is_sent(honest: Fake) -> None:
    server = Server.parse(honest.url + "/v1/", key="secret")
    post = client.request(server, "POST", "/v1/completions", {"max_tokens": 1, "prompt": [1, 2]})
    asyncio.run(client.complete(server, post, TIMEOUT))
    head = honest.heads[0].decode()
    assert head.startswith("POST /v1/completions HTTP/1.1\r\n")
    assert "\r\nAuthorization: Bearer secret\r\n" in head
    assert honest.asked == [{"max_tokens": 1, "prompt": [1, 2]}]


def test_what_a_server_says_steers_no_terminal(serve: Callable[[Behave], Fake]) -> None:
    got = ask(serve(sends(answer("400 Bad Request", "no\n\x1b[31m \x9b \u202e é".encode()))).url)
    assert (got.error, got.detail) == ("status 400", r"no \x1b[31m \x9b \u202e é")
    long = ask(serve(sends(answer("400 Bad Request", b"\x1b" * 9000))).url)
    assert len(long.detail) == client.QUOTED
    assert long.detail.isprintable()


CASES: dict[str, tuple[bytes, ...]] = {
    "status 429": (answer("429 Too Many Requests", b'{"error": {"message": "full"}}'),),
    "status 500": (answer("500 Internal Server Error", b"oops"),),
    "cut": (CHUNKED + chunk(text(" a")),),
    "cut ": (CHUNKED + chunk(text(" a"))[:-20],),
    "cut  ": (b"",),
    "cut   ": (b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: 99\r\n\r\n" + text(" a"),),
    "no terminal event": (CHUNKED + chunk(text(" a", "stop")) + b"0\r\n\r\n",),
    "no finish reason": (CHUNKED + chunk(text(" a") + END) + b"0\r\n\r\n",),
    "error event": (CHUNKED + chunk(event({"error": {"message": "engine died"}}) + END) + b"0\r\n\r\n",),
    "not a stream": (answer("200 OK", b'{"choices": []}'),),
    "malformed": (CHUNKED + chunk(b"data: {nonsense\n\n") + b"0\r\n\r\n",),
    "malformed ": (b"220 smtp.example.org ESMTP\r\n\r\n",),
    "malformed  ": (CHUNKED + b"-5\r\nabc",),
    "malformed   ": (CHUNKED + b"zz\r\nabc",),
    "malformed    ": (CHUNKED + chunk(b"data: [1, 2]\n\n"),),
    "malformed     ": (b"HTTP/1.1 200 OK\r\nContent-Length: -3\r\n\r\n",),
    "malformed      ": (CHUNKED + chunk(event({"choices": [], "usage": {"prompt_tokens": "many"}})),),
}


@pytest.mark.parametrize("kind", CASES)
def test_kinds_of_errors(kind: str, serve: Callable[[Behave], Fake]) -> None:
    got = ask(serve(sends(*CASES[kind])).url)
    assert got.error == kind.strip()
    assert got.ended >= got.sent


def test_details_quote_the_server(serve: Callable[[Behave], Fake]) -> None:
    got = ask(serve(sends(answer("429 Too Many Requests", b'{"error":\n {"message": "full"}}'))).url)
    assert got.detail == '{"error": {"message": "full"}}'
    long = ask(serve(sends(answer("500 No", b"x" * 100_000))).url)
    assert long.detail == "x" * client.QUOTED


def test_what_came_before_an_error_is_kept(serve: Callable[[Behave], Fake]) -> None:
    got = ask(serve(sends(CHUNKED + chunk(text(" a") + text(" b")))).url)
    assert (got.error, len(got.arrivals)) == ("cut", 2)


def test_nobody_listens() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound but not listening: the port is refused, and nobody else gets it
        got = ask(f"http://127.0.0.1:{taken.getsockname()[1]}")
    assert got.error == "refused"
    assert "nothing listens at http://127.0.0.1:" in got.detail


def test_a_server_that_says_nothing(serve: Callable[[Behave], Fake]) -> None:
    async def behave(body: dict[str, Any], writer: Any) -> None:
        await asyncio.sleep(2)

    assert ask(serve(behave).url, timeout=0.1).error == "timeout"


@pytest.mark.parametrize(
    "attack",
    [
        b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 20_000,
        CHUNKED + b"1" * 100_000,
        CHUNKED + chunk(b"data: " + b"x" * 5_000_000),
    ],
)
def test_what_a_server_sends_is_bounded(attack: bytes, serve: Callable[[Behave], Fake]) -> None:
    assert ask(serve(sends(attack)).url).error == "malformed"


def read(pieces: list[bytes]) -> tuple[Answer, str | None]:
    """What a reader makes of a response in these pieces, and how it failed."""

    async def run() -> tuple[Answer, str | None]:
        events = Events()
        reader = Reader(b"", events.take, streamed=True)
        for piece in pieces:
            reader.data_received(piece)
        reader.connection_lost(None)
        try:
            await reader.finished
        except Failed as failed:
            return events.answer, failed.kind
        return events.answer, None if events.done else "no terminal event"

    return asyncio.run(run())


FRAMES = {
    "chunked": CHUNKED + b"".join(chunk(GOOD[i : i + 7]) for i in range(0, len(GOOD), 7)) + b"0\r\n\r\n",
    "one chunk": CHUNKED + chunk(GOOD) + b"0\r\n\r\n",
    "counted": b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: %d\r\n\r\n" % len(GOOD) + GOOD,
    "to the end": b"HTTP/1.0 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n\r\n" + GOOD,
    "after 100": b"HTTP/1.1 100 Continue\r\n\r\n" + CHUNKED + chunk(GOOD.replace(b"\n", b"\r\n")) + b"0\r\n\r\n",
    "comments": CHUNKED + chunk(b": ping\n\nevent: x\nid: 3\n" + GOOD) + b"0;last\r\n\r\n",
}


@given(st.sampled_from(sorted(FRAMES)), st.lists(st.integers(0, 900), max_size=12))
def test_pieces_do_not_matter(frame: str, cuts: list[int]) -> None:
    data = FRAMES[frame]
    at = [0, *sorted(cut % len(data) for cut in cuts), len(data)]
    got, failed = read([data[a:b] for a, b in pairwise(at)])
    assert failed is None
    assert len(got.arrivals) == 3
    assert (got.prompt_tokens, got.completion_tokens, got.finish_reason) == (5, 3, "stop")


@given(st.sampled_from(["chunked", "one chunk", "counted"]), st.integers(0, 2000))
def test_no_beginning_of_a_stream_is_a_stream(frame: str, end: int) -> None:
    data = FRAMES[frame].removesuffix(b"\r\n\r\n" if frame != "counted" else b"")
    _, failed = read([data[: end % len(data)]])
    assert failed == "cut"


def test_usage_may_say_what_was_cached() -> None:
    counts = {"prompt_tokens": 9, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 8}}
    content = text(" a", "stop") + event({"choices": [], "usage": counts}) + END
    assert read([CHUNKED + chunk(content) + b"0\r\n\r\n"])[0].cached_tokens == 8
    assert read([FRAMES["one chunk"]])[0].cached_tokens is None


def test_chats() -> None:
    delta = [
        event({"choices": [{"index": 0, "delta": piece, "finish_reason": finish}], "usage": None})
        for piece, finish in (
            ({"role": "assistant", "content": ""}, None), ({"content": "a"}, None), ({"reasoning_content": "b"}, None),
            ({"content": None}, None), ({}, "stop"),
        )
    ]  # fmt: skip
    got, failed = read([CHUNKED + chunk(b"".join(delta) + END) + b"0\r\n\r\n"])
    assert failed is None
    assert (len(got.arrivals), got.finish_reason, got.completion_tokens) == (2, "stop", None)


@pytest.mark.parametrize(
    "url, expected",
    [
        ("http://localhost:8000", Server("localhost", 8000)),
        ("http://10.0.0.1/v1", Server("10.0.0.1", 80)),
        ("https://api.example.org/openai/v1/", Server("api.example.org", 443, True, "/openai")),
        ("http://[::1]:9", Server("::1", 9)),
    ],
)
def test_addresses(url: str, expected: Server) -> None:
    assert Server.parse(url) == expected


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://x", "http://", "http://x:99999", "http://x\r\nHost: y", ""])
def test_what_is_no_address(url: str) -> None:
    with user_error("address_invalid"):
        Server.parse(url)


def test_fetching(honest: Fake, serve: Callable[[Behave], Fake]) -> None:
    assert asyncio.run(client.fetch(Server.parse(honest.url), "/v1/models")) == {"data": [{"id": "fake"}]}
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        with user_error("server_unreachable"):
            asyncio.run(client.fetch(Server.parse(f"http://127.0.0.1:{taken.getsockname()[1]}"), "/v1/models"))
