"""Latencies under load: what one request takes alone, and what no load can make faster."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attar.kv.schemes import SCHEMES
from attar.model.shapes import shape
from attar.plan.costs import Storage
from attar.plan.goals.simulate import MOST_REQUESTS, MOST_USERS, Arrival, Capacity, closed, quantiles, traced, unloaded
from attar.plan.rates.step_time import StepModel
from attar.protocol.scheduler_config import TOWER_SHARE
from tests.pretend_rates import PROFILE

MODEL = StepModel(shape("qwen2.5-0.5b"), Storage.named("w4g128"), SCHEMES["int8"], PROFILE)
ROOMY = Capacity(512, 64, 1 << 30)


def test_quantiles_are_values() -> None:
    assert quantiles(list(range(1, 101))) == {"p50": 50, "p95": 95, "p99": 99}
    assert quantiles([7.0]) == {"p50": 7.0, "p95": 7.0, "p99": 7.0}


def test_one_request_takes_what_it_takes_alone() -> None:
    alone = unloaded(MODEL, 600, 64, 512)
    found = traced(MODEL, [Arrival(0.0, 600, 64)], ROOMY)
    assert found.ttft["p50"] == pytest.approx(alone.ttft["p50"], rel=1e-9)
    assert found.tpot["p50"] == pytest.approx(alone.tpot["p50"], rel=0.01)
    assert found.tokens_per_second == pytest.approx(alone.tokens_per_second, rel=0.01)


def test_requests_far_apart_do_not_wait() -> None:
    alone = unloaded(MODEL, 100, 16, 512)
    found = traced(MODEL, [Arrival(1000.0 * n, 100, 16) for n in range(5)], ROOMY)
    assert found.ttft["p99"] == pytest.approx(alone.ttft["p50"], rel=1e-6)


@given(st.integers(2, 12), st.integers(1, 700), st.integers(1, 70))
def test_load_makes_nothing_faster(users: int, prompt: int, answer: int) -> None:
    alone, found = unloaded(MODEL, prompt, answer, 512), closed(MODEL, users, prompt, answer, ROOMY)
    assert found.ttft["p50"] <= found.ttft["p95"] <= found.ttft["p99"]
    assert found.ttft["p99"] >= 0.999 * alone.ttft["p50"]
    assert answer == 1 or found.tpot["p99"] >= 0.95 * alone.tpot["p50"]
    assert found.tokens_per_second <= 1.01 * users * alone.tokens_per_second


def test_a_small_cache_makes_requests_wait() -> None:
    asks = [Arrival(0.0, 200, 32) for _ in range(6)]
    wide, narrow = traced(MODEL, asks, ROOMY), traced(MODEL, asks, Capacity(512, 64, 300))
    assert narrow.ttft["p95"] > 2 * wide.ttft["p95"]


def test_a_request_larger_than_the_cache_still_ends() -> None:
    assert traced(MODEL, [Arrival(0.0, 500, 8)] * 2, Capacity(512, 4, 64)).tokens_per_second > 0


def test_small_steps_even_out_gaps() -> None:
    asks = [Arrival(0.0, 32, 200), *(Arrival(0.05 * n, 2000, 2) for n in range(1, 8))]
    large, small = traced(MODEL, asks, Capacity(2048, 64, 1 << 30)), traced(MODEL, asks, Capacity(64, 64, 1 << 30))
    assert small.ttft["p95"] > large.ttft["p95"]


def test_two_runs_are_identical() -> None:
    assert closed(MODEL, 8, 300, 40, ROOMY) == closed(MODEL, 8, 300, 40, ROOMY)


def test_many_users_and_long_traces_take_little_time() -> None:
    few, many = (closed(MODEL, users, 300, 100, Capacity(512, 32, 1 << 30)) for users in (MOST_USERS, 100_000))
    assert many.ttft["p95"] > few.ttft["p95"]
    endless = [Arrival(0.0, 10, 4)] * (MOST_REQUESTS * 1000)
    assert traced(MODEL, endless, ROOMY) == traced(MODEL, endless[:MOST_REQUESTS], ROOMY)


def test_an_image_comes_before_the_prompt_alone() -> None:
    alone, seen = unloaded(MODEL, 600, 64, 512), unloaded(MODEL, 600, 64, 512, encoding=0.7)
    assert seen.ttft["p95"] == pytest.approx(alone.ttft["p95"] + 0.7)
    assert seen.tpot == alone.tpot
    found = traced(MODEL, [Arrival(0.0, 600, 64, 0.7)], ROOMY)
    assert found.ttft["p50"] == pytest.approx(seen.ttft["p50"], rel=1e-9)


def test_a_tower_takes_its_share_between_steps() -> None:
    """A request that decodes gets its tokens as many times slower as the tower's share says, while an image is
    computed; the image takes as long as its share of steps."""
    answer, encoding = 400, 0.05
    plain = traced(MODEL, [Arrival(0.0, 8, answer)], ROOMY)
    both = traced(MODEL, [Arrival(0.0, 8, answer), Arrival(0.0, 8, 1, encoding)], ROOMY)
    step = MODEL.decode(1, 8 + answer // 2).total
    assert answer * step * TOWER_SHARE > encoding, "steps are enough for the image"
    slower = both.tpot["p99"] - plain.tpot["p99"]
    early = TOWER_SHARE * MODEL.of([(0, 8, 1)]).total  # what the tower did before the first token
    prompt = MODEL.of([(16, 1, 1), (0, 8, 1)]).total - MODEL.of([(16, 1, 1)]).total  # behind the image, in one step
    assert slower * (answer - 1) == pytest.approx(encoding - early + prompt, rel=0.01)
    assert both.ttft["p99"] >= encoding * (1 + 1 / TOWER_SHARE)


@given(st.integers(2, 30), st.integers(1, 700), st.integers(1, 70), st.floats(0.001, 3.0))
def test_images_make_nothing_faster(users: int, prompt: int, answer: int, encoding: float) -> None:
    plain = closed(MODEL, users, prompt, answer, ROOMY)
    seen = closed(MODEL, users, prompt, answer, ROOMY, encoding)
    assert seen.ttft["p50"] >= encoding
    assert seen.tokens_per_second <= 1.01 * plain.tokens_per_second
    assert seen.tokens_per_second <= 1.01 * answer / encoding, "one tower serves all"
