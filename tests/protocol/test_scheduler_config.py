"""Limits: what a preset comes to, and that each policy does as it says in an engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from attar.engine.config import EngineConfig
from attar.engine.engine import Engine
from attar.model.decoder import Decoder
from attar.protocol.messages import Submit
from attar.protocol.request import SamplingParams
from attar.protocol.scheduler_config import PRESETS, Policy, SchedulerConfig
from attar.protocol.settings import Settings


def test_what_a_preset_comes_to_is_told_with_what_it_changes() -> None:
    told = SchedulerConfig().told(None)
    assert told.startswith("scheduler: policy continuous, max-running 32, max-step-tokens 512, ")
    assert "default" not in told
    changed = replace(PRESETS["latency"], max_waiting=9).told("latency")
    assert changed.startswith(
        "latency: policy continuous, max-running 16 (default 32), max-step-tokens 128 (default 512)"
    )
    assert "max-waiting 9 (default 256)" in changed
    assert "headroom 0.05 (default 0.02)" in changed
    assert "max-passed 16, " in changed


@pytest.mark.parametrize("delay", [float("inf"), float("nan"), -1.0])
def test_a_delay_that_is_no_time_is_refused(delay: float) -> None:
    with pytest.raises(ValueError, match=r"number of seconds|not negative"):
        SchedulerConfig(policy="dynamic", max_delay=delay)


def test_the_delay_is_told_of_the_policy_that_heeds_it() -> None:
    assert "max-delay" not in SchedulerConfig(policy="static").told(None)
    assert "max-delay 0.1, " in SchedulerConfig(policy="dynamic").told(None)
    assert "max-delay 2.0 (default 0.1), " in SchedulerConfig(policy="dynamic", max_delay=2.0).told(None)


@pytest.mark.parametrize("policy, delay, after", [("static", None, 0.0), ("dynamic", None, 0.1), ("dynamic", 0.5, 0.5)])
def test_a_dynamic_batch_waits_for_company_that_a_static_one_does_not(
    tiny_decoder: Callable[..., Decoder], policy: Policy, delay: float | None, after: float
) -> None:
    """From the settings that the command line makes to the engine's first step."""
    now = 0.0
    limits = Settings("model", "socket", policy=policy, max_delay=delay).limits()
    engine = Engine(tiny_decoder(layers=1), None, EngineConfig(4, 64, limits), clock=lambda: now)
    engine.submit(Submit("a", (1, 2), SamplingParams(max_tokens=2, temperature=0, seed=0)))
    if after:
        now = 0.9 * after
        assert engine.step() == []
        assert engine.scheduler.wake() == after
    now = after
    engine.step()
    assert engine.steps == 1
