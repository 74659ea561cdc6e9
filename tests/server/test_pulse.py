"""When an engine counts as stopped, as hung, and as slow: by numbers, with nobody's clock."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from attar.engine.messages import Beat, Stats
from attar.server import client
from attar.server.client import EngineClient
from attar.server.pulse import FAR, LEAST_SLOW, SILENCE, Pulse


def after(pulse: Pulse, busy: float) -> Pulse:
    pulse.busy = busy
    return pulse


def test_a_step_far_longer_than_any_before_is_slow_long_before_it_is_hung() -> None:
    pulse = Pulse(600.0)
    assert after(pulse, 599.0).slow is None, "nothing is known of its steps yet"
    for longest in (0.01, 2.0, 0.5, 45.0):
        pulse.longest = max(pulse.longest, longest)
        bound = max(LEAST_SLOW, FAR * pulse.longest)
        assert after(pulse, bound).slow is None
        assert after(pulse, bound + 0.1).slow is not None
        assert (pulse.trouble is None) == (bound + 0.1 <= 600.0)
    assert after(pulse, 0.0).slow is None


def test_the_longest_step_is_told_by_the_counters_of_one_engine() -> None:
    pulse = Pulse()
    counted = [(2, 1.0), (2, 1.0), (102, 2.0), (103, 9.0), (203, 10.0)]
    known = None
    for steps, seconds in counted:
        now = Stats(1, 0, 1, 1, 1, steps, 1, 1, 1, 1, seconds)
        pulse.count(known, now)
        known = now
    assert pulse.longest == 7.0
    pulse.count(None, Stats(1, 0, 1, 1, 1, 1, 1, 1, 1, 1, 0.5))  # a new one
    assert pulse.longest == 7.0


def test_one_that_is_not_heard_is_stopped_and_not_hung() -> None:
    pulse = after(Pulse(60.0), 61.0)
    assert pulse.hung
    pulse.silent = SILENCE
    assert not pulse.hung
    assert pulse.trouble is not None
    pulse.begin()
    assert not pulse.hung
    assert pulse.trouble is None


def test_who_owns_a_hung_engine_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "WATCH_SECONDS", 0.001)

    async def scene() -> None:
        engine, ended = EngineClient(Path("nobody"), 60.0), asyncio.Event()
        calls = []

        def hung() -> None:
            calls.append(engine.pulse.busy)
            ended.set()

        engine.hung = hung
        engine._arrived([Beat(59.0)])
        watch = asyncio.create_task(engine._watch(ended))
        while not engine.pulse.silent:  # it has looked
            await asyncio.sleep(0)
        assert calls == []
        engine._arrived([Beat(60.5)])
        async with asyncio.timeout(10):
            await watch
        assert calls == [60.5]

    asyncio.run(scene())
