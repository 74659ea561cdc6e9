"""Prompts whose rows read few keys: whoever is beside them, cached or interrupted, outputs keep their bits."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from attar.engine.engine import Engine
from attar.kv import sparse_prefill
from attar.kv.sparse import SparseAttention
from attar.kv.sparse_prefill import SparsePrefill
from attar.model import sparse_layers
from attar.model.decoder import Decoder
from attar.model.sparse_layers import SparseLayers
from attar.protocol.messages import Finished, Submit
from attar.protocol.request import SamplingParams
from attar.protocol.scheduler_config import SchedulerConfig
from tests.engine.conftest import ROOM, TIGHT, Answers, answers, make_engine, run, run_as_they_come
from tests.errors import user_error

SHAPE = SparsePrefill(sinks=4, window=24, last=10)
SKIP = SparsePrefill(lost=0.5, last=10)


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of tests are short, and yet skip."""
    monkeypatch.setattr(sparse_prefill, "WHOLE", 24)


def engine(decoder: Decoder, few: SparsePrefill | None, blocks: int = ROOM, rows: int = 48, **how: object) -> Engine:
    limits = SchedulerConfig(max_running=4, max_step_tokens=rows, headroom=0.0)
    return make_engine(decoder, blocks, limits, prefill=few, **how)


def submits(draw: random.Random, count: int) -> list[Submit]:
    """Requests, of which some continue the prompts of others, or repeat them."""
    found = list[Submit]()
    for i in range(count):
        prompt = [draw.randrange(90) for _ in range(draw.choice([3, 50, 75, 100]))]
        if found and draw.random() < 0.7:
            prompt = [*draw.choice(found).prompt, *prompt[: draw.choice([0, 5, 20, 40])]]
        params = SamplingParams(max_tokens=draw.choice([4, 30]), temperature=0, seed=0, logprobs=0)
        found.append(Submit(f"{i}", tuple(prompt[:150]), params))
    return found


def alone(decoder: Decoder, few: SparsePrefill | None, asks: list[Submit], **how: object) -> Answers:
    found: Answers = {}
    for each in asks:
        found |= answers(run(engine(decoder, few, **how), [each]))
    return found


@settings(max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 10_000), few=st.sampled_from([SHAPE, SKIP]))
def test_no_bit_depends_on_company_chunks_cache_or_preemption(decoder: Decoder, seed: int, few: SparsePrefill) -> None:
    draw = random.Random(seed)
    asks = submits(draw, 5)
    expected = alone(decoder, few, asks)
    for blocks, rows in ((ROOM, draw.choice([8, 33])), (TIGHT, 48)):
        made = engine(decoder, few, blocks, rows)
        assert answers(run_as_they_come(made, asks, draw)) == expected, f"{blocks} blocks, steps of {rows} rows"


def test_prompts_are_shared_up_to_their_last_rows(decoder: Decoder) -> None:
    """The end of a prompt reads all, and would not in the middle of another: the tree does not have it."""
    params = SamplingParams(max_tokens=4, temperature=0, seed=0, logprobs=0)
    first, longer = Submit("0", tuple(range(80)), params), Submit("1", (*range(80), *range(40)), params)
    expected = alone(decoder, SHAPE, [first, longer])
    made = engine(decoder, SHAPE)
    assert answers(run(made, [first])) | answers(run(made, [longer])) == expected
    assert 0 < made.cache.reused <= SHAPE.alike(80)
    assert expected != alone(decoder, None, [first, longer])


def test_short_prompts_change_no_bit(decoder: Decoder) -> None:
    asks = submits(random.Random(2), 3)
    assert alone(decoder, SparsePrefill(sinks=4, window=200), asks) == alone(decoder, None, asks)


@pytest.mark.parametrize("kv", ["bfloat16", "int8", "fp8", "int4", "nuq4", "klt2"])
@pytest.mark.parametrize("few", [SHAPE, SKIP])
def test_every_cache(decoder: Decoder, kv: str, few: SparsePrefill) -> None:
    asks = submits(random.Random(4), 3)
    made = engine(decoder, few, TIGHT, kv=kv)
    assert answers(run_as_they_come(made, asks, random.Random(4))) == alone(decoder, few, asks, kv=kv)


@pytest.mark.parametrize("few", [SHAPE, SKIP])
def test_outputs_may_read_few_keys_too(decoder: Decoder, few: SparsePrefill, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparse_layers, "DIFFUSE", 2.0)  # no layer stays dense
    ids = torch.randint(0, decoder.config.vocab_size, (2, 64), generator=torch.Generator().manual_seed(3))
    settings = SparseAttention(topk=48, dense_below=40)
    sparse = SparseLayers(settings, sparse_layers.calibrate(decoder, ids))
    asks = submits(random.Random(7), 5)
    expected = alone(decoder, few, asks, sparse=sparse)
    assert expected != alone(decoder, few, asks)
    for blocks, rows in ((ROOM, 17), (TIGHT, 48)):
        made = engine(decoder, few, blocks, rows, sparse=sparse)
        assert answers(run_as_they_come(made, asks, random.Random(7))) == expected


def test_trees_of_drafts_are_refused(decoder: Decoder) -> None:
    with user_error("option_conflict"):
        engine(decoder, SHAPE, draft_tree=4)


@pytest.mark.parametrize("few", [SHAPE, SKIP])
def test_reports_count_the_keys(decoder: Decoder, few: SparsePrefill) -> None:
    made = engine(decoder, few)
    ask = Submit("0", tuple(range(80)), SamplingParams(max_tokens=3, temperature=0, seed=0))
    (report,) = [event.report for event in run(made, [ask]) if isinstance(event, Finished)]
    lengths = range(1, 81)
    assert report is not None
    assert report.sparse_prefill == str(few)
    assert report.prompt_keys_seen == sum(lengths)
    if not few.skips:
        assert report.prompt_keys_read == sum(n if n > few.until(80) else few.tokens_read(n) for n in lengths)
    assert 0 < report.prompt_keys_read <= report.prompt_keys_seen
    assert (made.stats().prompt_keys_seen, made.stats().prompt_keys_read) == (
        report.prompt_keys_seen,
        report.prompt_keys_read,
    )
