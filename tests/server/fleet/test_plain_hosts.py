"""A router in front of servers that speak OpenAI's API: fake ones, which fail in every way that a host can."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw

from attar.server.fleet import plain_host, proxy, text_prefixes
from attar.server.fleet.host_client import client
from attar.server.fleet.plain_hosts import ASKED, FleetServer
from attar.server.fleet.text_prefixes import PIECE, PromptBody, TextRouter
from attar.server.http.security import Keys
from attar.server.options import ServerOptions
from tests.server.conftest import Running

COMPLETIONS = "/v1/completions"
KEY = "client-key-of-at-least-32-characters"
EVENTS = [b'data: {"choices": [{"text": "%d"}]}\n\n' % at for at in range(5)] + [b"data: [DONE]\n\n"]


@dataclass
class FakeHost:
    """A server of one connection a request. `act` writes the answer to a POST."""

    health: int = 200
    act: Callable[[FakeHost, asyncio.StreamWriter], Any] | None = None
    seen: list[tuple[str, dict[str, str], bytes]] = field(default_factory=list)
    port: int = 0

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    def close(self) -> None:
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:] if line)}
            body = await reader.readexactly(int(headers.get("content-length", "0")))
            if head[0].startswith("GET /health"):
                writer.write(b"HTTP/1.1 %d X\r\nContent-Length: 0\r\nConnection: close\r\n\r\n" % self.health)
            else:
                self.seen.append((head[0], headers, body))
                await (self.act or stream)(self, writer)
            await writer.drain()
        writer.close()


START = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nServer: fake/1\r\nSet-Cookie: a=b\r\n\r\n"


async def stream(host: FakeHost, writer: asyncio.StreamWriter) -> None:
    writer.write(START)
    for event in EVENTS:
        writer.write(event)
        await writer.drain()


async def cut(host: FakeHost, writer: asyncio.StreamWriter) -> None:
    """Two events, a part of the third, and a reset."""
    writer.write(START + EVENTS[0] + EVENTS[1] + EVENTS[2][:9])
    await writer.drain()
    await asyncio.sleep(0.1)
    writer.transport.abort()


LASTS = (
    b"data: [DONE]\n\n", b"data: [DONE]\r\n\r\n", b'event: message_stop\ndata: {"type":"message_stop"}\n\n',
)  # fmt: skip


def cut_behind(last: bytes) -> Callable[[FakeHost, asyncio.StreamWriter], Any]:
    async def act(host: FakeHost, writer: asyncio.StreamWriter) -> None:
        """Chunks up to the last event, and a reset before the end of the body."""
        writer.write(START.replace(b"\r\n\r\n", b"\r\nTransfer-Encoding: chunked\r\n\r\n"))
        for event in (EVENTS[0], last):
            writer.write(b"%x\r\n%s\r\n" % (len(event), event))
            await writer.drain()
            await asyncio.sleep(0.05)
        writer.transport.abort()

    return act


async def endless(host: FakeHost, writer: asyncio.StreamWriter) -> None:
    writer.write(START + EVENTS[0])
    for _ in range(6):
        writer.write(b"data: " + b"x" * (1 << 20))
        await writer.drain()


async def reset(host: FakeHost, writer: asyncio.StreamWriter) -> None:
    writer.transport.abort()


async def mute(host: FakeHost, writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(3)


def says(data: bytes) -> Callable[[FakeHost, asyncio.StreamWriter], Any]:
    async def say(host: FakeHost, writer: asyncio.StreamWriter) -> None:
        writer.write(data)

    return say


def status(code: int, more: bytes = b"") -> Callable[[FakeHost, asyncio.StreamWriter], Any]:
    return says(b"HTTP/1.1 %d X\r\n%sContent-Length: 2\r\nConnection: close\r\n\r\n{}" % (code, more))


BEFORE: dict[str, Callable[[FakeHost, asyncio.StreamWriter], Any]] = {
    "reset": reset, "503": status(503), "429": status(429, b"Retry-After: 7\r\n"),
    "redirect": status(302, b"Location: http://127.0.0.1:1/\r\n"), "no HTTP": says(b"\0\xff\r\n\r\n"),
    "nothing": says(b""), "headers": says(b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 60_000),
    "body cut": says(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n{"),
}  # fmt: skip
"""Failures before the client has got anything."""


class Fleet(Running):
    """A router and its hosts."""

    def __init__(self, hosts: list[FakeHost], options: ServerOptions) -> None:
        self.hosts, self._options, self.port = hosts, options, 0
        self._begun = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), daemon=True)
        self._thread.start()
        assert self._begun.wait(60)

    async def _main(self) -> None:
        self.loop = asyncio.get_running_loop()
        for host in self.hosts:
            await host.start()
        async with client() as http:
            urls = [f"http://127.0.0.1:{host.port}" for host in self.hosts]
            self.router = self.server = FleetServer(urls, self._options, http)  # type: ignore[assignment]

            def started(url: str) -> None:
                self.port = int(url.rpartition(":")[2])
                self._begun.set()

            await self.router.run(started, signals=False)
        for host in self.hosts:
            host.close()

    router: FleetServer

    def ready(self, *states: str) -> None:
        self.wait(lambda: [each.state for each in self.router.hosts] == list(states or ["ready"] * len(self.hosts)))


@pytest.fixture
def fleet(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Fleet]]:
    """Starts routers: `fleet(*hosts, options=None)`, whose hosts are all ready."""
    monkeypatch.setattr(plain_host, "LOOK_SECONDS", 0.05)
    running: list[Fleet] = []

    def make(*hosts: FakeHost, options: ServerOptions | None = None) -> Fleet:
        running.append(Fleet(list(hosts), options or ServerOptions(port=0, deadline=1.0)))
        running[-1].ready()
        return running[-1]

    yield make
    ended = [each.stop() for each in running]
    assert all(ended)


def body(text: str = "a", **more: Any) -> dict[str, Any]:
    return {"prompt": text, "stream": True, **more}


def test_a_stream_is_passed_on_with_few_headers(fleet: Callable[..., Fleet]) -> None:
    made = fleet(FakeHost())
    sent = {"Authorization": "Bearer k", "Cookie": "secret=1", "X-Forwarded-For": "1.2.3.4"}
    reply = made.post(COMPLETIONS, body(), sent)
    assert (reply.status, reply.body) == (200, b"".join(EVENTS))
    assert not {"server", "set-cookie"} & set(reply.headers)
    line, headers, data = made.hosts[0].seen[0]
    assert line == "POST /v1/completions HTTP/1.1"
    assert json.loads(data) == body()
    assert headers["authorization"] == "Bearer k"
    assert not {"cookie", "x-forwarded-for"} & set(headers)
    assert made.post("/internal/hello", {}).status == 401
    assert made.post("/v1/load_lora_adapter", {}).status == 404, "administration is not passed on"


@pytest.mark.parametrize("failure", BEFORE)
def test_before_the_first_byte_another_host_is_asked(fleet: Callable[..., Fleet], failure: str) -> None:
    made = fleet(FakeHost(act=BEFORE[failure]), FakeHost(), options=ServerOptions(port=0, deadline=30.0))
    for _ in range(2):
        reply = made.post(COMPLETIONS, body())
        assert (reply.status, reply.body) == (200, b"".join(EVENTS))
    assert len(made.hosts[0].seen) >= 1, "the first host was asked first"
    made.wait(lambda: sum(each.open for each in made.router.hosts) == 0)


def test_a_silent_host_is_left_when_its_health_fails_too(fleet: Callable[..., Fleet]) -> None:
    made = fleet(FakeHost(act=mute), FakeHost(), options=ServerOptions(port=0, deadline=30.0))
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(made.post(COMPLETIONS, body())))
    thread.start()
    made.wait(lambda: len(made.hosts[0].seen) == 1)
    made.hosts[0].health = 500
    thread.join(2.5)
    assert found, "it did not wait for the host's answer"
    assert found[0].body == b"".join(EVENTS)


def test_a_healthy_host_that_is_silent_has_the_deadline(fleet: Callable[..., Fleet]) -> None:
    made = fleet(FakeHost(act=mute), FakeHost())
    assert made.post(COMPLETIONS, body()).code == "deadline", "it may compute a long prompt"


@pytest.mark.parametrize("act", [cut, endless])
def test_a_stream_that_breaks_has_one_error_event_and_is_not_asked_again(
    fleet: Callable[..., Fleet], act: Callable[[FakeHost, asyncio.StreamWriter], Any]
) -> None:
    made = fleet(FakeHost(act=act), FakeHost(act=act))
    reply = made.post(COMPLETIONS, body())
    assert [event.get("error", {}).get("code") for event in reply.events][-1] == "engine_down"
    assert sum("error" in event for event in reply.events) == 1
    assert reply.body.startswith(EVENTS[0])
    assert sum(len(host.seen) for host in made.hosts) == 1
    anthropic = made.post("/v1/messages", body())
    assert anthropic.body.endswith(b"\n\n")
    assert anthropic.body.count(b"event: error") == 1


@pytest.mark.parametrize("last", LASTS)
def test_nothing_follows_the_last_event_when_the_host_breaks_off_behind_it(
    fleet: Callable[..., Fleet], last: bytes
) -> None:
    made = fleet(FakeHost(act=cut_behind(last)))
    assert made.post(COMPLETIONS, body()).body == EVENTS[0] + last
    made.wait(lambda: sum(each.open for each in made.router.hosts) == 0)


def test_full_hosts_say_when_the_first_has_room(fleet: Callable[..., Fleet]) -> None:
    made = fleet(FakeHost(act=status(429, b"Retry-After: 9\r\n")), FakeHost(act=status(429, b"Retry-After: 4\r\n")))
    reply = made.post(COMPLETIONS, body())
    assert (reply.status, reply.code, reply.headers["retry-after"]) == (429, "overloaded", "4")
    assert sum(len(host.seen) for host in made.hosts) == 2


def test_refusals_of_a_host_are_passed_on(fleet: Callable[..., Fleet]) -> None:
    made = fleet(FakeHost(act=status(400)), FakeHost(act=status(400)))
    reply = made.post(COMPLETIONS, body())
    assert (reply.status, reply.body) == (400, b"{}")
    assert sum(len(host.seen) for host in made.hosts) == 1


def test_health_decides_and_metrics_tell(fleet: Callable[..., Fleet]) -> None:
    made = fleet(FakeHost(), FakeHost())
    made.hosts[0].health = 503
    made.ready("busy", "ready")
    for _ in range(3):
        assert made.post(COMPLETIONS, body()).status == 200
    assert len(made.hosts[1].seen) == 3
    label = made.router.hosts[1].label
    assert f'attar_host_requests_total{{host="{label}"}} 3.0' in made.get("/metrics").body.decode()
    made.hosts[1].health = 500
    made.ready("busy", "down")
    assert made.get("/readyz").status == 503
    assert made.post(COMPLETIONS, body()).code == "engine_down"
    assert made.get("/livez").status == 200
    made.hosts[0].health = made.hosts[1].health = 200
    made.ready()
    assert made.get("/readyz").json["status"] == "ready"


def test_a_loop_of_routers_is_refused(fleet: Callable[..., Fleet]) -> None:
    made = fleet(FakeHost())
    made.post(COMPLETIONS, body())
    name = made.hosts[0].seen[0][1][proxy.HOPS]
    for hops in (name, f"other,{name},third", "a,b,c,d"):
        reply = made.post(COMPLETIONS, body(), {proxy.HOPS: hops})
        assert (reply.status, reply.code) == (508, "loop_detected")
    assert made.post(COMPLETIONS, body(), {proxy.HOPS: "other"}).status == 200
    assert made.hosts[0].seen[-1][1][proxy.HOPS] == f"other,{name}"


def test_keys_of_the_router_are_checked_and_passed_on(fleet: Callable[..., Fleet]) -> None:
    made = fleet(FakeHost(), options=ServerOptions(port=0, keys=Keys.of([KEY])))
    assert made.post(COMPLETIONS, body()).code == "invalid_api_key"
    assert made.post(COMPLETIONS, body(), {"Authorization": f"Bearer {KEY}"}).status == 200
    assert [headers["authorization"] for _, headers, _ in made.hosts[0].seen] == [f"Bearer {KEY}"]


@pytest.mark.parametrize("data", [b"", b"[]", b"{", b'{"n": "a"}', b'{"prompt": ' + b"[" * 100_000, b'{"stream": 7}'])
def test_bodies_that_are_no_requests_are_refused(fleet: Callable[..., Fleet], data: bytes) -> None:
    made = fleet(FakeHost())
    assert made.post(COMPLETIONS, data, {"Content-Type": "application/json"}).code == "invalid_json"
    assert not made.hosts[0].seen


def test_a_prompt_goes_where_its_beginning_was(fleet: Callable[..., Fleet]) -> None:
    made = fleet(FakeHost(), FakeHost())
    made.hosts[0].health = 503
    made.ready("busy", "ready")
    prompts = [f"{at} " * 3000 for at in range(3)]
    for text in prompts:
        made.post(COMPLETIONS, body(text))
    made.hosts[0].health = 200
    made.ready()
    for text in prompts:
        made.post(COMPLETIONS, body(text + " and more"))
    assert [len(host.seen) for host in made.hosts] == [0, 6]
    made.post(COMPLETIONS, body("another " * 1000))
    assert [len(host.seen) for host in made.hosts] == [1, 6]
    made.hosts[1].health = 500
    made.ready("ready", "down")
    made.hosts[1].health = 503  # as while it loads its model
    made.ready("ready", "busy")
    made.hosts[1].health = 200
    made.ready()
    made.post(COMPLETIONS, body(prompts[0]))
    assert len(made.hosts[0].seen) == 2, "a host that was down has forgotten"


@given(st.lists(st.binary(min_size=1, max_size=40), max_size=12), st.randoms(use_true_random=False))
def test_whole_events_are_passed_on_however_they_arrive(texts: list[bytes], rng: Any) -> None:
    ends = [rng.choice([b"\n\n", b"\r\n\r\n"]) for _ in texts]
    events = [
        b"data: " + text.replace(b"\n", b"").replace(b"\r", b"") + end for text, end in zip(texts, ends, strict=True)
    ]
    data = b"".join(events)

    async def arriving() -> Any:
        at = 0
        while at < len(data):
            step = rng.randint(1, 30)
            yield data[at : at + step]
            at += step

    async def read() -> list[bytes]:
        return [piece async for piece in proxy.whole_events(arriving())]

    pieces = asyncio.run(read())
    assert b"".join(pieces) == data
    assert all(piece.endswith((b"\n\n", b"\n\r\n")) for piece in pieces)


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 5), st.integers(1, 6)), max_size=40))
def test_pieces_that_a_host_has_are_bounded_and_the_latest(asked: list[tuple[int, int, int]]) -> None:
    router, latest = TextRouter(3), dict[tuple[int, int], int]()
    before, text_prefixes.PIECES = text_prefixes.PIECES, 8
    try:
        for host in range(3):
            router.forget(host)
        for number, (host, text, length) in enumerate(asked):
            digests = list(text_prefixes.chain(b"k", bytes([text]) * (PIECE * length)))
            router.begun(str(number), host, digests)
            latest[host, text] = length
            assert router.router.prefixes.matched(digests, (host,))[host] == length
        router.router.prefixes.check()
    finally:
        text_prefixes.PIECES = before


def test_texts_of_different_keys_and_models_have_nothing_in_common() -> None:
    text = "word " * 500
    found = [
        set(PromptBody(model=model, prompt=Raw(json.dumps(text).encode())).asked(salt).digests)
        for model in ("a", "b") for salt in (b"", b"x")
    ]  # fmt: skip
    assert all(len(each) == 4 for each in found)
    assert not any(one & other for at, one in enumerate(found) for other in found[:at])
    assert set(ASKED)
