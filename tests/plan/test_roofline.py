"""Bounds of steps against the sums that `costs` makes, and where one limit takes over from the other."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attar.formats.scheme import Scheme
from attar.kv.schemes import SCHEMES
from attar.model.config import Experts, ModelConfig
from attar.model.shapes import shape
from attar.plan import comparison, costs
from attar.plan.costs import Storage
from attar.plan.fit import Demand, Deployment
from attar.plan.roofline import Rates, Roofline, seen

CONFIG = shape("llama-3.2-1b")
W4 = Storage(Scheme.parse("w4g128").with_scale_dtype("bfloat16"), Scheme.parse("w8").with_scale_dtype("bfloat16"))
BANDWIDTH, INT8, OTHER = 20e9, 3e12, 2e11
INT8_KV = SCHEMES["int8"]


def rates(bandwidth: float = BANDWIDTH, integer: float = INT8, other: float = OTHER) -> Rates:
    return Rates(bandwidth, lambda scheme: other if scheme is None else integer)


def slid(config: ModelConfig) -> ModelConfig:
    """With a window in every other layer."""
    return replace(config, windows=tuple(512 if i % 2 else None for i in range(config.layers)))


def linears(config: ModelConfig, head: bool) -> float:
    """Operations of one token in them."""
    return 2.0 * sum(e.active * e.rows * e.columns for e in costs.matrices(config) if head or e.part != "head")


def attention(config: ModelConfig, context: int) -> float:
    """Those of a token's scores and mixed values that sees so many positions, itself among them."""
    seen = sum(context if window is None else min(context, window) for window in config.windows)
    return 4.0 * config.heads * config.head_dim * seen


@given(st.integers(0, 2000), st.integers(1, 600), st.one_of(st.none(), st.integers(1, 1500)))
def test_what_rows_see(start: int, rows: int, window: int | None) -> None:
    one_by_one = sum(at + 1 if window is None else min(at + 1, window) for at in range(start, start + rows))
    assert seen(start, rows, window) == one_by_one


@pytest.mark.parametrize("config", [CONFIG, slid(CONFIG)], ids=["full", "slid"])
@pytest.mark.parametrize("users", [1, 16])
def test_a_decode_step_reads_and_computes_what_costs_say(config: ModelConfig, users: int) -> None:
    reading, computing = Roofline(config, W4, INT8_KV, rates()).least([(999, 1, True)] * users)
    read = costs.step_bytes(config, W4, users) + users * costs.kv_read_bytes(config, INT8_KV, 1000)
    assert reading * BANDWIDTH == pytest.approx(read)
    integer = costs.int8_flops(config, W4) / INT8
    assert computing == pytest.approx(users * (integer + attention(config, 1000) / OTHER))


@pytest.mark.parametrize("config", [CONFIG, slid(CONFIG)], ids=["full", "slid"])
def test_a_prompt_computes_what_costs_say_however_it_is_cut(config: ModelConfig) -> None:
    roof = Roofline(config, Storage(), INT8_KV, rates())
    pieces = [(0, 300, False), (300, 500, False), (800, 200, True)]
    whole = roof.least([(0, 1000, True)])[1]
    operations = sum(linears(config, at == 1000) + attention(config, at) for at in range(1, 1001))
    assert whole * OTHER == pytest.approx(operations)
    assert sum(roof.least([piece])[1] for piece in pieces) == pytest.approx(whole)


def test_the_head_is_read_where_a_token_is_chosen() -> None:
    roof = Roofline(CONFIG, W4, INT8_KV, rates())
    without, with_it = (roof.least([(0, 8, samples)])[0] for samples in (False, True))
    head = costs.read_bytes(CONFIG.vocab_size, CONFIG.hidden, W4.head)
    assert (with_it - without) * BANDWIDTH == pytest.approx(head)


def test_of_experts_those_count_that_are_reached() -> None:
    config = replace(CONFIG, experts=Experts(count=8, top_k=2, intermediate=1024, normalise_top_k=True))
    roof = Roofline(config, W4, INT8_KV, rates())
    for rows in (1, 4, 200):
        reading, computing = roof.least([(0, 1, True)] * rows)
        read = costs.step_bytes(config, W4, rows) + rows * costs.kv_read_bytes(config, INT8_KV, 1)
        assert reading * BANDWIDTH == pytest.approx(read)
        products = rows * costs.int8_flops(config, W4) / INT8
        assert computing > products
        assert computing == pytest.approx(products, rel=0.1)  # but for routers and attention, which are small


def test_the_limit_changes_at_the_ridge() -> None:
    """Where nothing but one kind of product counts, `costs.ridge` says from how many rows."""
    config = replace(CONFIG, vocab_size=64)
    roof = Roofline(config, Storage.named("w8a8"), INT8_KV, rates(other=float("inf")))
    ridge = costs.ridge(INT8, BANDWIDTH, 8)
    for rows, compute in ((round(0.9 * ridge), False), (round(1.1 * ridge), True)):
        reading, computing = roof.least([(0, rows, False)])
        assert (computing > reading) == compute


@pytest.mark.parametrize("users", [1, 4, 64])
def test_a_plan_names_the_same_limit(users: int) -> None:
    found = comparison.speed(Deployment(CONFIG, W4, INT8_KV), Demand(512, users), BANDWIDTH, INT8)
    least = Roofline(CONFIG, W4, INT8_KV, rates(other=float("inf"))).least([(511, 1, True)] * users)
    assert users / max(least) == pytest.approx(found.tokens_per_second)
    assert ("compute" if least[1] > least[0] else "bandwidth") == found.limited_by


def test_another_machine_lays_weights_out_otherwise() -> None:
    roof = Roofline(CONFIG, W4, INT8_KV, replace(rates(), size=lambda each, scheme: 7))
    count = sum(1 for _ in costs.matrices(CONFIG))
    reading = roof.least([(0, 1, True)])[0] * BANDWIDTH
    assert reading == pytest.approx(7 * count + costs.kv_read_bytes(CONFIG, INT8_KV, 1))
