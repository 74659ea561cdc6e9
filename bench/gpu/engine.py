"""The engine's steps on the card, as far as they need no server: graphs beside full steps, memory as it is measured,
tokens chosen, and the compression of one block.

Sequences, chunks and plans are the engine's own; who schedules them is a loop in here.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from gpu import models
from gpu.timing import DEVICE
from torch import Tensor

from attar.engine import device_sampler, footprint, graphs
from attar.engine.limits import Limits
from attar.engine.request import SamplingParams
from attar.engine.runner import Runner
from attar.engine.sampler import BadLogits, Sampler, sample
from attar.engine.sequence import Sequence
from attar.engine.step import Chunk, StepPlan
from attar.formats.kv import SCHEMES
from attar.kernels.triton import backend
from attar.model.decoder import Decoder

SMALL = "tiny"
PROMPTS = (3, 5, 9) if backend.interpreted() else (5, 70, 130)  # tokens, in a graph of four rows: one is left over
STEPS = 2 if backend.interpreted() else 40
TIMED = 2 if backend.interpreted() else 50
Row = dict[str, Any]


class Again:
    """A recorder whose graphs run their call again: the same kernels on the same shapes, launched one by one."""

    def __call__(self, call: Callable[[], Tensor]) -> graphs.Recorded:
        result = call()
        return graphs.Recorded(lambda: result.copy_(call()), result)


def recorder() -> graphs.Record:
    """How the card records; in a rehearsal, the way beside it."""
    return Again() if backend.interpreted() else graphs.CudaRecorder(torch.device(DEVICE))


class Decoders:
    """Sequences of one runner, decoded greedily from their prompts."""

    def __init__(self, decoder: Decoder, prompts: list[list[int]], steps: int, record: graphs.Record, kv: str) -> None:
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
        chunks = [Chunk(each, each.computed, each.pending, True) for each in self.sequences]
        logits = self.runner.run(StepPlan(chunks)).clone()
        samplers = [Sampler(SamplingParams(temperature=0, seed=0), (0,), logits.shape[1]) for _ in chunks]
        for each, draw in zip(self.sequences, device_sampler.sample(logits, samplers), strict=True):
            assert not isinstance(draw, BadLogits)
            each.computed = len(each.tokens)
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
    there = device_sampler.sample(logits.to(DEVICE), [Sampler(p, (0,), vocab, DEVICE) for p in params])
    here = sample(logits, [Sampler(p, (0,), vocab) for p in params])
    return float(
        sum(getattr(a, "token_id", a) != getattr(b, "token_id", b) for a, b in zip(there, here, strict=True))
    ), 0.0


def serving(name: str, schemes: tuple[str, ...], batches: tuple[int, ...], filled: int, roofs: Row) -> Iterator[Row]:
    """A server's decode steps: inputs filled on the host, a graph replayed, tokens chosen and fetched. Beside what the
    graph alone takes, the difference is the host's share that nothing hides."""
    for scheme in schemes:
        decoder = models.decoder(name, scheme)
        kv_bytes = 2 * decoder.config.kv_heads * decoder.config.head_dim * 2 * decoder.config.layers  # a token, bf16
        for batch in batches:
            width = -(-(filled + TIMED + 2) // 64)
            record = recorder()
            runner = Runner(decoder, batch * width, width * 64, None, batch, None, record)
            sequences = []
            for i in range(batch):
                made = Sequence(id=str(i), prompt_ids=[1] * filled, max_tokens=TIMED + 2)
                made.blocks, made.computed = list(range(i * width, (i + 1) * width)), filled - 1
                sequences.append(made)
            vocab = decoder.config.vocab_size
            samplers = [Sampler(SamplingParams(temperature=0, seed=0), (0,), vocab) for _ in sequences]
            began = time.perf_counter()
            runner.record_all()
            recorded, took = time.perf_counter() - began, []
            for _ in range(TIMED + 1):
                since = time.perf_counter()
                logits = runner.run(StepPlan([Chunk(each, each.computed, 1, True) for each in sequences]))
                for each, draw in zip(sequences, device_sampler.sample(logits, samplers), strict=True):
                    each.computed += 1
                    each.tokens.append(0 if isinstance(draw, BadLogits) else draw.token_id)
                took.append(time.perf_counter() - since)
            once = sorted(took[1:])[len(took[1:]) // 2]
            read = models.read_bytes(decoder) + batch * filled * kv_bytes
            work = 2.0 * batch * models.multiplications(decoder)
            roof = max(read / roofs["copy"], work / roofs["fp8" if scheme == "fp8" else "bf16"])
            yield {
                "work": f"served {scheme}, batch {batch}, context {filled}", "us": once * 1e6, "tok_s": batch / once,
                "of_roof": roof / once, "record_s": recorded,
            }  # fmt: skip
            del runner, logits
        del decoder


def memory(name: str, scheme: str) -> Iterator[Row]:
    """What `attar serve` would measure at its start."""
    if backend.interpreted():
        return
    held = footprint.CardMemory(torch.device(DEVICE))
    held.settle()
    available = held.free() + held.held()
    began = time.perf_counter()
    decoder = models.decoder(name, scheme)
    made = time.perf_counter() - began
    limits = Limits(max_running=128, max_step_tokens=2048)
    began = time.perf_counter()
    trial = footprint.Trial(decoder, SCHEMES["bfloat16"], limits, 8192)
    found = footprint.measure(held, available, trial)
    took = time.perf_counter() - began
    parts = {part: getattr(found, part) / 1e9 for part in ("available", "weights", "step", "graphs", "driver")}
    yield {"work": f"memory of {scheme}, measured", "us": took * 1e6, "made_s": made, "gb": parts}
    assert min(found.weights, found.step, found.graphs) > 0, f"a part takes nothing: {parts}"


def block(name: str, samples: int, length: int, recipe: str) -> Iterator[Row]:
    """One block compressed on the card: statistics gathered, linears solved for, in order."""
    from attar.compression import place
    from attar.compression.calibrate import HiddenStates, rows_at_once
    from attar.compression.passes import BlockWork
    from attar.compression.recipe import Recipe
    from attar.model.decoder import build_block
    from attar.model.shapes import shape

    config, plan = shape(name), Recipe.load(recipe)
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
        records = BlockWork(made, states, plan, schemes, config.architecture).run()
        place.move(made, place.CPU)
        took = time.perf_counter() - began
    worse = [record.name for record in records if record.error > record.rtn_error]
    assert not worse, f"rounded to nearest would have been better: {worse}"
    yield {
        "work": f"{recipe} of a block of {name}, {samples} x {length}", "us": took * 1e6,
        "model_minutes": took * config.layers / 60,
    }  # fmt: skip


def block_as_on_a_cpu() -> tuple[float, float]:
    """Relative difference of what GPTQ leaves, on the card and on the CPU."""
    from attar.compression import place
    from attar.compression.calibrate import HiddenStates
    from attar.compression.passes import BlockWork
    from attar.compression.recipe import Recipe
    from attar.model.decoder import build_block
    from attar.model.shapes import shape

    config, plan, errors = shape(SMALL), Recipe.load("gptq-w4g32"), []
    made = build_block(config, models.RandomWeights(config, "bf16"), 0)
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        for device in (place.CPU, torch.device(DEVICE)):
            place.move(made, device)
            weights = [linear.weight for linear in made.linears()]
            states = HiddenStates(Path(folder) / f"{device.type}.f32", (8, 64, config.hidden), 1 << 30, 128, device)
            for s in range(8):
                rows = torch.randn(64, config.hidden, generator=torch.Generator().manual_seed(s))
                states.write(range(s, s + 1), rows)
            schemes = {linear.name: plan.scheme for linear in made.linears()}
            errors.append(
                [record.error for record in BlockWork(made, states, plan, schemes, config.architecture).run()]
            )
            for linear, weight in zip(made.linears(), weights, strict=True):
                linear.weight = weight
    return max(abs(a / b - 1) for a, b in zip(*errors, strict=True)), 0.05


def checks() -> Iterator[tuple[str, Callable[[], tuple[float, float]]]]:
    """Name and check, as in `checks.py`."""
    pairs = (("w4g128", "int8"), ("bf16", "bfloat16"), ("fp8", "fp8"))
    for scheme, kv in pairs[:1] if backend.interpreted() else pairs:
        yield f"graphs, {scheme} with {kv} pages", lambda s=scheme, k=kv: graphs_and_full_steps(s, k)  # type: ignore[misc]
    yield "choices of tokens", choices
    if not backend.interpreted():
        yield "a block compressed as on a CPU", block_as_on_a_cpu
