"""Sequences that drop keys: whoever is beside them and however they were interrupted, they keep their bits."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from attar.engine.engine import Engine
from attar.kernels import ops
from attar.kv import ranking
from attar.kv.eviction import Eviction
from attar.kv.pages import Rotation
from attar.model.cache import BLOCK
from attar.model.config import Rope
from attar.model.decoder import Decoder
from attar.model.rope import rotation
from attar.protocol.messages import Delta, Failed, Finished, PromptLogprobs, Submit
from attar.protocol.request import SamplingParams
from attar.protocol.scheduler_config import SchedulerConfig
from tests.engine.conftest import CONTEXT, ROOM, Answers, answers, make_engine, run, run_as_they_come
from tests.errors import user_error
from tests.kv.test_eviction import kept_when_diffuse

SINK = Eviction.parse("sink:4+124")
SNAP = Eviction("snapkv", 64)  # smaller than one that may be asked for
POLICIES = ("sink:4+124", "snapkv:128", "h2o:128", "expected:128")
KV = ("float32", "bfloat16", "int8", "fp8", "int4")  # int4 is stored as klt4 is, and needs no calibration
TIGHT = 8  # blocks: requests have to give way to each other


@pytest.fixture(autouse=True)
def mixed_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some heads choose, and others are diffuse: by the usual share every head of random weights is."""
    monkeypatch.setattr(ranking, "LEAST", 0.38)


def engine(decoder: Decoder, *evictions: Eviction, blocks: int = ROOM, rows: int = 48, **how: Any) -> Engine:
    limits = SchedulerConfig(max_running=4, max_step_tokens=rows, headroom=0.0)
    return make_engine(decoder, blocks, limits, evictions=evictions, **how)


def submit(id: str, prompt: list[int], tokens: int, eviction: Eviction | None = None) -> Submit:
    name = "none" if eviction is None else str(eviction)
    params = SamplingParams(max_tokens=tokens, temperature=0, seed=0, logprobs=0, kv_eviction=name)
    return Submit(id, tuple(prompt), params)


def plain(asks: list[Submit]) -> list[Submit]:
    """The requests for a server without eviction."""
    return [msgspec.structs.replace(each, params=replace(each.params, kv_eviction=None)) for each in asks]


def submits(draw: random.Random, count: int, eviction: Eviction) -> list[Submit]:
    """Requests, of which some continue others' prompts, and some keep every key."""
    found = list[Submit]()
    for i in range(count):
        prompt = [draw.randrange(90) for _ in range(draw.choice([3, 60, 100, 150, 260]))]
        if found and draw.random() < 0.6:
            prompt = [*draw.choice(found).prompt, *prompt[: draw.choice([0, 5, 20])]]
        own = None if draw.random() < 0.3 else eviction
        most = 300 if own is not None and own.streams else CONTEXT - 41
        found.append(submit(f"{i}", prompt[:most], draw.choice([4, 40, 150 if own else 40]), own))
    return found


def alone(decoder: Decoder, asks: list[Submit], *evictions: Eviction, **how: Any) -> Answers:
    found: Answers = {}
    for each in asks:
        found |= answers(run(engine(decoder, *evictions, **how), [each]))
    return found


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 10_000), kv=st.sampled_from(KV))
def test_no_bit_depends_on_company_chunks_or_preemption(decoder: Decoder, policy: str, seed: int, kv: str) -> None:
    draw, eviction = random.Random(seed), Eviction.parse(policy)
    asks = submits(draw, 5, eviction)
    expected = alone(decoder, asks, eviction, kv=kv)
    for blocks, rows in ((ROOM, draw.choice([8, 33, 200])), (TIGHT, 48)):
        made = engine(decoder, eviction, blocks=blocks, rows=rows, kv=kv)
        assert answers(run_as_they_come(made, asks, draw)) == expected, f"{blocks} blocks, steps of {rows} rows"
        made.scheduler.check()
        assert made.pool.active == 0
        made.cache.flush()
        assert made.pool.free == made.pool.total


def test_a_budget_that_covers_all_changes_no_bit(decoder: Decoder) -> None:
    asks = [submit("0", list(range(60)), 60, SINK), submit("1", list(range(9)), 100, SINK)]
    assert alone(decoder, asks, SINK) == alone(decoder, plain(asks))


def test_requests_that_keep_all_have_the_bits_of_a_server_without_eviction(decoder: Decoder) -> None:
    asks = [submit("0", list(range(60)), 60)]
    assert alone(decoder, asks, SINK) == alone(decoder, plain(asks))


def streaming_llm(decoder: Decoder, ids: list[int], eviction: Eviction) -> torch.Tensor:
    """Logits [N, V] as StreamingLLM computes them: keys are cached unrotated, and turned at each read by their index
    in the cache. A block of tokens is dropped at a time."""
    cached = [(list[torch.Tensor](), list[torch.Tensor]()) for _ in decoder.blocks]
    found = []
    for token in ids:
        stream, delta = decoder.embedding.forward(torch.tensor([token]), torch.tensor([0])), None
        for block, (keys, values) in zip(decoder.blocks, cached, strict=True):
            if len(keys) == eviction.budget:
                del keys[eviction.sinks : eviction.sinks + BLOCK], values[eviction.sinks : eviction.sinks + BLOCK]
            one = block.attention
            stream, x = ops.norm(stream, delta, block.attention_norm)
            q, k, v = one.heads(x, None)
            keys.append(k), values.append(v)
            assert one.rope is not None
            cos, sin = rotation(one.rope, torch.arange(len(keys)), CONTEXT)
            at = torch.arange(len(keys))
            q, k = ops.rope(q, cos[-1:], sin[-1:]), ops.rope(torch.cat(keys), cos, sin)
            mixed = ops.attention(q, [k], [torch.cat(values)], [at[-1:]], [at], one.form)
            stream, x = ops.norm(stream, ops.linear(mixed, (one.output,)), block.feed_forward_norm)
            delta = block.feed_forward.forward(x)
        found.append(decoder.logits(stream, delta))
    return torch.cat(found)


@pytest.mark.parametrize("sinks", [0, 4])
def test_a_stream_is_the_published_one(tiny_decoder: Callable[..., Decoder], sinks: int) -> None:
    decoder, eviction = tiny_decoder(), Eviction("sink", 128, sinks)
    draw = random.Random(5)
    ids = [draw.randrange(90) for _ in range(400)]  # past the context, and past a table of angles
    params = SamplingParams(max_tokens=1, temperature=0, seed=0, prompt_logprobs=0)
    events = run(engine(decoder, eviction), [Submit("0", tuple(ids), params)])
    (told,) = (event.logprobs for event in events if isinstance(event, PromptLogprobs))
    expected = streaming_llm(decoder, ids, eviction).log_softmax(-1)[:-1].gather(1, torch.tensor(ids)[1:, None])[:, 0]
    torch.testing.assert_close(torch.tensor([each.logprob for each in told]), expected, atol=1e-4, rtol=0)
    report = next(event.report for event in events if isinstance(event, Finished))
    assert report is not None
    assert (report.kv_eviction, report.evicted_tokens) == (str(eviction), 5 * BLOCK)


def test_a_policy_that_is_not_offered_is_refused(decoder: Decoder) -> None:
    made = engine(decoder, SINK)
    (failed,) = run(made, [submit("0", [1, 2], 3, Eviction("sink", 192, 4))])
    assert isinstance(failed, Failed)
    assert failed.code == "invalid"
    (failed,) = run(engine(decoder), [submit("0", [1, 2], 3, SINK)])
    assert isinstance(failed, Failed)


def test_the_first_policy_is_that_of_requests_which_name_none(decoder: Decoder) -> None:
    asks = [submit("0", list(range(90)), 80, SINK)]
    assert alone(decoder, plain(asks), SINK) == alone(decoder, asks, SINK) != alone(decoder, plain(asks))


def test_an_answer_runs_past_the_context_in_few_blocks(decoder: Decoder) -> None:
    made = engine(decoder, SINK, blocks=4)  # twice the budget
    ask = submit("0", list(range(50)), 4 * CONTEXT, SINK)
    finished = next(event for event in run(made, [ask]) if isinstance(event, Finished))
    assert finished.completion_tokens == 4 * CONTEXT
    assert made.scheduler.preemptions == 0


def test_combinations_that_cannot_work_are_refused(decoder: Decoder, tiny_decoder: Callable[..., Decoder]) -> None:
    for how in ({"kv": "klt2"}, {"draft_tree": 4}):
        with user_error("option_conflict"):
            engine(decoder, SINK, **how)
    with user_error("context_exceeded"):
        engine(decoder, Eviction.parse("sink:4+1020"))
    with user_error("memory_insufficient"):
        engine(decoder, SINK, blocks=3)
    with user_error("option_conflict"):
        engine(tiny_decoder(rope=Rope(1e4, 16, kind="dynamic", factor=2.0, original_context=64)), SINK)


def published_snapkv(decoder: Decoder, ids: list[int], prompt: int, budget: int, heads: set[bool]) -> torch.Tensor:
    """Logits [N, V] with SnapKV's cache behind a prompt, token by token, from lists of keys for each head; diffuse
    heads keep the first and newest. `heads` takes whether each is diffuse."""
    cached = [([], []) for _ in decoder.blocks]  # keys [D] and values [D] of each head, at their own angles
    seen = [torch.zeros(0) for _ in decoder.blocks]  # sums [G, prompt] of the last rows' weights
    peaks = [torch.zeros(0) for _ in decoder.blocks]  # the greatest of them
    found = []
    for at, token in enumerate(ids):
        stream, delta = decoder.embedding.forward(torch.tensor([token]), torch.tensor([at])), None
        for i, (block, (keys, values)) in enumerate(zip(decoder.blocks, cached, strict=True)):
            one, form = block.attention, block.attention.form
            stream, x = ops.norm(stream, delta, block.attention_norm)
            assert one.rope is not None
            q, k, v = one.heads(x, Rotation(*rotation(one.rope, torch.tensor([at]), CONTEXT), torch.tensor([0])))
            if not keys:
                keys += [[] for _ in range(form.kv_heads)]
                values += [[] for _ in range(form.kv_heads)]
                seen[i], peaks[i] = torch.zeros(form.kv_heads, prompt), torch.zeros(form.kv_heads, prompt)
            if at == prompt:
                for g in range(form.kv_heads):
                    early = seen[i][g, : prompt - 32].tolist()
                    pooled = [max(early[max(0, n - 3) : n + 4]) for n in range(len(early))]
                    best = sorted(range(len(early)), key=lambda n, of=pooled: (-of[n], n))[: budget - 32]
                    kept = [*sorted(best), *range(prompt - 32, prompt)]
                    diffuse = float(seen[i][g, kept].sum()) < ranking.LEAST * float(seen[i][g].sum())
                    heads.add(diffuse)
                    if diffuse:
                        kept = kept_when_diffuse(seen[i][g].tolist(), peaks[i][g].tolist(), budget)
                    keys[g], values[g] = [keys[g][n] for n in kept], [values[g][n] for n in kept]
            mixed = []
            for head in range(form.heads):
                g = head // (form.heads // form.kv_heads)
                if head % (form.heads // form.kv_heads) == 0:
                    keys[g].append(k[0, g]), values[g].append(v[0, g])
                weights = (torch.stack(keys[g]) @ q[0, head] * form.scale).softmax(0)
                mixed.append(weights @ torch.stack(values[g]))
                if prompt - 32 <= at < prompt:
                    seen[i][g, : at + 1] += weights
                    peaks[i][g, : at + 1] = torch.maximum(peaks[i][g, : at + 1], weights)
            stream, x = ops.norm(stream, ops.linear(torch.cat(mixed)[None], (one.output,)), block.feed_forward_norm)
            delta = block.feed_forward.forward(x)
        found.append(decoder.logits(stream, delta))
    return torch.cat(found)


def test_what_snapkv_keeps_is_what_was_published(tiny_decoder: Callable[..., Decoder]) -> None:
    decoder = tiny_decoder()
    ask = submit("0", [i * 31 % 89 for i in range(150)], 12, SNAP)
    deltas = [event for event in run(engine(decoder, SNAP), [ask]) if isinstance(event, Delta)]
    said = [token for event in deltas for token in event.token_ids]
    told = [each.logprob for event in deltas for each in event.logprobs or ()]
    heads = set[bool]()
    logits = published_snapkv(decoder, [*ask.prompt, *said], len(ask.prompt), SNAP.budget, heads)
    rows = logits.log_softmax(-1)[len(ask.prompt) - 1 : -1]
    torch.testing.assert_close(torch.tensor(told), rows.gather(1, torch.tensor(said)[:, None])[:, 0], atol=1e-4, rtol=0)
    assert heads == {True, False}
    assert alone(decoder, [ask], SNAP) != alone(decoder, plain([ask]))


@pytest.mark.parametrize("policy", POLICIES)
def test_another_engine_continues_an_answer_to_the_same_bits(decoder: Decoder, policy: str) -> None:
    eviction = Eviction.parse(policy)
    ask = submit("0", [i * 31 % 89 for i in range(140)], 50, eviction)
    deltas = [event for event in run(engine(decoder, eviction), [ask]) if isinstance(event, Delta)]
    for known in (1, 30):
        again = msgspec.structs.replace(ask, generated=(tuple(event.token_ids[0] for event in deltas[:known]),))
        rest = [event for event in run(engine(decoder, eviction), [again]) if isinstance(event, Delta)]
        assert [event.logprobs for event in rest] == [event.logprobs for event in deltas[known:]]
