"""The server's end of the socket between the two processes."""

from __future__ import annotations

import asyncio
import socket

import pytest

from attar.protocol.messages import Beat, encode
from attar.server.engine_client import connection
from attar.server.engine_client.connection import Connection

SECONDS = 20.0


@pytest.mark.parametrize("user, heard", [(0, True), (1, False)])
def test_nobody_else_is_listened_to_in_the_engines_place(
    user: int, heard: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose folder it is may have changed since the engine was started."""
    own = connection.os.geteuid()
    monkeypatch.setattr(connection.os, "geteuid", lambda: own + user)

    async def talk() -> list[object]:
        ours, theirs = socket.socketpair()
        events: list[object] = []
        wrong: list[str] = []
        ended = asyncio.Event()
        with theirs:
            theirs.sendall(encode([Beat(0.5)]))
            theirs.shutdown(socket.SHUT_WR)
            loop = asyncio.get_running_loop()
            await loop.create_unix_connection(lambda: Connection(events.extend, ended.set, wrong.append), sock=ours)
            await asyncio.wait_for(ended.wait(), SECONDS)
        assert wrong == ([] if heard else ["another user's process listens at the engine's socket"])
        return events

    assert asyncio.run(talk()) == ([Beat(0.5)] if heard else [])
