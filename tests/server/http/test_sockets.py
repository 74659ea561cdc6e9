"""Connections that wait: which goes when there are too many, on a real server and on pretended ones."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
from collections.abc import Callable

import pytest

from attar.server import serve
from attar.server.http import sockets
from attar.server.http.sockets import FILES, MANY, Waiting
from tests.server.conftest import Running
from tests.server.http.test_limits import GET, head

MOST = 20


class Pretended(asyncio.BaseTransport):
    def __init__(self) -> None:
        super().__init__()
        self.closed = False

    def close(self) -> None:
        self.closed = True


def drain(connection: socket.socket) -> None:
    """What is left of its answer, and then its end: a reset, where something that it sent was not read."""
    with contextlib.suppress(ConnectionResetError):
        while connection.recv(1 << 16):
            pass


def test_files_are_allowed_for_as_far_as_the_user_may(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: asked.append(limits))
    for soft, hard, expected in (
        (1024, 1 << 20, [(2 * 1216 + FILES, 1 << 20)]), (1024, 2048, [(2048, 2048)]), (1 << 19, 1 << 20, []),
        (1024, resource.RLIM_INFINITY, [(2 * 1216 + FILES, resource.RLIM_INFINITY)]),
    ):  # fmt: skip
        asked.clear()
        monkeypatch.setattr(resource, "getrlimit", lambda _, found=(soft, hard): found)
        sockets.allow(1216)
        assert asked == expected


@pytest.mark.parametrize(
    "soft, most",
    [(1024, 1024 - FILES), (2 * FILES, FILES), (64, 32), (1, 1), (1 << 30, MANY), (resource.RLIM_INFINITY, MANY)],
)
def test_as_many_connections_as_files_are_left_for(
    soft: int, most: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, soft))
    assert sockets.allowed() == most
    few = f"may open {soft} files, which leaves {most} connections" in caplog.text
    assert few == (most < FILES)


def test_the_longest_waiting_goes_first_and_never_one_that_is_answered() -> None:
    waiting, made = Waiting(3), [Pretended() for _ in range(6)]
    for opened, each in enumerate(made[:3], 1):
        waiting.add(each, opened)
    waiting.remove(made[0])  # something is asked over it
    waiting.add(made[1], 3)  # was asked over it, and is answered
    assert not any(each.closed for each in made)
    waiting.add(made[3], 4)
    assert [each.closed for each in made[:4]] == [False, False, True, False]
    waiting.remove(made[2])  # as it is lost
    waiting.add(made[4], 4)
    assert [each.closed for each in made[:5]] == [False, True, True, False, False]


@pytest.mark.parametrize("sent", [b"", GET, head()[:-2]], ids=["silent", "answered", "half a request"])
def test_idle_connections_keep_nobody_out(
    sent: bytes, start: Callable[[], Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "allowed", lambda: MOST)
    server = start()
    held = []
    try:
        for _ in range(3 * MOST):
            held.append(socket.create_connection(("127.0.0.1", server.port), 10))
            held[-1].sendall(sent)
            if sent == GET:
                assert held[-1].recv(1 << 16).startswith(b"HTTP/1.1 200")
        assert server.get("/livez").status == 200
        held[0].settimeout(10)
        drain(held[0])  # it waited longest
        held[-1].settimeout(0.05)
        with pytest.raises(TimeoutError):
            drain(held[-1])
    finally:
        for each in held:
            each.close()
