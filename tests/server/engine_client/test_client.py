"""The engine's death, and what else can go wrong between two processes."""

from __future__ import annotations

import asyncio
import gc
import json
import socket
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from attar import faults
from attar.faults import Fault
from attar.protocol import messages
from attar.protocol.messages import MAX_FRAME, Delta, Embed, Embedding, Failed, Finished, Ready, Report, Submit, encode
from attar.protocol.request import SamplingParams
from attar.server.admission.fair_queue import Places
from attar.server.engine_client import client, connection
from attar.server.engine_client.client import (
    LATENESS,
    MAX_HELD,
    MAX_LEFT,
    MAX_TOTAL,
    MAX_WAITING,
    ROOM_SECONDS,
    WATCH_SECONDS,
    Answer,
    Backlog,
    EngineClient,
)
from attar.server.engine_client.heartbeat import LEAST_SLOW, SILENCE, STUCK
from attar.server.http.middleware import Options
from attar.server.logprobs import PromptScores
from tests.server.conftest import Running
from tests.server.http.test_limits import connect, post

LONG = {"prompt": "a", "max_tokens": 500, "ignore_eos": True}


@pytest.fixture
def fragile(start: Callable[..., Running]) -> Iterator[Running]:
    """A server whose engine may be ended; it is up again after the test."""
    server = start()
    yield server
    server.engine.held = False
    server.engine.fail = None
    server.engine.beats, server.engine.busy = True, 0.0
    server.wait(lambda: server.server.engine.ready is not None)
    assert server.post("/v1/completions", {"prompt": "a", "max_tokens": 1}).status == 200
    assert server.engine.open == 0
    assert not server.server.engine.open


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
    monkeypatch.setattr(client, "GRACE", 0.1)
    server = start(Options(port=0, deadline=2.0), step=0.02)
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


def answering(
    commands: list[Submit | Embed], window: int = 1000
) -> tuple[Answer, list[Submit | Embed], list[tuple[list[str], bool]]]:
    """An answer that has begun, what it sends, and what it drops."""
    sent: list[Submit | Embed] = []
    dropped: list[tuple[list[str], bool]] = []
    places = Places()
    places.size = 1000
    answer = Answer(
        commands,
        window,
        lambda answer, batch: sent.extend(batch),
        lambda ids, tell: dropped.append((list(ids), tell)),
        places,
    )
    answer.go_on()
    return answer, sent, dropped


def test_several_events_wait_as_one_batch_and_a_reader_too_far_behind_is_let_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client, "PATIENCE", 1000.0)
    late = answering([Submit("a", (1,), SamplingParams())])[0]
    for _ in range(100):
        late.put(Delta("a", 0, (1,), "x" * 1000))
    assert not late.ended
    with pytest.raises(StopIteration) as taken:
        late.take().send(None)
    assert len(taken.value.value) == 100
    monkeypatch.setattr(client, "PATIENCE", -1.0)
    answer, _, dropped = answering([Submit("a", (1,), SamplingParams())])
    delta = Delta("a", 0, (1,), "x" * 1000)
    count = 0
    while not answer.ended:
        answer.put(delta)
        count += 1
    assert MAX_LEFT / 8000 < count < MAX_LEFT / 4000 + 2
    assert dropped == [(["a"], True)]
    answer.put(delta)
    with pytest.raises(StopIteration) as taken:
        answer.take().send(None)
    (event,) = taken.value.value  # what waited would never be read
    assert isinstance(event, Failed)
    assert event.code == "slow_reader"
    with pytest.raises(StopIteration) as taken:
        answer.take().send(None)
    assert taken.value.value == []


def test_what_waits_is_counted_by_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "PATIENCE", -1.0)
    large: list[tuple[Submit | Embed, PromptScores | Embedding]] = [
        (Submit("a", (1,), SamplingParams()), PromptScores("a", msgspec.Raw(bytes(MAX_LEFT)))),
        (Embed("a", (1,)), Embedding("a", bytes(MAX_LEFT))),
    ]
    for command, event in large:
        answer, _, dropped = answering([command])
        answer.put(event)
        assert answer.failure == "slow_reader"
        assert dropped == [(["a"], True)]
        whole = answering([command, Submit("b", (1,), SamplingParams())])[0]
        whole.whole = True  # nothing but this process keeps its reader from it
        whole.put(event)
        assert not whole.ended


def test_a_reader_that_is_at_work_has_not_left_what_came_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "PATIENCE", 1000.0)
    answer = answering([Submit("a", (1,), SamplingParams())])[0]
    delta = Delta("a", 0, (1,), "x" * MAX_LEFT)
    answer.put(delta)
    answer.since -= 2000.0
    answer.reading()
    answer.put(delta)
    assert not answer.ended
    answer.since -= 2000.0
    answer.put(delta)
    assert answer.ended


def test_what_waits_for_a_reader_that_is_at_work_is_bounded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "PATIENCE", 1000.0)
    half = PromptScores("a", msgspec.Raw(bytes(MAX_HELD // 2)))
    stream, whole = (answering([Submit("a", (1,), SamplingParams())])[0] for _ in range(2))
    whole.whole = True
    for answer in (stream, whole):
        answer.put(half)
        answer.reading()
        assert not answer.ended
        answer.put(half)
    assert stream.failure == "slow_reader"
    assert len(stream._events) == 1  # none of what waited
    assert not whole.ended


def test_where_all_streams_together_leave_too_much_the_one_that_leaves_most_is_let_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backlog = Backlog()

    def stream() -> Answer:
        command = Submit("a", (1,), SamplingParams())
        places = Places()
        places.size = 1
        made = Answer([command], 1, lambda answer, batch: None, lambda ids, tell: None, places, backlog)
        made.go_on()
        return made

    def taken(answer: Answer) -> list[object]:
        with pytest.raises(StopIteration) as taken:
            answer.take().send(None)
        return list(taken.value.value)

    some = Delta("a", 0, (1,), "x" * (MAX_WAITING // 8))  # half of what one may leave
    monkeypatch.setattr(client, "LOOK_SECONDS", 0.0)
    most, recent, *others = (stream() for _ in range(1 + 2 * MAX_TOTAL // MAX_WAITING))
    most.put(some)
    most.put(Delta("a", 0, (1,), "x"))
    most.put(Finished("a", 0, "length", 2))  # the engine has ended it
    for answer in others:
        answer.put(some)
    for answer in (most, *others):
        answer.since -= 2 * LATENESS
    recent.put(Delta("a", 0, (1,), "x" * (MAX_WAITING // 5)))  # more than any, but it has just come
    assert backlog.size - recent.left < MAX_TOTAL
    recent.put(PromptScores("a", msgspec.Raw(bytes(2 * MAX_TOTAL))))  # nobody else is let go for that
    assert most.failure == "slow_reader"
    assert [event.code for event in taken(most) if isinstance(event, Failed)] == ["slow_reader"]
    assert taken(most) == []
    assert not any(answer.ended for answer in (recent, *others))
    assert taken(others[0]) == [some]
    for answer in (recent, *others):
        answer.close()
        assert answer.ended
    assert backlog.size == 0


def pausing(server: Running) -> socket.socket:
    """A stream whose reader has read nothing yet, and has little room for what comes."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.settimeout(60)
    sock.connect(("127.0.0.1", server.port))
    sock.sendall(post(json.dumps({**LONG, "n": 8, "max_tokens": 480, "logprobs": 1, "stream": True}).encode()))
    return sock


def test_a_reader_that_pauses_gets_all(fragile: Running) -> None:
    fragile.engine.step = 4 * LATENESS / 480
    with pausing(fragile) as sock:
        fragile.wait(lambda: fragile.engine.open == 1)
        fragile.wait(lambda: fragile.engine.open == 0)
        data = rest(sock)
    assert data.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    assert data.count(b'"finish_reason":"length"') == 8
    fragile.wait(lambda: fragile.server.engine.backlog.size == 0)
    fragile.engine.step = 0.001


def test_a_reader_that_is_too_slow_is_told_so(fragile: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "PATIENCE", 0.1)
    fragile.engine.step = 0.002
    fragile.engine.cancelled = 0
    counted = b'attar_requests_ended_total{outcome="slow_reader"} 1.0'
    assert counted not in fragile.get("/metrics").body
    with pausing(fragile) as sock:
        fragile.wait(lambda: fragile.engine.cancelled == 1)
        data = rest(sock)
    assert b"[DONE]" not in data
    error = json.loads(data.split(b"data: ")[-1].partition(b"\n")[0])["error"]
    assert error["code"] == "slow_reader"
    assert error["message"] == "the stream was ended because its reader took too little for too long"
    fragile.wait(lambda: fragile.server.engine.backlog.size == 0)
    assert counted in fragile.get("/metrics").body
    fragile.engine.step = 0.001


def test_no_timer_holds_an_answer_that_has_ended() -> None:
    async def held(*ends: Finished | Failed) -> bool:
        answer = answering([Submit("a", (1,), SamplingParams())])[0]
        answer.end_after(600.0)
        for each in ends:
            answer.put(each)
        seen = weakref.ref(answer)
        del answer
        gc.collect()
        return seen() is not None

    assert asyncio.run(held())
    assert not asyncio.run(held(Finished("a", 0, "stop", 1)))
    assert not asyncio.run(held(Failed("a", "internal", "")))


def test_an_answer_of_several_ends_with_the_last() -> None:
    commands = [Submit("a", (1,), SamplingParams(), n=2), Embed("b", (1,)), Submit("c", (1,), SamplingParams())]
    answer, sent, dropped = answering(commands)
    assert sent == commands
    answer.put(Finished("a", 0, "stop", 1))
    assert dropped == []
    answer.put(Finished("a", 1, "stop", 1))
    assert dropped == [(["a"], False)]
    answer.put(Failed("c", "internal", ""))
    assert answer.ended
    assert dropped[1:] == [(["c"], False), (["b"], True)]
    answer.cancel()
    assert len(dropped) == 3


def ids(sent: list[Submit | Embed]) -> list[str]:
    return [command.id for command in sent]


def test_prompts_go_out_a_window_at_a_time() -> None:
    params = SamplingParams()
    answer, sent, dropped = answering([Submit(name, (1,), params, n=2) for name in "abcd"], window=5)
    assert ids(sent) == ["a", "b"]  # a third would be six choices
    answer.put(Finished("a", 0, "stop", 1))
    assert ids(sent) == ["a", "b"]
    answer.put(Finished("a", 1, "stop", 1))
    assert ids(sent) == ["a", "b", "c"]
    answer.cancel()
    assert dropped == [(["a"], False), (["d"], False), (["b", "c"], True)]  # of one the engine knows nothing
    answer.put(Finished("b", 0, "stop", 1))
    assert ids(sent) == ["a", "b", "c"]
    alone, sent, _ = answering([Submit(name, (1,), params, n=16) for name in "ab"], window=4)
    assert ids(sent) == ["a"]  # one prompt goes out whatever the window
    for number in range(16):
        alone.put(Finished("a", number, "stop", 1))
    assert ids(sent) == ["a", "b"]


def test_a_deadline_is_the_whole_requests() -> None:
    answer, sent, _ = answering([Embed(name, (1,), deadline=10.0) for name in "abc"], window=1)
    answer._began -= 4.0
    answer.put(Embedding("a", b""))
    answer._began -= 10.0
    answer.put(Embedding("b", b""))
    first, second, third = (command.deadline for command in sent)
    assert first is not None
    assert second is not None
    assert 9.0 < first <= 10.0
    assert 5.0 < second <= 6.0
    assert third == 0.0  # the engine says that it has passed


def test_a_queue_that_others_filled_is_waited_for_once_a_request_is_under_way() -> None:
    async def go() -> None:
        commands: list[Submit | Embed] = [Embed(name, (1,)) for name in "abcd"]
        answer, sent, dropped = answering(commands, window=2)
        answer.put(Embedding("a", b""))
        answer.put(Failed("c", "full", ""))  # sent for a, when others had come
        assert not answer.ended
        assert ids(sent) == ["a", "b", "c"]
        answer.put(Embedding("b", b""))
        assert ids(sent) == ["a", "b", "c", "c", "d"]
        for name in "dc":
            answer.put(Failed(name, "full", ""))
        assert ids(sent)[5:] == []  # nothing of its own is there that could end
        await asyncio.sleep(3 * ROOM_SECONDS)
        assert ids(sent)[5:] == ["c", "d"]
        answer.put(Failed("d", "full", ""))
        answer.cancel()
        assert dropped == [(["a"], False), (["b"], False), (["d"], False), (["c"], True)]
        await asyncio.sleep(3 * ROOM_SECONDS)
        assert ids(sent)[5:] == ["c", "d"]
        refused, _, _ = answering(commands, window=4)
        refused.put(Failed("a", "full", ""))
        assert refused.ended  # at the beginning it is the answer

    asyncio.run(go())


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
                assert said == ["the engine is given up: somebody else listens in the engine's place"] * times
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
    monkeypatch.setattr(client, "MAX_LEFT", 0)
    last = Finished("a", 0, "stop", 1, None, Report())
    for patience, armed in ((-1.0, None), (1000.0, Fault("client.receive"))):
        monkeypatch.setattr(client, "PATIENCE", patience)
        late: list[object] = []
        answer = engine.ask([Submit("a", (1,), SamplingParams())], 1)
        answer.late = late.append
        if armed is not None:
            faults.arm(armed)
        try:
            engine._arrived([last])
        finally:
            faults.disarm()
        assert answer.ended
        assert late == [last]
        assert not engine.open
        assert not engine._left
