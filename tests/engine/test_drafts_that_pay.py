"""What drafts cost and bring under a clock of our own: `auto` comes near the best number, and never loses much."""

from __future__ import annotations

import itertools
import random
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from attar.engine import speculation
from attar.engine.engine import Engine
from attar.model.decoder import Decoder
from attar.protocol.messages import Submit
from attar.protocol.request import SamplingParams
from attar.protocol.scheduler_config import SchedulerConfig
from attar.sampling import draft_gains
from attar.sampling.drafters.drafter import Draft, DraftRequest
from attar.sampling.drafters.model import evidence_of
from attar.scheduling.sequence import Sequence as Tokens
from tests.engine.conftest import make_engine, run
from tests.engine.test_speculation_schedules import texts_of

LIMITS = SchedulerConfig(max_step_tokens=192, max_drafts=16)
DRAFT, READ = 0.2, 0.05  # seconds of a draft, and of a token that the drafter reads; a step of one row takes 1
TOKENS = 150


def cost(rows: int) -> float:
    """Seconds of a step, which the fifth row makes dear."""
    return 1 + 0.1 * (rows - 1) + 0.7 * (rows > 4)


@dataclass
class Model:
    """A costly drafter that knows the texts, and is right so often; where it is `honest` it knows when."""

    texts: dict[str, list[int]]
    right: float
    honest: bool = False
    now: float = 0.0
    spent: float = 0.0
    name: str = "model"
    costly: bool = True
    read: dict[Tokens, int] = field(default_factory=dict)
    draw: random.Random = field(default_factory=lambda: random.Random(5))

    @property
    def stops(self) -> bool:
        return self.honest

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        since, found = self.now, []
        for request in requests:
            sequence, tokens, sure = request.sequence, list[int](), list[int]()
            self.now += READ * max(0, len(sequence.tokens) - self.read.get(sequence, 0) - 17)
            self.read[sequence] = len(sequence.tokens)
            for token in self.texts[sequence.id][sequence.output :][: request.limit]:
                self.now += DRAFT
                good = self.draw.random() < self.right
                tokens.append(token if good else token ^ 1)
                sure.append(evidence_of(0.95 if good else 0.2))
                if self.honest and not request.continues(sure):
                    break
            found.append(Draft(tuple(tokens), 1, sure=tuple(sure) if self.honest else ()))
        self.spent += self.now - since
        return found

    def forget(self, sequence: Tokens) -> None:
        self.read.pop(sequence, None)

    def reset(self) -> None:
        self.read.clear()


def engine_of(decoder: Decoder, drafter: Model, monkeypatch: pytest.MonkeyPatch, **how: Any) -> Engine:
    """Return an engine in which time passes by the costs above."""
    for module in (speculation, draft_gains):
        monkeypatch.setattr(module, "time", types.SimpleNamespace(perf_counter=lambda: drafter.now))
    made = make_engine(decoder, limits=LIMITS, drafter=drafter, clock=lambda: drafter.now, **how)
    real: Callable[..., Any] = made.runner.run

    def timed(plan: Any, *given: Any) -> Any:
        drafter.now += cost(plan.tokens)
        return real(plan, *given)

    made.runner.run = timed  # type: ignore[assignment, method-assign]
    return made


def seconds(made: Engine, drafter: Model, asks: Sequence[Submit]) -> float:
    """Return the seconds of requests one after another, each behind its first step."""
    taken = 0.0
    for ask in asks:
        since = drafter.now
        run(made, [ask])
        taken += drafter.now - since - cost(len(ask.prompt))
    return taken


@pytest.fixture(scope="module")
def asks() -> list[Submit]:
    params = SamplingParams(max_tokens=TOKENS, temperature=1.0, seed=3, ignore_eos=True)
    return [Submit(f"{i}", (5 + i, 6, 7), params) for i in range(4)]


@pytest.fixture(scope="module")
def texts(decoder: Decoder, asks: list[Submit]) -> dict[str, list[int]]:
    return texts_of(run(make_engine(decoder), asks))


@pytest.mark.parametrize("right", [0.0, 0.1])
def test_drafts_that_do_not_pay_take_little_time(
    decoder: Decoder, asks: list[Submit], texts: dict[str, list[int]], right: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = Model(texts, right)
    made = engine_of(decoder, drafter, monkeypatch)
    seconds(made, drafter, asks[:1])  # it learns
    drafter.spent = 0.0
    taken = seconds(made, drafter, asks[1:])
    assert taken < 1.03 * 3 * (TOKENS - 1)
    assert 0 < drafter.spent < 0.02 * taken, "now and then one is made to learn"


@pytest.mark.parametrize("right", [0.6, 0.85, 0.95])
def test_the_number_of_drafts_is_near_the_best(
    decoder: Decoder, asks: list[Submit], texts: dict[str, list[int]], right: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = Model(texts, right)
    made = engine_of(decoder, drafter, monkeypatch)
    seconds(made, drafter, asks[:1])
    speed = 3 * (TOKENS - 1) / seconds(made, drafter, asks[1:])
    best = max(
        (1 - right ** (count + 1)) / (1 - right) / (cost(1 + count) + count * DRAFT) for count in (0, 1, 2, 3, 4, 8)
    )
    assert speed > 0.92 * best


def test_a_drafter_that_knows_when_it_is_wrong_is_faster(
    decoder: Decoder, asks: list[Submit], texts: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    speeds = []
    for honest in (False, True):
        drafter = Model(texts, 0.8, honest)
        made = engine_of(decoder, drafter, monkeypatch)
        seconds(made, drafter, asks[:1])
        speeds.append(3 * (TOKENS - 1) / seconds(made, drafter, asks[1:]))
        assert made.speculation is not None
        assert made.speculation.errors == 0
    assert speeds[1] > 1.03 * speeds[0]


def test_a_long_prompt_is_read_only_for_a_text_that_is_long_enough(
    decoder: Decoder, asks: list[Submit], texts: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(max_tokens=6, temperature=1.0, seed=3, ignore_eos=True)
    long = [Submit(f"long {i}", (*range(5, 85), i), params) for i in range(3)]
    known = texts | texts_of(run(make_engine(decoder), long))
    drafter = Model(known, 0.9)
    made = engine_of(decoder, drafter, monkeypatch)
    seconds(made, drafter, [*asks, long[0]])
    drafter.spent = 0.0
    seconds(made, drafter, long[1:])
    assert drafter.spent == 0.0, "to read a prompt takes more than 5 tokens can save"
    drafter.spent = 0.0
    seconds(made, drafter, asks[:1])
    assert drafter.spent > DRAFT * 30


def test_a_sequence_whose_drafts_do_not_pay_is_looked_at_seldom_until_they_do(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look costs the host time in each step; a text that begins to be drafted well still gains at once."""
    params = SamplingParams(max_tokens=2 * TOKENS, temperature=1.0, seed=3, ignore_eos=True)
    ask = Submit("a", (5, 6, 7), params)
    (text,) = texts_of(run(make_engine(decoder), [ask])).values()
    looks: list[int] = []

    class Cheap(Model):
        def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
            (request,) = requests
            at = request.sequence.output
            looks.append(at)
            right = tuple(text[at:][: request.limit])
            if at >= TOKENS:
                return [Draft(right, 20)]
            return [Draft(tuple(token ^ 1 for token in right), 1)]

    drafter = Cheap({}, 0.0, costly=False)
    made = engine_of(decoder, drafter, monkeypatch)
    assert list(texts_of(run(made, [ask])).values()) == [text]
    wrong = [at for at in looks if at < TOKENS]
    settled = [at for at in wrong if at >= TOKENS // 2]
    assert len(settled) <= TOKENS // 2 // speculation.SELDOM + 1
    assert all(b - a <= speculation.SELDOM for a, b in itertools.pairwise(wrong))
    assert made.speculation is not None
    assert made.speculation.accepted > 0.6 * (len(text) - TOKENS)
