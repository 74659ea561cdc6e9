"""Speculative decoding changes no bit: random schedules with drafts, against the same requests without.

A seed makes everything: the requests (prompts with beginnings in common, chunked prefill, `n`, penalties, biases,
filters, log probabilities, stop strings, EOS, adapters, constraints, embeddings), the format of keys and values, the
scheduler's limits, when requests come, are cancelled or run out of time, faults at the named points, a shutdown in the
middle, the seconds of each step, and the drafter with the number of drafts of every step. What a request gets must be
what it gets without, or the beginning of it where it was ended early, and it must be ended early for a reason.

`make soak-speculation` runs 2,000 of them.
"""

from __future__ import annotations

import os
import random
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from torch import Tensor

from attar import faults
from attar.checkpoints.adapters import lora
from attar.checkpoints.sources import hf
from attar.compression.runs.pipeline import compress
from attar.engine import speculation
from attar.engine.engine import Engine
from attar.engine.requests.outputs import Choice
from attar.kernels import dispatch
from attar.kernels.operands import Linear
from attar.kv.schemes import SCHEMES
from attar.model.decoder import Decoder
from attar.model.drafts.early_exit import EarlyExit, early_exit
from attar.protocol.grammar import Grammar
from attar.protocol.messages import Delta, Embed, Event, Failed, Submit
from attar.protocol.scheduler_config import SchedulerConfig
from attar.sampling import draft_gains
from attar.sampling.drafters.drafter import Draft, Drafter, DraftRequest
from attar.sampling.drafters.early_exit import EarlyExitDrafter
from attar.sampling.drafters.first_of import FirstOf
from attar.sampling.drafters.lookahead import LookaheadDrafter
from attar.sampling.drafters.model import ModelDrafter
from attar.sampling.drafters.suffix import SuffixDrafter
from attar.scheduling import draft_tree
from attar.scheduling.sequence import Sequence as Tokens
from attar.scheduling.step_plan import StepPlan
from attar.text.convert import bytes_to_chars
from attar.text.tokenizer import Tokenizer
from tests.engine.conftest import CONTEXT, ROOM, TIGHT, Answers, answers, ask, make_engine, run
from tests.engine.test_adapters import save
from tests.engine.test_engine import some_requests

SEEDS = int(os.environ.get("TEST_SPECULATION_SEEDS", "16"))
FIRST = int(os.environ.get("TEST_SPECULATION_FIRST", "0"))
COUNT, LONG = 7, 8  # requests of a schedule, and drafts of a sequence in a step
VOCABULARY = 256
ADAPTERS = ("tone", "style")
EOS = frozenset(range(2, 10))
HAND_MADE = Grammar("regex", "stands for `RandomMask`")
LETTERS = Grammar("regex", "[a-z ]{3,30}")
OBJECT = Grammar(
    "json_schema",
    '{"type": "object", "properties": {"kind": {"enum": ["left", "right"]}, "count": {"type": "integer"}, '
    '"of": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3}}, "required": ["kind", "count", "of"], '
    '"additionalProperties": false}',
)
CHOICE = Grammar("choice", '["yes", "yesterday", "no", "north"]')
KINDS = ("scheduler.", "radix.", "pool.", "runner.", "sampler.", "draft.", "detokenizer.", "stops.", "engine.")
POINTS = [name for name in faults.POINTS if name.startswith(KINDS)]
EARLY = {"cancelled", "deadline", "shutdown", "internal"}


class RandomMask:
    """A constraint of no language: which tokens may come next is a function of the output, and so is where it ends."""

    def __init__(self, seed: str) -> None:
        self.seed, self.tokens, self.failed = seed, (), False  # type: tuple[str, tuple[int, ...], bool]

    def _bits(self, tokens: tuple[int, ...]) -> Tensor:
        words = random.Random(f"{self.seed} {tokens}").randbytes(VOCABULARY // 8)
        return torch.frombuffer(bytearray(words), dtype=torch.int32)

    def allowed(self, drafts: Sequence[int] = ()) -> Tensor:
        tokens = self.tokens
        for draft in drafts:
            if self._ends(tokens) or not self._bits(tokens)[draft // 32] >> draft % 32 & 1:
                return torch.zeros(VOCABULARY // 32, dtype=torch.int32)
            tokens = (*tokens, draft)
        return self._bits(tokens)

    def forced(self) -> bytes:
        return b""

    def consume(self, token_id: int) -> None:
        assert self._bits(self.tokens)[token_id // 32] >> token_id % 32 & 1, "a token that may not come"
        self.tokens = (*self.tokens, token_id)

    @property
    def finished(self) -> bool:
        return self._ends(self.tokens)

    def _ends(self, tokens: tuple[int, ...]) -> bool:
        return bool(tokens) and random.Random(f"end {self.seed} {tokens}").random() < 0.03


@dataclass
class Foreseeing:
    """A drafter that knows what is to come, and says it with a share of errors, in runs of any length; it may also
    propose what is no token, and raise. With `branching` its guesses are trees, in any order and sometimes of none."""

    texts: dict[str, list[int]]
    draw: random.Random
    right: float
    costly: bool = False
    name: str = "foreseeing"
    branching: bool = False
    held: set[str] = field(default_factory=set)

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        found = []
        for request in requests:
            self.held.add(request.sequence.id)
            at = request.sequence.output
            known = self.texts.get(request.sequence.id, [])[at : at + request.limit]
            guess = [t if self.draw.random() < self.right else self.draw.randrange(VOCABULARY) for t in known]
            guess = guess[: self.draw.randrange(LONG + 1)]
            if self.draw.random() < 0.05:
                guess.append(self.draw.choice([-1, VOCABULARY, 2**40]))
            parents = self._branched(guess) if self.branching and self.draw.random() < 0.9 else []
            more = self.draw.choice([0, 0, 30])  # than asked for
            parents += [self.draw.randrange(len(guess) + i + 1) for i in range(more)] if parents else []
            guess += [0] * more
            found.append(Draft(tuple(guess), self.draw.randrange(4), parents=tuple(parents)))
        if self.draw.random() < 0.02:
            raise RuntimeError("a drafter that fails")
        return found

    def _branched(self, guess: list[int]) -> list[int]:
        """Put wrong drafts among the guesses, with guesses of their own; return the row that each follows."""
        parents = list(range(len(guess)))
        for _ in range(self.draw.randrange(7)):
            at = self.draw.randrange(len(guess) + 1)
            parents = [parent + (parent > at) for parent in parents]
            guess.insert(at, self.draw.choice([self.draw.randrange(VOCABULARY), *guess[-1:]]))
            parents.insert(at, self.draw.randrange(at + 1))
        if parents and self.draw.random() < 0.03:
            parents[-1] = self.draw.choice([-1, len(parents), 99])
        return parents

    def forget(self, sequence: Tokens) -> None:
        self.held.discard(sequence.id)

    def reset(self) -> None:
        self.held.clear()


@dataclass
class Clock:
    """Seconds that pass as they like: what drafts cost, and with it how many pay, is a matter of luck."""

    draw: random.Random
    now: float = 0.0

    def __call__(self) -> float:
        self.now += self.draw.expovariate(1000)
        return self.now


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """One token a byte."""
    backend = Backend(models.BPE({char: index for index, char in enumerate(bytes_to_chars().values())}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    folder = tmp_path_factory.mktemp("bytes")
    backend.save(str(folder / "tokenizer.json"))
    return Tokenizer.load(folder)


@pytest.fixture(scope="module")
def adapted(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    """A quantized model in the native kernels' layout, with two adapters."""
    store = dispatch.store("int8g32")
    if store is None:
        pytest.skip("the native kernels are off or do not load")
    folder = tmp_path_factory.mktemp("adapted")
    compress(tiny, folder / "packed", recipe="rtn-w4g32")
    made = hf.load(folder / "packed", torch.float32, store=store)
    shapes = lora.shapes_of(hf.load(tiny, torch.float32))
    for number, name in enumerate(ADAPTERS, 1):
        save(folder / name, shapes, number)
        lora.install(made, number, folder / name)
    return made


@pytest.fixture(scope="module")
def leaving(adapted: Decoder) -> EarlyExit:
    """An exit of the model behind its first layer."""
    store, linear = dispatch.store("int8g32"), Linear("linear", torch.eye(adapted.config.hidden))
    assert store is not None
    store.take(linear)
    return early_exit(adapted, 1, adapted.final_norm, linear, adapted.head, None)


Make = Callable[..., Engine]


@pytest.fixture(scope="module")
def make(adapted: Decoder, tokenizer: Tokenizer) -> Make:
    def made(*given: Any, **how: Any) -> Engine:
        engine = make_engine(adapted, *given, tokenizer=tokenizer, adapters=ADAPTERS, eos_ids=EOS, **how)
        real = engine.intake.masks.mask

        def mask(grammar: Grammar, salt: bytes = b"", name: str = "") -> Any:
            return RandomMask(name) if grammar is HAND_MADE else real(grammar, salt, name)

        engine.intake.masks.mask = mask  # type: ignore[method-assign]
        return engine

    return made


@pytest.fixture(scope="module")
def plain(make: Make) -> Callable[[str | None], Engine]:
    """One engine without speculation for each format of keys and values."""
    made: dict[str | None, Engine] = {}
    return lambda kv: made[kv] if kv in made else made.setdefault(kv, make(kv=kv))


def some_of_every_kind(seed: int, draw: random.Random) -> list[Submit | Embed]:
    asks: list[Submit | Embed] = []
    for each in some_requests(seed, COUNT, VOCABULARY):
        how: dict[str, Any] = {"adapter": draw.choice(("", "", *ADAPTERS))}
        if isinstance(each, Submit):
            params = replace(
                each.params, top_p=draw.choice((1.0, 0.9)), min_p=draw.choice((0.0, 0.05)),
                presence_penalty=draw.choice((0.0, 0.5)), frequency_penalty=draw.choice((0.0, 0.0, 0.3)),
                min_tokens=draw.choice((0, 0, 6)), ignore_eos=draw.random() < 0.5,
                draft_tokens=draw.choice((None, None, 0, 1, 5, 16)),
                stop_token_ids=draw.choice(((), (draw.randrange(VOCABULARY),))),
            )  # fmt: skip
            if draw.random() < 0.3:
                how["grammar"] = draw.choice((HAND_MADE, HAND_MADE, LETTERS, OBJECT, CHOICE))
                params = replace(params, min_tokens=0, stop_token_ids=(), ignore_eos=False)
            elif draw.random() < 0.3:  # an end that is wanted at once, and held until the minimum
                bias = {draw.choice(sorted(EOS)): draw.choice((4.0, 8.0))}
                params = replace(
                    params, min_tokens=draw.choice((3, 6, 12)), ignore_eos=False, logit_bias=bias,
                    presence_penalty=0.0, frequency_penalty=0.0, repetition_penalty=1.0,
                )  # fmt: skip
            how["params"] = params
        asks.append(msgspec.structs.replace(each, **how))
    return asks


def stopped(each: Submit, events: Iterable[Event], draw: random.Random) -> Submit:
    """The request with a stop string out of its text."""
    text = "".join(
        event.text for event in events if isinstance(event, Delta) and (event.id, event.choice) == (each.id, 0)
    )
    at = draw.randrange(len(text) + 1)
    stop = ("never seen", *filter(None, (text[at : at + 3],)))
    return msgspec.structs.replace(each, params=replace(each.params, stop=stop))


def texts_of(events: Iterable[Event]) -> dict[str, list[int]]:
    texts: dict[str, list[int]] = {}
    for event in events:
        if isinstance(event, Delta):
            texts.setdefault(f"{event.id}#{event.choice}", []).extend(event.token_ids)
    return texts


def mishaps(draw: random.Random, ids: Sequence[str]) -> list[faults.Fault]:
    if draw.random() < 0.6:
        return []
    return [
        faults.Fault(draw.choice(POINTS), draw.choice((0, 1, 5, 20)), times, key=draw.choice(("", *ids)))
        for times in draw.choice(((1,), (2,), (1, 1)))
    ]


def overflowing(made: Engine, draw: random.Random) -> None:
    """Have more drafts proposed than a sequence has room for: the scheduler alone holds the last limit, that no row
    lies past the last token that may be run."""
    assert made.speculation is not None
    real, plan = made.speculation.propose, made.scheduler.plan

    def propose(choices: Iterable[Choice]) -> None:
        choices = list(choices)
        real(choices)
        for choice in choices:
            sequence = choice.sequence
            if sequence.drafts and draw.random() < 0.5:
                known, more = len(sequence.drafts), draw.randrange(1, 17)
                sequence.drafts += tuple(draw.randrange(VOCABULARY) for _ in range(more))
                sequence.parents += tuple(range(known, known + more)) if sequence.parents else ()

    def planned(*given: Any) -> StepPlan:
        step = plan(*given)
        for chunk in step.chunks:
            deepest = chunk.rows - len(chunk.drafts) + draft_tree.depth_of(chunk.drafts, chunk.parents)
            assert chunk.start + deepest <= chunk.sequence.longest, "a row behind the last token"
        return step

    made.speculation.propose, made.scheduler.plan = propose, planned  # type: ignore[method-assign]


def life(made: Engine, asks: Sequence[Submit | Embed], draw: random.Random, shutdown: int | None) -> Iterator[Event]:
    """The events of requests that come one after another, some of which are cancelled; all end in step `shutdown`."""
    waiting, steps = list(asks), 0
    while waiting or not made.idle:
        steps += 1
        assert steps < 4000, "it does not come to an end"
        while waiting and draw.random() < 0.4:
            ask(made, [waiting.pop(0)])
        if draw.random() < 0.01:
            made.cancel(draw.choice(asks).id)
        if shutdown == steps:
            yield from made.close()
            waiting.clear()
        if made.speculation is not None and draw.random() < 0.5:
            pace = made.speculation.pace
            pace.most, pace.fixed = draw.randrange(LONG + 1), draw.random() < 0.5
        yield from made.step()
        made.scheduler.check()


@pytest.mark.parametrize("branching", [False, True], ids=["chains", "trees"])
@pytest.mark.parametrize("seed", range(FIRST, FIRST + SEEDS))
def test_no_schedule_of_drafts_changes_a_bit(
    make: Make,
    plain: Callable[[str | None], Engine],
    adapted: Decoder,
    leaving: EarlyExit,
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
    branching: bool,
) -> None:
    draw = random.Random(-(2**40) - seed - 2**50 * branching)
    kv = draw.choice([None, None, None, *SCHEMES])
    without, asks = plain(kv), some_of_every_kind(seed, draw)
    events = run(without, asks)
    without.cache.flush()
    for place, each in enumerate(asks):
        if isinstance(each, Submit) and each.grammar is None and draw.random() < 0.3:
            asks[place] = again = stopped(each, events, draw)
            events = [event for event in events if event.id != each.id] + run(without, [again])
            without.cache.flush()
    for each in draw.sample(asks, 2):  # they go on where another ends, and would find what its drafts left behind
        if text := texts_of(events).get(f"{each.id}#0", [])[: draw.randrange(1, 80)]:
            prompt = (*each.prompt, *text, *draw.choice(((), (5, 6))))[: CONTEXT - 1]
            asks.append(msgspec.structs.replace(each, id=f"{each.id} goes on", prompt=prompt))
            events += run(without, [asks[-1]])
            without.cache.flush()
    expected, texts = answers(events), texts_of(events)
    limits = SchedulerConfig(
        policy=draw.choice(("continuous", "continuous", "dynamic", "static", "none")),
        max_running=draw.choice((1, 2, 4, 8)),
        max_step_tokens=draw.choice((8, 17, 64)),
        max_drafts=draw.choice((3, 16)),
    )
    clock = Clock(random.Random(seed))
    for module in (speculation, draft_gains):
        monkeypatch.setattr(module, "time", types.SimpleNamespace(perf_counter=clock))
    kinds: list[Callable[[], Drafter]] = [
        SuffixDrafter,
        LookaheadDrafter,
        lambda: ModelDrafter(adapted, CONTEXT, 8, VOCABULARY, blocks=draw.choice((4, 9, 40))),
        lambda: FirstOf(ModelDrafter(adapted, CONTEXT, 8, VOCABULARY, blocks=draw.choice((4, 40)))),
        lambda: EarlyExitDrafter(leaving, CONTEXT, 8, VOCABULARY, blocks=draw.choice((4, 40))),
        lambda: FirstOf(EarlyExitDrafter(leaving, CONTEXT, 8, VOCABULARY, blocks=draw.choice((4, 40)))),
        lambda: Foreseeing(texts, draw, draw.choice((0.0, 0.5, 0.9, 1.0)), draw.random() < 0.3),
    ]
    how: dict[str, Any] = {"draft_tokens": draw.choice((None, LONG))}
    if branching and not (kv and SCHEMES[kv].recent):
        how = {"draft_tree": draw.choice((2, 8, 16))}
        kinds = [lambda: replace(Foreseeing(texts, draw, draw.choice((0.5, 0.9, 1.0))), branching=True)]
    drafter = draw.choice((*kinds, kinds[-1]))()
    made = make(
        draw.choice((ROOM, TIGHT)), limits, kv=kv, drafter=drafter, overlaps=draw.random() < 0.3, clock=clock, **how
    )
    if draw.random() < 0.6:
        overflowing(made, draw)
    hurried = draw.choice(asks)
    if draw.random() < 0.1:
        asks[asks.index(hurried)] = msgspec.structs.replace(hurried, deadline=0.05)
    armed = mishaps(draw, [each.id for each in asks])
    faults.arm(*armed)
    shutdown = draw.randrange(60) if draw.random() < 0.1 else None
    events = list(life(made, asks, draw, shutdown))
    faults.arm()
    made.step()  # what ended without a word is put away
    same_but_for_early_ends(events, expected, sum(fault.fired for fault in armed))
    assert shutdown is not None or {event.id for event in events} == {each.id for each in asks}
    made.scheduler.check()
    made.pool.check()
    assert made.pool.active == 0
    assert made.speculation is not None
    assert not made.speculation._accounts, "something is kept of what has ended"
    assert not getattr(drafter, "held", None)
    model = drafter.second if isinstance(drafter, FirstOf) else drafter
    assert not getattr(drafter, "_trails", None)
    if isinstance(model, ModelDrafter):
        assert model.pool.free == model.pool.total


def same_but_for_early_ends(events: Sequence[Event], expected: Answers, fired: int) -> None:
    early = {event.id: event for event in events if isinstance(event, Failed) and event.code in EARLY}
    assert sum(event.code == "internal" for event in early.values()) <= fired, "more fail than faults there were"
    found = answers(event for event in events if event not in early.values())
    for key, answer in expected.items():
        if key[0] not in early and key in found:
            assert found[key] == answer, f"choice {key}"
        elif key in found:
            assert found[key] == answer[: len(found[key])], f"the beginning of choice {key}"
    assert found.keys() <= expected.keys()
