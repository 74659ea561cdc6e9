"""An exception at any of the engine's fault points ends one request, once; no other loses a bit, and nothing leaks."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
import pytest

from attar import faults
from attar.engine.engine import Engine
from attar.faults import Fault
from attar.model.decoder import Decoder
from attar.protocol.grammar import Grammar
from attar.protocol.messages import Delta, Embed, Embedding, Event, Failed, Finished, Submit
from attar.protocol.request import SamplingParams
from attar.protocol.scheduler_config import SchedulerConfig
from attar.text.tokenizer import Tokenizer
from tests.engine.conftest import Answers, answers, make_engine
from tests.engine.images.seeing import SeededTower, image
from tests.engine.test_main import GREEDY, Client, Running

CONTEXT = 320
BLOCKS = 9  # so few that requests have to give way to each other
LIMITS = SchedulerConfig(max_step_tokens=48, headroom=0.0)
LATE = 10**9  # hits, which never come
MOMENTS = int(os.environ.get("TEST_FAULT_MOMENTS", "2"))
"""At how many moments of a scene each point raises; `make soak-faults` asks for a hundred."""

BEGINNING = tuple(i * 13 % 97 for i in range(150))  # of the victim's prompt and a canary's
EVERYTHING = SamplingParams(
    max_tokens=60, temperature=0.9, top_p=0.9, seed=7, repetition_penalty=1.2, logit_bias={5: 1.0}, logprobs=2,
    stop=("@@",),
)  # fmt: skip
VICTIM = Submit("victim", (*BEGINNING, 1, 2, 3), EVERYTHING, n=2, priority=1)
CANARIES = [
    Submit("greedy", tuple(range(60)), SamplingParams(max_tokens=70, temperature=0, seed=0, logprobs=1)),
    Submit("seeded", (9, 8, 7) * 4, SamplingParams(max_tokens=30, seed=3, frequency_penalty=0.5), n=2),
    Submit("shares", (*BEGINNING[:140], 4, 5), SamplingParams(max_tokens=20, temperature=0, seed=0)),
    Submit("gives way", tuple(range(90, 30, -1)), SamplingParams(max_tokens=90, temperature=0, seed=0), priority=9),
]
IDS = {canary.id for canary in CANARIES}


LAST = msgspec.structs.replace(VICTIM, priority=99)  # gives way to everybody
SCORED = msgspec.structs.replace(VICTIM, params=replace(EVERYTHING, prompt_logprobs=1))
GREEDILY = msgspec.structs.replace(VICTIM, params=replace(GREEDY, max_tokens=60))
CONSTRAINED = msgspec.structs.replace(VICTIM, grammar=Grammar("regex", "(?s:.{100,})"))
MEAN = Embed("victim", VICTIM.prompt, "mean")
IMAGE, IMAGE_TOKEN = image(1), 97  # no other token
SEEING = msgspec.structs.replace(
    VICTIM, prompt=(*BEGINNING, *[IMAGE_TOKEN] * IMAGE.rows, 1, 2, 3), images=(IMAGE,)
)  # fmt: skip

CASES: dict[str, Submit | Embed | None] = {
    "engine.submit": VICTIM,
    "grammar.compile": CONSTRAINED,
    "engine.choice": VICTIM,
    "scheduler.add": VICTIM,
    "scheduler.admit": VICTIM,
    "radix.match": None,
    "radix.split": None,
    "radix.evict": None,
    "pool.hold": None,
    "pool.allocate": None,
    "scheduler.grow": VICTIM,
    "scheduler.preempt": LAST,
    "images.encode": SEEING,
    "runner.copy": VICTIM,
    "runner.memory": VICTIM,
    "runner.table": VICTIM,
    "runner.features": SEEING,
    "runner.rows": VICTIM,
    "runner.replay": VICTIM,
    "engine.prompt_logprobs": SCORED,
    "engine.pool": MEAN,
    "sampler.penalties": VICTIM,
    "grammar.mask": CONSTRAINED,
    "sampler.noise": VICTIM,
    "sampler.draw": GREEDILY,
    "sampler.commit": VICTIM,
    "grammar.consume": CONSTRAINED,
    "detokenizer.push": VICTIM,
    "detokenizer.flush": VICTIM,
    "stops.push": VICTIM,
    "engine.delta": VICTIM,
    "scheduler.commit": VICTIM,
    "radix.insert": None,
    "scheduler.release": VICTIM,
    "engine.vector": MEAN,
    "engine.report": VICTIM,
    "engine.finish": VICTIM,
}
"""By point, the victim; None where the point does not know for whom it is passed: then any one request fails."""

IN_THE_PROCESS = "events.encode"  # the last on an event's way out of the engine's process

HEALED = [
    "runner.copy", "runner.memory", "runner.table", "runner.features", "runner.rows", "runner.replay",
    "engine.prompt_logprobs", "engine.pool", "grammar.mask", "sampler.penalties", "sampler.noise", "sampler.draw",
]  # fmt: skip
"""Passed for a whole batch: where they raise once, nobody fails."""

IN_COMPANY = ("runner.table", "runner.rows")


@pytest.fixture(scope="module")
def tokenizer(demo: Path) -> Tokenizer:
    return Tokenizer.load(demo)


@dataclass
class Made:
    """An engine and what it said, step by step."""

    engine: Engine
    events: list[Event] = field(default_factory=list)

    def take(self, *asks: Submit | Embed) -> None:
        for ask in asks:
            self.engine.submit(ask) if isinstance(ask, Submit) else self.engine.embed(ask)

    def run(self, steps: int = 4000) -> None:
        """To the end, at most so many steps."""
        for _ in range(steps):
            if self.engine.idle:
                return
            self.events += self.engine.step()
            self.check()
        assert steps < 4000, "it does not come to an end"

    def check(self) -> None:
        self.engine.scheduler.check()
        self.engine.cache.check()
        self.engine.pool.check()

    def ends(self) -> None:
        """Nothing is left of anything."""
        self.run()
        self.engine.step()  # what was dropped without a word is put away
        engine = self.engine
        assert engine.pool.active == 0
        assert not engine.scheduler.sequences
        assert not engine.requests.choices
        assert not engine.requests.requests
        engine.cache.flush()
        assert engine.pool.free == engine.pool.total


Alone = dict[str, Answers]


@pytest.fixture(scope="module")
def make(decoder: Decoder, tokenizer: Tokenizer) -> Callable[..., Made]:
    settings = {"blocks": BLOCKS, "context": CONTEXT, "limits": LIMITS, "tower": SeededTower(image_token=IMAGE_TOKEN)}
    return lambda **more: Made(make_engine(decoder, tokenizer=tokenizer, **settings | more))


@pytest.fixture(scope="module")
def alone(make: Callable[..., Made]) -> Alone:
    """What each gets when nobody else is there."""
    found: Alone = {}
    for ask in [*CANARIES, VICTIM, LAST, SCORED, GREEDILY, CONSTRAINED, SEEING, MEAN]:
        made = make()
        made.take(ask)
        made.run()
        found.setdefault(ask.id if ask.id != "victim" else repr(ask), answers(made.events))
    return found


def scene(made: Made, victim: Submit | Embed) -> None:
    """Everybody together: two canaries run when the victim comes, two come later."""
    made.take(*CANARIES[:2], CANARIES[3])
    made.run(steps=6)
    made.take(victim)
    made.run(steps=1)
    made.take(CANARIES[2])
    made.run()


def failed(events: list[Event]) -> list[str]:
    """Ids of requests that failed; that each request ended once, and rightly, is checked."""
    ids = {event.id for event in events if isinstance(event, Delta | Finished | Failed | Embedding)}
    found = []
    for id in ids:
        ends = [event for event in events if isinstance(event, Finished | Failed | Embedding) and event.id == id]
        failures = [event for event in ends if isinstance(event, Failed)]
        if failures:
            assert [event.code for event in failures] == ["internal"], id
            said = [event for event in events if getattr(event, "id", "") == id]
            assert isinstance(said[-1], Failed), id
            found.append(id)
        choices = 2 if id in ("victim", "seeded") and not isinstance(ends[0], Embedding) else 1
        assert len(ends) <= choices if failures else len(ends) == choices, id
    return found


def of(found: Answers, id: str) -> Answers:
    return {key: answer for key, answer in found.items() if key[0] == id}


def moments(point: str) -> list[float]:
    """When it raises, from 0 for its first hit to 1 for its last."""
    # A late row of a table comes of somebody else's prompt in the step: apart from that, the victim's is a replay.
    last = 0.4 if point in IN_COMPANY else 1.0
    return [last * moment / (MOMENTS - 1) for moment in range(MOMENTS)]


@pytest.mark.parametrize("point, when", [(point, when) for point in CASES for when in moments(point)])
def test_one_request_fails_and_no_other_notices(
    make: Callable[..., Made], alone: Alone, point: str, when: float
) -> None:
    victim = CASES[point]
    key = "" if victim is None else "victim"
    dry = Fault(point, after=LATE, key=key)
    faults.arm(dry)
    scene(make(), victim or VICTIM)
    assert dry.hits > 0, "the point was never reached"
    after = round((dry.hits - 1) * when)
    fault = Fault(point, after=after, times=1 if victim is None else 0, key=key)
    faults.arm(fault)
    made = make()
    scene(made, victim or VICTIM)
    faults.arm()
    assert fault.fired > 0
    (lost,) = failed(made.events)
    if victim is not None:
        assert lost == "victim"
    found = answers(made.events)
    for id in IDS | {"victim"}:
        if id != lost:
            assert of(found, id) == alone[id if id in IDS else repr(VICTIM)], id
    made.events.clear()
    made.take(*CANARIES, victim or VICTIM)
    made.run()
    again = answers(made.events)
    assert failed(made.events) == []
    for id in IDS:
        assert of(again, id) == alone[id], id
    made.ends()


@pytest.mark.parametrize("point", CASES)
def test_nor_does_it_where_the_next_step_is_under_way(make: Callable[..., Made], alone: Alone, point: str) -> None:
    """As above, in the middle of a scene, whose every step may be launched before the one before is known."""
    victim = CASES[point]
    key = "" if victim is None else "victim"
    dry, made = Fault(point, after=LATE, key=key), make(overlaps=True)
    faults.arm(dry)
    scene(made, victim or VICTIM)
    assert dry.hits > 0, "the point was never reached"
    assert made.engine.ahead > made.engine.steps / 2
    fault = Fault(point, after=dry.hits // (3 if point in IN_COMPANY else 2), times=0 if key else 1, key=key)
    faults.arm(fault)
    made = make(overlaps=True)
    scene(made, victim or VICTIM)
    faults.arm()
    assert fault.fired > 0
    (lost,) = failed(made.events)
    assert lost == "victim" or not key
    found = answers(made.events)
    for id in IDS | {"victim"}:
        if id != lost:
            assert of(found, id) == alone[id if id in IDS else repr(VICTIM)], id
    made.ends()


@pytest.mark.parametrize("point", HEALED)
def test_a_step_that_raises_once_is_run_again(make: Callable[..., Made], alone: Alone, point: str) -> None:
    victim = CASES[point]
    assert victim is not None
    dry = Fault(point, after=LATE, key="victim")
    faults.arm(dry)
    scene(make(), victim)
    for after in {0, dry.hits // 2, dry.hits - 1}:
        fault = Fault(point, after=after, key="victim")
        faults.arm(fault)
        made = make()
        scene(made, victim)
        assert fault.fired == 1
        assert failed(made.events) == []
        found = answers(made.events)
        assert of(found, "victim") == alone[repr(victim)]
        for id in IDS:
            assert of(found, id) == alone[id], id
        made.ends()


def test_what_could_not_be_copied_is_never_used(make: Callable[..., Made], alone: Alone) -> None:
    """Not even by a sequence whose turn has not come: the budget of its first step went to another."""
    limits = SchedulerConfig(policy="static", max_running=4, max_step_tokens=4)
    made = make(limits=limits)
    made.take(VICTIM)
    made.run()
    fault = Fault("runner.copy", times=0, key="victim#0")
    faults.arm(fault)
    made.events.clear()
    made.take(CANARIES[0], VICTIM)
    made.run(steps=1)
    faults.arm()
    assert fault.fired == 2
    assert failed(made.events) == ["victim"]
    made.run()
    assert of(answers(made.events), "greedy") == alone["greedy"]
    made.events.clear()
    made.take(VICTIM)
    made.run()
    assert of(answers(made.events), "victim") == alone[repr(VICTIM)]
    made.ends()


def test_the_scene_has_somebody_give_way(make: Callable[..., Made]) -> None:
    """Else the tests above would not see what preemption does."""
    made = make()
    scene(made, VICTIM)
    reports = {event.id: event.report for event in made.events if isinstance(event, Finished) and event.report}
    assert reports["gives way"].preemptions > 0
    assert reports["shares"].reused_tokens > 64


@pytest.mark.parametrize("how", ["cancelled", "deadline"])
@pytest.mark.parametrize("steps", [5, 8, 20])
def test_a_failure_while_a_request_is_ended_from_outside(
    make: Callable[..., Made], alone: Alone, how: str, steps: int
) -> None:
    now = [0.0]
    made = make(clock=lambda: now[0])
    made.take(*CANARIES[:2], msgspec.structs.replace(VICTIM, deadline=5.0))
    made.run(steps)
    fault = Fault("scheduler.release", times=0, key="victim")
    faults.arm(fault)
    if how == "cancelled":
        made.engine.cancel("victim")
    else:
        now[0] = 6.0
    made.run()
    assert fault.fired > 0
    ends = [event.code for event in made.events if isinstance(event, Failed)]
    assert ends == (["cancelled"] if how == "cancelled" else ["internal"])
    found = answers(made.events)
    for canary in CANARIES[:2]:
        assert of(found, canary.id) == alone[canary.id]
    made.ends()


@pytest.mark.parametrize("after", range(4, 4 + max(1, MOMENTS - 2)))
def test_what_cannot_be_encoded_ends_its_request_and_the_engine_forgets_it(
    tmp_path: Path, decoder: Decoder, after: int
) -> None:
    running = Running(tmp_path / "engine", decoder)
    try:
        client = Client(running.path)
        client.send(Submit("canary", (1, 2, 3), replace(GREEDY, max_tokens=40)))
        expected = answers(client.until(Finished))
        fault = Fault(IN_THE_PROCESS, after=after, times=0, key="victim")
        faults.arm(fault)
        client.send(
            Submit("victim", (5, 6, 7), replace(GREEDY, max_tokens=200)),
            Submit("canary", (1, 2, 3), replace(GREEDY, max_tokens=40)),
        )
        events = client.until(Finished)
        if not any(isinstance(event, Failed) for event in events):
            events += client.until(Failed)  # a late moment comes after the canary's end
        client.send(Submit("last", (1,), GREEDY))
        events += client.until(Finished)
        faults.arm()
        assert fault.fired > 0
        assert of(answers(events), "canary") == expected
        said = [event for event in events if getattr(event, "id", "") == "victim"]
        assert [event.code for event in said if isinstance(event, Failed)] == ["internal"]
        assert isinstance(said[-1], Failed)
        assert 1 < len(said) < 200
        assert running.engine.idle
        assert running.engine.pool.active == 0
    finally:
        running.stop()


@pytest.mark.parametrize("point", ["radix.insert", "scheduler.add"])
def test_the_log_says_which_request_failed(
    make: Callable[..., Made], point: str, caplog: pytest.LogCaptureFixture
) -> None:
    faults.arm(Fault(point))
    made = make()
    made.take(VICTIM)
    made.run()
    assert any("victim" in record.getMessage() and record.exc_info for record in caplog.records)
