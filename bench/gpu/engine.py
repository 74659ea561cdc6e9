"""The engine's steps on the card, as far as they need no server: graphs beside full steps, memory as it is measured,
tokens chosen, and the compression of one block.

Scheduler, runner and sampling are the engine's own. What calls them is a loop in here: the engine itself wants packages
that not every machine with a card has.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gpu import models
from gpu.timing import DEVICE
from torch import Tensor

from attar.engine import memory_profile
from attar.execution import cuda_graphs
from attar.execution.model_runner import Runner
from attar.execution.step_inputs import InflightTokens
from attar.kernels.triton import backend
from attar.kv.schemes import SCHEMES
from attar.model.decoder import Decoder
from attar.protocol.request import SamplingParams
from attar.protocol.scheduler_config import SchedulerConfig
from attar.sampling import device_sampler
from attar.sampling.sampler import BadLogits, Sampler, sample
from attar.scheduling.block_pool import BlockPool
from attar.scheduling.prefix_cache import PrefixCache
from attar.scheduling.scheduler import Scheduler
from attar.scheduling.sequence import Sequence
from attar.scheduling.step_plan import Outcome, ScheduledTokens, StepPlan

SMALL = "tiny"
PROMPTS = (3, 5, 9) if backend.interpreted() else (5, 70, 130)  # tokens, in a graph of four rows: one is left over
STEPS = 2 if backend.interpreted() else 40
TIMED = 1 if backend.interpreted() else 50
GREEDY, DRAWN = SamplingParams(temperature=0, seed=0), SamplingParams(temperature=0.8, top_p=0.95, seed=0)
Row = dict[str, Any]


class Again:
    """A recorder whose graphs run their call again: the same kernels on the same shapes, launched one by one."""

    def __call__(self, call: Callable[[], Tensor]) -> cuda_graphs.Recorded:
        result = call()

        def replay() -> None:
            result.copy_(call())

        return cuda_graphs.Recorded(replay, result)


def recorder() -> cuda_graphs.Record:
    """How the card records; in a rehearsal, the way beside it."""
    return Again() if backend.interpreted() else cuda_graphs.CudaRecorder(torch.device(DEVICE))


class Decoders:
    """Sequences of one runner, decoded greedily from their prompts."""

    def __init__(
        self, decoder: Decoder, prompts: list[list[int]], steps: int, record: cuda_graphs.Record, kv: str
    ) -> None:
        longest = max(map(len, prompts)) + steps
        width = -(-longest // 64)
        self.runner = Runner(decoder, len(prompts) * width, longest, SCHEMES[kv], 4, None, record)
        self.sequences = []
        for i, prompt in enumerate(prompts):
            made = Sequence(id=str(i), prompt_ids=prompt, max_tokens=steps)
            made.blocks = list(range(i * width, (i + 1) * width))
            self.sequences.append(made)

    def step(self) -> Tensor:
        """Every pending token of every sequence; returns the logits behind them, and appends their largest."""
        chunks = [ScheduledTokens(each, each.computed, each.pending, True) for each in self.sequences]
        logits = self.runner.run(StepPlan(chunks)).clone()
        samplers = [Sampler(SamplingParams(temperature=0, seed=0), (0,), logits.shape[1]) for _ in chunks]
        for each, draw in zip(self.sequences, device_sampler.sample(logits, samplers), strict=True):
            assert not isinstance(draw, BadLogits)
            each.computed = each.planned = len(each.tokens)
            each.tokens.append(draw.token_id)
        return logits


def graphs_and_full_steps(scheme: str, kv: str) -> tuple[float, float]:
    """The largest difference of logits between steps replayed from a graph and the same steps launched one by one:
    none, for they are the same kernels on the same shapes."""
    decoder = models.decoder(SMALL, scheme)
    draw = torch.Generator().manual_seed(0)
    prompts = [torch.randint(0, decoder.config.vocab_size, (n,), generator=draw).tolist() for n in PROMPTS]
    one, other = (Decoders(decoder, prompts, STEPS, record, kv) for record in (recorder(), Again()))
    worst = 0.0
    for _ in range(STEPS):
        a, b = one.step(), other.step()
        worst = max(worst, float((a - b).abs().max()))
    same = all(x.tokens == y.tokens for x, y in zip(one.sequences, other.sequences, strict=True))
    return worst if same else float("inf"), 0.0


def choices() -> tuple[float, float]:
    """How many tokens are chosen otherwise on the card than on the CPU, of rows where that is no matter of rounding."""
    logits = torch.randn(24, 1000 if backend.interpreted() else 128256, generator=torch.Generator().manual_seed(0)) * 3
    params = [
        SamplingParams(temperature=t, top_k=k, top_p=p, min_p=m, seed=i)
        for i, (t, k, p, m) in enumerate([(0, 0, 1, 0), (1, 0, 1, 0), (0.8, 40, 1, 0), (1.2, 0, 0.9, 0.01)] * 6)
    ]
    vocab = logits.shape[1]
    there = device_sampler.sample(logits.to(DEVICE), [Sampler(p, (0,), vocab) for p in params])
    here = sample(logits, [Sampler(p, (0,), vocab) for p in params])
    return float(
        sum(getattr(a, "token_id", a) != getattr(b, "token_id", b) for a, b in zip(there, here, strict=True))
    ), 0.0


class Server:
    """Sequences of one length over the engine's own scheduler, runner and sampling; what is left out of an engine is
    the events. All prompts differ. They are run through the model once, by `fill`, and found in the prefix tree from
    then on: else the first would have ended before the last begins."""

    def __init__(self, decoder: Decoder, batch: int, filled: int) -> None:
        self.batch, self.vocab = batch, decoder.config.vocab_size
        numbers = torch.Generator().manual_seed(0)
        self.prompts = torch.randint(0, self.vocab, (batch, filled), generator=numbers).tolist()
        width = -(-(filled + TIMED + 2) // 64) + 1
        self.runner = Runner(decoder, 2 * batch * width, width * 64, None, batch, None, recorder())
        pool = BlockPool(2 * batch * width, self.runner.block)
        limits = SchedulerConfig(max_running=batch, max_step_tokens=max(2048, batch), max_waiting=batch, headroom=0.0)
        self.scheduler = Scheduler(pool, PrefixCache(pool), limits)
        self._requests = itertools.count()

    def fill(self) -> None:
        """Compute the prompts."""
        self._answer(GREEDY, 1)

    def run(self, params: SamplingParams, ahead: bool = False) -> tuple[float, float]:
        """Seconds of a step in which all decode, and how many of them the host works before it has launched the step
        and after it has the tokens: medians of `TIMED`. `ahead`: the next one is launched before it has them."""
        took, hosts = zip(*self._answer(params, TIMED + 2, ahead)[1:], strict=True)
        return statistics.median(took), statistics.median(hosts)

    def _answer(self, params: SamplingParams, tokens: int, ahead: bool = False) -> list[tuple[float, float]]:
        """So many tokens after each prompt; returns the two times of each step in which all decode."""
        samplers: dict[str, Sampler] = {}
        for i, prompt in enumerate(self.prompts):
            made = Sequence(id=str(next(self._requests)), prompt_ids=prompt, max_tokens=tokens)
            samplers[made.id] = Sampler(replace(params, seed=i), (0,), self.vocab)
            self.scheduler.add([made], time.perf_counter())
        times = []
        following: tuple[StepPlan, Tensor] | None = None
        while self.scheduler.sequences:
            since = time.perf_counter()
            if following is None:
                plan = self.scheduler.plan(since)
                following = plan, self.runner.run(plan)
            (plan, logits), following = following, None
            own = [chunk.sequence for chunk in plan.chunks if chunk.samples]
            chosen = device_sampler.choose(logits, [samplers[each.id] for each in own]) if own else None
            if ahead and (behind := self.scheduler.ahead(since)) is not None and behind.chunks:
                places = {each: i for i, each in enumerate(own)}
                inflight_tokens = None if chosen is None else InflightTokens(chosen.tokens, places)
                following = behind, self.runner.run(behind, None, inflight_tokens)
            launched = time.perf_counter()
            draws = chosen.draws() if chosen else []
            drawn, outcomes = time.perf_counter(), {}
            for each, draw in zip(own, draws, strict=True):
                assert not isinstance(draw, BadLogits), draw
                samplers[each.id].commit(draw.token_id)
                outcomes[each.id] = Outcome((draw.token_id,))
            self.scheduler.commit(plan, outcomes, time.perf_counter())
            self.scheduler.collect()
            ended = time.perf_counter()
            if plan.tokens == len(plan.chunks) == self.batch:
                times.append((ended - since, ended - since - (drawn - launched)))
        return times


def serving(name: str, schemes: tuple[str, ...], batches: tuple[int, ...], filled: int, roofs: Row) -> Iterator[Row]:
    """A server's decode steps, planned, replayed, sampled and committed: greedy, then drawn. Beside what the graph
    alone takes, the difference is the host's share that nothing hides, in `ahead_us` where each step is launched
    before the tokens of the one before are known, as an engine does."""
    for scheme in schemes:
        decoder = models.decoder(name, scheme)
        for batch in batches:
            server = Server(decoder, batch, filled)
            began = time.perf_counter()
            server.runner.record_all()
            recorded = time.perf_counter() - began
            server.fill()
            for how, params in (("greedy", GREEDY), ("drawn", DRAWN)):
                (once, host), (ahead, _) = (server.run(params, each) for each in (False, True))
                roof = models.roof(decoder, scheme, batch, filled, roofs)
                yield {
                    "work": f"served {scheme}, batch {batch}, context {filled}, {how}", "us": once * 1e6,
                    "tok_s": batch / ahead, "of_roof": roof / ahead, "host_us": host * 1e6, "ahead_us": ahead * 1e6,
                    "record_s": recorded,
                }  # fmt: skip
            del server
        del decoder


def memory(name: str, scheme: str) -> Iterator[Row]:
    """What `attar serve` would measure at its start."""
    if backend.interpreted():
        return
    held = memory_profile.GpuMemory(torch.device(DEVICE))
    held.settle()
    available = held.free() + held.held()
    began = time.perf_counter()
    decoder = models.decoder(name, scheme)
    made = time.perf_counter() - began
    limits = SchedulerConfig(max_running=128, max_step_tokens=2048)
    began = time.perf_counter()
    trial = memory_profile.ProfileRun(decoder, SCHEMES["bfloat16"], limits, 8192)
    found = memory_profile.measure(held, available, trial)
    took = time.perf_counter() - began
    parts = {part: getattr(found, part) / 1e9 for part in ("available", "weights", "step", "graphs", "driver")}
    yield {"work": f"memory of {scheme}, measured", "us": took * 1e6, "made_s": made, "gb": parts}
    assert min(found.weights, found.step, found.graphs) > 0, f"a part takes nothing: {parts}"


def block(name: str, samples: int, length: int, recipe: str) -> Iterator[Row]:
    """One block compressed on the card: statistics gathered, linears solved for, in order."""
    from attar.compression import device_placement
    from attar.compression.block import passes
    from attar.compression.block.work import BlockWork
    from attar.compression.calibration.hidden_states import HiddenStates, rows_at_once
    from attar.compression.recipe.recipe_file import load_recipe
    from attar.model.assembly import build_block
    from attar.model.shapes import shape

    config, plan = shape(name), load_recipe(recipe)
    made = build_block(config, models.RandomWeights(config, "bf16"), 0)
    for linear in made.linears():
        linear.keep_dense = False
    schemes = {linear.name: plan.scheme for linear in made.linears()}
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        size = (samples, length, config.hidden)
        states = HiddenStates(Path(folder) / "h.f32", size, 1 << 34, rows_at_once(config), torch.device(DEVICE))
        for batch in states.batches():
            states.write(batch, torch.randn(len(batch) * length, config.hidden, device=DEVICE))
        began = time.perf_counter()
        records = passes.run(BlockWork(made, (states, None), plan, schemes, config.architecture))
        device_placement.move(made, device_placement.CPU)
        took = time.perf_counter() - began
    worse = [record.name for record in records if record.error > record.rtn_error]
    assert not worse, f"rounded to nearest would have been better: {worse}"
    yield {
        "work": f"{recipe} of a block of {name}, {samples} x {length}", "us": took * 1e6,
        "model_minutes": took * config.layers / 60,
    }  # fmt: skip


def block_as_on_a_cpu() -> tuple[float, float]:
    """Relative difference of what GPTQ leaves, on the card and on the CPU."""
    from attar.compression import device_placement
    from attar.compression.block import passes
    from attar.compression.block.work import BlockWork
    from attar.compression.calibration.hidden_states import HiddenStates
    from attar.compression.recipe.recipe_file import load_recipe
    from attar.model.assembly import build_block
    from attar.model.shapes import shape

    config, plan, errors = shape(SMALL), load_recipe("gptq-w4g32"), []
    made = build_block(config, models.RandomWeights(config, "bf16"), 0)
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        for device in (device_placement.CPU, torch.device(DEVICE)):
            device_placement.move(made, device)
            weights = [linear.weight for linear in made.linears()]
            states = HiddenStates(Path(folder) / f"{device.type}.f32", (8, 64, config.hidden), 1 << 30, 128, device)
            for s in range(8):
                rows = torch.randn(64, config.hidden, generator=torch.Generator().manual_seed(s))
                states.write(range(s, s + 1), rows)
            schemes = {linear.name: plan.scheme for linear in made.linears()}
            work = BlockWork(made, (states, None), plan, schemes, config.architecture)
            errors.append([record.error for record in passes.run(work)])
            for linear, weight in zip(made.linears(), weights, strict=True):
                linear.weight = weight
    return max(abs(a / b - 1) for a, b in zip(*errors, strict=True)), 0.05


def checks() -> Iterator[tuple[str, Callable[[], tuple[float, float]]]]:
    """Name and check, as in `checks.py`."""
    pairs = (("w4g128", "int8"), ("bf16", "bfloat16"), ("fp8", "fp8"), ("qserve-g128", "int4"))
    for scheme, kv in pairs[:1] if backend.interpreted() else pairs:
        yield f"graphs, {scheme} with {kv} pages", partial(graphs_and_full_steps, scheme, kv)
    yield "choices of tokens", choices
    if not backend.interpreted():
        yield "a block compressed as on a CPU", block_as_on_a_cpu
