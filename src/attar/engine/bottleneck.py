"""Bottleneck of a step: overhead, or else bandwidth or compute.

Overhead is measured: the model took less than half of the step's time on the device. On a CPU that is time inside
native calls, which the extension counts; the reference's computation is no part of it. On a GPU it lies between two
events on the stream, before the model's first kernel and behind its last. A replayed graph keeps the device busy in
between; where kernels are launched one by one, gaps between them count as busy.

Bandwidth or compute is estimated: whichever takes longer by the roofline of this model on this machine
(`plan/roofline.py`), at rates that are measured before the model is loaded. So "compute" means that with ideal kernels
arithmetic would take longer than reading, and not that the kernels are ideal.

A step launched before the one before was over takes the time between their ends. A GPU is not waited for: a step that
samples no token returns while the device still works, and its time falls on the clock of a later one. Such steps are
judged together with the first step after them that waits, at the latest with the `OPEN`th of them, which is waited for;
a request that is cancelled before that gets no verdict of them.

The roofline also gives the least seconds of a step. Their ratio to the measured ones is reported, for a limit that is
far away limits nothing: kernels that wait for a core in use elsewhere have neither limit. The seconds to expect come
from the model of `attar plan` (`plan/rates/step_time.py`), where rates of this machine are kept. A start does not
measure those, which takes a minute: `attar bench --rates` and plans by goals do.

Nothing is judged where the verdict could only be wrong: for a model in stages on CPUs, where this process computes one
stage and waits for the others, which looks like overhead; and on a GPU whose rates could not be measured.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import NamedTuple, Protocol

import torch

from attar.engine.requests.outputs import Request
from attar.formats.scheme import multiplied_in
from attar.kernels.native import extension, limits
from attar.kernels.triton.weights import knows_float8
from attar.plan import gpus
from attar.plan.costs import against
from attar.plan.fit import Deployment
from attar.plan.rates import store
from attar.plan.rates.step_time import StepModel, StepSeconds
from attar.plan.roofline import Rates, Roofline
from attar.protocol.settings import Settings
from attar.scheduling.step_plan import StepPlan

COPIED, SQUARE = 1 << 30, 8192  # bytes of a copy, and rows of a product, that measure a GPU's rates
OPEN = 64  # at most, steps that wait for a verdict: a prompt of a million tokens is thousands
MEASURED = "int8g128"  # activations of the products whose rates are kept
LANES = 4  # int8 numbers multiplied in the time of one float, by four-byte dot products

logger = logging.getLogger(__name__)


class Meter(Protocol):
    """Measures the model's time on the device, from `begin` to `end`. `end` returns a function that gives seconds; a
    `late` meter's may wait for the device."""

    late: bool

    def begin(self) -> None: ...

    def end(self) -> Callable[[], float]: ...


class KernelMeter:
    """Meter of a CPU: time inside native kernels."""

    late = False

    def begin(self) -> None:
        self._before = extension.busy_seconds()

    def end(self) -> Callable[[], float]:
        spent = extension.busy_seconds() - self._before
        return lambda: spent


class StreamMeter:
    """Meter of a CUDA device: time between two events on its stream."""

    late = True

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def begin(self) -> None:
        self._start = self._event()

    def end(self) -> Callable[[], float]:
        start, end = self._start, self._event()

        def spent() -> float:
            end.synchronize()
            return float(start.elapsed_time(end)) / 1e3

        return spent

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event


class _Step(NamedTuple):
    requests: Collection[Request]
    otherwise: str  # the bottleneck, if not overhead
    least: float  # least seconds by the roofline; 0 where unknown
    seconds: float
    busy: Callable[[], float]
    expected: StepSeconds | None


class Bottlenecks:
    """Judges an engine's steps, by the roofline of its model; None where there are no kernels.

    model: the step-time model of `attar plan`, which gives the seconds to expect; None without rates that are kept.
    """

    def __init__(self, roof: Roofline | None, meter: Meter, model: StepModel | None = None) -> None:
        self.roof, self.meter, self.model = roof, meter, model
        self._open: list[_Step] = []

    def count(self, plan: StepPlan, seconds: float, busy: Callable[[], float], requests: Collection[Request]) -> None:
        """Judge a step that took `seconds`, of which the meter gave `busy`, and add the verdict to its `requests`."""
        otherwise, least = "overhead", 0.0
        chunks = [(chunk.slot, chunk.rows, chunk.samples) for chunk in plan.chunks]
        if self.roof is not None:
            reading, computing = self.roof.least(chunks)
            otherwise, least = "compute" if computing > reading else "bandwidth", max(reading, computing)
        self._open.append(
            _Step(requests, otherwise, least, seconds, busy, None if self.model is None else self.model.of(chunks))
        )
        if self.meter.late and not any(chunk.samples for chunk in plan.chunks) and len(self._open) < OPEN:
            return
        steps, self._open = self._open, []
        overhead = sum(step.busy() for step in steps) < sum(step.seconds for step in steps) / 2
        for step in steps:
            for request in step.requests:
                request.limited_by["overhead" if overhead else step.otherwise] += 1
                request.least += step.least
                request.stepped += step.seconds
                if step.expected is not None:
                    for part in ("products", "attention", "overhead"):
                        request.expected[part] += getattr(step.expected, part)


def cpu_rates(weights: int, activations: str) -> Rates | None:
    """Measure this machine at the present number of threads; None without kernels. Reading is measured on as many bytes
    as a model's `weights`, up to `limits.READ`: a model that fits a cache is read from there. The best of some runs
    counts: other load at that moment is no limit of the machine.

    Integer products count at the rate of tiles, where there are any, or of four-byte dot products. Others, and those
    whose rows stay `exact`, count at a quarter of the dot products' rate, the ratio of lanes.
    """
    if not extension.loaded():
        return None
    found = limits.measure(min(limits.READ, weights), min)
    integer, other = 1e9 * (found.tile_gops or found.int8_gops), 1e9 * found.int8_gops / LANES
    exact = activations == "exact"
    return Rates(1e9 * found.read_gb_s, lambda scheme: other if exact or scheme is None or against(scheme) else integer)


def card_rates(device: torch.device) -> Rates:
    """Measure a GPU, whose kernels read weights as `cards.size` describes."""
    (bandwidth, gops), float8 = card_limits(device), knows_float8(device)
    return Rates(
        1e9 * bandwidth,
        lambda scheme: 1e9 * gops[multiplied_in(scheme)],
        lambda each, scheme: gpus.size(each, scheme, float8),
    )


def card_limits(device: torch.device) -> tuple[float, dict[str, float]]:
    """Measure a GPU's best rates: GB/s read and written by a copy, and 1e9 operations/s of torch's products in bf16,
    int8 and fp8 (as bf16 where the GPU has no fp8). The copy takes at most half of the free memory, the products less
    than a gigabyte: raises torch.OutOfMemoryError where that is missing."""
    work = 2 * SQUARE**3 / 1e9
    with torch.cuda.device(device):
        size = min(COPIED, torch.cuda.mem_get_info(device)[0] // 4)
        copied = _copying(size, device)
        a, b = (torch.randn(SQUARE, SQUARE, device=device, dtype=torch.bfloat16) for _ in range(2))
        found = {"bf16": work / _seconds(lambda: torch.mm(a, b.t()))}
        codes = [(30 * each).round().clamp(-127, 127).to(torch.int8) for each in (a, b)]
        found["int8"] = work / _seconds(lambda: torch._int_mm(codes[0], codes[1].t()))
        found["fp8"] = found["bf16"]
        if knows_float8(device):
            one, (x, y) = torch.ones((), device=device), (each.to(torch.float8_e4m3fn) for each in (a, b))
            found["fp8"] = work / _seconds(
                lambda: torch._scaled_mm(x, y.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True)
            )
    return 2 * size / copied / 1e9, found


def _copying(size: int, device: torch.device) -> float:
    """Return the seconds of a copy of `size` bytes. They are freed: the products need the room."""
    source, target = (torch.ones(size, dtype=torch.uint8, device=device) for _ in range(2))
    return _seconds(lambda: target.copy_(source))


def _seconds(call: Callable[[], object]) -> float:
    """Return the seconds of a call on the current GPU: the best of some runs of several calls."""
    call()
    best = []
    for _ in range(5):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(8):
            call()
        end.record()
        end.synchronize()
        best.append(float(start.elapsed_time(end)) / 8e3)
    return min(best)


def step_model(settings: Settings, held: Deployment, threads: int) -> StepModel | None:
    """Return the model of a CPU engine's steps with so many threads.

    None where no rates of this machine, build and number of threads are kept, and for what they do not describe: other
    activations than the default, several processes, and attention that reads few keys.
    """
    few = settings.sparse_attention is not None or settings.sparse_prefill is not None
    if settings.activations != MEASURED or held.share.count > 1 or few:
        return None
    kept = store.RatesStore(store.folder())
    profile = kept.find(replace(store.key(), threads=threads))
    if kept.problem is not None:
        logger.warning("requests have no expected_seconds; %s", kept.problem)
    return None if profile is None else StepModel(held.config, held.storage, held.kv, profile)
