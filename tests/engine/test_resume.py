"""Answers that another engine began and this one continues: the same tokens, text and log probabilities as of one.

The table of features is that of docs/serving.md, by the embedded model. Each request is cut at several places.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from attar.checkpoints.adapters import lora
from attar.engine.engine import Engine
from attar.engine.llm.llm import LLM
from attar.execution import kv_cache
from attar.kv.eviction import Eviction
from attar.kv.sparse import SparseAttention
from attar.kv.sparse_prefill import SparsePrefill
from attar.protocol.grammar import Grammar
from attar.protocol.messages import Delta, Event, Failed, Finished, PromptLogprobs, Submit
from attar.protocol.reasoning import ReasoningSection
from attar.protocol.request import SamplingParams
from attar.protocol.scheduler_config import SchedulerConfig
from attar.sampling.drafters.suffix import SuffixDrafter
from attar.text.tools.constraints import constraint
from attar.text.tools.formats import detect
from attar.text.tools.tool import Tool, ToolChoice
from tests.engine.conftest import make_engine, run
from tests.engine.test_adapters import save
from tests.text.tools.families import HERMES

CONTEXT = 256
TEXT = 4 * "Once upon a time there was a little fox. " + "Once upon a time there was a little"
TOKENS = 24
CUTS = (1, 2, 7, 23)
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}, "ok": {"type": "boolean"}},
    "required": ["name", "age", "ok"],
    "additionalProperties": False,
}
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": TOKENS, "ignore_eos": True}
SEEDED: dict[str, Any] = {"temperature": 0.9, "seed": 7, "max_tokens": TOKENS, "ignore_eos": True}
FEATURES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "greedy": ({}, {"params": SamplingParams(**GREEDY)}),
    "sampled": ({}, {"params": SamplingParams(**SEEDED, top_k=40, top_p=0.95, min_p=0.02)}),
    "penalties": (
        {},
        {
            "params": SamplingParams(
                **SEEDED, repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.3, min_tokens=5,
                logit_bias={40: 2.0},
            )
        },
    ),
    "n": ({}, {"params": SamplingParams(**SEEDED), "n": 3}),
    "logprobs": ({}, {"params": SamplingParams(**SEEDED, logprobs=3, prompt_logprobs=1)}),
    "stop strings": ({}, {"params": SamplingParams(**SEEDED, stop=(" she", " it was", "zzz"))}),
    "grammar": ({}, {"params": SamplingParams(temperature=0.8, seed=3, max_tokens=48), "grammar": SCHEMA}),
    "grammar, n and logprobs": (
        {}, {"params": SamplingParams(temperature=1.0, seed=5, max_tokens=48, logprobs=1), "grammar": SCHEMA, "n": 2}
    ),
    "tools": (
        {},
        {
            "params": SamplingParams(temperature=0.8, seed=3, max_tokens=64),
            "tools": (Tool("look_up", parameters=SCHEMA),),
        },
    ),
    "reasoning": (
        {},
        {
            "params": SamplingParams(temperature=0.8, seed=3, max_tokens=48),
            "grammar": SCHEMA,
            "reasoning": ReasoningSection(5, 6, opened=True, budget=9),
        },
    ),
    "speculation": ({"drafter": SuffixDrafter, "draft_tokens": 4}, {"params": SamplingParams(**GREEDY)}),
    "speculation, sampled": ({"drafter": SuffixDrafter}, {"params": SamplingParams(**SEEDED)}),
    "speculation, grammar": (
        {"drafter": SuffixDrafter},
        {"params": SamplingParams(temperature=0.8, seed=3, max_tokens=48), "grammar": SCHEMA},
    ),
    "LoRA": ({}, {"params": SamplingParams(**SEEDED), "adapter": "tone"}),
    "sparse attention": ({"sparse": SparseAttention(topk=32, dense_below=32)}, {"params": SamplingParams(**SEEDED)}),
    "sparse prefill": ({"prefill": SparsePrefill.parse("skip:0.05")}, {"params": SamplingParams(**SEEDED)}),
    **{
        f"KV eviction, {policy.policy}": (
            {"evictions": (policy,)},
            {"params": SamplingParams(**SEEDED), "prompt": tuple(5 + at * 37 % 90 for at in range(120))},
        )
        for policy in (Eviction("sink", 64, 4), Eviction("snapkv", 64))
    },
    **{kv: ({"kv": kv}, {"params": SamplingParams(**SEEDED)}) for kv in ("int8", "klt4", "klt2", "kivi4", "kivi2")},
}  # fmt: skip

Answer = dict[int, tuple[list[int], str, list[object], object]]


@pytest.fixture(scope="module")
def llm(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> LLM:
    made = LLM(demo, verify=False)
    folder = tmp_path_factory.mktemp("adapters") / "tone"
    config = made.decoder.config
    save(folder, {f"model.layers.{at}.mlp.down_proj": (config.hidden, config.intermediate) for at in range(2)}, 1)
    lora.install(made.decoder, 1, folder, demo)
    return made


@pytest.fixture(scope="module")
def make(llm: LLM) -> Callable[..., Engine]:
    def engine(drafter: Any = None, sparse: Any = None, **how: Any) -> Engine:
        limits = SchedulerConfig(max_step_tokens=64, max_drafts=0 if drafter is None else 16)
        layers = None if sparse is None else kv_cache.sparse_layers_of(llm.decoder, sparse)
        return make_engine(
            llm.decoder, limits=limits, tokenizer=llm.tokenizer, context=CONTEXT, adapters=("tone",), sparse=layers,
            drafter=None if drafter is None else drafter(), **how,
        )  # fmt: skip

    return engine


def submit(llm: LLM, how: dict[str, Any]) -> Submit:
    grammar, tools = how.get("grammar"), how.get("tools")
    proven = None if grammar is None else Grammar.json_schema(grammar)
    if tools is not None:
        must_call = constraint(detect(llm.tokenizer, HERMES), tools, ToolChoice("required"), lambda grammar: None)
        assert must_call is not None
        proven = must_call.grammar
    rest = {name: value for name, value in how.items() if name != "tools"}
    return Submit("a", **{"prompt": tuple(llm.tokenizer.encode(TEXT))} | rest | {"grammar": proven})


def answer(events: list[Event]) -> Answer:
    found: Answer = {}
    for event in events:
        assert not isinstance(event, Failed), event
        if isinstance(event, Delta):
            tokens, text, logprobs, _ = found.setdefault(event.choice, ([], "", [], None))
            told = [*logprobs, *(event.logprobs or ())]
            found[event.choice] = ([*tokens, *event.token_ids], text + event.text, told, None)
        elif isinstance(event, Finished):
            tokens, text, logprobs, _ = found[event.choice]
            found[event.choice] = (tokens, text, logprobs, (event.reason, event.completion_tokens, event.stop))
    return found


def cut(whole: Answer, events: list[Event], at: int) -> tuple[tuple[int, ...] | None, ...]:
    """What each choice has when `at` tokens of it were told; None where it has ended."""
    return tuple(None if len(whole[choice][0]) <= at else tuple(whole[choice][0][:at]) for choice in sorted(whole))


@pytest.mark.parametrize("feature", FEATURES)
def test_the_rest_of_an_answer_is_the_same_from_another_engine(
    feature: str, make: Callable[..., Engine], llm: LLM
) -> None:
    how, asked = FEATURES[feature]
    ask = submit(llm, asked)
    first, second = make(**how), make(**how)
    events = run(first, [ask])
    whole = answer(events)
    for at in CUTS:
        known = cut(whole, events, at)
        if all(each is None for each in known):
            continue
        told = run(second, [msgspec.structs.replace(ask, generated=known)])
        assert not any(isinstance(event, PromptLogprobs) for event in told)
        rest = answer(told)
        assert set(rest) == {choice for choice, each in enumerate(known) if each is not None}
        for choice, (tokens, text, logprobs, end) in rest.items():
            all_tokens, all_text, all_logprobs, all_end = whole[choice]
            assert tokens == all_tokens[at:], f"cut at {at}"
            assert text == all_text[len(all_text) - len(text) :]
            assert logprobs == all_logprobs[len(all_logprobs) - len(logprobs) :]
            assert end == all_end
        assert {event.report.prompt_tokens for event in told if isinstance(event, Finished) and event.report} == {
            len(ask.prompt)
        }


def test_text_is_told_once_even_where_a_character_or_a_stop_string_is_cut(
    make: Callable[..., Engine], llm: LLM
) -> None:
    """The text of both parts is the whole text, at every cut."""
    ask = submit(llm, FEATURES["stop strings"][1])
    engine = make()
    events = [event for event in run(engine, [ask]) if isinstance(event, Delta)]
    whole = "".join(event.text for event in events)
    for at in range(1, len(events)):
        known = tuple(token for event in events[:at] for token in event.token_ids)
        rest = run(engine, [msgspec.structs.replace(ask, generated=(known,))])
        before = "".join(event.text for event in events[:at])
        assert before + "".join(event.text for event in rest if isinstance(event, Delta)) == whole


@pytest.mark.parametrize("generated", [((1,), (2,)), (None,), ((10**6,),), (tuple(range(5, 5 + TOKENS)),)])
def test_tokens_that_cannot_be_continued_are_refused(
    generated: tuple[Any, ...], make: Callable[..., Engine], llm: LLM
) -> None:
    """Of another number of choices, of none, outside the vocabulary, and as many as were asked for."""
    ask = msgspec.structs.replace(submit(llm, FEATURES["greedy"][1]), generated=generated)
    events = run(make(), [ask])
    assert [event.code for event in events if isinstance(event, Failed)] == ["invalid"]
