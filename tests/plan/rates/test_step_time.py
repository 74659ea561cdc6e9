"""Time of a step: sums of its parts, fits that find what they were made of, and limits that a data sheet sets."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attar.kv.schemes import SCHEMES
from attar.model.shapes import shape
from attar.plan import comparison, costs
from attar.plan.costs import Storage
from attar.plan.fit import Demand, Deployment
from attar.plan.gpus import GPUS, gpu_spec
from attar.plan.rates.profile import NO_OVERHEADS, AttentionCost, ProductCurve
from attar.plan.rates.step_time import Efficiency, StepModel, fitted, of_gpu, weakest
from tests.pretend_rates import BANDWIDTH, INT8, PROFILE, ROWS, profile

CONFIG = shape("llama-3.2-1b")
W4, DENSE = Storage.named("w4g128"), Storage()
BF16 = SCHEMES["bfloat16"]
NEAR = 1e-9


def test_a_step_is_the_sum_of_its_products_attention_and_overhead() -> None:
    model = StepModel(CONFIG, DENSE, BF16, PROFILE)
    found = model.decode(1, 1000)
    weights = sum(each.rows * each.columns for each in costs.matrices(CONFIG))
    assert found.products == pytest.approx(weights * PROFILE.products["bf16"].seconds[0], rel=NEAR)
    cost, beside = PROFILE.attention["bfloat16"], PROFILE.overheads
    numbers = 1000 * CONFIG.layers * CONFIG.head_dim
    attention = numbers * 2 * CONFIG.kv_heads * cost.stored(CONFIG.heads / CONFIG.kv_heads)
    assert found.attention == pytest.approx(attention, rel=NEAR)
    overhead = beside.step + CONFIG.layers * (beside.layer + beside.element * CONFIG.hidden)
    assert found.overhead == pytest.approx(overhead + beside.logit * CONFIG.vocab_size, rel=NEAR)
    assert found.total == found.products + found.attention + found.overhead
    assert model.evidence == "measured"


def test_attention_lies_on_lines_through_the_measured_groups() -> None:
    cost = AttentionCost((1, 4, 8), (1.0, 2.0, 6.0), 1.0)
    assert [cost.stored(group) for group in (1, 2.5, 4, 6, 8, 9)] == [1.0, 1.5, 2.0, 4.0, 6.0, 7.0]


def test_rows_behind_the_first_cost_a_score_at_each_position() -> None:
    cost = replace(PROFILE.attention["bfloat16"], prefill_score=3e-12)
    model = StepModel(CONFIG, DENSE, BF16, profile(attention={"bfloat16": cost}))
    more = model.full_attention(100, 4) - model.full_attention(103, 1)
    seen = (101 + 102 + 103 + 104) - 104  # by all rows, less the positions that are read once anyway
    expected = CONFIG.layers * seen * CONFIG.heads * CONFIG.head_dim * 3e-12
    assert more == pytest.approx(expected, rel=NEAR)


def test_a_step_with_rows_of_a_prompt_is_not_recorded() -> None:
    rates = profile(overheads=replace(PROFILE.overheads, prompt=1e-3))
    before, after = (StepModel(CONFIG, W4, BF16, each) for each in (PROFILE, rates))
    for chunks, more in (([(5, 1, 1)], 0.0), ([(5, 4, 4)], 0.0), ([(5, 1, 1), (0, 8, 1)], 1e-3 * CONFIG.layers)):
        assert after.of(chunks).total - before.of(chunks).total == pytest.approx(more)


def test_a_narrow_model_takes_the_times_of_narrow_blocks() -> None:
    known = PROFILE.products["w8a8"]
    curve = replace(known, narrow=tuple(2 * each for each in known.seconds), outputs=(1500.0, 700.0))
    rates = profile(products={**PROFILE.products, "w8a8": curve})
    for config, times in ((shape("smollm2-135m"), 2.0), (CONFIG, 1.0)):
        models = [StepModel(config, Storage.named("w8a8"), BF16, each) for each in (PROFILE, rates)]
        before, after = (model.products(1, 0) for model in models)  # no row has logits: the head is left out
        assert after / before == pytest.approx(times, rel=0.03)


@given(
    st.floats(0.1, 1.5), st.floats(0.05, 1.5), st.floats(0.1, 4.0),
)  # fmt: skip
def test_a_fit_finds_the_efficiencies_of_its_curve(read: float, compute: float, size: float) -> None:
    made = Efficiency(read, compute, 0.0)
    curve = ProductCurve(size, ROWS, tuple(made.seconds(size, rows, BANDWIDTH, INT8) for rows in ROWS))
    found = fitted(curve, BANDWIDTH, INT8)
    assert found.error < 1e-6
    for rows in (1, 3, 100):
        expected = made.seconds(size, rows, BANDWIDTH, INT8)
        assert found.seconds(size, rows, BANDWIDTH, INT8) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("seconds", [(1e-10, 1e-10), (1e-12, 512e-12), (1e-10, 1e-12)])
def test_a_fit_has_no_negative_part(seconds: tuple[float, float]) -> None:
    found = fitted(ProductCurve(1.0, (1, 512), seconds), BANDWIDTH, INT8)
    assert found.read > 0
    assert found.compute > 0


def test_a_scheme_without_a_curve_is_fitted_and_named() -> None:
    model = StepModel(CONFIG, Storage.named("w3g128"), SCHEMES["int4"], PROFILE)
    assert model.evidence == "fitted"
    assert model.fitted == ("w3g128", "int4")
    near = StepModel(CONFIG, W4, SCHEMES["int4"], PROFILE).decode(1, 1).products
    assert 0.7 * near < model.decode(1, 1).products < near, "three bits are read faster than four"


@given(st.integers(1, 64), st.integers(1, 8000), st.integers(1, 8))
def test_a_step_grows_with_users_context_and_rows(users: int, context: int, rows: int) -> None:
    model = StepModel(CONFIG, W4, BF16, PROFILE)
    here = model.decode(users, context + rows, rows).total
    assert model.decode(users + 1, context + rows, rows).total > here
    assert model.decode(users, context + rows + 1, rows).total > here
    assert model.decode(users, context + rows + 1, rows + 1).total > here
    one = [(context, rows, rows)] * users
    assert model.of(one).total == pytest.approx(here, rel=NEAR)


def test_a_prompt_is_its_chunks() -> None:
    model = StepModel(CONFIG, W4, BF16, PROFILE)
    chunks = [(0, 512, 0), (512, 512, 0), (1024, 76, 1)]
    assert model.prefill(1100) == pytest.approx(sum(model.of([each]).total for each in chunks), rel=NEAR)
    assert model.prefill(100, before=1000) == model.of([(1000, 100, 1)]).total


def test_windows_bound_what_attention_reads() -> None:
    from attar.model.families import read_config

    shaped = {
        "architectures": ["MistralForCausalLM"], "vocab_size": 1000, "hidden_size": 256, "intermediate_size": 512,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32768,
        "sliding_window": 1024,
    }  # fmt: skip
    model = StepModel(read_config(shaped), DENSE, BF16, PROFILE)
    assert model.decode(1, 1024).attention == pytest.approx(model.decode(1, 30000).attention, rel=NEAR)


def test_rows_cost_what_the_curve_says() -> None:
    model = StepModel(CONFIG, W4, BF16, profile(overheads=NO_OVERHEADS))
    found = model.relative((1, 2, 4, 8), 1, 16)
    assert found[1] == 1
    assert all(a < b for a, b in pairwise(found.values()))


@pytest.mark.parametrize("name", GPUS)
def test_a_data_sheet_gives_limits(name: str) -> None:
    """No step is faster than the roofline of the same sheet, and one at short context is near their sum."""
    gpu = gpu_spec(name)
    model = StepModel(CONFIG, DENSE, BF16, of_gpu(gpu))
    assert model.evidence == ("data sheet" if gpu.verified else "unverified")
    limit = comparison.gpu_speed(Deployment(CONFIG, DENSE, BF16, gpu=gpu), gpu, Demand(512, 4))
    seconds = model.decode(4, 512).total
    assert 0.98 * 4 / limit.tokens_per_second <= seconds <= 2 * 4 / limit.tokens_per_second


def test_the_weakest_label_counts() -> None:
    assert weakest(["exact", "measured"]) == "measured"
    assert weakest(["fitted", "data sheet", "exact"]) == "data sheet"


@pytest.mark.parametrize("kv", ["float32", "int8", "int4"])
def test_another_cache_format_is_a_model_of_its_own(kv: str) -> None:
    found, own = StepModel(CONFIG, W4, BF16, PROFILE).with_kv(SCHEMES[kv]), StepModel(CONFIG, W4, SCHEMES[kv], PROFILE)
    assert found.decode(3, 700) == own.decode(3, 700)
    assert (found.evidence, found.fitted, found.spread) == (own.evidence, own.fitted, own.spread)
