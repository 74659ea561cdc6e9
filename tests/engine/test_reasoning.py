"""Answers with a reasoning section: a budget holds, a constraint holds behind it, and drafts change nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from attar.engine.engine import Engine
from attar.kernels import dispatch
from attar.model.decoder import Decoder
from attar.protocol.grammar import Grammar
from attar.protocol.messages import Embed, Event, Failed, Finished, Submit
from attar.protocol.reasoning import ReasoningSection
from attar.protocol.request import SamplingParams
from attar.protocol.scheduler_config import SchedulerConfig
from attar.protocol.speculation import FORCED_STEP_DRAFTS
from attar.sampling.drafters.suffix import SuffixDrafter
from attar.text.tokenizer import Tokenizer
from tests.engine.conftest import answers, make_engine, run
from tests.engine.test_grammar import WORD

FORCING = SchedulerConfig(max_step_tokens=48, max_drafts=FORCED_STEP_DRAFTS)
START, END = 20, 21
PROMPT = (5, 6, 7, 8)
SEEDS = 12


@pytest.fixture(scope="module")
def tokenizer(demo: Any) -> Tokenizer:
    return Tokenizer.load(demo)


@pytest.fixture(scope="module")
def make(tiny_decoder: Callable[..., Decoder], tokenizer: Tokenizer) -> Callable[..., Engine]:
    if (store := dispatch.store("int8g32")) is None:
        pytest.skip("the native kernels are off or do not load")
    decoder = tiny_decoder(scheme="w4g32", store=store, vocab=tokenizer.vocab_size + 5)
    return lambda **more: make_engine(decoder, tokenizer=tokenizer, eos_ids=tokenizer.eos_ids, **more)


def asks(grammar: Grammar | None, opened: bool, budget: int | None, **params: Any) -> list[Submit | Embed]:
    section = ReasoningSection(START, END, opened, budget)
    bias = {} if opened else {START: 100.0}
    own = {"max_tokens": 48, "logit_bias": bias, **params}
    return [
        Submit(f"{seed}", PROMPT, SamplingParams(seed=seed, **own), grammar=grammar, reasoning=section)
        for seed in range(SEEDS)
    ]


def tokens(events: list[Event]) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {}
    for event in events:
        for token in getattr(event, "token_ids", ()):
            found[event.id] = (*found.get(event.id, ()), token)
    return found


@pytest.mark.parametrize("overlaps", [False, True], ids=["waits", "overlaps"])
def test_a_budget_ends_the_section_and_the_constraint_follows(
    make: Callable[..., Engine], tokenizer: Tokenizer, overlaps: bool
) -> None:
    events = run(make(overlaps=overlaps), asks(WORD, True, 7))
    found = tokens(events)
    assert len(found) == SEEDS
    reasons = {event.id: event.reason for event in events if isinstance(event, Finished)}
    for id, ids in found.items():
        assert END in ids[:8], "a section of more than 7 tokens"
        text = tokenizer.decode(ids[ids.index(END) + 1 :])
        assert reasons[id] == "stop"
        assert len(text) == 6
        assert set(text) == {"a", "b"}


def test_a_section_that_the_answer_opens_is_counted_from_there(make: Callable[..., Engine]) -> None:
    for ids in tokens(run(make(), asks(None, False, 3, logit_bias={START: 100.0, END: -100.0}))).values():
        assert ids[0] == START
        assert ids.index(END) == 4


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("opened", [False, True])
@pytest.mark.parametrize("grammar", [None, WORD], ids=["free", "constrained"])
def test_drafts_change_nothing(
    make: Callable[..., Engine], grammar: Grammar | None, opened: bool, temperature: float
) -> None:
    given = asks(grammar, opened, 5, temperature=temperature, repetition_penalty=1.1)
    plain = answers(run(make(), given))
    forcing = make(limits=FORCING)
    assert answers(run(forcing, given)) == plain
    assert forcing.stats().forced_tokens > 0
    assert answers(run(make(drafter=SuffixDrafter(), draft_tokens=4), given)) == plain


def test_markers_outside_the_vocabulary_are_refused(make: Callable[..., Engine]) -> None:
    section = ReasoningSection(START, 1 << 20, budget=1)
    (event,) = run(make(), [Submit("a", PROMPT, SamplingParams(), reasoning=section)])
    assert isinstance(event, Failed)
    assert event.code == "invalid"
