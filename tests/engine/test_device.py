"""The engine beside a device: one that only pretends to be (`tests/pretend.py`), one with too little memory, and one
that is still busy. What is computed is what a CPU computes; when the host waits, and for what, is counted."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from attar import machine
from attar.checkpoints.sources import opening
from attar.checkpoints.sources.opening import stored
from attar.compression import device_placement
from attar.engine import bottleneck, startup
from attar.engine.bottleneck import KernelMeter
from attar.engine.config import EngineConfig
from attar.engine.engine import Engine
from attar.engine.main import Loop, listen
from attar.evaluation import decode_speed
from attar.execution.cuda_graphs import Recorded
from attar.execution.model_runner import Runner
from attar.kernels import dispatch, ops
from attar.kernels.operands import Adapter, Linear, Routes
from attar.model.cache import ForwardBatch, KVCache, pool
from attar.model.decoder import Decoder
from attar.model.layers import FeedForward, MixtureOfExperts
from attar.plan import gpus
from attar.plan.costs import matrices
from attar.plan.fit import size
from attar.protocol.messages import Cancel, Delta, Event, Failed, PromptLogprobs, Ready, Submit
from attar.protocol.request import SamplingParams
from attar.protocol.settings import Settings
from attar.sampling import device_sampler
from attar.sampling.sampler import Sampler, sample
from attar.scheduling.step_plan import StepPlan
from tests import pretend
from tests.engine.conftest import answers, make_engine, run
from tests.engine.test_main import Client
from tests.errors import user_error
from tests.execution.test_cuda_graphs import Again
from tests.pretend import there

Make = Callable[..., Decoder]
SAME = 1e-5  # of numbers that are summed in another order
CONTEXT = 64


def moved(decoder: Decoder, device: torch.device) -> Decoder:
    """As `place.move`, with what is no block's."""
    for block in decoder.blocks:
        device_placement.move(block, device)
    assert isinstance(decoder.embedding.table, Tensor)
    decoder.embedding.table = decoder.embedding.table.to(device)
    assert isinstance(decoder.head.weight, Tensor)
    decoder.head.weight = decoder.head.weight.to(device)
    decoder.final_norm.weight = decoder.final_norm.weight.to(device)
    return decoder


# What crosses


def tokens(events: list[Event]) -> dict[tuple[str, int], list[int]]:
    found: dict[tuple[str, int], list[int]] = defaultdict(list)
    for event in events:
        assert not isinstance(event, Failed), event
        if isinstance(event, Delta):
            found[event.id, event.choice] += event.token_ids
        elif isinstance(event, PromptLogprobs):
            found[event.id, -1] += [each.top[0][0] for each in event.logprobs]
    return dict(found)


@pytest.mark.parametrize("graphs", [False, True])
def test_an_engine_there_answers_as_one_here(tiny_decoder: Make, graphs: bool) -> None:
    greedy = SamplingParams(max_tokens=4, temperature=0, seed=0, logprobs=2)
    drawn = SamplingParams(max_tokens=4, temperature=0.8, top_p=0.9, seed=3, repetition_penalty=1.2)
    scored = SamplingParams(max_tokens=0, temperature=0, seed=0, prompt_logprobs=1)
    asks = [Submit("a", (1, 2, 3), greedy), Submit("b", (4, 5), drawn, 2), Submit("c", (6, 7, 8, 9), scored)]
    expected = tokens(run(make_engine(tiny_decoder(layers=1)), asks))
    assert expected.keys() == {("a", 0), ("b", 0), ("b", 1), ("c", -1)}
    with there() as device:
        made = make_engine(moved(tiny_decoder(layers=1), device), record=Again() if graphs else None)
        assert made.overlaps
        assert tokens(run(made, asks)) == expected


class Mark:
    """By which the host waits for tokens."""

    def set(self) -> None: ...

    def wait(self) -> None:
        pretend.waits.append("mark")


@pytest.fixture
def marked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_sampler, "mark", lambda device: Mark())


@pytest.mark.usefixtures("marked")
def test_the_host_waits_for_a_choice_of_tokens_once() -> None:
    params = [
        SamplingParams(temperature=0, seed=0, logprobs=0),
        SamplingParams(temperature=0.7, top_k=5, top_p=0.9, min_p=0.01, seed=1, logprobs=3),
        SamplingParams(temperature=1.0, seed=2, logit_bias={3: 2.0}),
        SamplingParams(temperature=0, seed=0, logprobs=1, repetition_penalty=1.3),
    ]
    logits = torch.randn(4, 97, generator=torch.Generator().manual_seed(0)).mul(3).round()  # ties among them
    expected = sample(logits, [Sampler(each, (1,), 97) for each in params])
    samplers = [Sampler(each, (1,), 97) for each in params]
    with there() as device:
        away = logits.to(device)
        pretend.waits.clear()
        chosen = device_sampler.choose(away, samplers)
        assert not pretend.waits
        found = chosen.draws()
        assert pretend.waits == ["mark"]
    assert found == expected


class Quiet(Again):
    """A recorder whose graphs wait for nothing: on a GPU they are kernels alone."""

    def __call__(self, call: Callable[[], Tensor]) -> Recorded:
        made = super().__call__(call)

        def replay() -> None:
            before = list(pretend.waits)
            made.replay()
            pretend.waits[:] = before

        return Recorded(replay, made.result)


@pytest.mark.usefixtures("marked")
@pytest.mark.parametrize("waits", [None, "a reason"])
def test_the_host_waits_for_a_decode_step_once(tiny_decoder: Make, waits: str | None) -> None:
    ways = [{"temperature": 0.0, "logprobs": 2}, {"temperature": 0.9, "top_p": 0.8}, {"frequency_penalty": 0.5}]
    with there() as device:
        made = make_engine(moved(tiny_decoder(layers=1), device), record=Quiet())
        for i, way in enumerate(ways):
            made.submit(Submit(str(i), (i + 1, 2), SamplingParams(max_tokens=9, seed=i, **way)))  # type: ignore[arg-type]
        made.runner.waits = waits
        made.step()
        made.step()  # and the graph is recorded
        for _ in range(3):
            pretend.waits.clear()
            made.step()
            assert pretend.waits == ["mark"]
        assert made.ahead == (0 if waits else 5)
        made.close()


def test_rows_of_adapters_are_sent_once_for_all_linears(tiny_decoder: Make) -> None:
    decoder = tiny_decoder(layers=1)
    numbers = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(shape, generator=numbers) for shape in ((5, 64), (32, 64)))
    down, up = (torch.randn(shape, generator=numbers) for shape in ((2, 64), (32, 2)))

    def product(device: torch.device) -> Tensor:
        each = Linear("a", weight.to(device), adapters={1: Adapter(down.to(device), up.to(device))})
        pages, tables = pool(decoder.config, 2, decoder.lossless, str(device)), torch.tensor([[0], [1]])
        view = KVCache.over(pages, tables.int(), [0, 0])
        step, rows = ForwardBatch((2, 3), CONTEXT, view, (0, 1)), x.to(device)
        pretend.waits.clear()
        for _ in range(2):
            out = ops.linear(rows, (each,), routes=step.routes)
        assert pretend.waits == []
        return out

    expected = product(torch.device("cpu"))
    with there() as device:
        assert torch.allclose(torch.tensor(product(device).tolist()), expected, atol=SAME)


def test_experts_are_waited_for_once_a_layer() -> None:
    numbers = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=numbers) / 4

    weights = [(random(16, 16), random(16, 8)) for _ in range(4)]
    router, x = random(4, 16), random(6, 16)

    def layer(device: torch.device) -> Tensor:
        experts = tuple(
            FeedForward((Linear("up", up.to(device)),), Linear("down", down.to(device)), "silu", True)
            for up, down in weights
        )
        made = MixtureOfExperts(Linear("router", router.to(device)), experts, 2, True)
        rows = x.to(device)
        pretend.waits.clear()
        return made.forward(rows, routes=Routes(torch.zeros(6, dtype=torch.long)))

    expected = layer(torch.device("cpu"))
    with there() as device:
        found = layer(device)
        assert len(pretend.waits) == 1
        assert torch.allclose(torch.tensor(found.tolist()), expected, atol=SAME)


# Its speed


def test_a_report_of_a_card(tiny_decoder: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it but the kernels; the roof is that of `plan/`, at rates that are made up."""
    monkeypatch.setattr(dispatch, "store", lambda *_: dispatch.GpuWeights(pretend.THERE, torch.float32))
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 7 * 10**6)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a card")
    monkeypatch.setattr(bottleneck, "card_limits", lambda device: (1000.0, {"bf16": 2.0, "int8": 4.0, "fp8": 8.0}))
    part, load = decode_speed.part("tiny", "fp8", "bf16"), decode_speed.Load(prompt=16, gen=4, batch=2)
    with there() as device:
        setup = decode_speed.Setup(str(device))
        report = decode_speed.run(lambda store: moved(tiny_decoder(layers=1), device), load, setup, part)
    products = 2.0 * 2 * sum(m.rows * m.columns / (2e9 if m.part == "head" else 8e9) for m in matrices(part[0]))
    scores = 2 * 4.0 * part[0].heads * part[0].head_dim * part[0].layers * (16 + 2 + 1) / 2e9
    assert report["roof_fraction"] == pytest.approx((products + scores) / (report["step_ms"] / 1e3))
    assert report["limited_by"] == "compute"
    assert (report["card"], report["peak_mb"], report["read_gb_s"], report["bf16_gops"]) == ("a card", 7.0, 1000.0, 2.0)
    assert "of what compute would allow" in decode_speed.to_text(report)


# Its memory


@pytest.mark.parametrize("fullest", [None, 2 * 10**6])
def test_an_engine_is_loaded_there(tiny: Path, fullest: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """From settings to an answer; of two devices the least that is free on any counts."""

    class Memory:
        """Which takes nothing."""

        device = pretend.THERE
        free, held, peak, settle = (lambda self, n=n: n for n in (4 * 10**6, 10**6, 10**6, 0))

    def loaded(path: Path, *, device: str, **_: Any) -> SimpleNamespace:
        executor = None if fullest is None else SimpleNamespace(workers=SimpleNamespace(free=fullest))
        decoder = moved(opening.load(path, torch.float32), torch.device(device))
        return SimpleNamespace(
            decoder=decoder,
            tokenizer=None,
            eos_ids=frozenset(),
            path=path,
            runner=Runner,
            executor=executor,
            tower=None,
        )

    monkeypatch.setattr(dispatch, "require", lambda device: None)
    monkeypatch.setattr(startup, "GpuMemory", lambda device: Memory())
    monkeypatch.setattr(startup, "StreamMeter", lambda device: KernelMeter())
    monkeypatch.setattr(bottleneck, "card_limits", lambda device: (1.0, {"bf16": 1.0, "int8": 1.0, "fp8": 1.0}))
    monkeypatch.setattr(startup, "load_model", loaded)
    ask = Submit("a", (1, 2, 3), SamplingParams(max_tokens=3, temperature=0, seed=0))
    with there() as device:
        made, ready = startup.start_engine(Settings(str(tiny), "", str(device), max_running=2, max_step_tokens=16))
        assert made.overlaps
        found = tokens(run(made, [ask]))
    here = Engine(opening.load(tiny, torch.float32), None, EngineConfig(4, 64))
    assert found == tokens(run(here, [ask]))
    available = 4 * 10**6 if fullest is None else fullest
    assert sum(size for _, size in ready.table) == int(available * machine.SHARE)


# Too little memory


def test_weights_that_a_card_has_no_room_for_are_not_read(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        device = torch.device("cpu")

        def free(self) -> int:
            return 2**19

    monkeypatch.setattr(dispatch, "require", lambda device: None)
    monkeypatch.setattr(startup, "GpuMemory", lambda device: Full())
    monkeypatch.setattr(startup, "load_model", lambda *rest, **options: pytest.fail("the model is loaded"))
    needed = gpus.weight_bytes(*stored(tiny), True).total
    with there() as device, user_error("memory_insufficient", "524 kB", size(needed - 2**19)):
        startup.start_engine(Settings(str(tiny), "", str(device)))


def test_decode_steps_stay_small_once_memory_was_too_little(tiny_decoder: Make) -> None:
    decoder, tried = tiny_decoder(layers=1), list[int]()

    class Small(Runner):
        def run(self, plan: StepPlan, *more: Any) -> Tensor:
            tried.append(plan.tokens)
            if plan.tokens > 2:
                raise torch.OutOfMemoryError("no room")
            return super().run(plan, *more)

    params = SamplingParams(max_tokens=3, temperature=0, seed=0)
    asks = [Submit(str(i), (i + 1,), params) for i in range(6)]
    made = make_engine(decoder, runner=Small)
    assert answers(run(made, asks)) == answers(run(make_engine(decoder), asks))
    assert made.launcher.rows == 2
    assert tried == [6, 3, 2, 1, 2, 1, *[2] * 6]


# What is done meanwhile


def test_what_is_asked_within_a_step_is_taken_within_it(tiny_decoder: Make, tmp_path: Path) -> None:
    during: list[Callable[[], None]] = []

    class Busy(Runner):
        def run(self, plan: StepPlan, *more: Any) -> Tensor:
            found = super().run(plan, *more)
            if during:
                during.pop()()
            return found

    params = SamplingParams(max_tokens=20, temperature=0, seed=0)
    made = make_engine(tiny_decoder(layers=1), overlaps=True, runner=Busy)
    with listen(tmp_path / "socket") as listener:
        loop = Loop(made, Ready("tiny", CONTEXT, 97, 12, 64, 256, (("weights", 1),)), listener, None)
        client = Client(tmp_path / "socket")
        loop._listen(0)
        made.submit(Submit("a", (1, 2), params))
        made.step()
        during.append(lambda: client.send(Cancel("a"), Submit("b", (3,), params), Submit("a", (4,), params)))
        assert made.step() == [], "what there is to say of them was said within the step"
        told = [each for each in client.until(Failed) if isinstance(each, Failed)]
        assert [(each.id, each.code) for each in told] == [("a", "cancelled"), ("a", "invalid")]
        assert [each.id for each in made.scheduler.waiting] == ["b#0"]
        made.scheduler.check()
        client.socket.close()
        made.close()
        loop._hang_up("the test is over")
