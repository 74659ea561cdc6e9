"""The events of a request: a reader that falls behind, a window of prompts, and how each ends."""

from __future__ import annotations

import asyncio
import gc
import json
import socket
import weakref

import msgspec
import pytest

from attar.protocol.messages import Delta, Embed, Embedding, Failed, Finished, Submit
from attar.protocol.request import SamplingParams
from attar.server.admission.fair_queue import FairQueue
from attar.server.engine_client import response_stream
from attar.server.engine_client.connection import PromptScores
from attar.server.engine_client.response_stream import (
    LATENESS,
    MAX_HELD,
    MAX_LEFT,
    MAX_TOTAL,
    MAX_WAITING,
    ROOM_SECONDS,
    Backlog,
    ResponseStream,
)
from tests.server.conftest import Running
from tests.server.engine_client.test_client import rest
from tests.server.http.test_limits import post

LONG = {"prompt": "a", "max_tokens": 500, "ignore_eos": True}


def answering(
    commands: list[Submit | Embed], window: int = 1000
) -> tuple[ResponseStream, list[Submit | Embed], list[tuple[list[str], bool]]]:
    """An answer that has begun, what it sends, and what it drops."""
    sent: list[Submit | Embed] = []
    dropped: list[tuple[list[str], bool]] = []
    places = FairQueue()
    places.size = 1000
    answer = ResponseStream(
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
    monkeypatch.setattr(response_stream, "PATIENCE", 1000.0)
    late = answering([Submit("a", (1,), SamplingParams())])[0]
    for _ in range(100):
        late.put(Delta("a", 0, (1,), "x" * 1000))
    assert not late.ended
    with pytest.raises(StopIteration) as taken:
        late.take().send(None)
    assert len(taken.value.value) == 100
    monkeypatch.setattr(response_stream, "PATIENCE", -1.0)
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
    monkeypatch.setattr(response_stream, "PATIENCE", -1.0)
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
    monkeypatch.setattr(response_stream, "PATIENCE", 1000.0)
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
    monkeypatch.setattr(response_stream, "PATIENCE", 1000.0)
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

    def stream() -> ResponseStream:
        command = Submit("a", (1,), SamplingParams())
        places = FairQueue()
        places.size = 1
        made = ResponseStream([command], 1, lambda answer, batch: None, lambda ids, tell: None, places, backlog)
        made.go_on()
        return made

    def taken(answer: ResponseStream) -> list[object]:
        with pytest.raises(StopIteration) as taken:
            answer.take().send(None)
        return list(taken.value.value)

    some = Delta("a", 0, (1,), "x" * (MAX_WAITING // 8))  # half of what one may leave
    monkeypatch.setattr(response_stream, "LOOK_SECONDS", 0.0)
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
    monkeypatch.setattr(response_stream, "PATIENCE", 0.1)
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
