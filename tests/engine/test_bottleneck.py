"""What limited a step: judged by the clock, the device's time and the model's roofline, and told of every step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from msgspec.structs import replace as with_settings

from attar import env
from attar.engine import bottleneck, startup
from attar.engine.bottleneck import Bottlenecks, KernelMeter, StreamMeter
from attar.engine.engine import Engine
from attar.formats.scheme import Scheme
from attar.kernels import dispatch
from attar.kernels.native import extension, limits
from attar.kv.schemes import SCHEMES
from attar.model.decoder import Decoder
from attar.model.shapes import shape
from attar.model.split import Share
from attar.plan.costs import Matrix, Storage
from attar.plan.fit import Deployment
from attar.plan.rates import store
from attar.plan.rates.step_time import StepModel
from attar.plan.roofline import Rates, Roofline
from attar.protocol.messages import Embed, Embedding, Event, Failed, Finished, Report, Submit
from attar.protocol.request import SamplingParams
from attar.protocol.scheduler_config import SchedulerConfig
from attar.protocol.settings import Settings
from attar.scheduling.step_plan import StepPlan
from tests.engine.conftest import ask, make_engine
from tests.pretend_rates import profile

GREEDY = SamplingParams(max_tokens=6, temperature=0, seed=0)
SETTINGS = Settings("", "")
HELD = Deployment(shape("llama-3.2-1b"), Storage.named("w4g128"), SCHEMES["int8"])
THREADS = 3
SLOW = 1e-30  # of a rate: whatever it bounds takes longest


class Clock:
    """A second has gone whenever somebody looks."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


class Told:
    """A meter that says what it is told to; with `late`, one that has to be waited for."""

    def __init__(self, busy: float, late: bool = False) -> None:
        self.busy, self.late = busy, late
        self.begun = self.ended = 0

    def begin(self) -> None:
        self.begun += 1

    def end(self) -> Callable[[], float]:
        self.ended += 1
        return lambda: self.busy


@pytest.fixture(scope="module")
def decoder(tiny_decoder: Callable[..., Decoder]) -> Decoder:
    return tiny_decoder(layers=1)


def roofline(decoder: Decoder, reads: bool) -> Roofline:
    """Of a machine that reads slowly, or else computes slowly."""
    rates = Rates(SLOW, lambda scheme: 1.0) if reads else Rates(1.0, lambda scheme: SLOW)
    return Roofline(decoder.config, Storage(dtype="float32"), SCHEMES["float32"], rates)


def judged(decoder: Decoder, judge: Bottlenecks | None, step: int = 48) -> Engine:
    return make_engine(
        decoder, limits=SchedulerConfig(max_step_tokens=step, max_running=8), clock=Clock(), bounds=judge
    )


def steps(made: Engine, *asks: Submit | Embed) -> Iterator[list[Event]]:
    ask(made, asks)
    while not made.idle:
        yield made.step()


def reports(made: Engine, *asks: Submit | Embed) -> dict[str, Report]:
    events = [event for told in steps(made, *asks) for event in told]
    ends = [event for event in events if isinstance(event, Finished | Embedding | Failed)]
    return {event.id: event.report for event in ends if event.report is not None}


@pytest.mark.parametrize(
    "busy, reads, limit",
    [(0.0, True, "overhead"), (0.0, False, "overhead"), (1e9, True, "bandwidth"), (1e9, False, "compute")],
)
def test_each_limit(decoder: Decoder, busy: float, reads: bool, limit: str) -> None:
    made = judged(decoder, Bottlenecks(roofline(decoder, reads), Told(busy)))
    assert reports(made, Submit("a", (1, 2, 3), GREEDY))["a"].limited_by == {limit: 6}


def test_overhead_begins_at_half_of_a_step(decoder: Decoder) -> None:
    """The clock is looked at twice from a step's beginning to its count: two seconds."""
    for busy, limit in ((0.9, "overhead"), (1.1, "bandwidth")):
        made = judged(decoder, Bottlenecks(roofline(decoder, True), Told(busy)))
        found = reports(made, Submit("a", (1, 2, 3), GREEDY))["a"].limited_by
        assert found == {limit: 6}
        assert made.step_seconds == 2.0 * made.steps


def test_what_the_roofline_would_allow_is_told_as_a_part_of_what_was_taken(decoder: Decoder) -> None:
    """Of a step that waits for its cores, next to nothing, whatever it is said to be limited by."""
    roof = roofline(decoder, True)
    made = judged(decoder, Bottlenecks(roof, Told(1e9)))
    plans: list[StepPlan] = []
    plan = made.scheduler.plan
    made.scheduler.plan = lambda now: plans.append(plan(now)) or plans[-1]  # type: ignore[method-assign, func-returns-value]
    found = reports(made, Submit("a", (1, 2, 3), GREEDY))["a"].roof_fraction
    least = sum(max(roof.least(chunk[1:4] for chunk in each.chunks)) for each in plans if each.chunks)
    assert found == pytest.approx(least / made.step_seconds)
    assert reports(judged(decoder, Bottlenecks(None, Told(0.0))), Submit("a", (1,), GREEDY))["a"].roof_fraction is None


def test_steps_have_the_seconds_that_a_plan_expects(decoder: Decoder) -> None:
    model = StepModel(decoder.config, Storage(dtype="float32"), SCHEMES["float32"], profile())
    made = judged(decoder, Bottlenecks(roofline(decoder, True), Told(1e9), model))
    plans: list[StepPlan] = []
    plan = made.scheduler.plan
    made.scheduler.plan = lambda now: plans.append(plan(now)) or plans[-1]  # type: ignore[method-assign, func-returns-value]
    found = reports(made, Submit("a", (1, 2, 3), GREEDY))["a"]
    expected = [model.of([chunk[1:4] for chunk in each.chunks]) for each in plans if each.chunks]
    assert found.expected_seconds == pytest.approx({
        "products": sum(each.products for each in expected), "attention": sum(each.attention for each in expected),
        "overhead": sum(each.overhead for each in expected),
    })  # fmt: skip
    assert sum(found.expected_seconds.values()) == pytest.approx(sum(each.total for each in expected))
    assert found.step_seconds == pytest.approx(made.step_seconds)
    without = judged(decoder, Bottlenecks(roofline(decoder, True), Told(1e9)))
    assert reports(without, Submit("a", (1,), GREEDY))["a"].expected_seconds == {}


def test_a_request_of_one_step_hears_of_it(decoder: Decoder) -> None:
    made = judged(decoder, Bottlenecks(roofline(decoder, True), Told(1e9)))
    one = SamplingParams(max_tokens=1, temperature=0, seed=0)
    found = reports(made, Submit("a", (1, 2), one), Embed("b", (1, 2, 3)))
    assert found["a"].limited_by == found["b"].limited_by == {"bandwidth": 1}


def test_several_choices_share_a_step_that_counts_once(decoder: Decoder) -> None:
    made = judged(decoder, Bottlenecks(roofline(decoder, True), Told(1e9)))
    found = reports(made, Submit("a", (1, 2, 3), GREEDY, n=3), Submit("b", (4, 5), GREEDY))
    assert sum(found["a"].limited_by.values()) <= made.steps < 3 * 6
    assert found["b"].limited_by == {"bandwidth": 6}


def test_those_that_end_early_hear_of_the_steps_that_they_had(decoder: Decoder) -> None:
    made = judged(decoder, Bottlenecks(roofline(decoder, True), Told(1e9)))
    ran = steps(made, Submit("a", (1, 2, 3), GREEDY), Submit("b", (4, 5), GREEDY))
    for _ in range(3):
        next(ran)
    made.cancel("a")
    (failed,) = [event for told in ran for event in told if isinstance(event, Failed)]
    assert failed.report is not None
    assert failed.report.limited_by == {"bandwidth": 3}


def test_steps_of_a_device_that_is_not_waited_for_are_judged_together(decoder: Decoder) -> None:
    """Two pieces of a prompt come back at once, and the third waits for all: by itself it would be overhead."""
    late = Told(2.5, late=True)
    made = judged(decoder, Bottlenecks(roofline(decoder, True), late), step=8)
    one = SamplingParams(max_tokens=1, temperature=0, seed=0)
    ran = steps(made, Submit("a", tuple(range(1, 25)), one))
    next(ran)
    next(ran)
    (request,) = made.requests.requests.values()
    assert not request.limited_by
    clock = made.clock
    assert isinstance(clock, Clock)
    run = made.runner.run

    def slow(*args: object) -> object:
        clock.now += 8.0
        return run(*args)  # type: ignore[arg-type]

    made.runner.run = slow  # type: ignore[method-assign, assignment]
    next(ran)
    assert request.limited_by == {"bandwidth": 3}, "7.5 seconds of 14"
    assert late.begun == late.ended == 3


def test_steps_that_nobody_waits_for_are_not_gathered_without_end(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bottleneck, "OPEN", 3)
    made = judged(decoder, Bottlenecks(roofline(decoder, True), Told(1e9, late=True)), step=8)
    told = steps(made, Submit("a", tuple(range(1, 65)), SamplingParams(max_tokens=1, temperature=0, seed=0)))
    heard = []
    for _ in range(7):
        next(told)
        (request,) = made.requests.requests.values()
        heard.append(sum(request.limited_by.values()))
    assert heard == [0, 0, 3, 3, 3, 6, 6]


def test_without_a_roofline_there_are_no_kernels_and_all_is_overhead(decoder: Decoder) -> None:
    assert reports(judged(decoder, Bottlenecks(None, Told(0.0))), Submit("a", (1,), GREEDY))["a"].limited_by == {
        "overhead": 6
    }


def test_who_does_not_ask_is_not_told(decoder: Decoder) -> None:
    assert reports(judged(decoder, None), Submit("a", (1,), GREEDY))["a"].limited_by == {}


def test_a_served_model_is_judged_by_this_machine(demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "READ", 1 << 20)
    measure, slow = bottleneck.cpu_rates, Rates(SLOW, lambda scheme: 1.0)
    monkeypatch.setattr(bottleneck, "cpu_rates", lambda *args: slow if measure(*args) else None)
    made, _ = startup.start_engine(Settings(str(demo), "", memory=10**9, context=256, verify=False))
    if not extension.loaded():
        pytest.skip("the native kernels are off or do not load")
    assert made.bounds is not None
    assert isinstance(made.bounds.meter, KernelMeter)
    before = extension.busy_seconds()
    found = reports(made, Submit("a", tuple(range(40)), GREEDY), Embed("b", tuple(range(30))))
    assert sum(found["a"].limited_by.values()) == made.steps
    assert sum(found["b"].limited_by.values()) == 1
    assert extension.busy_seconds() > before
    made.bounds.meter = Told(1e9)
    assert reports(made, Submit("c", (5, 6, 7), GREEDY))["c"].limited_by == {"bandwidth": 6}, "by the rates measured"
    made.bounds.meter = Told(0.0)
    assert reports(made, Submit("d", (5, 6, 7), GREEDY))["d"].limited_by == {"overhead": 6}


def test_one_stage_of_several_on_cpus_is_not_judged(demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    judges: list[Bottlenecks | None] = []
    decoder = SimpleNamespace(store=SimpleNamespace(refused={}))
    model = SimpleNamespace(
        decoder=decoder, tokenizer=None, eos_ids=frozenset(), runner=None, executor=object(), tower=None
    )
    monkeypatch.setattr(startup, "load_model", lambda *args, **kwargs: model)

    def engine(*args: object, bounds: Bottlenecks | None, **kwargs: object) -> SimpleNamespace:
        judges.append(bounds)
        return SimpleNamespace(runner=SimpleNamespace(horizons=()), images=None)

    monkeypatch.setattr(startup, "Engine", engine)
    monkeypatch.setattr(bottleneck, "cpu_rates", lambda *args: None)
    for tp, pp in ((1, 1), (2, 1), (1, 2)):
        threads = tp * pp * torch.get_num_threads()  # which leaves each process those that there are now
        startup.start_engine(Settings(str(demo), "", memory=10**9, context=256, tp=tp, pp=pp, threads=threads))
    assert [judge is None for judge in judges] == [False, False, True]


def test_time_in_kernels_is_that_of_native_calls(tiny_decoder: Callable[..., Decoder]) -> None:
    store = dispatch.store()
    if store is None:
        pytest.skip("the native kernels are off or do not load")
    made, meter = judged(tiny_decoder(layers=1, store=store), None), KernelMeter()
    meter.begin()
    assert meter.end()() == 0.0
    meter.begin()
    began = time.perf_counter()
    reports(made, Submit("a", (1, 2, 3), GREEDY))
    passed = time.perf_counter() - began
    assert 0.0 < meter.end()() < passed


def test_time_on_a_stream_lies_between_two_events_and_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing
            self.name = "end" if done else "start"

        def record(self, stream: object) -> None:
            done.append(f"{self.name} on {stream}")

        def synchronize(self) -> None:
            done.append(f"wait for {self.name}")

        def elapsed_time(self, other: Event) -> float:
            done.append(f"{self.name} to {other.name}")
            return 1500.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"the stream of {device}")
    meter = StreamMeter(torch.device("cuda:1"))
    meter.begin()
    spent = meter.end()
    assert done == ["start on the stream of cuda:1", "end on the stream of cuda:1"]
    assert spent() == 1.5
    assert done[2:] == ["wait for end", "start to end"]


def test_rates_of_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bottleneck, "card_limits", lambda device: (4000.0, {"bf16": 8e5, "int8": 15e5, "fp8": 16e5}))
    monkeypatch.setattr(bottleneck, "knows_float8", lambda device: False)
    found = bottleneck.card_rates(torch.device("cuda"))
    w4 = Scheme.parse("w4g128").with_scale_dtype("bfloat16")
    assert (found.bandwidth, found.operations(w4), found.operations(None)) == (4e12, 8e14, 8e14)
    assert found.operations(Scheme.parse("w8a8")) == 15e14
    assert found.operations(Scheme.parse("fp8")) == 16e14
    assert found.size is not None
    matrix = Matrix("m", 256, 128)
    assert found.size(matrix, None) == 2 * 256 * 128
    assert found.size(matrix, w4) == 256 * 128 // 2 + 2 * 256, "codes and scales"
    assert found.size(matrix, Scheme.parse("fp8")) == 2 * 256 * 128, "which this card does not know"


@pytest.mark.parametrize("room", [1 << 20, 1024])
def test_limits_of_a_card_are_of_each_kind_of_numbers(room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The calls themselves, on a CPU; their times are made up."""
    seconds = iter((0.5, 0.25, 0.125, 0.0625))

    def timed(call: Callable[[], object]) -> float:
        call()
        return next(seconds)

    monkeypatch.setattr(bottleneck, "_seconds", timed)
    monkeypatch.setattr(bottleneck, "COPIED", 4096)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (4 * room, 1 << 30))
    monkeypatch.setattr(bottleneck, "SQUARE", 64)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    bandwidth, gops = bottleneck.card_limits(torch.device("cpu"))
    work = 2 * 64**3 / 1e9
    assert bandwidth == 2 * min(room, 4096) / 0.5 / 1e9
    assert gops == {"bf16": work / 0.25, "int8": work / 0.125, "fp8": work / 0.0625}


def test_a_card_without_room_to_measure_serves_all_the_same(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(device: torch.device) -> Rates:
        raise error

    monkeypatch.setattr(bottleneck, "card_rates", fails)
    error: Exception = torch.OutOfMemoryError("2 GiB")
    assert startup._measured(torch.device("cuda")) is None
    assert "the rates of cuda could not be measured" in caplog.text
    error = torch.AcceleratorError("gone")
    with pytest.raises(torch.AcceleratorError):
        startup._measured(torch.device("cuda"))


def test_rates_of_a_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def measured(read: int, of: object) -> limits.Limits:
        assert of is min
        asked.append(read)
        return limits.Limits(20.0, 800.0, 6000.0)

    monkeypatch.setattr(limits, "measure", measured)
    monkeypatch.setattr(extension, "loaded", lambda: True)
    found = bottleneck.cpu_rates(10**6, "int8g128")
    assert found is not None
    w4 = Scheme.parse("w4g128")
    assert (found.bandwidth, found.operations(w4), found.operations(None)) == (20e9, 6e12, 2e11)
    exact = bottleneck.cpu_rates(10**12, "exact")
    assert exact is not None
    assert exact.operations(w4) == 2e11
    assert asked == [10**6, limits.READ]
    monkeypatch.setattr(extension, "loaded", lambda: False)
    assert bottleneck.cpu_rates(10**6, "int8g128") is None


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of kept rates that has this machine's, of three threads."""
    at = tmp_path / "cache"
    monkeypatch.setattr(env, "get", lambda: env.Env(cache=at))
    now = datetime.now(UTC).replace(microsecond=0).isoformat().replace("+00:00", "Z")
    assert store.RatesStore(at).keep(profile(key=replace(store.key(), threads=THREADS), measured=now))
    return at


def test_kept_rates_give_the_model_of_a_plan(folder: Path) -> None:
    found = bottleneck.step_model(SETTINGS, HELD, THREADS)
    assert found is not None
    chunks = [(100, 1, 1), (7, 40, 0)]
    assert found.of(chunks) == StepModel(HELD.config, HELD.storage, HELD.kv, profile()).of(chunks)


def test_rates_of_other_threads_do_not_count(folder: Path) -> None:
    assert bottleneck.step_model(SETTINGS, HELD, THREADS + 1) is None


@pytest.mark.parametrize(
    "changes", [{"activations": "exact"}, {"sparse_attention": "topk:1/4"}, {"sparse_prefill": "skip:0.01"}]
)
def test_what_the_rates_do_not_describe_has_no_model(folder: Path, changes: dict[str, str]) -> None:
    assert bottleneck.step_model(with_settings(SETTINGS, **changes), HELD, THREADS) is None  # type: ignore[arg-type]


def test_several_processes_have_no_model(folder: Path) -> None:
    assert bottleneck.step_model(SETTINGS, replace(HELD, share=Share(0, 2)), THREADS) is None


def test_a_damaged_file_is_reported(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (file,) = folder.glob("rates-*.json")
    file.write_bytes(b"{")
    assert bottleneck.step_model(SETTINGS, HELD, THREADS) is None
    assert "expected_seconds" in caplog.text
