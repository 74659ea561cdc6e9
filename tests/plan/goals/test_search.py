"""The search: it agrees with an exhaustive look, names what rejects, and its answer follows from the budgets."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attar.kv.schemes import SCHEMES
from attar.model.shapes import shape
from attar.model.split import Share
from attar.model.vision.against import Beside, against
from attar.model.vision.config import VisionConfig
from attar.model.vision.tiles import Tiles
from attar.plan import costs
from attar.plan.costs import Storage
from attar.plan.fit import CacheLimits, Deployment, blocks_for, fit, shared
from attar.plan.goals import advice, candidates, quality, report, search
from attar.plan.goals.candidates import Weights
from attar.plan.goals.parse import parse, shown
from attar.plan.goals.search import Question, Workload
from attar.plan.gpus import gpu_spec
from attar.plan.rates.step_time import of_gpu
from attar.plan.steps import StepLimits
from attar.plan.vision import EncodingTime, ImageLoad
from tests.errors import user_error
from tests.pretend_rates import PROFILE

CONFIG = shape("llama-3.2-1b")


def question(goals: str, users: int = 1, context: int = 2048, **changes: Any) -> Question:
    work = Workload(users, context * 3 // 4, context - context * 3 // 4)
    made = Question(CONFIG, Storage(), parse(goals), work, PROFILE, 64 * 10**9, StepLimits(sequences=max(32, users)))
    return replace(made, **changes)


@settings(max_examples=8)
@given(
    st.floats(1e-4, 1.0), st.floats(0.01, 0.3), st.integers(500, 6000), st.sampled_from([1, 4]),
)  # fmt: skip
def test_the_answer_is_that_of_an_exhaustive_look(kl: float, tpot: float, megabytes: int, users: int) -> None:
    asked = question(f"kl<={kl}, tpot<={tpot}s, memory<={megabytes}MB", users, 512)
    answer = search.search(asked)
    meeting = [each for each in answer.all if each.fits and max(each.excess(asked.goals).values()) <= 1]
    assert answer.met == bool(meeting)
    if answer.best is not None:
        assert answer.best in meeting
        sure = [each for each in meeting if not each.assumed] or meeting
        fastest = max(each.cells["tokens_per_second"].value for each in sure)
        assert answer.best.cells["tokens_per_second"].value >= fastest / (1 + search.SEPARATE)
        own = {name: answer.best.cells[name].value for name in ("kl", "memory", "tokens_per_second")}
        for each in sure:
            within = all(each.cells[name].value <= own[name] for name in ("kl", "memory"))
            assert not within or each.cells["tokens_per_second"].value <= own["tokens_per_second"]
    else:
        least = min(max(each.excess(asked.goals).values()) for each in answer.all if each.fits)
        assert max(answer.nearest.excess(asked.goals).values()) == least


def test_budgets_decide_and_not_rules() -> None:
    """Quality leaves the weights alone, a tight memory quantizes them, and a long context quantizes the cache first."""
    best = search.search(question("kl<=0.0001")).best
    assert best is not None
    assert best.weights.recipe is None
    small = search.search(question("memory<=2.8GB, kl<=0.2")).best
    assert small is not None
    assert small.weights.recipe is not None
    long = search.search(question("memory<=7GB, kl<=0.001", users=8, context=16384)).best
    assert long is not None
    assert (long.weights.recipe, long.kv.name) == (None, "int8")


def test_without_a_goal_on_quality_the_best_is_kept() -> None:
    best = search.search(question("memory<=60GB")).best
    assert best is not None
    assert best.cells["kl"].value == 0


@pytest.mark.parametrize("share", [Share(0, 2, 1), Share(0, 4, 1), Share(0, 1, 2), Share(0, 2, 2)])
def test_several_gpus_each_have_their_part(share: Share) -> None:
    """Memory is that of a GPU's division, and a step takes the bytes and operations of its part of all layers."""
    gpu, limits = gpu_spec("h100"), StepLimits(sequences=32)
    asked = question("kl<=1", 4, 4096, gpu=gpu, profile=of_gpu(gpu), share=share, limits=limits)
    whole = {(each.name, each.rows): each for each in search.search(replace(asked, share=Share())).all}
    found = search.search(asked).all
    assert found
    for each in found:
        held = Deployment(CONFIG, each.weights.storage, each.kv, share, gpu)
        blocks = blocks_for(4, 4096 // 64, limits.headroom)
        own = fit(held, 10**12, 4096, CacheLimits(blocks * 64), replace(limits, rows=each.rows))
        assert each.cells["memory"].value == own.memory - own.unused
        other = whole[each.name, each.rows]
        assert each.cells["memory"].value < other.cells["memory"].value
        assert each.cells["size"] == other.cells["size"]
        token, one = each.cells["tpot_p95"], other.cells["tpot_p95"]
        assert token.evidence == "data sheet" if not each.technique else token.evidence != "measured"
        if share.tp == 1:
            assert token == one, "stages run one after another"
        else:
            assert one.value / share.tp <= 1.001 * token.value < one.value
    best = search.search(asked)
    assert f"--tp {share.tp}" in report.commands(best, "m")[-1] or share.tp == 1
    assert f"--pp {share.pp}" in report.commands(best, "m")[-1] or share.pp == 1
    assert advice.advise(asked, best.nearest.kv)


@pytest.mark.parametrize("share", [Share(0, 2, 1), Share(0, 1, 2), Share(0, 2, 2)])
def test_advice_counts_the_bytes_of_one_gpu(share: Share) -> None:
    """A cache of int8 is compared with that of bfloat16, and both with one GPU's weights."""
    gpu = gpu_spec("h100")
    asked = question("kl<=1", 4, 4096, gpu=gpu, profile=of_gpu(gpu), share=share)
    rows = {each.technique: each.reason for each in advice.advise(asked, SCHEMES["bfloat16"])}
    _, held = shared(CONFIG, asked.storage, share)
    wide, narrow = (4 * 64 * costs.block_bytes(held, SCHEMES[name]) for name in ("bfloat16", "int8"))
    saved = (wide - narrow) / (wide + costs.weight_bytes(held, asked.storage).total)
    said = f"cache {shown('memory', wide)} -> {shown('memory', narrow)}, {saved:.0%} of weights and cache"
    assert said in rows["KV int8"]
    assert 1.9 * wide < 4 * 64 * costs.block_bytes(CONFIG, SCHEMES["bfloat16"])


def test_a_split_that_fails_is_named() -> None:
    """Groups divide the columns, and not those of each process."""
    gpu, odd = gpu_spec("h100"), shape("qwen2.5-0.5b")
    for scheme, share, word in (("w4g64", Share(0, 7, 1), "--tp 7"), ("w4g{g}", Share(0, 1, 25), "--pp 25")):
        said = candidates.divided(scheme, odd, Storage(), share)
        assert isinstance(said, str)
        assert word in said
    assert "divides all columns" in str(candidates.divided("w4g512", odd, Storage(), Share()))
    made = candidates.divided("w4g{g}", odd, Storage(), Share(0, 2, 1))
    assert not isinstance(made, str)
    assert made[1].linears is not None
    assert (made[0], made[1].linears.name) == (64, "w4g64"), "groups of 128 divide the columns of the whole alone"
    asked = question("kl<=1", config=odd, gpu=gpu, profile=of_gpu(gpu), share=Share(0, 2, 1))
    assert advice.advise(asked, SCHEMES["bfloat16"])


def test_weights_that_several_gpus_cannot_share_are_rejected() -> None:
    gpu = gpu_spec("h100")
    asked = question("kl<=1", gpu=gpu, profile=of_gpu(gpu), share=Share(0, 3, 1))
    with user_error("parallel_indivisible"):
        search.search(asked)
    outputs = tuple(Weights(name, Storage.named(name), quality.UNCHANGED) for name in ("w4", "nf4"))
    odd = replace(asked, config=shape("qwen2.5-0.5b"), share=Share(0, 2, 1), outputs=outputs)
    answer = search.search(odd)
    used = {each.weights.label for each in answer.all}
    assert {"w4", "gptq-w4g64"} <= used, "groups of 128 would be cut, those of 64 are not"
    assert "nf4" not in used
    assert any(each.technique == "nf4" and "cannot be cut" in each.reason for each in answer.rejected)


def seeing(users: int, seconds: float, **changes: Any) -> Question:
    """A question whose requests have an image of 256 rows, which takes a tower so long, half to double."""
    asked = question("kl<=0.1", users)
    load = ImageLoad(1, Tiles((1, 896, 896), (1, 1), (896, 896)), 256)
    work = replace(asked.workload, encoding=EncodingTime(load, seconds, 1.0))
    return replace(asked, workload=work, images=10**9, tower_size=4 * 10**8, vision=VISION, **changes)


VISION = VisionConfig(64, 4, 128, 2, 14, 896, 2048, "pool", 4, 5, bidirectional=True, sections=True)


@pytest.mark.parametrize("users", [1, 4])
def test_images_take_memory_and_time(users: int) -> None:
    plain, seen = search.search(question("kl<=0.1", users)), search.search(seeing(users, 0.7))
    without = {(each.name, each.rows): each for each in plain.all}
    for each in seen.all:
        other = without[each.name, each.rows].cells
        assert each.cells["memory"].value == other["memory"].value + 10**9
        assert each.cells["size"].value == other["size"].value + 4 * 10**8
        first, before, drafts = each.cells["ttft_p50"], other["ttft_p50"], each.technique is not None
        assert first.value >= before.value + 0.69
        assert first.evidence == ("assumed" if drafts else "fitted")
        assert first.high / first.value > before.high / before.value
        token, alone = each.cells["tpot_p95"], other["tpot_p95"]
        assert (token == alone) is (users == 1)
        assert token.value >= 0.99 * alone.value


def test_what_images_do_not_go_with_is_rejected() -> None:
    answer = search.search(seeing(1, 0.1))
    found = {each.technique: each.reason for each in answer.rejected}
    assert {"sparse attention", "KV eviction sink", "KV eviction snapkv", "KV cache in kivi4"} <= set(found)
    assert found["sparse attention"] == found["KV cache in kivi4"] == against(VISION, Beside(few=True))
    assert found["KV eviction sink"] == against(VISION, Beside(evicts=True))
    assert all(not each.kv.recent for each in answer.all)
    rows = {each.technique: each for each in advice.advise(answer.question, answer.nearest.kv)}
    assert not rows["sparse attention"].pays
    assert not rows["KV eviction sink"].pays


def test_steps_hold_an_image_whose_rows_see_each_other() -> None:
    """256 rows fit beside 31 other sequences into 512, and not into 128."""
    plain, seen = ({each.rows for each in search.search(each).all} for each in (question("kl<=1", 4), seeing(4, 0.1)))
    assert plain - seen == {128}
    apart = replace(seeing(4, 0.1), vision=replace(VISION, bidirectional=False))
    assert {each.rows for each in search.search(apart).all} == plain


def test_what_does_not_fit_beside_the_tower_is_no_answer() -> None:
    least = min(each.cells["memory"].value for each in search.search(seeing(1, 0.1)).all)
    assert any(each.fits for each in search.search(seeing(1, 0.1, memory=round(least))).all)
    assert not any(each.fits for each in search.search(seeing(1, 0.1, memory=round(least) - 1)).all)


@pytest.mark.parametrize("asked", ["memory<=60GB", "kl<=0.0001", "memory<=2.8GB, kl<=0.2", "memory<=2.8GB, kl<=0.05"])
def test_what_only_a_measurement_decides_is_no_promise(asked: str) -> None:
    answer = search.search(question(asked))
    assert answer.best is not None
    reaches = any(answer.best.cell(goal).high > goal.limit for goal in answer.question.goals)
    assert ("is expected to meet" in report.sentence(answer)) is bool(report.open_goals(answer)) is reaches


def test_an_impossible_goal_names_the_nearest_miss() -> None:
    answer = search.search(question("tpot<=1us"))
    assert not answer.met
    said = report.to_dict(answer, "m", [], [])
    assert said["met"] is False
    assert said["binding"] == "tpot"
    assert answer.nearest.weights.label in report.sentence(answer)
    fastest = min(each.cells["tpot_p95"].value for each in answer.all)
    assert answer.nearest.cells["tpot_p95"].value == fastest


def test_memory_that_nothing_fits_is_said() -> None:
    answer = search.search(question("kl<=1", memory=10**6))
    assert not answer.met
    assert not answer.nearest.fits


def test_each_cell_has_a_label_and_lies_in_its_range() -> None:
    for each in search.search(question("kl<=1")).all:
        for name, cell in each.cells.items():
            assert cell.evidence in ("exact", "measured", "fitted", "assumed", "unverified"), name
            assert cell.low <= cell.value <= cell.high
        assert each.cells["memory"].evidence == "exact"
        assert each.cells["kl"].evidence != "measured"


def test_the_pareto_set_has_no_beaten_row() -> None:
    front = search.search(question("kl<=1", users=4)).front
    names = ("kl", "memory", "ttft_p95", "tpot_p95")
    for a in front:
        for b in front:
            assert a is b or not all(b.cells[n].value < 0.97 * a.cells[n].value for n in names)


def test_what_is_rejected_has_a_number() -> None:
    answer = search.search(question("kl<=0.05, tpot<=90ms, memory<=3GB"))
    reasons = {each.technique: each.reason for each in answer.rejected}
    assert any(char.isdigit() for char in reasons["bf16"])
    assert all(reasons.values())


def test_a_receipt_is_used_as_it_is() -> None:
    own = Weights("./out", Storage.named("w4g128"), quality.receipt(0.011, 0.010, 0.012, 0.92, "r"), path="./out")
    answer = search.search(question("kl<=0.012, memory<=3GB", outputs=(own,)))
    assert answer.best is not None
    assert answer.best.weights.path == "./out"
    assert answer.best.kv.name in ("float32", "bfloat16", "int8")
    (command,) = report.commands(answer, "m")
    assert command.startswith(f"attar serve ./out --kv {answer.best.kv.name} --context 2048 --max-running 1 --memory ")


def test_compressed_weights_stay() -> None:
    answer = search.search(question("kl<=1", storage=Storage.named("w4g128")))
    assert {each.weights.recipe for each in answer.all} == {None}


def test_a_data_sheet_is_named_as_one() -> None:
    for name, label in (("h100", "data sheet"), ("b200", "unverified")):
        gpu = gpu_spec(name)
        answer = search.search(question("kl<=0.1", 8, gpu=gpu, profile=of_gpu(gpu), memory=gpu.memory))
        assert answer.nearest.cells["tpot_p95"].evidence == label


def test_ten_percent_more_buys_something_or_nothing() -> None:
    answer = search.search(question("memory<=2.5GB, kl<=0.2"))
    assert set(answer.relaxed) == set(answer.question.goals)


def test_presets_are_tried_where_prompts_fill_their_steps() -> None:
    def rows(users: int, context: int) -> set[int]:
        return {each.rows for each in search.search(question("kl<=1", users, context)).all}

    assert rows(1, 2048) == {512}
    assert rows(2, 256) == {512, 128}
    assert rows(4, 2048) == set(search.ROWS) == {128, 512, 1024, 2048}


def test_json_has_no_infinity() -> None:
    for goals, kv in (("kl<=1", None), ("kl<=1", "nuq4")):
        asked = question(goals, kv=kv)
        answer = search.search(asked)
        said = report.to_dict(answer, "m", advice.advise(asked, answer.nearest.kv), ["note"])
        json.dumps(said, allow_nan=False)
        assert report.to_text(answer, "m", advice.advise(asked, answer.nearest.kv), []).startswith(said["answer"])


def test_a_model_of_too_many_layers_is_refused() -> None:
    wide = replace(CONFIG, windows=(None,) * 60000, ropes=(CONFIG.ropes[0],) * 60000)
    with user_error("config_invalid"):
        search.search(question("kl<=1", config=wide))
    with user_error("option_out_of_range"):
        search.require_users(10**9)
    with user_error("context_exceeded"):
        search.search(question("kl<=1", context=10**6))


def test_size_on_disk_is_a_sum_of_tensors() -> None:
    dense = candidates.disk_bytes(CONFIG, Storage())
    weights = sum(each.rows * each.columns for each in costs.matrices(CONFIG))
    assert dense == 2 * (weights + costs.norm_weights(CONFIG)), "the embedding is tied"
    assert candidates.disk_bytes(CONFIG, Storage.named("w4g128")) < 0.5 * dense


def test_drafts_pay_where_rows_are_cheap() -> None:
    assert advice.break_even({2: 1.0, 3: 1.0}) is not None
    assert advice.break_even({2: 2.0, 3: 3.0}) is None
    cheap, costly = advice.break_even({2: 1.02, 5: 1.1}), advice.break_even({2: 1.4, 5: 2.0})
    assert cheap is not None
    assert costly is not None
    assert cheap[0] < costly[0]


def test_advice_follows_from_the_numbers() -> None:
    def rows(users: int, context: int) -> dict[str, bool]:
        asked = question("kl<=1", users, context)
        answer = search.search(asked)
        return {each.technique: each.pays for each in advice.advise(asked, answer.nearest.kv)}

    short, long = rows(1, 256), rows(16, 8192)
    assert short["W4A16"]
    assert not short["KV int8"], "a short context has no cache to speak of"
    assert not short["sparse attention"]
    assert long["KV int8"]
    assert long["sparse attention"]
    assert not long["2:4 sparsity"]
