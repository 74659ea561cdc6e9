"""Constrained answers of an engine: each that ends is valid, whatever logits, company and mishaps there are."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import jsonschema
import msgspec
import pytest
import torch

from attar.engine.engine import Engine
from attar.engine.llm.llm import LLM
from attar.kernels import dispatch
from attar.model.decoder import Decoder
from attar.protocol.grammar import Grammar
from attar.protocol.messages import Delta, Event, Failed, Finished, Submit
from attar.protocol.request import SamplingParams
from attar.protocol.scheduler_config import SchedulerConfig
from attar.sampling import masks
from attar.text.tokenizer import Tokenizer
from tests.engine.conftest import TIGHT, answers, make_engine, run
from tests.errors import user_error

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
        "kind": {"enum": ["a", "b", None]},
    },
    "required": ["name", "sizes", "kind"],
    "additionalProperties": False,
}
JSON = Grammar.json_schema(SCHEMA)
WORD = Grammar("regex", "(ab|ba){3}")
PROMPT = (5, 6, 7, 8)


@pytest.fixture(scope="module")
def tokenizer(demo: Any) -> Tokenizer:
    return Tokenizer.load(demo)


@pytest.fixture(scope="module")
def random(tiny_decoder: Callable[..., Decoder], tokenizer: Tokenizer) -> Decoder:
    """A model of random weights with the embedded model's vocabulary, and a few columns more."""
    store = dispatch.store("int8g32")
    if store is None:
        pytest.skip("the native kernels are off or do not load")
    return tiny_decoder(scheme="w4g32", store=store, vocab=tokenizer.vocab_size + 5)


@pytest.fixture(scope="module")
def make(random: Decoder, tokenizer: Tokenizer) -> Callable[..., Engine]:
    eos = tokenizer.eos_ids
    return lambda **more: make_engine(random, tokenizer=tokenizer, eos_ids=eos, **more)


def texts(events: list[Event]) -> dict[tuple[str, int], tuple[str, str]]:
    """Text and reason of each choice."""
    said: dict[tuple[str, int], str] = {}
    for event in events:
        if isinstance(event, Delta):
            said[event.id, event.choice] = said.get((event.id, event.choice), "") + event.text
    ends = {(event.id, event.choice): event.reason for event in events if isinstance(event, Finished)}
    return {key: (said.get(key, ""), ends[key]) for key in ends}


def asks(grammar: Grammar, count: int, **params: Any) -> list[Submit]:
    given = {"max_tokens": 120, **params}
    return [Submit(f"{i}", PROMPT, SamplingParams(seed=i, **given), grammar=grammar) for i in range(count)]


@pytest.mark.parametrize("overlaps", [False, True], ids=["waits", "overlaps"])
@pytest.mark.parametrize("temperature", [0.0, 1.0, 2.0])
def test_every_answer_that_stops_is_valid(make: Callable[..., Engine], temperature: float, overlaps: bool) -> None:
    found = texts(run(make(overlaps=overlaps), asks(JSON, 8, temperature=temperature, logprobs=1)))
    done = [text for text, reason in found.values() if reason == "stop"]
    assert len(found) == 8
    assert done
    for text in done:
        jsonschema.validate(json.loads(text), SCHEMA, jsonschema.Draft202012Validator)


def test_the_end_comes_with_the_last_token_that_may_be(make: Callable[..., Engine]) -> None:
    """Without asking for EOS; and where `max_tokens` comes before, the text is a beginning."""
    (whole,) = texts(run(make(), asks(WORD, 1))).values()
    assert whole[1] == "stop"
    assert len(whole[0]) == 6
    assert set(whole[0]) == {"a", "b"}
    events = run(make(), asks(WORD, 1))
    (end,) = [event for event in events if isinstance(event, Finished)]
    for most in range(1, end.completion_tokens + 1):
        ((text, reason),) = texts(run(make(), asks(WORD, 1, max_tokens=most))).values()
        assert whole[0].startswith(text), most
        assert reason == ("stop" if most == end.completion_tokens else "length")


def test_where_the_text_may_go_on_the_model_ends_it(make: Callable[..., Engine], tokenizer: Tokenizer) -> None:
    bias = dict.fromkeys(tokenizer.eos_ids, 100.0)
    (one,) = asks(Grammar("regex", "a{3,9}"), 1, logit_bias=bias)
    events = run(make(), [one])
    assert texts(events)["0", 0][1] == "stop"
    assert 3 <= len(texts(events)["0", 0][0]) <= 9
    last = [event.token_ids[-1] for event in events if isinstance(event, Delta)][-1]
    assert last in tokenizer.eos_ids


def test_choices_company_preemption_and_prefix_hits_change_no_token(make: Callable[..., Engine]) -> None:
    everyone = [
        Submit("json", PROMPT * 15, SamplingParams(max_tokens=60, seed=1, logprobs=2), n=3, grammar=JSON),
        Submit("free", PROMPT * 15, SamplingParams(max_tokens=40, seed=2, logit_bias={3: 2.0})),
        Submit("word", PROMPT * 15, SamplingParams(max_tokens=30, temperature=0, seed=0), grammar=WORD),
        Submit(
            "penal", PROMPT * 15, SamplingParams(max_tokens=60, seed=4, repetition_penalty=1.5, top_p=0.8), grammar=JSON
        ),
    ]
    alone = [answers(run(make(), [each])) for each in everyone]
    tight = make(blocks=TIGHT, limits=SchedulerConfig(max_step_tokens=48, headroom=0.0))
    together = answers(run(tight, everyone))
    assert tight.scheduler.preemptions
    assert together == {key: value for each in alone for key, value in each.items()}
    assert answers(run(tight, everyone)) == together


def test_stop_strings_cut_as_ever(make: Callable[..., Engine]) -> None:
    ((text, reason),) = texts(run(make(), asks(Grammar("regex", "a{2}b{2}c"), 1, stop=("bb",)))).values()
    assert (text, reason) == ("aa", "stop")


def test_a_mask_wins_over_biases(make: Callable[..., Engine], tokenizer: Tokenizer) -> None:
    a, b = (tokenizer.token_to_id(letter) for letter in "ab")
    ((text, _),) = texts(run(make(), asks(Grammar("regex", "a"), 1, logit_bias={a: -100.0, b: 100.0}))).values()
    assert text == "a"


def codes(events: list[Event]) -> list[str]:
    return [event.code for event in events if isinstance(event, Failed)]


def test_what_grows_past_its_limits_fails_alone(make: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    plain = asks(WORD, 1)[0]
    expected = answers(run(make(), [plain]))
    ahead, count = masks.mask, [0]

    def limited(found: Any) -> bytes | None:
        count[0] += 1
        if count[0] == 6:
            found.consume_token(0)  # into the state of an error, as a limit does
        return ahead(found)

    victim = msgspec.structs.replace(asks(JSON, 1)[0], id="victim")
    made = make()
    with monkeypatch.context() as patch:
        patch.setattr(masks, "mask", limited)
        assert codes(run(made, [victim])) == ["grammar_limit"]
    assert answers(run(made, [plain])) == expected


@pytest.mark.parametrize("params", [{"ignore_eos": True}, {"min_tokens": 2}], ids=str)
def test_what_contradicts_a_constraint_is_refused(make: Callable[..., Engine], params: dict[str, Any]) -> None:
    assert codes(run(make(), asks(WORD, 1, **params))) == ["invalid"]


def test_without_a_tokenizer_a_constraint_is_refused(random: Decoder) -> None:
    assert codes(run(make_engine(random), asks(WORD, 1))) == ["invalid"]


def test_what_does_not_compile_is_refused(make: Callable[..., Engine]) -> None:
    assert codes(run(make(), asks(Grammar("regex", "("), 1))) == ["invalid"]


def test_compiled_grammars_are_kept_within_bounds_and_by_salt(
    make: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[Grammar] = []
    real = masks.matcher

    def count(vocabulary: Any, grammar: Grammar) -> Any:
        compiled.append(grammar)
        return real(vocabulary, grammar)

    monkeypatch.setattr(masks, "matcher", count)
    monkeypatch.setattr(masks, "KEPT", 2)
    made = make()
    run(made, [msgspec.structs.replace(each, n=2) for each in asks(WORD, 2)])
    assert compiled == [WORD]
    run(made, [msgspec.structs.replace(each, cache_salt=b"other") for each in asks(WORD, 2)])
    assert compiled == [WORD, WORD]
    run(made, asks(JSON, 1))
    run(made, asks(WORD, 1))
    assert compiled == [WORD, WORD, JSON, WORD]


def test_compiled_grammars_are_kept_within_bytes(make: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    made = make().intake.masks
    small, large = Grammar("regex", "a{3}"), Grammar.choice([f"text {number}" for number in range(900)])
    monkeypatch.setattr(masks, "KEPT_BYTES", masks.compiled_bytes(large) + 1)
    for grammar in (small, WORD, large):
        made.mask(grammar)
    assert [size for _, size in made._known.values()] == [masks.compiled_bytes(large)]
    monkeypatch.setattr(masks, "KEPT_BYTES", 1)
    assert made.mask(large).allowed().any()  # usable, and not kept
    assert not made._known


def test_the_masks_columns_are_those_of_the_logits(make: Callable[..., Engine], random: Decoder) -> None:
    made = make()
    bits = made.intake.masks.mask(WORD).allowed()
    assert bits.dtype == torch.int32
    assert len(bits) == -(-random.config.vocab_size // 32)


def test_llm_takes_schemas_models_and_grammars(demo: Any) -> None:
    class Model:
        @classmethod
        def model_json_schema(cls) -> dict[str, Any]:
            return SCHEMA

    llm = LLM(demo)
    params = SamplingParams(max_tokens=100, seed=1)
    for constraint in (SCHEMA, Model, JSON):
        for done in llm.generate(["Once", "The"], params, constraint=constraint):
            if done.finish_reason == "stop":
                jsonschema.validate(json.loads(done.text), SCHEMA)
    assert "".join(llm.stream("It was", params, constraint=Grammar.choice(["yes", "no"]))) in ("yes", "no")
    with user_error("grammar_invalid", "/properties/a"):
        llm.generate("x", params, constraint={"properties": {"a": {"not": {}}}})
    with user_error("option_conflict", "ignore_eos"):
        llm.generate("x", SamplingParams(ignore_eos=True), constraint=JSON)
    assert llm.generate("x", SamplingParams(max_tokens=1, seed=0))[0].finish_reason == "length"


@pytest.mark.parametrize("overlaps", [False, True], ids=["waits", "overlaps"])
def test_answers_of_allowed_tokens_alone(make: Callable[..., Engine], tokenizer: Tokenizer, overlaps: bool) -> None:
    """Also beside answers that are free or constrained; an EOS token ends one only where it is allowed."""
    (end,) = tokenizer.eos_ids
    engine = make(overlaps=overlaps)
    allowed = {"none": [40, 41, 4000], "ends": [end]}
    asked = [
        Submit(name, PROMPT, SamplingParams(seed=1, max_tokens=24, allowed_token_ids=tokens))
        for name, tokens in allowed.items()
    ]
    events = run(engine, [*asked, *asks(JSON, 2), Submit("free", PROMPT, SamplingParams(seed=1, max_tokens=24))])
    made: dict[str, set[int]] = {name: set() for name in allowed}
    for event in events:
        if isinstance(event, Delta) and event.id in made:
            made[event.id].update(event.token_ids)
    assert made["none"]
    assert all(made[name] <= set(tokens) for name, tokens in allowed.items())
    reasons = {event.id: event.reason for event in events if isinstance(event, Finished)}
    assert (reasons["none"], reasons["ends"]) == ("length", "stop")
    only_end = SamplingParams(seed=1, max_tokens=24, min_tokens=2, allowed_token_ids=[end])
    beyond = SamplingParams(seed=1, max_tokens=24, allowed_token_ids=[10**6])
    for params, words in ((only_end, "min_tokens"), (beyond, "allowed_token_ids")):
        (failed,) = [event for event in run(engine, [Submit("x", PROMPT, params)]) if isinstance(event, Failed)]
        assert failed.code == "invalid"
        assert words in failed.message
