"""Clients that go away, at every phase and in every way: nothing of theirs stays, and nobody else notices."""

from __future__ import annotations

import json
import random
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from attar.server import desk
from attar.server.protocol import LimitedProtocol
from tests.server.conftest import Running
from tests.server.test_protocol import connect, post

ENDS = 300
KINDS = ["stream", "whole", "chat", "messages", "embeddings", "several"]


def request_of(kind: str) -> bytes:
    body: dict[str, object] = {"max_tokens": 120, "ignore_eos": True, "prompt": "a b c"}
    path = b"/v1/completions"
    if kind == "stream":
        body |= {"stream": True, "n": 3}
    elif kind == "several":
        body |= {"prompt": ["a", "b", "c", "d"], "n": 2, "stream": True, "logprobs": 5}
    elif kind == "embeddings":
        body, path = {"input": ["a"] * 50}, b"/v1/embeddings"
    elif kind in ("chat", "messages"):
        path = b"/v1/messages" if kind == "messages" else b"/v1/chat/completions"
        body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 120, "stream": kind == "chat"}
    return post(json.dumps(body).encode()).replace(b"/v1/completions", path)


def leave(sock: socket.socket, rudely: bool) -> None:
    if rudely:  # RST
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


def idle(server: Running) -> bool:
    return server.engine.open == 0 and not server.server.engine.open and server.server.door.open == 0


@pytest.mark.parametrize("kind", KINDS)
def test_leaving_while_the_engine_works_cancels_at_once(server: Running, kind: str) -> None:
    server.engine.step = 0.05  # 6 s for the whole of it
    try:
        with connect(server) as sock:
            sock.sendall(request_of(kind))
            if kind != "embeddings":
                server.wait(lambda: server.engine.open > 0)
        started = time.monotonic()
        server.wait(lambda: idle(server))
        assert time.monotonic() - started < 5
    finally:
        server.engine.step = 0.001


def test_leaving_with_a_request_behind_the_one_that_is_answered(server: Running) -> None:
    server.engine.step = 0.02
    try:
        with connect(server) as sock:
            sock.sendall(request_of("whole") * 2)
            server.wait(lambda: server.engine.open == 1)
        server.wait(lambda: idle(server), 2)
    finally:
        server.engine.step = 0.001


def test_leaving_the_queue(server: Running) -> None:
    server.engine.held = True
    try:
        socks = [connect(server) for _ in range(20)]
        for at, sock in enumerate(socks):
            sock.sendall(request_of(KINDS[at % 3]))
        server.wait(lambda: server.engine.open == 20)
        for sock in socks:
            sock.close()
        server.wait(lambda: idle(server))
    finally:
        server.engine.held = False


def test_leaving_a_stream_before_its_status(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(desk, "PROMPT_ANSWER", 1000.0)  # nothing but the leaving ends the wait for the first word
    server.engine.held = True
    try:
        socks = [connect(server) for _ in range(8)]
        for sock in socks:
            sock.sendall(request_of("chat"))
        server.wait(lambda: server.engine.open == 8)
        for at, sock in enumerate(socks):
            leave(sock, rudely=at % 2 == 0)
        server.wait(lambda: idle(server))
    finally:
        server.engine.held = False


@pytest.mark.parametrize("kind", KINDS)
def test_leaving_while_the_prompt_is_made_asks_nothing_of_the_engine(
    start: Callable[..., Running], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    made = start()
    entered, go_on, gone = threading.Event(), threading.Event(), threading.Event()
    lost = LimitedProtocol.connection_lost

    def told(protocol: LimitedProtocol, error: Exception | None) -> None:
        lost(protocol, error)
        gone.set()

    monkeypatch.setattr(LimitedProtocol, "connection_lost", told)

    def waits(call: Callable[..., Any]) -> Callable[..., Any]:
        def waited(*args: Any) -> Any:
            entered.set()
            assert go_on.wait(20)
            return call(*args)

        return waited

    for name in ("_encode", "_render"):
        monkeypatch.setattr(made.server.prompts, name, waits(getattr(made.server.prompts, name)))
    with connect(made) as sock:
        sock.sendall(request_of(kind))
        assert entered.wait(20)
    assert gone.wait(20)
    assert made.server.door.open == 1
    go_on.set()
    made.wait(lambda: idle(made))
    assert not made.engine.commands


def test_leaving_at_any_moment(server: Running) -> None:
    rng = random.Random(11)
    canary = {"prompt": "canary", "max_tokens": 5, "seed": 1}
    expected = server.post("/v1/completions", canary).json["choices"]
    for number in range(ENDS):
        data = request_of(rng.choice(KINDS))
        phase = rng.choice(["headers", "body", "sent", "queued", "reading"])
        sock = connect(server)
        if phase == "headers":
            sock.sendall(data[: rng.randrange(60)])
        elif phase == "body":
            sock.sendall(data[: -rng.randrange(1, 30)])
        else:
            sock.sendall(data)
            if phase == "queued":
                time.sleep(rng.random() * 0.01)
            elif phase == "reading":
                sock.recv(rng.randrange(1, 4000))
        leave(sock, rng.random() < 0.5)
        if number % 30 == 0:
            assert server.post("/v1/completions", canary).json["choices"] == expected
    server.wait(lambda: idle(server))
    assert server.post("/v1/completions", canary).json["choices"] == expected


def test_leaving_leaves_no_tasks_and_no_descriptors(server: Running) -> None:
    import asyncio
    import os

    def count() -> tuple[int, int]:
        found: list[int] = []
        server.call(lambda: found.append(len(asyncio.all_tasks(server.loop))))
        return found[0], len(os.listdir("/proc/self/fd"))

    server.wait(lambda: idle(server))
    before = count()
    for _ in range(30):
        with connect(server) as sock:
            sock.sendall(request_of("stream"))
            sock.recv(100)
    server.wait(lambda: idle(server))
    server.wait(lambda: count() <= before)
