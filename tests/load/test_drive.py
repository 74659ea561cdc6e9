"""Sending: in order, at its times or as clients come free, every request once, whatever becomes of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from attar.load import drive, schedule
from attar.load.client import Server
from attar.load.drive import Run, Target
from attar.load.schedule import Load
from attar.load.traces import Ask
from tests.load.fake import Behave, Fake, answer, well

ASKS = [Ask(0.01 * i, (200 + i, 300), 2 + i % 3) for i in range(12)]
EARLY = 0.002  # seconds that a timer may come before its time


def send(load: Load, fake: Fake, **settings: Any) -> Run:
    target = Target(Server.parse(fake.url), "m", timeout=10.0)
    return asyncio.run(drive.run(load, target, **settings))


def test_an_open_loop_sends_at_its_times(honest: Fake) -> None:
    done = send(schedule.as_recorded(ASKS), honest)
    assert [each.ask for each in done.sent] == ASKS
    assert all(each.answer.error is None for each in done.sent)
    assert all(each.due == done.started + each.ask.at for each in done.sent)
    assert all(each.answer.sent >= each.due - EARLY for each in done.sent)
    assert [len(each.answer.arrivals) for each in done.sent] == [ask.output for ask in ASKS]
    assert done.started < done.ended == max(each.answer.ended for each in done.sent)


def test_an_open_loop_does_not_wait_for_answers(serve: Callable[[Behave], Fake]) -> None:
    async def slow(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        while fake.most < 12:  # nobody is answered before everybody has asked
            await asyncio.sleep(0.005)
        await well(body, writer)

    fake = serve(slow)
    done = send(schedule.as_recorded(ASKS), fake)
    assert fake.most == 12
    assert all(each.answer.error is None for each in done.sent)


@pytest.mark.parametrize("clients", [1, 3])
def test_a_closed_loop_has_as_many_in_flight_as_clients(clients: int, honest: Fake) -> None:
    done = send(schedule.closed(ASKS, clients), honest)
    assert honest.most == clients
    assert [body["prompt"][0] for body in honest.asked[:clients]] == [200 + i for i in range(clients)]
    assert sorted(body["prompt"][0] for body in honest.asked) == [200 + i for i in range(12)]
    assert len(done.sent) == 12


def test_clients_that_begin_one_after_another_are_counted_from_their_second_request(honest: Fake) -> None:
    load = schedule.closed(ASKS, 3, ramp=0.15)
    done = send(load, honest)
    assert len(honest.asked) == 12
    assert [each.ask for each in done.sent] == list(load.asks[3:])
    assert done.started == min(each.due for each in done.sent)
    assert [ask.at for ask in load.asks[:4]] == pytest.approx([0.0, 0.05, 0.1, 0.0])


def test_a_failed_request_is_told_though_it_is_not_counted(serve: Callable[[Behave], Fake]) -> None:
    async def first(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        if body["prompt"][0] == 200:
            writer.write(answer("429 Too Many Requests", b"full"))
        else:
            await well(body, writer)

    done = send(schedule.closed(ASKS, 3, ramp=0.03), serve(first))
    assert [each.answer.error for each in done.sent] == ["status 429"] + [None] * 9


def test_a_failure_is_one_request_s_own(serve: Callable[[Behave], Fake]) -> None:
    async def some(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        if body["prompt"][0] % 2:
            writer.write(answer("429 Too Many Requests", b"full"))
        else:
            await well(body, writer)

    done = send(schedule.closed(ASKS, 4), serve(some))
    assert [each.answer.error for each in done.sent] == [None, "status 429"] * 6


def test_nothing_is_sent_after_the_limit(honest: Fake) -> None:
    done = send(schedule.as_recorded(ASKS), honest, limit=0.055)
    assert len(done.sent) == len(honest.asked) == 6
    assert len(send(schedule.closed(ASKS, 1), honest, limit=0.0).sent) <= 1


def test_progress_ends_with_everything_done(honest: Fake) -> None:
    told: list[tuple[str, int, int]] = []
    send(schedule.closed(ASKS, 2), honest, progress=lambda *now: told.append(now))
    assert told[-1] == ("2 clients", 12, 12)


def test_the_client_watches_itself(honest: Fake) -> None:
    done = send(schedule.as_recorded(ASKS), honest)
    assert done.loop_lags
    assert done.cpu > 0


def test_bodies() -> None:
    server = Server("h", 1)
    ids = Target(server, "m").body(Ask(0.0, (5, 6), 3))
    assert ids == {
        "model": "m", "prompt": [5, 6], "max_tokens": 3, "temperature": 0.0, "stream": True,
        "stream_options": {"include_usage": True}, "ignore_eos": True,
    }  # fmt: skip
    words = Target(server, "m", text=True, ignore_eos=False, extra={"top_k": 1}).body(Ask(0.0, (0, 1, 0), 3))
    assert words["prompt"] == f"{drive.WORDS[0]} {drive.WORDS[1]} {drive.WORDS[0]}"
    assert "ignore_eos" not in words
    assert words["top_k"] == 1
    chat = Target(server, "m", chat=True, decode=lambda ids: f"<{list(ids)}>")
    assert chat.path == "/v1/chat/completions"
    assert chat.body(Ask(0.0, (5,), 3))["messages"] == [{"role": "user", "content": "<[5]>"}]


def test_the_model_is_the_first_that_is_listed(honest: Fake) -> None:
    assert asyncio.run(drive.first_model(Server.parse(honest.url))) == "fake"


@pytest.mark.parametrize(
    "models, expected",
    [
        ([{"id": "fake"}], None),
        ([{"id": "other", "max_model_len": 9}, {"id": "fake", "max_model_len": 512}], 512),
        ([{"id": "other", "max_model_len": 9}], None),
        *(([{"id": "fake", "max_model_len": wrong}], None) for wrong in (None, "512", 5.5, 0, -1, True, [])),
        (["fake"], None),
        ([{"max_model_len": 512}], None),
    ],
)
def test_the_longest_context_where_it_is_said(honest: Fake, models: list[Any], expected: int | None) -> None:
    honest.models = models
    assert asyncio.run(drive.context(Server.parse(honest.url), "fake")) == expected
    assert asyncio.run(drive.context(Server.parse(f"{honest.url}/elsewhere"), "nobody")) is None


def test_a_probe(honest: Fake, serve: Callable[[Behave], Fake]) -> None:
    assert asyncio.run(drive.probe(Target(Server.parse(honest.url), "m"))) is None

    async def refuse(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(answer("401 Unauthorized", b"no key"))

    assert asyncio.run(drive.probe(Target(Server.parse(serve(refuse).url), "m"))) == "status 401: no key"
