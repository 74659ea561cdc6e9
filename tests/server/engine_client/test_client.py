"""The engine's death, and what else can go wrong between two processes."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from attar import faults
from attar.faults import Fault
from attar.protocol import messages
from attar.protocol.messages import MAX_FRAME, Delta, Failed, Finished, Ready, Report, Submit, encode
from attar.protocol.request import SamplingParams
from attar.server.engine_client import client, connection, response_stream
from attar.server.engine_client.client import WATCH_SECONDS, EngineClient
from attar.server.engine_client.heartbeat import LEAST_SLOW, SILENCE, STUCK
from attar.server.options import ServerOptions
from tests.server.conftest import Running
from tests.server.http.test_limits import connect, post

LONG = {"prompt": "a", "max_tokens": 500, "ignore_eos": True}


def streaming(server: Running, path: str = "/v1/completions", **more: object) -> socket.socket:
    sock = connect(server)
    body = {**LONG, **more, "stream": True}
    sock.sendall(post(json.dumps(body).encode()).replace(b"/v1/completions", path.encode()))
    return sock


def rest(sock: socket.socket) -> bytes:
    """Until the other side closes, or the last chunk."""
    data = b""
    while not data.endswith(b"0\r\n\r\n") and (more := sock.recv(65536)):
        data += more
    return data


def test_at_the_engines_death_every_open_request_is_told(fragile: Running) -> None:
    fragile.engine.step = 0.02
    socks = [streaming(fragile, n=2) for _ in range(5)]
    chat = {"messages": [{"role": "user", "content": "a"}], "prompt": None, "ignore_eos": None}
    body = {name: value for name, value in {**LONG, **chat, "stream": True}.items() if value is not None}
    with connect(fragile) as messages, connect(fragile) as whole:
        messages.sendall(post(json.dumps(body).encode()).replace(b"/v1/completions", b"/v1/messages"))
        whole.sendall(post(json.dumps(LONG).encode()))
        fragile.wait(lambda: fragile.engine.open == 7)
        time.sleep(0.1)
        started = time.monotonic()
        fragile.call(fragile.engine.die)
        for sock in socks:
            data = rest(sock)
            assert data.count(b'"error"') == 1
            assert b"[DONE]" not in data
            assert b'"code":"engine_down"' in data.split(b"data: ")[-1]
            sock.close()
        data = rest(messages)
        assert data.count(b"event: error\n") == 1
        assert b"message_stop" not in data
        reply = whole.recv(65536)
        assert b" 503 " in reply.split(b"\r\n")[0]
        assert b"retry-after" in reply.lower()
        assert time.monotonic() - started < 5  # it takes milliseconds; a minute would be a timeout of somebody's
    fragile.engine.step = 0.001


def test_readiness_follows_the_engine(fragile: Running) -> None:
    fragile.call(fragile.engine._server.close)
    fragile.call(fragile.engine.die)
    fragile.wait(lambda: fragile.server.engine.ready is None)
    reply = fragile.get("/readyz")
    assert (reply.status, reply.code, reply.headers["retry-after"]) == (503, "engine_down", "2")
    assert fragile.get("/livez").status == 200
    assert fragile.get("/metrics").status == 200
    assert fragile.get("/v1/models").status == 503
    assert fragile.post("/v1/completions", LONG).status == 503
    assert fragile.post("/v1/messages", {}).status in (400, 503)
    fragile.call(lambda: fragile.loop.create_task(fragile.engine.start()))
    fragile.wait(lambda: fragile.get("/readyz").status == 200)


def test_a_long_step_refuses_nothing_and_one_that_never_ends_does(fragile: Running) -> None:
    fragile.engine.held = True
    with streaming(fragile) as sock:
        stuck = fragile.server.engine.heartbeat.stuck
        assert stuck >= STUCK
        fragile.server.engine.heartbeat.longest = 0.1
        for busy, ready, taken in ((LEAST_SLOW, 200, 200), (stuck - 1, 503, 200), (stuck + 1, 503, 503), (0, 200, 200)):
            fragile.engine.busy = busy
            fragile.wait(lambda busy=busy: fragile.server.engine.heartbeat.busy == busy)  # type: ignore[misc]
            reply = fragile.get("/readyz")
            assert reply.status == ready
            assert (reply.status == 200) or reply.code == "engine_down"
            assert fragile.post("/v1/completions", {"prompt": "a", "max_tokens": 0, "echo": True}).status == taken
        fragile.engine.held = False
        assert rest(sock).endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


def test_an_engine_that_is_not_heard_is_not_ready_until_it_is_again(fragile: Running) -> None:
    fragile.engine.held = True
    fragile.engine.beats = False
    with streaming(fragile) as sock:
        fragile.wait(lambda: fragile.get("/readyz").status == 503)
        assert fragile.post("/v1/completions", LONG).code == "engine_down"
        assert b"attar_engine_up 0.0" in fragile.get("/metrics").body
        assert fragile.engine.open == 1
        fragile.engine.held, fragile.engine.beats = False, True
        fragile.wait(lambda: fragile.get("/readyz").status == 200)
        assert rest(sock).endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")  # it waited, and went on


def test_a_stopped_engine_is_seen_within_two_seconds() -> None:
    """By the numbers: a machine that is busy takes longer, and is no reason to fail."""
    assert messages.BEAT_SECONDS < SILENCE - 2 * WATCH_SECONDS, "two beats late are no trouble yet"
    assert SILENCE + 2 * WATCH_SECONDS < 2.0


def test_where_the_engine_does_not_end_a_request_at_its_deadline_the_server_does(
    start: Callable[..., Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(response_stream, "GRACE", 0.1)
    server = start(ServerOptions(port=0, deadline=2.0), step=0.02)
    with streaming(server, n=2) as sock:
        begun = sock.recv(65536)
        server.engine.held = True
        data = begun + rest(sock)
        assert data.count(b'"error"') == data.count(b'"code":"deadline"') == 1
        assert b"[DONE]" not in data
    assert server.post("/v1/completions", LONG).code == "deadline"
    server.wait(lambda: server.engine.open == 0)  # it was told
    assert not server.server.engine.open
    server.engine.held = False
    assert server.post("/v1/completions", {"prompt": "a", "max_tokens": 1}).status == 200


@pytest.mark.parametrize(
    "raw",
    [
        (MAX_FRAME + 1).to_bytes(4, "little"),
        (5).to_bytes(4, "little") + b"hello",
        (1).to_bytes(4, "little") + b"\x93",
        encode([Submit("a", (1,), SamplingParams())]),
        (0).to_bytes(4, "little"),
    ],
    ids=["too long", "noise", "cut", "a command", "nothing"],
)
def test_what_cannot_be_read_ends_the_connection(fragile: Running, raw: bytes) -> None:
    with streaming(fragile) as sock:
        fragile.wait(lambda: fragile.engine.open == 1)
        fragile.call(lambda: fragile.engine.say(raw))
        assert b'"code":"engine_down"' in rest(sock)


@pytest.mark.parametrize(
    "code, status, says",
    [
        ("full", 429, "overloaded"), ("too_long", 400, "context_length_exceeded"), ("invalid", 400, "invalid_value"),
        ("deadline", 503, "deadline"), ("bad_logits", 500, "bad_logits"), ("internal", 500, "internal"),
        ("shutdown", 503, "engine_down"), ("no such code", 500, "internal"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_a_refusal_of_the_engine_is_the_answers_status(
    fragile: Running, code: str, status: int, says: str, stream: bool
) -> None:
    fragile.engine.fail = (code, 0)
    reply = fragile.post("/v1/completions", {**LONG, "stream": stream, "n": 3})
    assert (reply.status, reply.code) == (status, says)
    assert ("retry-after" in reply.headers) == (says in ("overloaded", "engine_down"))
    assert reply.headers.get("x-should-retry") == ("false" if says == "deadline" else None)
    fragile.engine.fail = None


def test_a_failure_within_a_stream_is_its_last_event_and_ends_all_prompts(fragile: Running) -> None:
    fragile.engine.fail = ("internal", 3)
    reply = fragile.post("/v1/completions", {**LONG, "prompt": ["a", "b", "c"], "n": 2, "stream": True})
    assert reply.status == 200
    assert [event for event in reply.events if "error" in event] == [reply.events[-1]]
    assert len(reply.events) > 3
    fragile.engine.fail = None
    fragile.wait(lambda: fragile.engine.open == 0)


def test_who_listens_in_the_engines_place_is_said_once_until_the_engine_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The client connects again ten times a second, and the log would be full of it."""
    own = connection.os.geteuid()
    monkeypatch.setattr(client, "RETRY_SECONDS", 0.001)
    came = 0

    async def ready(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal came
        came += 1
        writer.write(encode([Ready("fake", 512, 100, 10, 16, 2, (), (), 0)]))
        writers.append(writer)

    async def until(true: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not true():
                await asyncio.sleep(0.001)

    async def scene() -> None:
        engine = EngineClient(tmp_path / "engine")
        async with await asyncio.start_unix_server(ready, str(tmp_path / "engine")):
            engine.start()
            for times in (1, 2):
                monkeypatch.setattr(connection.os, "geteuid", lambda: own + 1)
                for writer in writers:
                    writer.transport.abort()
                before = came
                await until(lambda before=before: came > before + 5)  # type: ignore[misc]
                said = [each.message for each in caplog.records if "given up" in each.message]
                assert said == ["the engine is given up: another user's process listens at the engine's socket"] * times
                monkeypatch.setattr(connection.os, "geteuid", lambda: own)
                await until(lambda: engine.ready is not None)
            await engine.close()
            for writer in writers:
                writer.transport.abort()

    writers: list[asyncio.StreamWriter] = []
    asyncio.run(scene())


@pytest.mark.parametrize("close", [False, True])
def test_an_answer_whose_rest_waits_here_ends_with_the_engine_too(tmp_path: Path, close: bool) -> None:
    async def scene() -> None:
        engine = EngineClient(tmp_path / "nobody")
        engine._arrived([Ready("fake", 512, 100, 10, 16, 2, (), (), 0)])
        params = SamplingParams()
        answer = engine.ask([Submit(name, (1,), params) for name in "abc"], 1)
        engine._arrived([Delta("a", 0, (1,), "x")])
        for name in "de":
            engine.ask([Submit(name, (1,), params)], 1)
        engine._arrived([Finished("a", 0, "stop", 1)])
        assert set(engine.open) == {"d", "e"}  # b and c wait for them to begin
        assert not answer.ended
        if close:
            await engine.close()
        else:
            engine._lost()
        assert answer.failure == "shutdown"
        assert [type(event) for event in await answer.take()] == [Delta, Finished, Failed]
        assert not engine.places.total

    asyncio.run(scene())


def test_what_the_engine_still_says_of_a_request_that_has_gone_is_read_and_then_forgotten(fragile: Running) -> None:
    fragile.engine.step = 0.02
    with streaming(fragile) as sock:
        sock.recv(1 << 16)
        name = next(iter(fragile.server.engine.open))
    fragile.wait(lambda: fragile.engine.cancelled == 1)
    fragile.wait(lambda: not fragile.server.engine._left)
    trace = fragile.get(f"/v1/requests/{name}/why").json
    assert trace["outcome"] == "cancelled"
    assert trace["prompts"][0]["decode"] > 0
    fragile.engine.step = 0.001


def test_a_last_word_that_could_not_be_taken_is_read_and_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reader has fallen behind for good, or what takes it raises, at what the engine says last."""
    engine = EngineClient(tmp_path / "nobody")
    engine._arrived([Ready("fake", 512, 100, 10, 16, 8, ())])
    monkeypatch.setattr(response_stream, "MAX_LEFT", 0)
    last = Finished("a", 0, "stop", 1, None, Report())
    for patience, armed in ((-1.0, None), (1000.0, Fault("client.receive"))):
        monkeypatch.setattr(response_stream, "PATIENCE", patience)
        late: list[object] = []
        answer = engine.ask([Submit("a", (1,), SamplingParams())], 1)
        answer.late = late.append
        if armed is not None:
            faults.arm(armed)
        try:
            engine._arrived([last])
        finally:
            faults.arm()
        assert answer.ended
        assert late == [last]
        assert not engine.open
        assert not engine._left
