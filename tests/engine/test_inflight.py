"""Steps that are launched before the tokens of the one before are known: on a device that is always late.

Whatever it is told, steps and choices of tokens, it does when somebody waits for what came of it, in its order and no
further. It knows no more than it was told then: of a step its rows, their blocks and the tokens that the host had. So a
host that looks too early finds nothing there, and one that forgets what is still on its way finds it changed.
"""

from __future__ import annotations

import copy
import itertools
import random
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from attar import faults
from attar.checkpoints.sources import opening
from attar.engine import inflight
from attar.engine.bottleneck import Bottlenecks
from attar.engine.engine import Engine
from attar.execution.model_runner import Runner, Wanted, waits
from attar.execution.step_inputs import InflightTokens
from attar.faults import Fault
from attar.kernels import dispatch
from attar.model.decoder import Decoder
from attar.model.layers import MixtureOfExperts
from attar.protocol.messages import Delta, Embed, Event, Failed, Finished, Submit
from attar.protocol.request import SamplingParams
from attar.protocol.scheduler_config import SchedulerConfig
from attar.sampling import device_sampler
from attar.sampling.sampler import BadLogits, SampledToken, Sampler
from attar.scheduling.step_plan import ScheduledTokens, StepPlan
from attar.text.tokenizer import Tokenizer
from tests.engine.conftest import ROOM, TIGHT, Answers, answers, make_engine, run
from tests.engine.test_engine import some_requests

GREEDY = SamplingParams(max_tokens=12, temperature=0, seed=0)
DRAWN = SamplingParams(max_tokens=12, temperature=50.0, seed=5)  # of random weights, a text that does not repeat itself
LONG = tuple(i * 13 % 97 for i in range(100))


class Device:
    """What it was told and has not done; and what happened, in the host's order."""

    def __init__(self) -> None:
        self.told: list[Callable[[], object]] = []
        self.seen: list[str] = []

    def tell(self, call: Callable[[], object]) -> Callable[[], None]:
        """Gives what waits for it."""
        self.told.append(call)

        def wait() -> None:
            while any(each is call for each in self.told):
                self.told.pop(0)()

        return wait


class LateLogits(Tensor):
    """Whoever touches them waits."""

    wait: Callable[[], None]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for each in args:
            if isinstance(each, LateLogits):
                each.wait()
        plain = [each.as_subclass(Tensor) if isinstance(each, LateLogits) else each for each in args]
        with torch._C.DisableTorchFunctionSubclass():
            return func(*plain, **(kwargs or {}))


class LateRunner(Runner):
    device_told: Device

    def run(
        self, plan: StepPlan, wanted: dict[str, Wanted] | None = None, inflight_tokens: InflightTokens | None = None
    ) -> Tensor:
        self.device_told.seen.append("launch")
        told = {chunk.sequence: as_told(chunk) for chunk in plan.chunks}
        late = inflight_tokens
        if inflight_tokens is not None:
            late = InflightTokens(
                inflight_tokens.tokens, {told[each]: i for each, i in inflight_tokens.places.items() if each in told}
            )
        chunks = [chunk._replace(sequence=told[chunk.sequence]) for chunk in plan.chunks]
        out = torch.empty(sum(chunk.samples for chunk in chunks), self.decoder.config.vocab_size)
        step = StepPlan(chunks, list(plan.copies))
        super_run = super().run
        wait = self.device_told.tell(lambda: out.copy_(super_run(step, wanted, late)))
        if wanted:  # the host looks at numbers of the step
            wait()
        found = out.as_subclass(LateLogits)
        found.wait = wait
        return found


def as_told(chunk: ScheduledTokens) -> Any:
    """The sequence as it is at this moment."""
    made = copy.copy(chunk.sequence)
    made.tokens, made.blocks = array("i", chunk.sequence.tokens), list(chunk.sequence.blocks)
    return made


class LateChosen:
    def __init__(self, device: Device, logits: Tensor, samplers: Sequence[Sampler]) -> None:
        self.tokens = torch.empty(len(samplers), dtype=torch.int64)
        self._logits, self._samplers, self._device = logits, samplers, device
        self._wait = device.tell(self._choose)

    def _choose(self) -> None:
        self._chosen = CHOOSE(self._logits.as_subclass(Tensor), self._samplers)
        self.tokens.copy_(self._chosen.tokens)

    def draws(self, first: int = 0, last: int | None = None) -> list[SampledToken | BadLogits]:
        self._device.seen.append("wait")
        self._wait()
        return self._chosen.draws(first, last)


CHOOSE = device_sampler.choose

Make = Callable[..., Engine]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device()
    monkeypatch.setattr(inflight.device_sampler, "choose", lambda logits, samplers: LateChosen(made, logits, samplers))
    return made


@pytest.fixture
def late(decoder: Decoder, device: Device) -> Make:
    """An engine beside that device."""

    class Lags(LateRunner):
        device_told = device

    def make(
        blocks: int = ROOM,
        tokenizer: Tokenizer | None = None,
        clock: Callable[[], float] = time.monotonic,
        **limits: Any,
    ) -> Engine:
        settings = SchedulerConfig(**{"max_running": 6, "max_step_tokens": 48, "headroom": 0.0} | limits)
        return make_engine(decoder, blocks, settings, tokenizer=tokenizer, overlaps=True, runner=Lags, clock=clock)

    return make


def in_turn(asked: Engine, blocks: int = ROOM, tokenizer: Tokenizer | None = None) -> Engine:
    """The same without overlap."""
    return make_engine(asked.decoder, blocks, asked.scheduler.limits, tokenizer=tokenizer, overlaps=False)


def known(made: Engine) -> set[tuple[int, ...]]:
    """What the prefix tree holds, from the root."""
    return {(*before, *node.tokens) for _, before, node in made.cache.nodes()}


# The order of things


def test_the_next_step_is_launched_before_the_last_one_is_waited_for(late: Make, device: Device) -> None:
    made = late()
    made.submit(Submit("a", (1, 2, 3), replace(GREEDY, max_tokens=5)))
    run(made)
    assert device.seen == ["launch", *["launch", "wait"] * 4, "wait"]
    assert (made.ahead, made.steps, made.alone) == (4, 5, {})


def test_pieces_of_a_prompt_are_launched_one_behind_the_other(late: Make, device: Device) -> None:
    made = late(max_step_tokens=8)
    made.submit(Submit("a", tuple(range(30)), replace(GREEDY, max_tokens=2)))
    run(made)
    assert device.seen == [*["launch"] * 5, "wait", "wait"]
    assert (made.ahead, made.steps) == (4, 5)


@pytest.mark.parametrize("blocks", [ROOM, TIGHT])
@pytest.mark.parametrize("seed", range(4))
def test_tokens_are_those_of_an_engine_that_waits(late: Make, seed: int, blocks: int) -> None:
    """Everything that a request may ask for; they come one after another."""
    draw = random.Random(seed)
    made = late(blocks, max_step_tokens=draw.choice((8, 17, 64)))
    waiting = some_requests(seed, 12, made.decoder.config.vocab_size)
    one, alone = in_turn(made), Answers()
    for ask in waiting:
        alone |= answers(run(one, [ask]))
        one.cache.flush()
    events: list[Event] = []
    while waiting or not made.idle:
        while waiting and draw.random() < 0.4:
            ask = waiting.pop(0)
            made.submit(ask) if isinstance(ask, Submit) else made.embed(ask)
        events += made.step()
        made.scheduler.check()
        made.cache.check()
        made.pool.check()
    assert answers(events) == alone
    assert made.pool.active == 0
    assert made.ahead + made.alone["numbers"] > made.steps / 2 or blocks == TIGHT
    assert bool(made.alone["blocks"] + made.alone["numbers"]) >= (made.scheduler.preemptions > 0)
    assert set(made.alone) <= {"blocks", "numbers"}


@pytest.mark.parametrize("kv", ["int8", "int4"])
def test_keys_and_values_may_be_rounded(decoder: Decoder, kv: str) -> None:
    rounded_alike(decoder, kv)


def test_an_unfinished_block_may_lie_apart(demo: Path) -> None:
    """It changes hands where a step ahead finishes it."""
    rounded_alike(opening.load(demo, torch.float32, store=dispatch.store()), "kivi2")


def rounded_alike(decoder: Decoder, kv: str) -> None:
    limits, found = SchedulerConfig(max_running=4, max_step_tokens=17), list[Answers]()
    for overlaps in (False, True):
        made = make_engine(decoder, limits=limits, kv=kv, overlaps=overlaps)
        found.append(answers(run(made, some_requests(7, 8, decoder.config.vocab_size))))
    assert found[0] == found[1]


# What comes in between


def stopped(made: Engine, ask: Submit, at: int) -> tuple[int, ...]:
    """The tokens that an engine which waits gives to the prompt; the one at `at` was not among those before."""
    tokens = [event.token_ids[0] for event in run(in_turn(made), [ask]) if isinstance(event, Delta)]
    assert tokens[at] not in tokens[:at], "choose another prompt"
    return tuple(tokens)


def test_a_stop_token_is_seen_one_step_late(late: Make, device: Device) -> None:
    made, ask = late(), Submit("a", LONG[:20], DRAWN)
    tokens = stopped(made, ask, 5)
    ask = Submit("a", LONG[:20], replace(DRAWN, stop_token_ids=(tokens[5],)))
    other = Submit("b", (9,) * 10, replace(GREEDY, max_tokens=30))
    made.submit(ask)
    events: list[Event] = []
    while not any(isinstance(event, Finished) for event in events):
        events = made.step()
    assert [type(event) for event in events] == [Delta, Finished], "told at once"
    assert not made.scheduler.running
    assert made.pool.active == 1, "a row of it is still on its way"
    made.submit(other)
    found = answers(run(made))
    assert found == answers(run(in_turn(made), [other]))
    assert known(made) == {LONG[:20] + tokens[:5], (9,) * 10 + _tokens(found["b", 0])[:-1]}
    assert device.seen.count("launch") == made.steps == 6 + 1 + 30


def _tokens(answer: list[Any]) -> tuple[int, ...]:
    return tuple(ids[0] for ids in answer[:-1:2])


def test_a_stop_string_is_seen_one_step_late(late: Make, demo: Path) -> None:
    tokenizer = Tokenizer.load(demo)
    made = late(tokenizer=tokenizer)
    ask = Submit("a", LONG[:20], replace(DRAWN, max_tokens=40))
    text = "".join(event.text for event in run(in_turn(made, tokenizer=tokenizer), [ask]) if isinstance(event, Delta))
    stop = text[len(text) // 2 :][:3]
    ask = Submit("a", LONG[:20], replace(DRAWN, max_tokens=40, stop=(stop,)))
    events, expected = run(made, [ask]), run(in_turn(made, tokenizer=tokenizer), [ask])
    assert [event for event in events if isinstance(event, Delta)] == [e for e in expected if isinstance(e, Delta)]
    (end,) = [event for event in events if isinstance(event, Finished)]
    assert (end.reason, end.stop) == ("stop", stop)
    assert made.steps == end.completion_tokens + 1


def test_an_end_by_length_is_known_before(late: Make, device: Device) -> None:
    made = late()
    run(made, [Submit(str(i), (i + 1,) * 10, replace(GREEDY, max_tokens=i)) for i in range(4)])
    assert device.seen == ["launch", "launch", "wait", "launch", "wait", "wait"]
    assert (made.steps, made.ahead, made.alone) == (3, 2, {})


def test_somebody_gives_way_only_between_steps(late: Make) -> None:
    made = late(TIGHT, max_step_tokens=64)
    asks = [Submit(str(i), (i + 1,) * 60, replace(GREEDY, max_tokens=70)) for i in range(4)]
    found = answers(run(made, asks))
    assert made.scheduler.preemptions > 0
    assert made.alone["blocks"] >= 1
    assert made.ahead > made.steps / 2
    for ask in asks:
        assert found[ask.id, 0] == answers(run(in_turn(made), [ask]))[ask.id, 0]


def test_who_is_cancelled_with_two_steps_on_their_way(late: Make, device: Device) -> None:
    made = late()
    asks = [Submit(id, LONG[:n], replace(GREEDY, max_tokens=30)) for id, n in (("a", 70), ("b", 40))]
    for ask in asks:
        made.submit(ask)
    events = [event for _ in range(6) for event in made.step()]
    told = made.requests.requests["a"].choices[0].sequence.output
    assert told > 1
    held: list[int] = []

    def cancels(events: list[Event]) -> None:
        made.cancel("a")
        assert len(device.told) == 3, "a step, its choice, and the step behind it"
        held.append(made.pool.active)

    made.meanwhile = cancels
    events += made.step()
    made.meanwhile = None
    assert held == [3], "two blocks of its own, one of the other's"
    assert made.pool.active == 3, "a step has a row of it still"
    events += made.step()
    assert made.pool.active == 1
    assert max(map(len, known(made))) == 70 + told - 1, "what was chosen and not told is not remembered"
    found = answers([*events, *run(made)])
    expected = answers(run(in_turn(made), asks))
    assert found["a", 0] == [*expected["a", 0][: 2 * told], "cancelled"]
    assert found["b", 0] == expected["b", 0]


def test_a_deadline_that_comes_with_two_steps_on_their_way(decoder: Decoder, late: Make) -> None:
    now = itertools.count()
    made = late(clock=lambda: float(next(now)))
    other = Submit("b", (5,) * 9, GREEDY)
    events = run(made, [Submit("a", LONG[:30], replace(GREEDY, max_tokens=100), deadline=25.0), other])
    found = answers(events)
    assert found["a", 0][-1] == "deadline"
    assert found["b", 0] == answers(run(in_turn(made), [other]))["b", 0]
    alone = answers(run(in_turn(made), [Submit("a", LONG[:30], replace(GREEDY, max_tokens=100))]))["a", 0]
    assert found["a", 0][:-1] == alone[: len(found["a", 0]) - 1]
    assert len(found["a", 0]) > 3


def test_a_row_of_nan_is_known_one_step_late(late: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    made, rows = late(), itertools.count()
    plain = inflight.device_sampler.choose

    def poisoned(logits: Tensor, samplers: Sequence[Sampler]) -> LateChosen:
        chosen = plain(logits, samplers)
        names = [sampler.name for sampler in samplers]
        if "a#0" in names and next(rows) == 4:
            rows_told = chosen._logits.as_subclass(Tensor)
            chosen._device.told.insert(-1, lambda: rows_told[names.index("a#0")].fill_(torch.nan))
        return chosen  # type: ignore[return-value]

    monkeypatch.setattr(inflight.device_sampler, "choose", poisoned)
    asks = [Submit("a", LONG[:30], GREEDY), Submit("b", (5,) * 9, GREEDY)]
    found = answers(run(made, asks))
    expected = answers(run(in_turn(made), asks))
    assert found["a", 0] == [*expected["a", 0][: 2 * 4], "bad_logits"]
    assert found["b", 0] == expected["b", 0]
    assert max(len(each) for each in known(made) if each[:30] == LONG[:30]) == 30, "only its prompt is remembered"


def test_choices_of_one_request_and_a_prefix_that_is_there(late: Make) -> None:
    made = late(max_step_tokens=20)
    drawn = SamplingParams(max_tokens=9, temperature=1.0, seed=4, frequency_penalty=0.5, logprobs=2)
    first, several = Submit("a", LONG[:80], GREEDY), Submit("b", (*LONG[:75], 5), drawn, n=3)
    events = run(made, [first])
    made.submit(Submit("c", (7,) * 30, replace(GREEDY, max_tokens=20)))
    events += made.step() + made.step()
    events += run(made, [several])
    (report,) = [event.report for event in events if isinstance(event, Finished) and event.id == "b" and event.report]
    assert report.reused_tokens == 75
    found = answers(events)
    for ask in (first, several):
        expected = answers(run(in_turn(made), [ask]))
        assert {key: found[key] for key in expected} == expected


# What goes wrong


def ahead(decoder: Decoder, runner: type[Runner] = Runner) -> Engine:
    """On a device that does at once what it is told, and raises at once."""
    limits = SchedulerConfig(max_running=6, max_step_tokens=48)
    return make_engine(decoder, limits=limits, overlaps=True, runner=runner)


@pytest.mark.parametrize("point", ["sampler.draw", "sampler.penalties", "sampler.noise"])
def test_a_choice_that_raises_is_made_one_by_one(decoder: Decoder, point: str) -> None:
    """Before the next step is launched, or else to the tokens that this one has begun with."""
    made = ahead(decoder)
    params = SamplingParams(max_tokens=10, temperature=0.8, seed=1, frequency_penalty=0.1)
    asks = [Submit(id, (n, 2, 3), params) for id, n in (("a", 1), ("b", 7))]
    expected = answers(run(in_turn(made), asks))
    faults.arm(Fault(point, after=4, key="a"))
    assert answers(run(made, asks)) == expected
    assert made.alone == ({} if point == "sampler.draw" else {"mishap": 1})
    faults.arm()
    faults.arm(Fault(point, after=4, times=0, key="a"))
    found = answers(run(made, asks))
    assert found["a", 0] == [*expected["a", 0][: 2 * 4], "internal"]
    assert found["b", 0] == expected["b", 0]


def test_too_little_memory_for_a_step_ahead(decoder: Decoder) -> None:
    class Small(Runner):
        def run(
            self, plan: StepPlan, wanted: dict[str, Wanted] | None = None, inflight_tokens: InflightTokens | None = None
        ) -> Tensor:
            if plan.tokens > (2 if inflight_tokens else 48):
                raise torch.OutOfMemoryError("no room")
            return super().run(plan, wanted, inflight_tokens)

    made = ahead(decoder, Small)
    asks = [Submit(str(i), (i + 1,) * (i + 1), GREEDY) for i in range(5)]
    assert answers(run(made, asks)) == answers(run(in_turn(made), asks))
    assert made.launcher.rows == 2
    assert made.ahead == made.steps - 1


@pytest.mark.parametrize("times", [1, 2])
def test_a_step_that_raises_when_it_is_launched_ahead(decoder: Decoder, times: int) -> None:
    """Once, it is healed; where it does so for one of them alone too, that one fails, with the token of the step
    before told, and the next step waits to know."""
    made = ahead(decoder)
    asks = [Submit(id, (n, 2, 3), GREEDY) for id, n in (("a", 1), ("b", 7))]
    expected = answers(run(in_turn(made), asks))
    faults.arm(Fault("runner.replay", after=2, times=times, key="a"))
    found = answers(run(made, asks))
    assert found["b", 0] == expected["b", 0]
    assert found["a", 0] == (expected["a", 0] if times == 1 else [*expected["a", 0][: 2 * 3], "internal"])
    assert made.alone == ({} if times == 1 else {"mishap": 1})


@pytest.mark.parametrize("rows", [None, 5])
def test_a_vector_adds_up_each_token_once(decoder: Decoder, rows: int | None) -> None:
    """Also where its second piece of 48 is run again since somebody behind it raises, also by few tokens at a time."""
    made = ahead(decoder)
    asks: list[Submit | Embed] = [Embed("a", LONG[:60], "mean"), Submit("b", (7, 2, 3, 4, 5, 6), GREEDY)]
    expected = answers(run(in_turn(made), asks))
    made.launcher.rows = rows
    fault = Fault("runner.rows", key="b")
    faults.arm(fault)
    assert answers(run(made, asks)) == expected
    assert fault.fired == 1


def test_who_closes_it_leaves_nothing_on_its_way(late: Make) -> None:
    made = late()
    made.submit(Submit("a", (1, 2, 3), GREEDY))
    made.step()
    assert [type(event) for event in made.close()] == [Failed]
    assert not made.idle, "a step is on its way"
    assert run(made) == []
    again = Submit("a", (1, 2, 3), GREEDY)
    assert answers(run(made, [again])) == answers(run(in_turn(made), [again]))


def test_an_id_may_come_again_while_a_row_of_it_is_on_its_way(late: Make) -> None:
    made, ask = late(), Submit("a", (1, 2, 3), GREEDY)
    made.submit(ask)
    for _ in range(3):
        made.step()
    made.meanwhile = lambda events: made.cancel("a")
    events = made.step()
    made.meanwhile = None
    assert [type(event) for event in events] == [Failed]
    made.submit(ask)
    assert made._inflight is not None
    assert answers(run(made)) == answers(run(in_turn(made), [ask]))


# Where there is none


def test_a_model_that_is_waited_for_runs_no_step_ahead(late: Make, device: Device) -> None:
    made = late()
    made.runner.waits = "it is waited for"
    run(made, [Submit("a", (1, 2, 3), replace(GREEDY, max_tokens=5))])
    assert device.seen == ["launch", "wait"] * 5
    assert (made.ahead, made.alone) == (0, {"model": 5})


def test_experts_are_waited_for_on_a_device(tiny_decoder: Callable[..., Decoder]) -> None:
    for place, why in (("cpu", None), ("meta", "which experts run depends on the token")):
        decoder = tiny_decoder(layers=1)
        decoder.final_norm.weight = decoder.final_norm.weight.to(place)
        assert waits(decoder) is None
        decoder.blocks[0].feed_forward = MixtureOfExperts(decoder.head, (), 1, False)
        assert waits(decoder) == why


@pytest.mark.parametrize("asked", ["vector", "scored"])
def test_tokens_are_told_before_numbers_of_a_prompt_are_waited_for(late: Make, device: Device, asked: str) -> None:
    made = late(max_step_tokens=16)
    made.submit(Submit("a", (1, 2, 3), replace(GREEDY, max_tokens=8)))
    for _ in range(2):
        made.step()
    device.seen.clear()
    if asked == "vector":
        made.embed(Embed("b", LONG[:25], "mean"))
    else:
        made.submit(Submit("b", LONG[:25], replace(GREEDY, max_tokens=1, prompt_logprobs=0)))
    for _ in range(4):
        made.step()
    alone = ["wait", "launch"]
    assert device.seen == [*alone, *alone, "launch", "wait", "launch", "wait"]
    assert (made.ahead, made.alone) == (4, {"numbers": 2})


class _Meter:
    late = True

    def __init__(self) -> None:
        self.ended = 0

    def begin(self) -> None: ...

    def end(self) -> Callable[[], float]:
        self.ended += 1
        return lambda number=self.ended: float(number)  # type: ignore[misc]


def test_each_step_is_judged_by_its_own_time(decoder: Decoder) -> None:
    """Another has begun by then. The clock of a step that was launched ahead runs from the end of the one before."""
    now, busy = itertools.count(), list[float]()
    judge = Bottlenecks(None, _Meter())
    count = judge.count
    judge.count = lambda plan, seconds, own, requests: (busy.append(own()), count(plan, seconds, own, requests))  # type: ignore
    made = make_engine(decoder, overlaps=True, bounds=judge, clock=lambda: float(next(now)))
    made.submit(Submit("a", (1, 2, 3), replace(GREEDY, max_tokens=5)))
    began = next(now)
    run(made)
    assert busy == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert made.step_seconds < next(now) - began
