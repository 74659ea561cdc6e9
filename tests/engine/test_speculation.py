"""Speculative decoding changes no text. `test_speculation_schedules.py` has random schedules."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from attar import faults
from attar.kernels import dispatch
from attar.model.decoder import Decoder
from attar.protocol.messages import Embed, Finished, Submit
from attar.protocol.request import SamplingParams
from attar.protocol.scheduler_config import SchedulerConfig
from attar.sampling import draft_gains
from attar.sampling.drafters.drafter import Draft, DraftRequest
from attar.sampling.drafters.first_of import FirstOf
from attar.sampling.drafters.model import ModelDrafter
from attar.sampling.drafters.suffix import SuffixDrafter
from attar.sampling.sampler import Sampler
from attar.scheduling.sequence import Sequence as Tokens
from attar.text.tokenizer import Tokenizer
from tests.engine.conftest import CONTEXT, answers, make_engine, run
from tests.engine.test_grammar import JSON, WORD
from tests.engine.test_speculation_schedules import LONG, Foreseeing, texts_of

DRAFTING = SchedulerConfig(max_step_tokens=48, max_drafts=16)


def test_right_drafts_save_steps_and_wrong_ones_cost_none(decoder: Decoder) -> None:
    ask = Submit("a", (5, 6, 7), SamplingParams(max_tokens=33, temperature=0))
    plain = make_engine(decoder)
    text = texts_of(run(plain, [ask]))
    right = make_engine(decoder, limits=DRAFTING, drafter=Known(text), draft_tokens=7)
    assert texts_of(run(right, [ask])) == text
    assert right.steps == 1 + 4  # the prompt, and 32 tokens of which 28 were drafts
    assert right.speculation is not None
    assert (right.speculation.drafted, right.speculation.accepted) == (28, 28)
    wrong = make_engine(
        decoder, limits=DRAFTING, drafter=Known({"a#0": [1 - (t & 1) for t in text["a#0"]]}), draft_tokens=7
    )
    assert texts_of(run(wrong, [ask])) == text
    assert wrong.steps == plain.steps
    assert wrong.speculation is not None
    assert wrong.speculation.accepted < wrong.speculation.drafted / 7


def test_what_speculation_gained_is_told(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """By position, and for a request in seconds: those of the steps saved, less those of drafting."""
    now = iter(range(10**6))
    monkeypatch.setattr(draft_gains, "time", SimpleNamespace(perf_counter=lambda: next(now) / 1000))
    ask = Submit("a", (5, 6, 7), SamplingParams(max_tokens=33, temperature=0))
    text = texts_of(run(make_engine(decoder), [ask]))
    text["a#0"][3] ^= 1
    steps = iter(range(10**6))
    made = make_engine(
        decoder, limits=DRAFTING, drafter=Known(text), draft_tokens=7, clock=lambda: float(next(steps) // 4)
    )
    (end,) = [event for event in run(made, [ask]) if isinstance(event, Finished)]
    stats, report = made.stats(), end.report
    assert report is not None
    assert stats.drafted_by_position[0] == stats.draft_steps == report.draft_steps == made.steps - 1
    assert stats.accepted_by_position[0] == stats.accepted_by_position[1] == stats.draft_steps
    assert sum(stats.drafted_by_position) == stats.drafted_tokens == report.drafted_tokens
    assert sum(stats.accepted_by_position) == stats.accepted_tokens == report.accepted_tokens
    assert report.draft_steps + report.accepted_tokens == 32
    assert 0 < report.draft_seconds <= stats.draft_seconds < 1
    assert report.saved_seconds > 0

    wrong = make_engine(decoder, limits=DRAFTING, drafter=Known({"a#0": [-1] * 40}), draft_tokens=7)
    (end,) = [event for event in run(wrong, [ask]) if isinstance(event, Finished)]
    assert end.report is not None
    assert end.report.saved_seconds < 0  # drafting took its time and gave nothing


class Known:
    """A drafter that repeats given texts."""

    name, costly = "known", False

    def __init__(self, texts: dict[str, list[int]]) -> None:
        self.texts = texts

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        return [
            Draft(tuple(self.texts[each.sequence.id][each.sequence.output :][: each.limit]), 1) for each in requests
        ]

    def forget(self, sequence: Tokens) -> None:
        pass

    def reset(self) -> None:
        pass


def test_an_end_within_drafts_cuts_everything_behind_it(decoder: Decoder) -> None:
    free = texts_of(run(make_engine(decoder), [Submit("a", (5, 6), SamplingParams(max_tokens=20, temperature=0))]))
    token = free["a#0"][4]
    params = SamplingParams(max_tokens=20, temperature=0, stop_token_ids=(token,))
    made = make_engine(decoder, limits=DRAFTING, drafter=Known(free), draft_tokens=8)
    found = answers(run(made, [Submit("a", (5, 6), params)]))
    first = free["a#0"].index(token)
    assert found["a", 0][-1] == ("stop", first + 1)
    # The prefix tree holds what was computed of the text, and nothing of the drafts behind its end.
    longest = max(len(before) + len(node.tokens) for _, before, node in made.cache.nodes())
    assert longest <= 2 + first


class Broken:
    """A drafter that always fails."""

    name, costly = "broken", False

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        raise RuntimeError("no")

    def forget(self, sequence: Tokens) -> None:
        raise RuntimeError("no")

    def reset(self) -> None:
        pass


def test_a_broken_drafter_costs_nothing_but_its_drafts(decoder: Decoder) -> None:
    asks: list[Submit | Embed] = [Submit("a", (5, 6), SamplingParams(max_tokens=12, seed=1))]
    made = make_engine(decoder, limits=DRAFTING, drafter=Broken())
    assert answers(run(made, asks)) == answers(run(make_engine(decoder), asks))
    assert made.speculation is not None
    assert made.speculation.errors == 10 + 1  # of each decode step but the last, and of its end


POINT = "draft.propose"  # the fault point of this file


def test_a_fault_in_drafting_costs_the_drafts_of_its_step(decoder: Decoder) -> None:
    ask = Submit("a", (5, 6, 7), SamplingParams(max_tokens=33, temperature=0))
    text = texts_of(run(make_engine(decoder), [ask]))
    made = make_engine(decoder, limits=DRAFTING, drafter=Known(text), draft_tokens=7)
    faults.arm(faults.Fault(POINT, after=1))
    assert texts_of(run(made, [ask])) == text
    assert made.speculation is not None
    assert made.speculation.errors == 1
    assert made.speculation.drafted == 27  # a step of one token, and fewer are left for the last


def test_states_along_drafts_are_those_of_committed_tokens() -> None:
    params = SamplingParams(
        repetition_penalty=1.4, presence_penalty=0.5, frequency_penalty=0.3, min_tokens=3, logit_bias={2: 1.5}, seed=3
    )
    ending = frozenset({4})
    for drafts in ([], [1], [4, 4, 2, 7, 1]):
        state = Sampler(params, [1, 2, 3], 9, ending=ending)
        state.commit(5)
        before = list(state.changes)
        along = state.along(drafts)
        assert list(state.changes) == before
        other = Sampler(params, [1, 2, 3], 9, ending=ending)
        other.commit(5)
        for at, token in zip(along, [*drafts, None], strict=True):
            assert (at.index, sorted(at.changes)) == (other.index, sorted(other.changes))
            assert at.draw() == other.draw()
            if token is not None:
                other.commit(token)


def test_states_along_a_tree_are_those_along_each_path() -> None:
    params = SamplingParams(repetition_penalty=1.4, frequency_penalty=0.3, min_tokens=2, seed=3)
    state = Sampler(params, [1, 2, 3], 9, ending=frozenset({4}))
    drafts, parents = (4, 2, 2, 7, 1), (0, 1, 0, 3, 3)
    paths = ([], [4], [4, 2], [2], [2, 7], [2, 1])
    for at, path in zip(state.along(drafts, parents), paths, strict=True):
        other = state.along(path)[-1]
        assert (at.index, list(at.changes), at.ahead) == (other.index, list(other.changes), tuple(path))


def test_constrained_answers_are_those_without_drafts(demo: Any, tiny_decoder: Callable[..., Decoder]) -> None:
    """Drafts that the constraint forbids, and those behind its end, are wrong drafts like any other."""
    tokenizer, store = Tokenizer.load(demo), dispatch.store("int8g32")
    assert store is not None
    made = tiny_decoder(scheme="w4g32", store=store, vocab=tokenizer.vocab_size + 5)
    how = {"tokenizer": tokenizer, "eos_ids": tokenizer.eos_ids}
    asks: list[Submit | Embed] = [
        Submit(
            f"{i}", (5, 6, 7), SamplingParams(max_tokens=60, temperature=i % 3 / 2, seed=i, logprobs=1), grammar=each
        )
        for i, each in enumerate([JSON, WORD] * 4)
    ]
    events = run(make_engine(made, **how), asks)
    for drafter in (SuffixDrafter(), Foreseeing(texts_of(events), random.Random(0), 0.8)):
        for tokens in (None, LONG):
            engine = make_engine(made, limits=DRAFTING, drafter=drafter, draft_tokens=tokens, **how)
            assert answers(run(engine, asks)) == answers(events)


def test_a_new_engine_finds_nothing_of_another_in_its_drafter(decoder: Decoder) -> None:
    """An engine that was broken off has told its drafter of no end."""
    ask = Submit("a", (5, 6, 5, 6, 5, 6), SamplingParams(max_tokens=30, temperature=0))
    suffix, model = SuffixDrafter(), ModelDrafter(decoder, CONTEXT, 1, decoder.config.vocab_size, blocks=2)
    for drafter in (suffix, model):
        made = make_engine(decoder, limits=DRAFTING, drafter=drafter, draft_tokens=3)
        made.submit(ask)
        for _ in range(4):
            made.step()
    assert suffix._known
    assert model.pool.free < model.pool.total
    for drafter in (suffix, model):
        make_engine(decoder, limits=DRAFTING, drafter=drafter)
    assert not suffix._known
    assert model.pool.free == model.pool.total


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.5])
def test_a_draft_model_that_is_the_target_is_always_right(decoder: Decoder, temperature: float) -> None:
    """Because both draw with the same noise, after the same filters and penalties."""
    params = SamplingParams(
        max_tokens=41, temperature=temperature, top_p=0.95, top_k=40, repetition_penalty=1.1, frequency_penalty=0.2,
        seed=4, min_tokens=5,
    )  # fmt: skip
    asks: list[Submit | Embed] = [Submit("a", (5, 6, 7) * 5, params, 2), Submit("b", (9,), params)]
    expected = answers(run(make_engine(decoder), asks))
    drafter = ModelDrafter(decoder, CONTEXT, 3, decoder.config.vocab_size, blocks=12)
    made = make_engine(decoder, limits=DRAFTING, drafter=drafter, draft_tokens=4)
    assert answers(run(made, asks)) == expected
    assert made.speculation is not None
    assert made.speculation.drafted == made.speculation.accepted > 80
    assert drafter.pool.free == drafter.pool.total, "blocks of sequences that have ended"


def test_a_draft_model_reads_again_what_it_had_no_room_for(decoder: Decoder) -> None:
    """Three sequences take turns in a cache for two."""
    params = SamplingParams(max_tokens=30, temperature=0)
    asks: list[Submit | Embed] = [Submit(f"{i}", (5 + i,) * 25, params) for i in range(3)]
    expected = answers(run(make_engine(decoder), asks))
    drafter = ModelDrafter(decoder, CONTEXT, 3, decoder.config.vocab_size, blocks=2)
    made = make_engine(decoder, limits=DRAFTING, drafter=drafter, draft_tokens=3)
    assert answers(run(made, asks)) == expected
    assert made.speculation is not None
    assert made.speculation.accepted > 20
    assert made.speculation.errors == 0


def test_a_long_match_is_copied_and_a_model_asked_elsewhere(decoder: Decoder) -> None:
    params = SamplingParams(max_tokens=60, temperature=0)
    asks = [Submit("loops", (5, 6, 7, 8) * 6, params), Submit("new", (9, 3), replace(params, max_tokens=8))]
    expected = answers(run(make_engine(decoder), asks))
    model = ModelDrafter(decoder, CONTEXT, 3, decoder.config.vocab_size)
    drafted: list[str] = []
    draft = model.draft

    def watched(requests: Sequence[DraftRequest]) -> list[Draft]:
        drafted.extend(request.sequence.id for request in requests)
        return draft(requests)

    model.draft = watched  # type: ignore[method-assign]
    combined = FirstOf(model)
    for tokens in (4, None):
        drafted.clear()
        made = make_engine(decoder, limits=DRAFTING, drafter=combined, draft_tokens=tokens)
        assert answers(run(made, asks)) == expected
        assert made.speculation is not None
        assert made.speculation.errors == 0
        assert not combined._matches
        if tokens:
            assert "new#0" in drafted
            assert drafted.count("loops#0") < made.steps / 2, "its text repeats itself"
            assert made.speculation.accepted > 40
    assert model.pool.free == model.pool.total
