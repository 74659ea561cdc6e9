"""Comparison of precisions: rows that agree with a start, speeds that agree with sums of bytes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from attar.formats.scheme import Scheme
from attar.kv.schemes import SCHEMES
from attar.model.shapes import shape
from attar.model.split import Share
from attar.plan import comparison, costs, fit
from attar.plan.comparison import Hardware, Plan, Precisions, Subject, plan, usual_storages
from attar.plan.costs import USUAL_KV, Storage
from attar.plan.fit import CacheLimits, Demand, Deployment
from attar.plan.steps import StepLimits
from tests.errors import user_error

CONFIG, LARGER = shape("llama-3.2-1b"), shape("llama-3.1-8b")
W4 = Storage.named("w4g128")
INT8 = Deployment(CONFIG, W4, SCHEMES["int8"])
GB = 10**9


def test_tokens_a_second_are_users_over_bytes() -> None:
    demand = Demand(1000, 7)
    found = comparison.speed(Deployment(CONFIG, W4, SCHEMES["bfloat16"]), demand, 50e9)
    read = costs.step_bytes(CONFIG, W4) + 7 * 1000 * costs.kv_bytes(CONFIG, SCHEMES["bfloat16"])
    assert found.read == read
    assert found.tokens_per_second == pytest.approx(7 * 50e9 / read)
    assert found.limited_by == "bandwidth"


def test_many_users_are_limited_by_compute() -> None:
    """Batch 16 of the Llama-3.2-1B shape with an 8-bit head: 380 tokens/s at 938 GOP/s (decode at short contexts)."""
    storage = Storage(W4.linears, Scheme.parse("w8"))
    headed = Deployment(CONFIG, storage, SCHEMES["int8"])
    few, many = (comparison.speed(headed, Demand(128, users), 62e9, 938e9) for users in (1, 16))
    assert few.limited_by == "bandwidth"
    assert many.limited_by == "compute"
    assert many.tokens_per_second == pytest.approx(380, rel=0.01)


def test_dense_weights_have_no_rate_of_int8() -> None:
    assert (
        comparison.speed(Deployment(CONFIG, Storage(), SCHEMES["int8"]), Demand(128, 64), 62e9, 1.0).limited_by
        == "bandwidth"
    )


def test_the_grid_has_the_stored_precision_first_and_once() -> None:
    labels = [storage.label for storage in usual_storages(CONFIG, W4)]
    assert labels == ["w4g128", "bf16", "w8a8", "w3g128"]
    narrow = replace(CONFIG, hidden=2080)
    assert [storage.label for storage in usual_storages(narrow, Storage())] == ["bf16", "w8a8"]


@pytest.mark.parametrize("context, tokens", [(8192, None), (8192, 5000), (None, None), (None, 5000)])
def test_a_plan_and_a_start_agree(context: int | None, tokens: int | None) -> None:
    limits = StepLimits(rows=256, sequences=12, threads=2)
    demand = Demand(context, 1 if context is None else 8)
    storages = usual_storages(CONFIG, W4)
    made = plan(
        Subject("x", CONFIG, W4), demand, Hardware(4 * GB, "--memory"), limits=limits, cache=CacheLimits(tokens)
    )
    for row, storage in zip(made.rows, [each for each in storages for _ in USUAL_KV], strict=True):
        started = fit.start(Deployment(CONFIG, storage, row.kv), 4 * GB, limits, context, CacheLimits(tokens))
        assert row.fit == started
        assert row.fits == (started.requests >= demand.users)
        assert row.fits or row.short or tokens


def test_a_plan_halves_what_each_process_reads() -> None:
    demand = Demand(4096)

    def made(share: Share) -> Plan:
        compared = Precisions([W4, Storage.named("w8a8")], [SCHEMES["int8"]])
        return plan(Subject("m", LARGER, W4), demand, Hardware(20 * GB, "x", GB), compared, share=share)

    alone, together, staged = (made(share).rows[0] for share in (Share(), Share(0, 2), Share(0, 1, 2)))
    assert alone.speed is not None
    assert together.speed is not None
    assert staged.speed is not None
    assert together.speed.tokens_per_second == pytest.approx(2 * alone.speed.tokens_per_second, rel=0.01)
    assert staged.speed.tokens_per_second == alone.speed.tokens_per_second, "stages run one after another"
    assert staged.weight_bytes.linears == alone.weight_bytes.linears // 2


def test_what_cannot_be_shared_is_left_out_of_a_plan() -> None:
    storages = [Storage.named("dense"), Storage.named("w4g128"), Storage.named("w8a8")]
    share = Share(0, 32)  # heads of 128 columns stay whole; the width's 448 columns are no groups
    subject, hardware, int8 = Subject("m", LARGER, storages[0]), Hardware(8 * GB, "x"), [SCHEMES["int8"]]
    made = plan(subject, Demand(1024), hardware, Precisions(storages, int8), share=share)
    assert [row.weights for row in made.rows] == ["bf16", "w8a8"]
    with user_error("parallel_indivisible"):
        plan(subject, Demand(1024), hardware, Precisions(storages[1:], int8), share=share)


def test_several_users_want_the_whole_context() -> None:
    float32 = SCHEMES["float32"]
    compared = Precisions([W4], [float32])
    several = plan(Subject("x", CONFIG, W4), Demand(None, 2), Hardware(4 * GB, "m"), compared).rows[0]
    asked = fit.start(Deployment(CONFIG, W4, float32), 4 * GB, StepLimits(), CONFIG.context)
    assert several.fit == asked
    assert several.short == asked.short(2)


@pytest.mark.parametrize("demand, sentence", [
    (Demand(131_073), "context_exceeded"), (Demand(10, 33), "option_conflict"),
])  # fmt: skip
def test_impossible_demands(demand: Demand, sentence: str) -> None:
    with user_error(sentence):
        plan(Subject("x", CONFIG, W4), demand, Hardware(GB, "m"), Precisions([W4], costs.USUAL_KV))


def test_a_rate_of_nothing_is_refused() -> None:
    with user_error("option_out_of_range"):
        comparison.speed(INT8, Demand(1), 0.0)
