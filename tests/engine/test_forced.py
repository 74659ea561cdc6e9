"""Tokens that a constraint forces ride as drafts: the same answers to the bit, in fewer steps, with no drafter asked
for."""

from __future__ import annotations

import json
import os
import random as sources
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from attar import faults
from attar.engine.engine import Engine
from attar.engine.llm.llm import LLM
from attar.kernels import dispatch
from attar.model.decoder import Decoder
from attar.protocol.grammar import Grammar
from attar.protocol.messages import Embed, Finished, Submit
from attar.protocol.request import SamplingParams
from attar.protocol.scheduler_config import SchedulerConfig
from attar.protocol.speculation import FORCED_STEP_DRAFTS
from attar.sampling.drafters.suffix import SuffixDrafter
from attar.text.tokenizer import Tokenizer
from tests.engine.conftest import ROOM, TIGHT, answers, make_engine, run, run_as_they_come
from tests.engine.test_grammar import JSON, WORD
from tests.engine.test_speculation import Broken, Known
from tests.engine.test_speculation_schedules import Foreseeing, texts_of

SEEDS = int(os.environ.get("TEST_FORCED_SEEDS", "12"))
FIRST = int(os.environ.get("TEST_FORCED_FIRST", "0"))
FORCING = SchedulerConfig(max_step_tokens=48, max_drafts=FORCED_STEP_DRAFTS)
KEYS = Grammar.json_schema({
    "type": "object", "additionalProperties": False, "required": ["temperature", "unit", "place"],
    "properties": {
        "temperature": {"type": "integer", "minimum": 0, "maximum": 99}, "unit": {"enum": ["celsius", "fahrenheit"]},
        "place": {"type": "object", "additionalProperties": False, "required": ["country"],
                  "properties": {"country": {"type": "string", "maxLength": 5}}},
    },
})  # fmt: skip
LIST = Grammar("gbnf", 'root ::= "The answers are: " item (", " item)* "."\nitem ::= "yes, sir" | "no, madam" | [0-9]')
GRAMMARS = [
    JSON, WORD, KEYS, LIST, Grammar.json_object("[ \\n]{0,2}"), Grammar.choice(["It was the best", "It was the worst"]),
    Grammar("regex", r"élan vital: \d{2}(, né en \d{4})?"), None,
]  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer(demo: Any) -> Tokenizer:
    return Tokenizer.load(demo)


@pytest.fixture(scope="module")
def make(tiny_decoder: Callable[..., Decoder], tokenizer: Tokenizer) -> Callable[..., Engine]:
    if (store := dispatch.store("int8g32")) is None:
        pytest.skip("the native kernels are off or do not load")
    decoder = tiny_decoder(scheme="w4g32", store=store, vocab=tokenizer.vocab_size + 5)
    return lambda **more: make_engine(decoder, tokenizer=tokenizer, eos_ids=tokenizer.eos_ids, **more)


def ask(id: str, grammar: Grammar | None, seed: int, **params: Any) -> Submit:
    return Submit(id, (5, 6, 7, 8), SamplingParams(seed=seed, **{"max_tokens": 80, **params}), grammar=grammar)


def test_forced_tokens_save_steps_and_change_nothing(make: Callable[..., Engine]) -> None:
    asks: list[Submit | Embed] = [ask("a", KEYS, 1, logprobs=2)]
    plain, forcing = make(), make(limits=FORCING)
    assert plain.speculation is None
    events = run(forcing, asks)
    assert answers(events) == answers(run(plain, asks))
    found = forcing.stats()
    assert found.forced_tokens == found.accepted_tokens > 10
    assert found.steps == plain.steps - found.accepted_tokens
    (end,) = [event for event in events if isinstance(event, Finished)]
    assert end.report is not None
    assert end.report.forced_tokens == found.forced_tokens
    off: list[Submit | Embed] = [ask("a", KEYS, 1, logprobs=2, draft_tokens=0)]
    quiet = make(limits=FORCING)
    assert answers(run(quiet, off)) == answers(events)
    assert quiet.steps == plain.steps


def test_trusted_tokens_stay_and_the_difference_is_counted(make: Callable[..., Engine], tokenizer: Tokenizer) -> None:
    """Every forced draft stays. A text of which none was drawn otherwise is the one without trust."""
    for seed in range(8):
        made, plain = make(limits=FORCING), make(limits=FORCING)
        events = run(made, [ask("a", KEYS, seed, trust_forced=True)])
        found, before = made.stats(), texts_of(run(plain, [ask("a", KEYS, seed)]))
        assert found.accepted_tokens == found.forced_tokens > 0
        assert found.drafted_tokens - found.accepted_tokens <= 1  # where a text ends with its draft, that saved no step
        (end,) = [event for event in events if isinstance(event, Finished)]
        assert end.report is not None
        assert end.report.overruled_tokens == found.overruled_tokens <= found.forced_tokens
        if not found.overruled_tokens:
            assert texts_of(events) == before
        (tokens,) = texts_of(events).values()
        text = tokenizer.decode([token for token in tokens if token not in tokenizer.eos_ids])
        assert text.startswith('{"temperature": ')
        if "}" in text[-2:]:
            assert json.loads(text).keys() == {"temperature", "unit", "place"}


def test_a_request_without_a_constraint_has_none(make: Callable[..., Engine]) -> None:
    made = make(limits=FORCING)
    run(made, [ask("a", None, 1)])
    assert made.speculation is not None
    assert made.speculation.drafted == 0
    assert not made.speculation.pace.costs._steps  # nothing is measured for it either


def test_drafts_of_a_drafter_go_on_behind_forced_ones(make: Callable[..., Engine]) -> None:
    asks: list[Submit | Embed] = [ask("a", KEYS, 1)]
    text = texts_of(run(make(), asks))
    forcing = make(limits=FORCING)
    run(forcing, asks)
    both = make(limits=replace(FORCING, max_drafts=16), drafter=Known(text), draft_tokens=16)
    assert texts_of(run(both, asks)) == text
    assert both.stats().forced_tokens > 10
    assert both.steps < forcing.steps * 0.7
    # A guess that contradicts the constraint gives way to what is forced.
    wrong = make(limits=FORCING, drafter=Known({"a#0": [3] * 80}), draft_tokens=4)
    assert texts_of(run(wrong, asks)) == text
    assert wrong.stats().forced_tokens > 10


def test_a_broken_drafter_costs_no_forced_token(make: Callable[..., Engine]) -> None:
    asks: list[Submit | Embed] = [ask("a", KEYS, 1)]
    broken, forcing = make(limits=FORCING, drafter=Broken()), make(limits=FORCING)
    assert answers(run(broken, asks)) == answers(run(forcing, asks))
    assert broken.stats().forced_tokens > 10


def test_a_fault_costs_the_drafts_of_its_step(make: Callable[..., Engine]) -> None:
    asks: list[Submit | Embed] = [ask("a", KEYS, 1)]
    expected = answers(run(make(), asks))
    made = make(limits=FORCING)
    faults.arm(faults.Fault("draft.propose", after=1))
    assert answers(run(made, asks)) == expected
    assert made.stats().draft_errors == 1


@pytest.mark.parametrize("seed", range(FIRST, FIRST + SEEDS))
def test_no_schedule_of_constrained_requests_changes_a_bit(make: Callable[..., Engine], seed: int) -> None:
    draw = sources.Random(-(2**20) - seed)
    asks: list[Submit | Embed] = []
    for number in range(8):
        params: dict[str, Any] = draw.choice([
            {"temperature": 0}, {"temperature": 1.0}, {"temperature": 2.0, "top_p": 0.9}, {"top_k": 9, "min_p": 0.01},
            {"repetition_penalty": 1.3, "presence_penalty": 0.5}, {"logit_bias": {9: 4.0}, "logprobs": 2},
        ])  # fmt: skip
        params |= draw.choice([{}, {"stop": ("m",)}, {"draft_tokens": 2}, {"max_tokens": draw.randrange(1, 40)}])
        asks.append(ask(f"{number}", draw.choice(GRAMMARS), draw.randrange(9), **params))
    one = make()
    events = [event for each in asks for event in run(one, [each])]
    limits = SchedulerConfig(
        max_running=draw.choice((1, 3, 8)), max_step_tokens=draw.choice((8, 17, 64)), max_drafts=draw.choice((3, 7, 16))
    )
    replay = Foreseeing(texts_of(events), draw, right=0.8)
    drafter = draw.choice((None, None, replay, SuffixDrafter()))
    made = make(
        blocks=draw.choice((ROOM, TIGHT)), limits=limits, drafter=drafter, overlaps=draw.random() < 0.2,
        draft_tokens=draw.choice((None, 7)) if drafter else None,
    )  # fmt: skip
    found, alone = answers(run_as_they_come(made, asks, draw)), answers(events)
    assert found.keys() == alone.keys()
    for key, answer in found.items():
        assert answer == alone[key], f"choice {key}"
    made.scheduler.check()
    assert made.pool.active == 0
    assert made.speculation is None or not made.speculation._accounts


def test_llm_drafts_them_without_being_asked(demo: Any) -> None:
    llm = LLM(demo)
    (done,) = llm.generate(["Weather: "], SamplingParams(max_tokens=80, seed=1), constraint=KEYS)
    assert llm.running.engine is not None
    assert llm.running.engine.stats().forced_tokens > 10
    params = SamplingParams(max_tokens=80, seed=1, draft_tokens=0)
    assert llm.generate(["Weather: "], params, constraint=KEYS) == [done]
    if done.finish_reason == "stop":
        assert json.loads(done.text).keys() == {"temperature", "unit", "place"}
