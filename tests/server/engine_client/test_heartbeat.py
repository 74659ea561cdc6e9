"""When an engine counts as stopped, as hung, and as slow: by numbers, with nobody's clock."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from attar.protocol.messages import BEAT_SECONDS, Beat, Stats
from attar.server.engine_client import client
from attar.server.engine_client.client import EngineClient
from attar.server.engine_client.heartbeat import FAR, FIRST_SLOW, HUNG, LEAST_SLOW, SILENCE, STUCK, Heartbeat


def after(heartbeat: Heartbeat, busy: float) -> Heartbeat:
    heartbeat.busy = busy
    return heartbeat


def test_a_step_far_longer_than_any_before_is_slow_long_before_it_is_hung() -> None:
    heartbeat = Heartbeat(600.0)
    for longest in (0.01, 2.0, 0.5, 45.0):
        heartbeat.longest = max(heartbeat.longest, longest)
        bound = max(LEAST_SLOW, FAR * heartbeat.longest)
        assert after(heartbeat, bound).slow is None
        assert after(heartbeat, bound + 0.1).slow is not None
        assert (heartbeat.trouble is None) == (bound + 0.1 <= 600.0)
    assert after(heartbeat, 0.0).slow is None


def test_the_first_prompt_of_a_large_model_is_nothing_unusual() -> None:
    """Eight billion weights on two cores: 0.4 s for single tokens, 10.5 s for 512 at a time."""
    heartbeat = Heartbeat(600.0)
    heartbeat.longest = 0.4
    assert after(heartbeat, 10.5).slow is None


def test_a_first_step_that_hangs_is_slow_long_before_a_request_may_take_no_longer() -> None:
    """Nothing is known of its steps yet; it may be cold, but not for ever."""
    heartbeat = Heartbeat(600.0)
    assert after(heartbeat, FIRST_SLOW).slow is None
    slow = after(heartbeat, FIRST_SLOW + 0.1).slow
    assert slow == "the engine has been in one step for more than 120 s, and it is the first"
    assert heartbeat.trouble is None


def stats(steps: int, seconds: float) -> Stats:
    return Stats(1, 0, 1, 1, 1, steps, 1, 1, 1, 1, seconds)


def test_the_longest_step_is_told_by_the_counters_of_one_engine() -> None:
    heartbeat = Heartbeat()
    counted = [(2, 1.0, 0.4), (2, 1.0, 6.0), (102, 2.0, 6.5), (103, 9.0, 6.8), (203, 10.0, 0.0)]
    known = None
    for steps, seconds, busy in counted:
        heartbeat.beat(busy)
        now = stats(steps, seconds)
        heartbeat.count(known, now)
        known = now
    assert heartbeat.longest == 7.0
    heartbeat.begin()
    assert heartbeat.longest == 0.0
    heartbeat.beat(0.4)
    heartbeat.count(None, stats(1, 0.5))  # a new one
    assert heartbeat.longest == 0.5


def test_time_for_which_the_engine_was_stopped_makes_no_step_a_long_one() -> None:
    heartbeat = Heartbeat(600.0)
    heartbeat.count(None, known := stats(100, 10.0))
    for busy in (0.3, 1.3):  # it was stopped within a step, for 300 s by the clock of `Stats`
        heartbeat.beat(busy)
    heartbeat.count(known, known := stats(101, 310.0))
    assert 0.1 < heartbeat.longest <= 1.3 + 2 * BEAT_SECONDS
    heartbeat.beat(0.0)
    heartbeat.count(known, known := stats(111, 311.0))
    assert after(heartbeat, FAR * 3.0).slow is not None
    heartbeat.beat(45.0)  # one that ran
    heartbeat.count(known, stats(112, 356.4))
    assert heartbeat.longest == pytest.approx(45.4)


def test_one_that_is_not_heard_is_stopped_and_not_hung() -> None:
    heartbeat = after(Heartbeat(60.0), HUNG + 1)
    assert heartbeat.hung
    heartbeat.silent = SILENCE
    assert not heartbeat.hung
    assert heartbeat.trouble is not None
    heartbeat.begin()
    assert not heartbeat.hung
    assert heartbeat.trouble is None


@pytest.mark.parametrize("stuck", [STUCK, 1800.0])
def test_a_step_that_is_refused_for_is_not_yet_one_to_end_the_engine_for(stuck: float) -> None:
    """One that a short deadline makes too long would be as long again, and six deaths end the server."""
    for busy, trouble, hung in ((stuck, False, False), (max(stuck, HUNG) + 1, True, True)):
        heartbeat = after(Heartbeat(stuck), busy)
        assert ((heartbeat.trouble is not None), heartbeat.hung) == (trouble, hung)
    assert not after(Heartbeat(STUCK), HUNG).hung
    assert after(Heartbeat(STUCK), HUNG).trouble is not None


def test_an_engine_that_has_ended_is_not_hung(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever is told then would end the one that follows."""

    async def scene() -> None:
        engine, ended = EngineClient(Path("nobody"), 60.0), asyncio.Event()
        calls = []
        engine.hung = lambda: calls.append(1)
        engine._arrived([Beat(HUNG + 1)])
        watch = asyncio.create_task(engine._watch(ended))
        await asyncio.sleep(0)
        ended.set()
        async with asyncio.timeout(10):
            await watch
        assert calls == []

    monkeypatch.setattr(client, "WATCH_SECONDS", SILENCE / 2)
    asyncio.run(scene())


def test_who_owns_a_hung_engine_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "WATCH_SECONDS", 0.001)

    async def scene() -> None:
        engine, ended = EngineClient(Path("nobody"), 60.0), asyncio.Event()
        calls = []

        def hung() -> None:
            calls.append(engine.heartbeat.busy)
            ended.set()

        engine.hung = hung
        engine._arrived([Beat(HUNG)])
        watch = asyncio.create_task(engine._watch(ended))
        while not engine.heartbeat.silent:  # it has looked
            await asyncio.sleep(0)
        assert calls == []
        engine._arrived([Beat(HUNG + 0.5)])
        async with asyncio.timeout(10):
            await watch
        assert calls == [HUNG + 0.5]

    asyncio.run(scene())
