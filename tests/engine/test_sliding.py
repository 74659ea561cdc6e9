"""Layers with a sliding window that release their blocks: tokens, log probabilities and embeddings to the bit, whatever
the schedule; what lies behind a window is never read; and a small pool is enough."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from attar.engine.engine import Engine
from attar.engine.llm.llm import LLM
from attar.engine.loader import Parallel
from attar.kernels import dispatch
from attar.model.decoder import Decoder
from attar.plan.sliding import SlidingLimits
from attar.protocol.messages import Delta, Submit
from attar.protocol.request import SamplingParams
from attar.protocol.scheduler_config import SchedulerConfig
from attar.scheduling.block_pool import FREE
from tests.engine.conftest import ROOM, TIGHT, Answers, answers, make_engine, run, run_as_they_come
from tests.engine.test_draft_trees import DRAFTING, Bushy
from tests.engine.test_engine import some_requests
from tests.engine.test_speculation_schedules import texts_of
from tests.execution.test_cuda_graphs import Again
from tests.model.random_model import LLAMA, write

WINDOW = 24
CONTEXT = 192
BLOCK = 64
STEP = 48
SIZES = {**LLAMA, "max_position_embeddings": CONTEXT, "sliding_window": WINDOW, "head_dim": 32}
GEMMA = {**SIZES, "query_pre_attn_scalar": 50, "final_logit_softcapping": 4.0}
MODELS: dict[str, dict[str, object]] = {
    "Gemma3ForCausalLM": {**GEMMA, "sliding_window_pattern": 2},
    "Gemma2ForCausalLM": {**GEMMA, "attn_logit_softcapping": 3.0},
    "MistralForCausalLM": SIZES,
}
LEAST = SlidingLimits(WINDOW, BLOCK, STEP)


@pytest.fixture(scope="module", params=MODELS)
def windowed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    """A model of each family with windows, in the native kernels' layout; Mistral has no other layers."""
    if dispatch.store() is None:
        pytest.skip("the native kernels are off or do not load")
    folder = tmp_path_factory.mktemp("windowed") / "model"
    path = write(folder, {**MODELS[request.param], "architectures": [request.param]})
    return LLM(path, activations="exact", verify=False).decoder


def sliding_engine(decoder: Decoder, blocks: int, spare: int, steps: int = 1, **how: object) -> Engine:
    """An engine whose windows have room for a few sequences and `spare` blocks more. Blocks that become free are
    overwritten with NaN."""
    limits = SlidingLimits(WINDOW, BLOCK, steps * STEP)
    made = make_engine(decoder, blocks, sliding_blocks=limits.held + limits.of_steps + spare, **how)
    assert made.sliding is not None
    pages = [p for p, window in zip(made.runner.pages, decoder.config.windows, strict=True) if window is not None]
    pool = made.sliding.pool
    drop, forget = pool.drop, pool.forget

    def poison() -> None:
        free = [block for block, state in enumerate(pool.states()) if state == FREE]
        for each in pages:
            for part in each.parts():
                if part.is_floating_point():
                    part[free] = torch.nan

    def dropped(blocks: list[int]) -> None:
        drop(blocks)
        poison()

    def forgotten(blocks: list[int]) -> None:
        forget(blocks)
        poison()

    pool.drop, pool.forget = dropped, forgotten  # type: ignore[method-assign, assignment]
    return made


def ended(made: Engine) -> None:
    """Nothing is held, and a flush frees everything."""
    assert made.sliding is not None
    made.scheduler.check()
    assert made.pool.active == made.sliding.pool.active == made.sliding.lent == 0
    made.cache.flush()
    assert made.sliding.pool.free == made.sliding.pool.total


@pytest.mark.parametrize("kv", [None, "int8", "kivi2"])
@pytest.mark.parametrize("seed", range(3))
def test_no_bit_changes_whatever_the_schedule(windowed: Decoder, seed: int, kv: str | None) -> None:
    """Random lengths, chunks, prefix hits, forks and preemption."""
    draw = random.Random(seed)
    asks = some_requests(seed + 100, 10, windowed.config.vocab_size)
    expected: Answers = {}
    for ask in asks:
        expected |= answers(run(make_engine(windowed, kv=kv), [ask]))
    made = sliding_engine(windowed, draw.choice((ROOM, TIGHT)), draw.choice((0, 2, 20)), kv=kv)
    assert answers(run_as_they_come(made, asks, draw)) == expected
    assert made.sliding is not None
    assert made.sliding.released > 0
    ended(made)


@pytest.mark.parametrize("seed", range(2))
def test_no_bit_changes_with_trees_of_drafts(windowed: Decoder, seed: int) -> None:
    asks = some_requests(seed + 7000, 6, windowed.config.vocab_size)
    expected: Answers = {}
    texts: dict[str, list[int]] = {}
    for ask in asks:
        events = run(make_engine(windowed), [ask])
        expected |= answers(events)
        texts |= texts_of(events)
    how = {"limits": DRAFTING, "drafter": Bushy(texts, seed), "draft_tree": 16}
    made = sliding_engine(windowed, ROOM, 40, **how)
    assert answers(run_as_they_come(made, asks, random.Random(seed))) == expected
    assert made.speculation is not None
    assert made.speculation.accepted > 10
    ended(made)


def test_no_bit_changes_in_graphs_and_steps_ahead(windowed: Decoder) -> None:
    asks = some_requests(4, 10, windowed.config.vocab_size)
    draw = random.Random(4)
    record = Again()
    made = sliding_engine(windowed, ROOM, 4, steps=2, record=record, overlaps=True)
    found = answers(run_as_they_come(made, asks, draw))
    plain = make_engine(windowed, ROOM, record=Again(), overlaps=True)
    assert found == answers(run_as_they_come(plain, asks, random.Random(4)))
    assert made.ahead > 0
    assert record.replayed
    ended(made)


def test_no_bit_changes_in_two_processes(tmp_path: Path) -> None:
    path = write(tmp_path / "model", {**MODELS["Gemma3ForCausalLM"], "architectures": ["Gemma3ForCausalLM"]})
    llm = LLM(path, activations="exact", parallel=Parallel(2, 1), verify=False)
    try:
        asks = some_requests(5, 8, llm.decoder.config.vocab_size)
        plain = make_engine(llm.decoder, ROOM, runner=llm.model.runner)
        expected = answers(run_as_they_come(plain, asks, random.Random(5)))
        made = sliding_engine(llm.decoder, TIGHT, 1, runner=llm.model.runner)
        assert answers(run_as_they_come(made, asks, random.Random(5))) == expected
        assert made.sliding is not None
        assert made.sliding.released > 0
        ended(made)
    finally:
        llm.close()


def test_the_reference_reads_nothing_behind_a_window(tiny_decoder: Callable[..., Decoder]) -> None:
    decoder = tiny_decoder(window=WINDOW)
    asked = Submit("a", tuple(range(97)), SamplingParams(max_tokens=60, temperature=0, logprobs=0))
    made = sliding_engine(decoder, ROOM, 0)
    assert answers(run(made, [asked])) == answers(run(make_engine(decoder), [asked]))
    ended(made)


def test_a_sequence_holds_no_more_than_its_window(windowed: Decoder) -> None:
    """Also during the prefill of its prompt; and requests that the other layers have room for are all answered."""
    made = sliding_engine(windowed, ROOM, 0)
    made.submit(Submit("a", tuple(range(100)), SamplingParams(max_tokens=80, temperature=0)))
    assert made.sliding is not None
    most = 0
    while not made.idle:
        made.step()
        most = max(most, made.sliding.pool.active)
    assert most <= LEAST.held + LEAST.of_steps
    assert most < -(-180 // BLOCK)
    asks = [Submit(str(i), (i, *range(90)), SamplingParams(max_tokens=3, temperature=0)) for i in range(6)]
    events = run(made, asks)
    assert sum(isinstance(event, Delta) for event in events) >= 6
    ended(made)


def test_a_match_ends_where_a_window_has_a_hole(windowed: Decoder) -> None:
    """The second of two turns begins where the first ended; a prompt that leaves it early finds its window evicted."""
    params = SamplingParams(max_tokens=1, temperature=0)
    first = tuple(i % 100 for i in range(150))
    made = sliding_engine(windowed, ROOM, 0)
    run(made, [Submit("a", first, params)])
    run(made, [Submit("b", (*first, 7, 8), params)])
    assert made.cache.reused == BLOCK * (len(first) // BLOCK)  # there was no block for a copy of the last one
    assert made.sliding is not None
    assert made.sliding.pool.cached < -(-len(first) // BLOCK) + 1
    salt, early = bytes(4), array("i", first[:70])
    match = made.cache.match(salt, early)
    assert (match.length, match.ended) == (0, "evicted")
    assert made.cache.match(salt, array("i", first[:130])).length >= 2 * BLOCK
    ended(made)


def test_steps_of_too_small_a_pool_are_refused(windowed: Decoder) -> None:
    limits = SchedulerConfig(max_step_tokens=STEP)
    with pytest.raises(ValueError, match="blocks"):
        make_engine(windowed, ROOM, limits, sliding_blocks=LEAST.held - 1)


def test_an_llm_frees_blocks_behind_windows(tmp_path: Path) -> None:
    """One long prompt has a small pool; a call of several prompts makes a larger one, to the same texts."""
    if dispatch.store() is None:
        pytest.skip("the native kernels are off or do not load")
    long = {**GEMMA, "max_position_embeddings": 8192, "architectures": ["Gemma2ForCausalLM"]}
    path = write(tmp_path / "model", {**long, "num_hidden_layers": 2})
    prompts = [tuple((7 * i + j) % 120 for i in range(length)) for j, length in enumerate((3000, 90, 200))]
    params = SamplingParams(max_tokens=5, temperature=0)
    made = LLM(path, activations="exact", verify=False)
    [first] = made.generate(prompts[:1], params)
    engine = made.running.engine
    assert engine is not None
    assert engine.sliding is not None
    assert engine.sliding.pool.total < engine.pool.total
    assert engine.sliding.released > 0
    again, *_ = made.generate(prompts, params)
    assert again.token_ids == first.token_ids
    plain = make_engine(made.decoder, 64, context=4096)
    asks = [Submit(str(i), prompt, params) for i, prompt in enumerate(prompts)]
    found = texts_of(run(plain, asks))
    assert list(found["0#0"]) == list(first.token_ids)


def test_models_without_windows_have_one_group(decoder: Decoder) -> None:
    made = make_engine(decoder, sliding_blocks=3)
    assert made.sliding is None
    assert not made.runner.slides
    assert made.stats().sliding_blocks is None
