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

from attar.server import request_handler
from attar.server.fair_thread_pool import LARGE, THREADS
from tests.server.conftest import Running
from tests.server.http.test_limits import connect, post

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
    return server.engine.open == 0 and not server.server.engine.open and server.server.middleware.open == 0


@pytest.mark.parametrize("kind", KINDS)
def test_leaving_while_the_engine_works_cancels_at_once(server: Running, kind: str) -> None:
    server.engine.step, cancelled = 0.05, server.engine.cancelled  # 6 s for the whole of it
    try:
        with connect(server) as sock:
            sock.sendall(request_of(kind))
            if kind != "embeddings":
                server.wait(lambda: server.engine.open > 0)
        server.wait(lambda: idle(server))
        if kind != "embeddings":
            assert server.engine.cancelled > cancelled, "it came to its end"
    finally:
        server.engine.step = 0.001


def test_leaving_with_a_request_behind_the_one_that_is_answered(server: Running) -> None:
    server.engine.step = 0.02
    try:
        with connect(server) as sock:
            sock.sendall(request_of("whole") * 2)
            server.wait(lambda: server.engine.open == 1)
        server.wait(lambda: idle(server))
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
    monkeypatch.setattr(
        request_handler, "PROMPT_ANSWER", 1000.0
    )  # nothing but the leaving ends the wait for the first word
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
    """And its place is free while a thread is still at it."""
    made = start()
    entered, go_on = threading.Event(), threading.Event()

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
    made.wait(lambda: idle(made))
    go_on.set()
    assert made.post("/v1/completions", {"prompt": "a", "max_tokens": 1}).status == 200
    assert len(made.engine.commands) == 1


@pytest.mark.parametrize("kind", ["whole", "chat", "messages", "embeddings", "tokenize"])
def test_the_texts_of_those_who_left_are_not_tokenized(
    start: Callable[..., Running], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """However many wait for their turn: each is a second of a thread, and megabytes."""
    made = start(context=1 << 20)
    prompts, encode = made.server.prompts, made.server.prompts.tokenizer.encode
    begun, go_on = [], threading.Event()

    def slow(text: str, **options: bool) -> list[int]:
        if len(text) > LARGE:
            begun.append(len(text))
            assert go_on.wait(20)
            return [1]
        return encode(text, **options)

    monkeypatch.setattr(prompts.tokenizer, "encode", slow)
    text = "a b c " * 20_000
    path, body = {
        "whole": (b"/v1/completions", {"prompt": text}),
        "chat": (b"/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}),
        "messages": (b"/v1/messages", {"messages": [{"role": "user", "content": text}], "max_tokens": 1}),
        "embeddings": (b"/v1/embeddings", {"input": text}),
        "tokenize": (b"/tokenize", {"prompt": text}),
    }[kind]
    data = post(json.dumps(body).encode()).replace(b"/v1/completions", path)
    socks = [connect(made) for _ in range(8)]
    try:
        for sock in socks:
            sock.sendall(data)
        made.wait(lambda: len(begun) == THREADS and made.server.middleware.open == 8)
        for sock in socks:
            sock.close()
        made.wait(lambda: idle(made) and not made.server.middleware.bodies.total())
    finally:
        go_on.set()
    assert made.post("/v1/completions", {"prompt": text, "max_tokens": 1}).status == 200
    assert len(begun) == THREADS + 1


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
