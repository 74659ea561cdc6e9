"""Outputs that read few keys: whoever is beside them and however they were interrupted, they keep their bits."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from attar.engine.engine import Engine
from attar.execution import kv_cache
from attar.kernels import dispatch
from attar.kv.sparse import SparseAttention
from attar.model import sparse_layers
from attar.model.decoder import Decoder
from attar.model.sparse_layers import SparseLayers
from attar.protocol.messages import Finished, Submit
from attar.protocol.request import SamplingParams
from attar.protocol.scheduler_config import SchedulerConfig
from tests.engine.conftest import CONTEXT, ROOM, TIGHT, Answers, answers, make_engine, run, run_as_they_come
from tests.errors import user_error

FEW = SparseAttention(topk=48, dense_below=40)


@pytest.fixture(scope="module")
def sparse(decoder: Decoder) -> SparseLayers:
    """Every layer reads few keys, about statistics of random tokens."""
    ids = torch.randint(0, decoder.config.vocab_size, (2, 64), generator=torch.Generator().manual_seed(3))
    diffuse, sparse_layers.DIFFUSE = sparse_layers.DIFFUSE, 2.0
    try:
        return SparseLayers(FEW, sparse_layers.calibrate(decoder, ids))
    finally:
        sparse_layers.DIFFUSE = diffuse


def engine(decoder: Decoder, sparse: SparseLayers | None, blocks: int = ROOM, rows: int = 48, **how: object) -> Engine:
    limits = SchedulerConfig(max_running=4, max_step_tokens=rows, headroom=0.0)
    return make_engine(decoder, blocks, limits, sparse=sparse, **how)


def submits(draw: random.Random, count: int) -> list[Submit]:
    """Requests, of which some continue the prompts and the likely outputs of others."""
    found = list[Submit]()
    for i in range(count):
        prompt = [draw.randrange(90) for _ in range(draw.choice([3, 50, 75, 100]))]
        if found and draw.random() < 0.6:
            prompt = [*draw.choice(found).prompt, *prompt[: draw.choice([0, 5, 20])]]
        params = SamplingParams(max_tokens=draw.choice([4, 40]), temperature=0, seed=0, logprobs=0)
        found.append(Submit(f"{i}", tuple(prompt[:140]), params))
    return found


def alone(decoder: Decoder, sparse: SparseLayers | None, asks: list[Submit], **how: object) -> Answers:
    found: Answers = {}
    for each in asks:
        found |= answers(run(engine(decoder, sparse, **how), [each]))
    return found


def test_every_layer_is_sparse_and_outputs_differ_from_full_ones(decoder: Decoder, sparse: SparseLayers) -> None:
    assert sparse.dense == ()
    asks = submits(random.Random(1), 4)
    assert alone(decoder, sparse, asks) != alone(decoder, None, asks)


@settings(max_examples=5, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 10_000))
def test_no_bit_depends_on_company_chunks_or_preemption(decoder: Decoder, sparse: SparseLayers, seed: int) -> None:
    draw = random.Random(seed)
    asks = submits(draw, 5)
    expected = alone(decoder, sparse, asks)
    for blocks, rows in ((ROOM, draw.choice([8, 33])), (TIGHT, 48)):
        made = engine(decoder, sparse, blocks, rows)
        assert answers(run_as_they_come(made, asks, draw)) == expected, f"{blocks} blocks, steps of {rows} rows"


def test_a_prompt_that_continues_an_answer_is_computed_whole(decoder: Decoder, sparse: SparseLayers) -> None:
    """The tree has no rows that read few keys, and an answer that starts over takes no others for its own."""
    first = Submit("0", tuple(range(80)), SamplingParams(max_tokens=60, temperature=0, seed=0, logprobs=0))
    (tokens, *_) = zip(*[iter(answers(run(engine(decoder, sparse), [first]))["0", 0])] * 2, strict=False)
    said = [token for piece in tokens if isinstance(piece, tuple) for token in piece]
    second = Submit("1", (*first.prompt, *said[:50]), SamplingParams(max_tokens=8, temperature=0, seed=0, logprobs=0))
    expected = alone(decoder, sparse, [first, second])
    made = engine(decoder, sparse)
    assert answers(run(made, [first])) | answers(run(made, [second])) == expected
    for blocks in (TIGHT, ROOM):
        both = engine(decoder, sparse, blocks)
        assert answers(run_as_they_come(both, [first, second], random.Random(0))) == expected


def test_below_its_length_every_token_is_shared_and_no_bit_changes(decoder: Decoder, sparse: SparseLayers) -> None:
    whole = sparse._replace(settings=SparseAttention(topk=48, dense_below=CONTEXT))
    asks = submits(random.Random(2), 3)
    assert alone(decoder, whole, asks) == alone(decoder, None, asks)


@pytest.mark.parametrize("kv", ["bfloat16", "int8", "fp8"])
def test_every_cache_that_has_one_bit_keys(decoder: Decoder, sparse: SparseLayers, kv: str) -> None:
    asks = submits(random.Random(4), 3)
    made = engine(decoder, sparse, TIGHT, kv=kv)
    assert answers(run_as_they_come(made, asks, random.Random(4))) == alone(decoder, sparse, asks, kv=kv)


def test_combinations_that_cannot_work_are_refused(decoder: Decoder, sparse: SparseLayers) -> None:
    for how in ({"kv": "int4"}, {"draft_tree": 4}):
        with user_error("option_conflict"):
            engine(decoder, sparse, **how)


def test_layers_are_found_on_a_sample(tiny_decoder: Callable[..., Decoder]) -> None:
    decoder = tiny_decoder(store=dispatch.store("exact"))
    told = list[tuple[str, int, int]]()
    once, again = (kv_cache.sparse_layers_of(decoder, FEW, lambda *report: told.append(report)) for _ in range(2))
    parts = kv_cache.SHORT + decoder.config.layers
    assert told[-1] == ("key statistics", parts, parts)
    assert once.dense == again.dense
    for one, other in zip(once.statistics, again.statistics, strict=True):
        assert (one is None) == (other is None)
        assert one is None or other is None or (torch.equal(one.means, other.means))


def test_reports_count_the_keys(decoder: Decoder, sparse: SparseLayers) -> None:
    made = engine(decoder, sparse)
    ask = Submit("0", tuple(range(60)), SamplingParams(max_tokens=21, temperature=0, seed=0))
    (report,) = [event.report for event in run(made, [ask]) if isinstance(event, Finished)]
    lengths = range(61, 81)  # the last token is never run
    assert report is not None
    assert (report.sparse_attention, report.dense_layers) == (str(FEW), ())
    assert (report.keys_seen, report.keys_read) == (sum(lengths), sum(map(FEW.tokens_read, lengths)))
    assert (made.stats().keys_seen, made.stats().keys_read) == (report.keys_seen, report.keys_read)
    assert report.keys_read < report.keys_seen
    assert str(sparse) == f"sparse attention topk:48: dense layers none, of {decoder.config.layers}"
