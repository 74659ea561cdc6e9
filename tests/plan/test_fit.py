"""Dividing a memory: nothing lost, nothing invented, and more of it never holds less."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attar.kv.eviction import Eviction
from attar.kv.schemes import SCHEMES, KvScheme
from attar.model.config import ModelConfig
from attar.model.shapes import shape
from attar.model.split import Share
from attar.plan import costs, fit
from attar.plan.costs import BLOCK, USUAL_KV, Storage
from attar.plan.fit import ROOM, CacheLimits, Demand, Deployment, Fit
from attar.plan.gpus import GpuSpec, gpu_spec
from attar.plan.steps import StepLimits
from tests.errors import user_error

CONFIG = shape("llama-3.2-1b")
W4 = Storage.named("w4g128")
INT8 = Deployment(CONFIG, W4, SCHEMES["int8"])
GB = 10**9

memories = st.integers(1, 64 * GB)
contexts = st.integers(1, CONFIG.context)
kinds = st.sampled_from(USUAL_KV)


@given(memories, contexts, kinds)
def test_every_byte_has_a_place(memory: int, context: int, kv: KvScheme) -> None:
    found = fit.fit(Deployment(CONFIG, W4, kv), memory, context)
    assert sum(count for _, count in found.table()) == memory
    assert found.tokens == found.blocks * BLOCK
    assert found.requests * -(-context // BLOCK) <= found.blocks
    if found.blocks:
        assert 0 <= found.unused < found.block_bytes


@given(memories, contexts, st.integers(1, 4 * GB))
def test_adapters_take_their_room_before_the_cache(memory: int, context: int, adapters: int) -> None:
    with_them = fit.fit(INT8, memory, context, adapters=adapters)
    assert dict(with_them.table())["adapters"] == with_them.adapters == adapters
    assert sum(count for _, count in with_them.table()) == memory
    without = fit.fit(INT8, memory, context)
    assert "adapters" not in dict(without.table())
    assert with_them.blocks <= without.blocks


@given(memories, st.integers(0, 8 * GB), contexts, kinds, st.integers(1, 64))
def test_more_memory_never_holds_less(memory: int, more: int, context: int, kv: KvScheme, users: int) -> None:
    small, large = (fit.fit(Deployment(CONFIG, W4, kv), size, context) for size in (memory, memory + more))
    assert small.blocks <= large.blocks
    assert small.requests <= large.requests
    assert small.short(users) >= large.short(users)


@given(memories, contexts, st.integers(1, 64))
def test_what_is_short_is_exactly_what_is_missing(memory: int, context: int, users: int) -> None:
    def held(size: int) -> Fit:
        return fit.fit(INT8, size, context)

    short = held(memory).short(users)
    assert held(memory + short).requests >= users
    if short:
        assert held(memory + short - 1).requests < users
        assert held(memory + short).short(users) == 0


@given(memories, contexts)
def test_smaller_keys_hold_no_fewer_requests(memory: int, context: int) -> None:
    held = [fit.fit(Deployment(CONFIG, W4, kv), memory, context).requests for kv in USUAL_KV]
    assert held == sorted(held)


@given(memories, contexts, st.integers(1, 64))
def test_a_longer_context_serves_no_more_users(memory: int, context: int, users: int) -> None:
    requests = [fit.fit(INT8, memory, size).requests for size in range(context, CONFIG.context + 1, 30_000)]
    assert all(b <= a for a, b in pairwise(requests))


@given(st.integers(1, 2_000_000), kinds)
def test_a_cache_of_a_given_size(tokens: int, kv: KvScheme) -> None:
    found = fit.fit(Deployment(CONFIG, W4, kv), 16 * GB, 512, cache=CacheLimits(tokens))
    assert tokens <= found.tokens < tokens + BLOCK
    assert found.cache == found.blocks * costs.block_bytes(CONFIG, kv)
    assert sum(count for _, count in found.table()) == 16 * GB


def test_what_is_calibrated_wants_room_for_it() -> None:
    """Of the 1B shape 16 texts of 256 tokens: less than 0.1 GB, where all of them at once would take 0.9."""
    taken = costs.calibration_bytes(CONFIG, SCHEMES["klt4"])
    assert 60 * 10**6 < taken < 100 * 10**6
    assert costs.calibration_bytes(CONFIG, SCHEMES["int4"]) == 0
    plain, calibrated = (
        fit.fit(Deployment(CONFIG, W4, kv), 16 * GB, cache=CacheLimits(64)) for kv in (SCHEMES["int4"], SCHEMES["klt4"])
    )
    bases = CONFIG.layers * SCHEMES["klt4"].basis_bytes(CONFIG.kv_heads, CONFIG.head_dim)
    assert calibrated.step - plain.step == taken + bases


def test_by_default_a_request_is_the_model_s_whole_context() -> None:
    assert fit.fit(INT8, 16 * GB).context == CONFIG.context


def test_a_model_that_does_not_fit_says_by_how_much() -> None:
    big = shape("llama-3.1-8b")
    found = fit.fit(Deployment(big, Storage(), SCHEMES["int8"]), 8 * GB, 4096)
    with user_error("memory_insufficient"):
        fit.require(found, "--memory")
    enough = fit.fit(Deployment(big, Storage(), SCHEMES["int8"]), 8 * GB + found.short(), 4096)
    fit.require(enough, "--memory")
    assert enough.requests == 1


def test_where_nothing_is_left_that_is_said() -> None:
    with user_error("memory_insufficient"):
        fit.require(fit.fit(INT8, 0, 4096), "left in control group (v2)")


headrooms = st.sampled_from([0.0, 0.01, 0.02, 0.05, 0.2, 0.9])
NOTHING_ELSE = Fit(memory=0, weights=0, step=0, processes=0, block=BLOCK, block_bytes=1, blocks=0, context=BLOCK)


@given(st.integers(1, 300), st.integers(1, 50), headrooms)
def test_the_least_blocks_for_so_many_requests(requests: int, each: int, headroom: float) -> None:
    def run(blocks: int) -> int:
        return replace(NOTHING_ELSE, blocks=blocks, context=each * BLOCK, headroom=headroom).requests

    needed = fit.blocks_for(requests, each, headroom)
    assert run(needed) >= requests > run(needed - 1)
    assert (needed == requests * each) == (headroom == 0 or requests == 1)


def test_a_cache_that_holds_no_request_is_refused() -> None:
    found = fit.fit(Deployment(CONFIG, W4, SCHEMES["float32"]), 4 * GB, 131_072)
    with user_error("plan_does_not_fit"):
        fit.require(found, "available memory")


def test_a_small_cache_in_much_memory_is_no_lack_of_memory() -> None:
    found = fit.start(INT8, 16 * GB, StepLimits(), 4096, CacheLimits(1000))
    with user_error("plan_does_not_fit"):
        fit.require(found, "--memory")


def test_a_cache_that_was_asked_for_and_does_not_fit() -> None:
    found = fit.fit(Deployment(CONFIG, W4, SCHEMES["bfloat16"]), 4 * GB, 4096, cache=CacheLimits(10_000_000))
    assert found.unused < 0
    with user_error("memory_insufficient"):
        fit.require(found, "--memory")


def test_a_start_keeps_some_room_for_prompts_that_come_again_and_not_all_there_is() -> None:
    limits = StepLimits(sequences=5)
    found = fit.start(INT8, 16 * GB, limits, 8000)
    assert found.blocks == ROOM * 638, "5 x 125, and the 2 % of all that the last of them has to leave free"
    assert found.requests == ROOM * 5
    assert found.unused > 2 * found.cache
    assert fit.start(INT8, 16 * GB, limits, 8000, CacheLimits(50_000)).tokens == 50_048, "more, where asked for"


def test_without_a_context_a_start_shortens_requests_to_what_the_cache_holds() -> None:
    found = fit.start(Deployment(CONFIG, W4, SCHEMES["float32"]), 4 * GB, StepLimits())
    assert found.context == found.tokens < CONFIG.context
    assert (found.requests, found.short()) == (1, 0)
    asked = fit.start(Deployment(CONFIG, W4, SCHEMES["float32"]), 4 * GB, StepLimits(), CONFIG.context)
    assert (asked.context, asked.requests) == (CONFIG.context, 0)


@pytest.mark.parametrize("policy", ["sink:4+2044", "snapkv:2048"])
def test_a_policy_of_eviction_says_what_a_request_holds(policy: str) -> None:
    eviction = Eviction.parse(policy)
    dropping = Deployment(CONFIG, W4, SCHEMES["float32"], eviction=eviction)
    found = fit.start(dropping, 4 * GB, StepLimits())
    assert found.requests >= 1
    if eviction.once:  # the prompt, and what is kept of it
        assert found.context == found.tokens - eviction.budget < CONFIG.context
    else:
        assert found.context == CONFIG.context > found.tokens
        assert found.requests == found.blocks // (2048 // BLOCK + 1)


@pytest.mark.parametrize(
    "sentence, run",
    [
        ("option_out_of_range", lambda: Demand(10, 0)),
        ("option_out_of_range", lambda: Demand(0)),
        ("option_out_of_range", lambda: fit.fit(INT8, -1)),
        ("option_out_of_range", lambda: fit.fit(INT8, GB, cache=CacheLimits(0))),
    ],
)
def test_impossible_questions(sentence: str, run: object) -> None:
    assert callable(run)
    with user_error(sentence):
        run()


@pytest.mark.parametrize(
    "count, text", [(0, "0 bytes"), (999, "999 bytes"), (1e6, "1 MB"), (763_000_000, "763 MB"), (1.236e9, "1.24 GB"),
                    (33.04e9, "33 GB"), (1.5e13, "15,000 GB")],
)  # fmt: skip
def test_sizes_for_people(count: float, text: str) -> None:
    assert fit.size(count) == text


@given(memories, contexts, kinds, st.integers(1, 100), st.none() | st.integers(1, 10**7))
def test_a_fraction_is_of_what_the_model_leaves(
    memory: int, context: int, kv: KvScheme, percent: int, tokens: int | None
) -> None:
    whole = fit.fit(Deployment(CONFIG, W4, kv), memory, context)
    found = fit.fit(Deployment(CONFIG, W4, kv), memory, context, CacheLimits(tokens, percent / 100))
    left = max(0, whole.unused + whole.cache)
    assert found.cache <= left * percent / 100
    assert found.blocks <= (found.blocks if tokens is None else -(-tokens // BLOCK))
    more = (found.blocks + 1) * found.block_bytes
    assert more > left * percent / 100 or (tokens is not None and found.blocks * BLOCK >= tokens)
    assert (found.weights, found.step, found.processes) == (whole.weights, whole.step, whole.processes)


def test_what_would_help_is_the_option_that_keeps_the_cache_small() -> None:
    for fraction, tokens, option in (
        (0.01, None, "--kv-fraction"), (0.01, 10**6, "--kv-fraction"), (0.9, 640, "--max-tokens-in-cache"),
        (None, 640, "--max-tokens-in-cache"),
    ):  # fmt: skip
        found = fit.start(INT8, 4 * GB, StepLimits(), 4096, CacheLimits(tokens, fraction))
        with user_error("plan_does_not_fit", option):
            fit.require(found, "--memory")
    short = fit.start(INT8, 4 * GB, StepLimits(), cache=CacheLimits(fraction=0.01))
    assert (short.requests, short.kept_by) == (1, "--kv-fraction"), "also where the context is cut to what it holds"


@pytest.mark.parametrize("fraction", [0.0, -0.1, 1.01, float("nan")])
def test_a_fraction_that_is_none_is_refused(fraction: float) -> None:
    with user_error("option_out_of_range"):
        fit.fit(INT8, GB, 512, cache=CacheLimits(fraction=fraction))


def test_a_server_takes_no_more_of_a_fraction_than_it_can_use() -> None:
    """Nor a longer request than the fraction holds."""
    limits = StepLimits(sequences=2)
    found = fit.start(INT8, 64 * GB, limits, 4096, cache=CacheLimits(fraction=0.9))
    assert found.requests == ROOM * 2
    short = fit.start(INT8, 4 * GB, limits, cache=CacheLimits(fraction=0.05))
    assert 0 < short.context == short.tokens < CONFIG.context
    assert short.cache <= 0.05 * (short.unused + short.cache)
    assert fit.start(INT8, 4 * GB, limits, cache=CacheLimits(640, 0.05)).tokens == 640


@pytest.mark.parametrize("config", [CONFIG, shape("qwen2.5-0.5b")])
@pytest.mark.parametrize("kv", ["float32", "bfloat16", "int8", "int4", "klt4", "klt2", "kivi4", "kivi2"])
def test_another_cache_format_is_a_division_of_its_own(config: ModelConfig, kv: str) -> None:
    limits, cache = StepLimits(rows=128), CacheLimits(64 * BLOCK)
    first = Deployment(config, W4, SCHEMES["bfloat16"])
    found = fit.with_kv(fit.fit(first, 4 * GB, 1000, cache, limits), first, SCHEMES[kv], limits)
    own = fit.fit(replace(first, kv=SCHEMES[kv]), 4 * GB, 1000, cache, limits)
    assert replace(found, kept_by="") == replace(own, kept_by="")


@pytest.mark.parametrize("kv", ["bfloat16", "int8", "int4"])
@pytest.mark.parametrize("share", [Share(0, 2, 1), Share(0, 1, 2), Share(0, 2, 2)])
@pytest.mark.parametrize("gpu", [None, gpu_spec("h100")])
def test_so_it_is_in_each_of_several_processes(kv: str, share: Share, gpu: GpuSpec | None) -> None:
    limits, cache = StepLimits(rows=128), CacheLimits(64 * BLOCK)
    first = Deployment(CONFIG, W4, SCHEMES["bfloat16"], share, gpu)
    found = fit.with_kv(fit.fit(first, 4 * GB, 1000, cache, limits), first, SCHEMES[kv], limits)
    own = fit.fit(replace(first, kv=SCHEMES[kv]), 4 * GB, 1000, cache, limits)
    assert replace(found, kept_by="") == replace(own, kept_by="")
