"""Decode steps in graphs, and an engine whose host and device overlap: on CPUs, where a graph is whatever runs its call
again. What is special about a GPU is the recording alone."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from attar.engine.engine import Engine
from attar.execution import cuda_graphs
from attar.execution.cuda_graphs import Graphs, Inputs, Recorded, sizes
from attar.execution.recorded_step import Decoding
from attar.kernels import dispatch
from attar.model import cache
from attar.model.cache import ForwardBatch, KVCache, sent
from attar.model.decoder import Decoder
from attar.model.layers import MixtureOfExperts
from attar.protocol.messages import Delta, Event, Failed, Submit
from attar.protocol.request import SamplingParams
from attar.protocol.scheduler_config import SchedulerConfig
from attar.sampling import device_sampler
from attar.sampling.sampler import BadLogits, Sampler, sample
from tests.engine.conftest import ROOM, TIGHT, answers, make_engine, run
from tests.engine.test_engine import some_requests
from tests.engine.test_speculation_schedules import Foreseeing, texts_of
from tests.errors import user_error
from tests.pretend import Late

Make = Callable[..., Decoder]

SMALL = SchedulerConfig(max_running=6, max_step_tokens=48)


class Again:
    """A recorder whose graphs run the call again, in place. It counts them."""

    def __init__(self) -> None:
        self.recorded: list[int] = []
        self.replayed: list[int] = []

    def __call__(self, call: Callable[[], Tensor]) -> Recorded:
        result = call().clone()
        self.recorded.append(len(result))

        def replay() -> None:
            self.replayed.append(len(result))
            result.copy_(call())

        return Recorded(replay, result)


def recording(decoder: Decoder, blocks: int = ROOM, record: Again | None = None) -> Engine:
    """One that launches steps ahead, from graphs."""
    return make_engine(decoder, blocks, SMALL, record=record or Again(), overlaps=True)


@pytest.mark.parametrize(("most", "found"), [(1, (1,)), (2, (1, 2)), (8, (1, 2, 4, 8)), (12, (1, 2, 4, 8, 12))])
def test_sizes(most: int, found: tuple[int, ...]) -> None:
    assert sizes(most) == found


def test_inputs_arrive_as_they_were_put() -> None:
    inputs = Inputs(rows=3, width=4, block=16, spare=(9,), device=torch.device("cpu"))
    inputs.put(0, token=7, at=18, blocks=[5, 2])
    inputs.put(1, token=8, at=0, blocks=[1])
    assert not inputs.ids.any(), "not sent yet"
    inputs.send()
    place = inputs.place
    assert inputs.ids.tolist() == [7, 8, 0]
    assert place.positions.tolist() == [18, 0, 0]
    assert place.lengths.tolist() == [19, 1, 1]
    assert place.slot_mapping.tolist() == [2 * 16 + 2, 16, 9 * 16]
    assert place.row_starts.tolist() == [0, 1, 2, 3]
    assert place.block_tables[:, 0].tolist() == [5, 1, 9]
    assert place.block_tables[0, 1] == 2
    inputs.put(0, token=1, at=1, blocks=[4])
    inputs.rest(1)
    inputs.send()
    assert inputs.place.block_tables[:, 0].tolist() == [4, 9, 9]
    assert inputs.place.slot_mapping.tolist() == [4 * 16 + 1, 9 * 16, 9 * 16]


def test_rows_left_over_touch_nobody(decoder: Decoder) -> None:
    """Three sequences in a graph of four rows: logits of the steps, and every block but the spare one, are those of the
    same steps without a graph."""
    record, blocks = Again(), 3
    pages = cache.pool(decoder.config, blocks + 1, decoder.lossless)
    made = Graphs(decoder, pages, 64, 4, record)
    plain = decoder.cache(64, 3)
    decoding = Decoding(decoder, plain, 64)
    for step in range(20):
        tokens = [5 * step % 97, 11 * step % 97, 96 - step]
        graph = made.of(3)
        for row, token in enumerate(tokens):
            graph.inputs.put(row, token, step, [row])
        assert torch.equal(graph.run(3), decoding.step(tokens))
    assert record.recorded == [4]
    for ours, theirs in zip(pages, plain.layers, strict=True):
        for part, expected in zip(ours.parts(), theirs.parts(), strict=True):
            assert torch.equal(part[:blocks], expected)


def test_rows_of_a_step_that_raised_touch_nobody(decoder: Decoder) -> None:
    """Five sequences run; then eight are put, of which the last cannot be; then the five run again."""
    pages = cache.pool(decoder.config, 9, decoder.lossless)
    graph = Graphs(decoder, pages, 64, 8, Again()).of(5)

    def run(step: int) -> None:
        for row in range(5):
            graph.inputs.put(row, 7 * row + step, step, [row])
        graph.run(5)

    run(0)
    for row in range(7):
        graph.inputs.put(row, 50 + row, 1, [row])
    with pytest.raises(IndexError):
        graph.inputs.put(7, 1, 64, [7])  # a position past its blocks
    run(1)
    assert all(bool(part[:5].any()) and not part[5:8].any() for page in pages for part in page.parts())


def test_pieces_of_a_step_keep_their_inputs(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five sequences in pieces of up to two, in graphs that are told of nothing between them by a host that reads
    nothing: each replay has the rows of its own piece."""
    pages, steps = cache.pool(decoder.config, 6, decoder.lossless), 2
    plain = decoder.cache(64, 5)
    expected = []
    for step in range(steps):
        ids = torch.tensor([7 * row + step for row in range(5)])
        expected += decoder.forward(ids, ForwardBatch((1,) * 5, 64, plain)).split(2)
    late = Late()
    monkeypatch.setattr(cuda_graphs, "mark", lambda device: late)
    made = Graphs(decoder, pages, 64, 2, late)
    with late:
        made.record_all()
        for step in range(steps):
            for first in range(0, 5, 2):
                piece = range(first, min(first + 2, 5))
                graph = made.of(len(piece))
                for row, sequence in enumerate(piece):
                    graph.inputs.put(row, 7 * sequence + step, step, [sequence])
                graph.run(len(piece))
        assert len(late.results) < 3 * steps, "the device is behind"
        late.catch_up()
    assert len(late.results) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(late.results, expected, strict=True))


def test_all_are_recorded_at_once_the_largest_first(decoder: Decoder) -> None:
    record = Again()
    made = Graphs(decoder, cache.pool(decoder.config, 2, decoder.lossless), 64, 5, record)
    made.record_all()
    assert record.recorded == [5, 4, 2, 1]
    assert [made.of(count).rows for count in range(1, 6)] == [1, 2, 4, 4, 5]
    assert len(record.recorded) == 4


@pytest.mark.parametrize("blocks", [ROOM, TIGHT])
def test_an_engine_with_graphs_answers_as_one_without(decoder: Decoder, blocks: int) -> None:
    asks = some_requests(3, 12, decoder.config.vocab_size)
    record = Again()
    plain = make_engine(decoder, blocks, SMALL)
    found, expected = run(recording(decoder, blocks, record), asks), run(plain, asks)
    assert answers(found) == answers(expected)
    assert record.replayed
    assert set(record.replayed) <= {1, 2, 4, 6}


@pytest.mark.parametrize("blocks", [ROOM, TIGHT])
def test_drafts_are_rows_of_a_graph(decoder: Decoder, blocks: int) -> None:
    """Sequences with different numbers of drafts are replayed together, a row for each of their tokens."""
    limits = SchedulerConfig(max_running=6, max_step_tokens=48, max_drafts=9)
    record, asks = Again(), some_requests(3, 12, decoder.config.vocab_size)
    expected = run(make_engine(decoder, blocks, SMALL), asks)
    drafter = Foreseeing(texts_of(expected), random.Random(blocks), right=0.7)
    made = make_engine(decoder, blocks, limits, record=record, overlaps=True, drafter=drafter, draft_tokens=3)
    assert answers(run(made, asks)) == answers(expected)
    assert made.speculation is not None
    assert made.speculation.drafted > made.speculation.accepted > 0
    assert set(record.recorded) <= {1, 2, 4, 8, 15}
    assert max(record.replayed) > 6, "steps with more rows than sequences"


def test_what_a_step_gave_is_said_while_the_next_one_runs(decoder: Decoder) -> None:
    made, running = recording(decoder), list[list[Event]]()
    made.meanwhile = running.append
    made.submit(Submit("a", (1, 2, 3), SamplingParams(max_tokens=5, temperature=0, seed=0)))
    told = [made.step() for _ in range(5)]
    assert [[type(event).__name__ for event in events] for events in told] == [["Delta"]] * 4 + [["Delta", "Finished"]]
    assert running == [[]] * 5
    assert (made.steps, made.ahead, made.idle) == (5, 4, True)


def test_what_the_last_step_gave_is_said_once_the_next_one_runs_where_that_had_to_wait(decoder: Decoder) -> None:
    made = recording(decoder)
    made.runner.waits = "a reason"
    said: list[tuple[int, Event]] = []
    made.meanwhile = lambda events: said.extend((made.steps, event) for event in events)
    last: list[Event] = []
    made.submit(Submit("a", (1, 2, 3), SamplingParams(max_tokens=5, temperature=0, seed=0)))
    while not made.idle:
        last += made.step()
    assert [(step, type(event)) for step, event in said] == [(step, Delta) for step in range(1, 5)]
    assert [type(event).__name__ for event in last] == ["Delta", "Finished"]


def test_whoever_is_cancelled_is_told_of_no_more(decoder: Decoder) -> None:
    made = recording(decoder)
    made.submit(Submit("a", (1, 2, 3), SamplingParams(max_tokens=50, temperature=0, seed=0)))
    events = made.step() + made.step()
    made.cancel("a")
    while not made.idle:
        events += made.step()
    assert [type(event) for event in events] == [Delta, Delta, Failed]
    assert made.pool.active == 0


def test_what_is_not_recorded_says_why(tiny_decoder: Make) -> None:
    assert cuda_graphs.against(tiny_decoder()) == "the model is not laid out for the kernels of a GPU"
    store = dispatch.GpuWeights("cpu", torch.float32)
    laid = tiny_decoder(store=store)
    assert cuda_graphs.against(laid) is None
    experts = MixtureOfExperts(laid.head, (), 1, False)
    laid.blocks[0].feed_forward = experts
    assert cuda_graphs.against(laid) == "which experts run depends on the token"
    store.refused["a"] = "no kernel"
    assert cuda_graphs.against(laid) == "a: no kernel"


def test_steps_of_a_whole_cache_in_a_graph(decoder: Decoder) -> None:
    """Recording runs the first step in its own place."""
    record, found = Again(), []
    for how in (None, record):
        held = decoder.cache(6, 2)
        decoder.forward(torch.tensor([4, 5, 6, 7, 8, 9]), ForwardBatch((3, 3), 6, held))
        decoding = Decoding(decoder, held, 6, how)
        found.append([decoding.step([i, i + 1]).clone() for i in range(3)])
        with user_error("context_exceeded"):
            decoding.step([1, 2])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert record.recorded == [2]


# The choice of tokens


def settings(seed: int) -> list[SamplingParams]:
    draw = torch.Generator().manual_seed(seed)

    def one(*of: float) -> float:
        return of[int(torch.randint(0, len(of), (1,), generator=draw))]

    return [
        SamplingParams(
            max_tokens=4,
            temperature=one(0.0, 0.7, 1.5),
            top_k=int(one(0, 0, 1, 7, 1000)),
            top_p=one(1.0, 1.0, 0.9, 0.3),
            min_p=one(0.0, 0.0, 0.05),
            repetition_penalty=one(1.0, 1.4),
            frequency_penalty=one(0.0, 0.5),
            logit_bias={3: 4.0} if one(0, 1) else {},
            logprobs=2 if one(0, 1) else None,
            seed=seed + i,
        )
        for i in range(70)
    ]


@pytest.mark.parametrize("seed", range(3))
def test_choices_without_a_look_are_those_with_one(seed: int) -> None:
    """Ties among them: every third logit is rounded."""
    params = settings(seed)
    logits = torch.randn(len(params), 97, generator=torch.Generator().manual_seed(seed)) * 3
    logits[:, ::3] = logits[:, ::3].round()
    logits[5, 7] = torch.nan
    logits[6, 7] = torch.inf
    logits[7] = -torch.inf
    ours, theirs = ([Sampler(p, (1, 2, 3), 97) for p in params] for _ in range(2))
    for _ in range(3):
        found, expected = device_sampler.sample(logits, ours), sample(logits, theirs)
        assert [isinstance(each, BadLogits) for each in found] == [isinstance(each, BadLogits) for each in expected]
        for one, other, sampler, twin in zip(found, expected, ours, theirs, strict=True):
            if not isinstance(one, BadLogits) and not isinstance(other, BadLogits):
                assert one == other
                sampler.commit(one.token_id)
                twin.commit(other.token_id)


def test_greedy_choices_without_a_look() -> None:
    logits = torch.randint(-3, 3, (5, 97), generator=torch.Generator().manual_seed(0)).float()
    logits[2, 4] = torch.nan
    samplers = [Sampler(SamplingParams(temperature=0, seed=0), (1,), 97) for _ in range(5)]
    found, expected = device_sampler.sample(logits, samplers), sample(logits, samplers)
    assert [getattr(each, "token_id", None) for each in found] == [getattr(e, "token_id", None) for e in expected]


# What goes to the device


def test_what_is_sent_together_arrives_apart() -> None:
    """On the device that has no memory there is nothing to compare but shapes; there the way is that of a GPU."""
    parts = (torch.arange(3), torch.zeros(0, dtype=torch.int32), torch.ones(2, 5, dtype=torch.int16))
    assert all(a is b for a, b in zip(sent(torch.device("cpu"), *parts), parts, strict=True))
    for there, part in zip(sent(torch.device("meta"), *parts), parts, strict=True):
        assert (there.shape, there.dtype, there.device.type) == (part.shape, part.dtype, "meta")


def test_a_step_without_a_cache_lies_where_its_rows_do() -> None:
    assert ForwardBatch((3, 2), 3, device="meta").positions.device.type == "meta"


def test_a_cache_tells_the_device_and_keeps_its_table(decoder: Decoder) -> None:
    pages = cache.pool(decoder.config, 4, decoder.lossless, "meta")
    view = KVCache.over(pages, torch.tensor([[2, 1], [3, 0]], dtype=torch.int32), [70, 3])
    place = view.place((1, 2))
    assert place.block_tables.device.type == place.slot_mapping.device.type == place.row_starts.device.type == "meta"
    assert view.block_tables.device.type == "cpu"
