"""What a request is told of itself when it ends, however it ends."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from attar.engine.engine import Engine
from attar.model.decoder import Decoder
from attar.protocol.messages import Embed, Embedding, Failed, Finished, Report, Submit
from attar.protocol.request import SamplingParams
from attar.protocol.scheduler_config import SchedulerConfig
from tests.engine.conftest import ask, make_engine

PROMPT = tuple(range(1, 71))
GREEDY = SamplingParams(max_tokens=4, temperature=0, seed=0)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(scope="module")
def decoder(tiny_decoder: Callable[..., Decoder]) -> Decoder:
    return tiny_decoder(layers=1)


@pytest.fixture
def engine(decoder: Decoder) -> Engine:
    return make_engine(decoder, limits=SchedulerConfig(max_running=2, max_step_tokens=32), clock=Clock())


def run(engine: Engine, *asks: Submit | Embed, steps: int = 100) -> dict[str, Report | None]:
    """The reports of those that end within so many steps, each of a second."""
    clock = engine.clock
    assert isinstance(clock, Clock)
    ask(engine, asks)
    found: dict[str, Report | None] = {}
    while steps and not engine.idle:
        steps -= 1
        clock.now += 1.0
        for event in engine.step():
            if isinstance(event, Embedding | Failed | Finished):
                found[event.id] = event.report
    return found


@pytest.mark.parametrize("pooling, reused, ended, seconds", [("mean", 0, "bypassed", 2.0), ("last", 69, "complete", 0)])
def test_a_vector_s_prompt_was_computed_as_far_as_the_vector_needs_it(
    engine: Engine, pooling: str, reused: int, ended: str, seconds: float
) -> None:
    """A mean is of all positions, and the cache has no states of theirs; the last one is always computed."""
    run(engine, Submit("before", PROMPT, GREEDY))
    report = run(engine, Embed("a", PROMPT, pooling))["a"]
    assert report is not None
    assert (report.prompt_tokens, report.reused_tokens, report.reuse_ended) == (70, reused, ended)
    assert (report.queued, report.prefill, report.decode) == (1.0, seconds, 0.0)


def test_what_a_key_embeds_only_that_key_finds(engine: Engine) -> None:
    run(engine, Embed("a", PROMPT, cache_salt=b"one"))
    found = run(
        engine,
        *(Submit(str(cache_salt), PROMPT, GREEDY, cache_salt=cache_salt) for cache_salt in (b"", b"one", b"two")),
    )
    reused = {cache_salt: report.reused_tokens for cache_salt, report in found.items() if report is not None}
    assert reused == {"b''": 0, "b'one'": 69, "b'two'": 0}


def test_a_deadline_tells_where_the_time_went(engine: Engine) -> None:
    report = run(engine, Submit("a", PROMPT, SamplingParams(max_tokens=50, temperature=0, seed=0), deadline=6.5))["a"]
    assert report is not None
    assert (report.queued, report.prefill, report.decode) == (1.0, 2.0, 4.0)
    assert (report.prompt_tokens, report.reuse_ended) == (70, "differs")


def test_one_that_never_ran_was_queued_all_the_time(engine: Engine) -> None:
    long = SamplingParams(max_tokens=40, temperature=0, seed=0)
    first = [Submit(str(i), (i + 1,) * 5, long) for i in range(2)]
    found = run(engine, *first, Submit("late", PROMPT, GREEDY, deadline=8.0))
    report = found["late"]
    assert report is not None
    assert (report.queued, report.prefill, report.reuse_ended) == (8.0, 0.0, "")


def test_a_cancelled_request_is_told_up_to_that_moment(engine: Engine) -> None:
    run(engine, Submit("a", PROMPT, GREEDY, n=2), steps=4)
    assert isinstance(engine.clock, Clock)
    engine.clock.now += 10.0
    engine.cancel("a")
    report = run(engine)["a"]
    assert report is not None
    assert report.queued == 1.0
    assert report.prefill + report.decode == pytest.approx(13.0)


def test_what_ends_with_the_engine_is_told_too(engine: Engine) -> None:
    run(engine, Submit("a", PROMPT, GREEDY), steps=2)
    (failed,) = engine.close()
    assert isinstance(failed, Failed)
    assert failed.report is not None
    assert failed.report.queued == 1.0


def test_what_was_refused_has_nothing_to_tell(engine: Engine) -> None:
    assert run(engine, Submit("a", (), GREEDY), Embed("b", (10**6,))) == {"a": None, "b": None}
