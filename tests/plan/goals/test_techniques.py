"""Techniques of a plan: their numbers follow from budgets and acceptances, and what is assumed is never a promise."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attar.kv.eviction import Eviction
from attar.kv.schemes import SCHEMES
from attar.kv.sparse import SparseAttention
from attar.plan.costs import Storage
from attar.plan.goals import report, search
from attar.plan.goals.parse import parse
from attar.plan.goals.search import Configuration
from attar.plan.goals.techniques import SHARES, Changed, Technique, expected_tokens, techniques
from attar.plan.gpus import gpu_spec
from attar.plan.rates.step_time import StepModel
from tests.plan.goals.test_search import CONFIG, question
from tests.pretend_rates import PROFILE

LONG = 16384
MODEL = StepModel(CONFIG, Storage(), SCHEMES["bfloat16"], PROFILE)
TOPK = Technique("topk:1/8", (), SHARES[8], sparse=SparseAttention(share=8))
SINK = Technique("sink", (), eviction=Eviction("sink", 1024, 4))
SNAPKV = Technique("snapkv", (), eviction=Eviction("snapkv", 1024))


def having(answer: search.Answer, name: str) -> list[Configuration]:
    return [each for each in answer.all if each.technique is not None and each.technique.name.startswith(name)]


def beside(answer: search.Answer) -> dict[tuple[str, str, int], Configuration]:
    """Return the configurations without a technique, by weights, KV format and rows."""
    return {(each.weights.label, each.kv.name, each.rows): each for each in answer.all if each.technique is None}


def test_sparse_attention_shortens_decoding_and_leaves_prompts_alone() -> None:
    changed = Changed(MODEL, TOPK, 8000)
    assert changed.decode(1, LONG).attention < 0.5 * MODEL.decode(1, LONG).attention
    assert changed.decode(1, LONG).products == MODEL.decode(1, LONG).products
    assert changed.prefill(4096) == MODEL.prefill(4096)
    assert changed.decode(1, 1024).total == MODEL.decode(1, 1024).total, "short contexts read all"
    assert changed.evidence == "fitted"


@given(st.integers(2, 60_000), st.sampled_from([TOPK, SINK, SNAPKV]))
def test_no_technique_of_attention_costs_time_in_decoding(context: int, technique: Technique) -> None:
    changed = Changed(MODEL, technique, max(1, context * 3 // 4))
    assert changed.decode(2, context).total <= MODEL.decode(2, context).total * (1 + 1e-9)


def test_eviction_holds_fewer_slots() -> None:
    assert SINK.slots(LONG, 12_000) == 1024 + 64
    assert SINK.slots(512, 256) == 512
    assert SNAPKV.slots(LONG, 12_000) == 12_000 + 1024, "the prompt is whole beside what is kept"
    assert SNAPKV.slots(LONG, 100) == LONG
    answer = search.search(question("kl<=1", users=8, context=LONG))
    plain = beside(answer)
    for each in having(answer, "sink"):
        without = plain[each.weights.label, each.kv.name, each.rows]
        assert each.cells["memory"].value < without.cells["memory"].value
        assert each.cells["kl"].value > without.cells["kl"].value
        assert each.cells["kl"].evidence == "fitted"


def test_one_bit_keys_take_memory() -> None:
    answer = search.search(question("kl<=1", users=8, context=LONG))
    plain = beside(answer)
    found = having(answer, "topk")
    assert found
    for each in found:
        assert each.cells["memory"].value > plain[each.weights.label, each.kv.name, each.rows].cells["memory"].value


@given(st.floats(0, 1), st.integers(0, 16))
def test_expected_tokens_are_a_sum_of_survivals(acceptance: float, drafts: int) -> None:
    expected = sum(acceptance**depth for depth in range(drafts + 1))
    assert expected_tokens(acceptance, drafts) == pytest.approx(expected, rel=1e-6)


def test_drafts_divide_the_time_of_their_steps() -> None:
    asked = question("tpot<=1s", acceptance=0.7, context=512)
    for each in having(search.search(asked), "3 drafts"):
        model = StepModel(CONFIG, each.weights.storage, each.kv, PROFILE)
        context = asked.workload.prompt + -(-asked.workload.answer * 10 // int(10 * expected_tokens(0.7, 3))) // 2
        step = model.decode(1, context, rows=4).total
        assert each.cells["tpot_p95"].value == pytest.approx(step / expected_tokens(0.7, 3), rel=0.02)


def test_an_assumed_acceptance_is_no_promise() -> None:
    """Drafts that are assumed to be right win only where nothing else meets the goal, and the range says so."""
    easy = search.search(question("kl<=0.2"))
    assert easy.best is not None
    assert not easy.best.assumed
    least = min(each.cells["tpot_p95"].value for each in easy.all if not each.assumed)
    with_drafts = min(each.cells["tpot_p95"].value for each in easy.all)
    assert with_drafts < least
    hard = search.search(question(f"tpot<={(with_drafts + least) / 2}s"))
    assert hard.best is not None
    assert hard.best.assumed
    assert hard.best.cells["tpot_p95"].evidence == "assumed"
    assert report.open_goals(hard)
    assert "is expected to meet" in report.sentence(hard)
    measured = search.search(question("kl<=0.2", acceptance=0.9))
    assert measured.best is not None
    assert measured.best.technique is not None
    assert measured.best.cells["tpot_p95"].evidence in ("measured", "fitted")
    assert "--draft-tokens" in report.commands(measured, "m")[-1]


def test_a_useless_acceptance_is_rejected_with_a_number() -> None:
    asked = question("kl<=0.2, tpot<=50ms", acceptance=0.0)
    answer = search.search(asked)
    plain = beside(answer)
    for each in having(answer, "7 drafts"):
        assert each.cells["tpot_p95"].value > plain[each.weights.label, each.kv.name, each.rows].cells["tpot_p95"].value
    tight = search.search(replace(asked, goals=parse("kl<=0.000001")))
    reasons = {each.technique: each.reason for each in tight.rejected}
    assert all(any(c.isdigit() for c in reason) for name, reason in reasons.items() if "draft" in name)


@pytest.mark.parametrize(
    ("changes", "context", "missing"),
    [({}, 1024, "sparse attention"), ({}, 256, "KV eviction sink"),
     ({"windows": (512,) * CONFIG.layers}, LONG, "KV eviction sink"),
     ({"learned_positions": 2048}, LONG, "KV eviction snapkv")],
)  # fmt: skip
def test_what_cannot_be_tried_has_its_reason(changes: dict[str, Any], context: int, missing: str) -> None:
    found, out = techniques(replace(CONFIG, **changes), None, context * 3 // 4, context, None)
    assert missing in {each.technique for each in out}
    assert not any(each.name.startswith(missing.split()[-1]) for each in found)


def test_a_gpu_has_none() -> None:
    found, out = techniques(CONFIG, gpu_spec("h100"), 6000, 8000, None)
    assert not found
    assert out
