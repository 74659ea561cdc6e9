"""Figures of runs worked out by hand, and percentiles against numpy."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attar.load import measures
from attar.load.client import Answer
from attar.load.drive import Run, Sent
from attar.load.schedule import Load
from attar.load.traces import Ask
from tests.errors import user_error

ASK = Ask(0.0, (1, 2, 3), 3)


def answer(sent: float, *arrivals: float, ended: float, tokens: int | None = None, error: str | None = None) -> Answer:
    prompt = None if tokens is None else 10
    return Answer(
        sent, ended, list(arrivals), prompt_tokens=prompt, completion_tokens=tokens, finish_reason="stop", error=error
    )  # fmt: skip


def run(*answers: Answer, load: Load | None = None, **more: Any) -> Run:
    sent = [Sent(ASK, each.sent, each) for each in answers]
    ended = max(each.ended for each in answers)
    settings: dict[str, Any] = {"started": 0.0, "ended": ended, "loop_lags": [0.0], "cpu": 0.0} | more
    return Run(load or Load((ASK,) * len(answers), clients=2), sent, **settings)


HAND = (
    answer(0.0, 1.0, 1.5, 3.0, ended=3.0, tokens=3),  # TTFT 1, E2E 3, TPOT 1
    answer(1.0, 1.5, 1.6, 1.7, ended=1.7, tokens=3),  # TTFT 0.5, E2E 0.7, TPOT 0.1
    answer(2.0, 2.4, ended=2.5, tokens=1),  # TTFT 0.4, E2E 0.5, no TPOT
    answer(2.0, 2.2, ended=10.0, error="cut"),
    answer(3.0, ended=3.0, error="status 429"),
    answer(3.5, ended=3.6, error="status 429"),
)


def test_a_run_by_hand() -> None:
    found = measures.measure(run(*HAND))
    assert (found["requests"], found["succeeded"]) == (6, 3)
    assert found["errors"] == {"status 429": 2, "cut": 1}
    assert list(found["errors"]) == ["status 429", "cut"]
    assert found["seconds"] == 10.0
    assert (found["prompt_tokens"], found["output_tokens"], found["counted"]) == (30, 7, "usage")
    assert found["output_tok_s"] == pytest.approx(0.7)
    assert found["total_tok_s"] == pytest.approx(3.7)
    assert found["requests_s"] == pytest.approx(0.3)
    assert found["ttft"]["p50"] == pytest.approx(0.5)
    assert found["ttft"]["max"] == pytest.approx(1.0)
    assert found["e2e"]["mean"] == pytest.approx(1.4)
    assert (found["tpot"]["p50"], found["tpot"]["max"]) == (pytest.approx(0.55), pytest.approx(1.0))
    assert found["itl"]["max"] == pytest.approx(1.5)  # gaps 0.5, 1.5, 0.1, 0.1
    assert found["itl"]["p50"] == pytest.approx(0.3)
    assert found["in_flight"] == pytest.approx((3.0 + 0.7 + 0.5 + 8.0 + 0.0 + 0.1) / 10)
    json.dumps(found, allow_nan=False)


@pytest.mark.parametrize(
    "slo, met",
    [
        ("ttft=1.0", 3),
        ("ttft=0.9", 2),
        ("tpot=0.5", 2),  # an answer of one token has no TPOT to break
        ("ttft=0.45,tpot=0.5", 1),
        ("e2e=0.6", 1),
        ("e2e=0.1", 0),
    ],
)
def test_goodput_by_hand(slo: str, met: int) -> None:
    goodput = measures.measure(run(*HAND), measures.parse_slo(slo))["goodput"]
    assert goodput["met"] == met
    assert goodput["requests_s"] == pytest.approx(met / 10)
    assert goodput["share"] == pytest.approx(met / 6)


def test_tokens_are_events_where_the_server_does_not_count() -> None:
    found = measures.measure(run(answer(0.0, 1.0, 2.0, 2.0, ended=3.0), answer(0.0, 1.0, ended=1.0, tokens=40)))
    assert (found["output_tokens"], found["counted"]) == (43, "usage and events")
    assert found["prompt_tokens"] == 3 + 10
    alone = measures.measure(run(answer(0.0, 1.0, ended=3.0)))
    assert alone["counted"] == "events"
    assert any("no usage" in warning for warning in alone["warnings"])


def test_what_came_from_the_cache_is_counted_where_the_server_says() -> None:
    hit, silent = answer(0.0, 1.0, ended=1.0, tokens=3), answer(0.0, 1.0, ended=1.0, tokens=3)
    hit.cached_tokens = 5
    found = measures.measure(run(hit, silent))
    assert (found["cached_tokens"], found["prompt_tokens"]) == (5, 20)
    assert next(line for line in measures.to_text([found]).splitlines() if line.startswith("cached")).endswith("25%")
    assert measures.measure(run(silent))["cached_tokens"] is None


def with_cached(cached: int | None, counted: int, *prompts: tuple[int, ...]) -> list[str]:
    """Warnings of a run of these prompts, each of so many tokens to the server, of them so many in its cache."""
    sent = [Sent(Ask(0.0, prompt, 1), 0.0, answer(0.0, 1.0, ended=1.0, tokens=1)) for prompt in prompts]
    for each in sent:
        each.answer.prompt_tokens, each.answer.cached_tokens = counted, cached
    found = measures.measure(Run(Load(tuple(each.ask for each in sent), clients=1), sent, 0.0, 1.0, [0.0], 0.0))
    assert all("came from the server's cache" in warning for warning in found["warnings"])
    return list(found["warnings"])


def test_a_cache_that_was_warm_is_named() -> None:
    apart = [tuple(range(100 * i, 100 * i + 20)) for i in range(4)]
    assert "95% of" in with_cached(19, 20, *apart)[0]
    assert "share only 0%" in with_cached(19, 20, *apart)[0]
    assert with_cached(1, 20, *apart) == with_cached(0, 20, *apart) == with_cached(None, 20, *apart) == []
    assert with_cached(30, 50, *apart) == [], "a template of 30 tokens stands in front of each"
    assert with_cached(49, 50, *apart), "but not all of 50 are the template's"
    together = [(*range(15), 100 + i, *range(4)) for i in (3, 1, 4, 0)]
    assert with_cached(11, 20, *together) == [], "what the prompts share may come from the cache"
    assert "share only 56%" in with_cached(19, 20, *together)[0]
    assert with_cached(19, 20, *[tuple(range(20))] * 40) == []
    assert with_cached(5, 0, ()), "a server may say anything"


def test_one_failure_of_each_kind_is_quoted() -> None:
    kinds = (("status 400", ""), ("status 400", "too long"), ("status 400", "another"), ("cut", ""), (None, ""))
    answers = [answer(0.0, ended=1.0, error=kind) for kind, _ in kinds]
    for each, (_, detail) in zip(answers, kinds, strict=True):
        each.detail = detail
    found, later = measures.measure(run(*answers)), measures.measure(run(answers[2], answers[3]))
    assert found["examples"] == {"status 400": "too long"}
    assert measures.failures([found, later]) == ["status 400 x 4: too long", "cut x 2"]
    lines = measures.to_text([found]).splitlines()
    assert [line for line in lines if line.startswith("error: ")] == [
        "error: status 400 x 3: too long",
        "error: cut x 1",
    ]


def test_a_run_in_which_everything_failed() -> None:
    found = measures.measure(run(answer(0.0, ended=0.0, error="refused")), {"ttft": 1.0})
    assert found["ttft"] is found["tpot"] is found["itl"] is found["e2e"] is None
    assert (found["counted"], found["goodput"]["share"]) == ("nothing", 0.0)
    text = measures.to_text([found])
    assert "error: refused x 1" in text
    json.dumps(found, allow_nan=False)


def test_a_run_that_sent_nothing_says_that_alone() -> None:
    found = measures.measure(Run(Load((ASK,)), [], 5.0, 5.0, [0.5], 0.03))
    assert (found["requests"], found["seconds"], found["client"]["cpu_share"]) == (0, 1e-9, 0.0)
    assert found["warnings"] == ["nothing was sent: the time for it was over before the first request was due"]


def test_a_late_client_says_so() -> None:
    late = Run(Load((ASK,)), [Sent(ASK, 0.0, answer(0.1, 0.2, ended=0.3, tokens=3))], 0.0, 0.3, [], 0.0)
    assert any("100 ms late or later" in warning for warning in measures.measure(late)["warnings"])
    slow_loop = run(answer(0.0, 0.2, ended=0.3, tokens=3), loop_lags=[0.05])
    assert any("50 ms late or later" in warning for warning in measures.measure(slow_loop)["warnings"])
    busy = run(answer(0.0, 0.2, ended=1.0, tokens=3), cpu=0.9)
    assert any("used 90% of a core" in warning for warning in measures.measure(busy)["warnings"])
    assert measures.measure(run(answer(0.0, 0.2, ended=1.0, tokens=3)))["warnings"] == []


def test_a_server_that_falls_behind_is_named() -> None:
    def warned(seconds: list[float]) -> bool:
        asks = tuple(Ask(float(i), (1,), 1) for i in range(len(seconds)))
        pairs = zip(asks, seconds, strict=True)
        sent = [Sent(ask, ask.at, answer(ask.at, ask.at, ended=ask.at + took, tokens=1)) for ask, took in pairs]
        found = measures.measure(Run(Load(asks, rate=1.0), sent, 0.0, 99.0, [0.0], 0.0))
        return any("fell behind: answers took 1 s at the beginning and" in warning for warning in found["warnings"])

    assert warned([1.0] * 4 + [2.0] * 4 + [3.0] * 4)
    assert not warned([1.0] * 12)
    assert not warned([1.0] * 11 + [9.0])  # one slow answer is no queue
    assert not warned([1.0, 9.0])  # too few to tell


def test_short_answers_are_named() -> None:
    found = measures.measure(run(answer(0.0, 1.0, ended=1.0, tokens=2)))
    assert any("1 answers were shorter" in warning for warning in found["warnings"])
    silent = measures.measure(run(answer(0.0, ended=1.0, tokens=3)))
    assert any("held no text" in warning for warning in silent["warnings"])


@given(
    st.lists(st.floats(0, 1e6), min_size=1, max_size=60),
    st.one_of(st.sampled_from([0.0, 50.0, 95.0, 99.0, 100.0]), st.floats(0, 100)),
)
def test_percentiles_are_numpy_s(values: list[float], q: float) -> None:
    assert measures.percentile(sorted(values), q) == pytest.approx(float(np.percentile(values, q)), rel=1e-9, abs=1e-9)


@given(st.lists(st.floats(0, 1e3), min_size=1, max_size=60))
def test_a_spread_is_in_order(values: list[float]) -> None:
    found = measures.spread(values)
    assert found is not None
    assert found["p50"] <= found["p95"] <= found["p99"] <= found["max"] == max(values)
    assert found["mean"] == pytest.approx(float(np.mean(values)))
    assert measures.spread([]) is None


def test_limits() -> None:
    assert measures.parse_slo("ttft=1.0, tpot = 0.05") == {"ttft": 1.0, "tpot": 0.05}


@pytest.mark.parametrize("text", ["", "ttft", "ttft=0", "ttft=nan", "ttft=-1", "speed=3", "ttft=1,ttft=2", "ttft=1,"])
def test_what_is_no_limit(text: str) -> None:
    with user_error("option_malformed"):
        measures.parse_slo(text)


def test_the_table() -> None:
    one = measures.measure(run(*HAND), {"ttft": 1.0})
    lines = measures.to_text([one, one]).splitlines()
    assert lines[0].split() == ["load", "2", "clients", "2", "clients"]
    assert next(line for line in lines if line.startswith("TTFT")).count("500 / 950 / 990 ms") == 2
    assert next(line for line in lines if line.startswith("goodput")).count("0.30/s (50%)") == 2
    assert not any(line.startswith("goodput") for line in measures.to_text([measures.measure(run(*HAND))]).splitlines())


def test_nothing_is_not_a_number() -> None:
    assert not math.isnan(measures.measure(run(answer(0.0, 1.0, ended=1.0, tokens=1)))["e2e"]["p50"])
