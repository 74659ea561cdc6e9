"""Time of one step by a machine profile: read plus compute, with fitted efficiencies.

    step    = products + attention + overhead
    product = weights * T(rows), with the measured curve T of the weights' scheme, in wide and in narrow blocks
    T(rows) = bytes / (bandwidth * read efficiency) + 2 * rows / (rate * compute efficiency), where none is measured

Reading and computing add, because kernels of a step overlap them little: the larger of both alone was off by a factor
of 2.4 to 2.9 at 16 rows. The two efficiencies of a kind of weights are fitted to its measured curve: dense weights,
integer weights, and weights whose activations are rounded too. A scheme without a curve takes those of its kind.

Attention reads every stored key and value number of a sequence once a step, at a cost that depends on how many query
heads share it. Each further row of a sequence costs a score for each query head and visible position. Overhead is what
a step takes beside both: norms, roundings, activations, the choice of tokens, and Python where rows of prompts keep it
from being recorded. Torch-free.
"""

from __future__ import annotations

import copy
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from attar.formats.scheme import Scheme
from attar.kv.schemes import KvScheme
from attar.model.config import ModelConfig
from attar.plan import costs, gpus
from attar.plan.costs import Storage
from attar.plan.gpus import GpuSpec
from attar.plan.rates.profile import DENSE, NO_OVERHEADS, AttentionCost, MachineKey, MachineProfile, ProductCurve, Rate
from attar.plan.roofline import Chunk, seen

Evidence = Literal["exact", "measured", "fitted", "assumed", "data sheet", "unverified"]
"""Where a number comes from: byte counts, this machine or a receipt, a fit, an acceptance of drafts that nothing
measured, a data sheet, or figures without one."""

WORST: tuple[Evidence, ...] = ("exact", "measured", "fitted", "assumed", "data sheet", "unverified")

SHEET, UNREAD = "data sheet", "unverified"  # `isa` of profiles that were not measured
KNOWN = 4096  # numbers of rows whose products are remembered
PREFILL_ROWS = 512  # of a prompt in one step, as `SchedulerConfig.max_step_tokens`


def weakest(labels: Iterable[Evidence]) -> Evidence:
    """Return the label of a number that is computed from numbers with these labels."""
    return max(labels, key=WORST.index)


def curve_name(scheme: Scheme | None) -> str:
    """Return the name under which a profile has the curve of a scheme; None is a dense weight."""
    return DENSE if scheme is None or costs.against(scheme) is not None else scheme.name


def kind(scheme: Scheme | None) -> str:
    """Return the measured scheme whose efficiencies weights of a scheme without a curve take."""
    if scheme is None or costs.against(scheme) is not None:
        return DENSE
    return "w8a8" if scheme.activation is not None else "w4g128"


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Fractions of bandwidth and of the rate of operations that a kind of weights reaches. error: the largest relative
    difference between fit and measured curve."""

    read: float
    compute: float
    error: float

    def seconds(self, bytes_per_weight: float, rows: float, bandwidth: float, rate: float) -> float:
        """Return the seconds of a product of `rows` rows, over its weights."""
        return bytes_per_weight / (bandwidth * self.read) + 2.0 * rows / (rate * self.compute)


def fitted(curve: ProductCurve, bandwidth: float, rate: float) -> Efficiency:
    """Fit the two efficiencies to a curve, by least squares of relative errors, both times at least zero."""
    reads = [curve.bytes / bandwidth / t for t in curve.seconds]
    computes = [2.0 * rows / rate / t for rows, t in zip(curve.rows, curve.seconds, strict=True)]
    rr, cc = sum(r * r for r in reads), sum(c * c for c in computes)
    rc, r1, c1 = sum(r * c for r, c in zip(reads, computes, strict=True)), sum(reads), sum(computes)
    least = 1e-9  # of a time over its limit: an efficiency is finite
    determinant = rr * cc - rc * rc
    choices = [(r1 / rr, least), (least, c1 / cc)]
    if determinant > 1e-12 * rr * cc:
        choices.append(((r1 * cc - c1 * rc) / determinant, (c1 * rr - r1 * rc) / determinant))

    def errors(x: float, y: float) -> list[float]:
        return [abs(x * r + y * c - 1.0) for r, c in zip(reads, computes, strict=True)]

    x, y = min(((max(x, least), max(y, least)) for x, y in choices), key=lambda p: sum(e * e for e in errors(*p)))
    return Efficiency(1.0 / x, 1.0 / y, max(errors(x, y)))


def efficiency_of(profile: MachineProfile, scheme: Scheme | None) -> tuple[Efficiency, float]:
    """Return the efficiencies of a scheme without a curve, and the rate that they are fractions of."""
    name = kind(scheme)
    integer = profile.tile.value if profile.tile is not None else profile.int8.value
    rate = profile.bf16.value if name == DENSE else integer
    if profile.isa in (SHEET, UNREAD):
        return Efficiency(1.0, 1.0, 0.0), rate
    curve = profile.products.get(name)
    if curve is None:
        curve = next(iter(profile.products.values()))
    return fitted(curve, profile.bandwidth.value, rate), rate


def product_seconds(
    profile: MachineProfile, scheme: Scheme | None, bytes_per_weight: float, rows: float
) -> tuple[float, float]:
    """Return the seconds of a product of `rows` rows with weights of a scheme, over their number, and the relative
    error."""
    if (curve := profile.products.get(curve_name(scheme))) is not None:
        return curve.of(rows), curve.spread
    efficiency, rate = efficiency_of(profile, scheme)
    bandwidth = profile.bandwidth
    error = max(efficiency.error, bandwidth.spread)
    return efficiency.seconds(bytes_per_weight, rows, bandwidth.value, rate), error


@dataclass(frozen=True, slots=True)
class StepSeconds:
    """Seconds of one step, by use."""

    products: float
    attention: float
    overhead: float

    @property
    def total(self) -> float:
        return self.products + self.attention + self.overhead


class StepModel:
    """Seconds of the steps of one model with given storage and KV scheme, by one profile.

    `evidence` is measured where the profile has a curve for every scheme in the model, else fitted; `fitted` names the
    schemes without one. `spread` is the largest spread of the rates that count.
    """

    def __init__(self, config: ModelConfig, storage: Storage, kv: KvScheme, profile: MachineProfile) -> None:
        self.config, self.profile = config, profile
        sizes: dict[tuple[str, float, bool], list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
        schemes: dict[str, Scheme | None] = {}
        for each, count in costs.counted(config, storage):
            scheme = storage.of(each)
            name = curve_name(scheme)
            schemes.setdefault(name, scheme)
            found = sizes[name, each.active, each.part == "head"]
            found[0] += count * each.rows * each.columns
            found[1] += count * _read_bytes(each, scheme, storage, profile)
            found[2] += count * each.columns
        self._sizes = dict(sizes)
        self._curves = {name: profile.products.get(name) for name in schemes}
        self._efficiencies = {
            name: efficiency_of(profile, schemes[name]) for name, curve in self._curves.items() if curve is None
        }
        self._kv, near = self._attention(kv)
        self.fitted: tuple[str, ...] = tuple(self._efficiencies) + ((kv.name,) if near else ())
        self._windows = Counter(config.windows)
        self._known: dict[tuple[int, int], float] = {}
        self._own_attention: Callable[[StepModel, int, int], float] | None = None
        self._judge()

    def _judge(self) -> None:
        """Set the evidence and the spread of what the model predicts."""
        self.evidence: Evidence = "fitted" if self.fitted else "measured"
        if self.profile.isa == SHEET:
            self.evidence = "data sheet"
        elif self.profile.isa == UNREAD:
            self.evidence = "unverified"
        curves = [curve.spread for curve in self._curves.values() if curve is not None]
        errors = [efficiency.error for efficiency, _ in self._efficiencies.values()]
        self.spread = max([self.profile.bandwidth.spread, self._kv.spread, *curves, *errors])
        c = self.config
        self._read = self._kv.stored(c.heads / c.kv_heads)
        every = c.layers * 2 * c.kv_heads * c.head_dim * self._read
        self._slot = every if set(self._windows) == {None} else None

    def with_kv(self, kv: KvScheme) -> StepModel:
        """Return the model of the same weights with another KV format. Both share what they know of products."""
        made = copy.copy(self)
        made._kv, near = self._attention(kv)
        schemes = tuple(self._efficiencies)
        made.fitted = (*schemes, kv.name) if near else schemes
        made._judge()
        return made

    def _attention(self, kv: KvScheme) -> tuple[AttentionCost, bool]:
        """Return the cost of attention on a KV scheme, and whether it is that of the nearest measured one."""
        known = self.profile.attention
        if kv.name in known:
            return known[kv.name], False
        return known["int8"] if "int8" in known else next(iter(known.values())), True

    def products(self, rows: int, samples: int) -> float:
        """Return the seconds of all products of a step of `rows` rows, `samples` of which have logits."""
        if (known := self._known.get((rows, samples))) is not None:
            return known
        total = 0.0
        for (name, active, head), (weights, read, columns) in self._sizes.items():
            many = samples if head else rows
            if not many:
                continue
            reached = 1.0 if active == 1.0 else 1.0 - (1.0 - active) ** many
            each = many if active == 1.0 else max(1.0, many * active / reached)
            if (curve := self._curves[name]) is not None:
                seconds = curve.of(each, weights / columns)
            else:
                efficiency, rate = self._efficiencies[name]
                seconds = efficiency.seconds(read / weights, each, self.profile.bandwidth.value, rate)
            total += weights * reached * seconds
        if len(self._known) < KNOWN:
            self._known[rows, samples] = total
        return total

    def of(self, chunks: Iterable[Chunk]) -> StepSeconds:
        """Return the seconds of a step of these rows: (position of the first, number, how many have logits)."""
        total, samples, prompts = 0, 0, False
        attention, attended = 0.0, self.full_attention if self._own_attention is None else self._attended
        for start, rows, sampled in chunks:
            total, samples, prompts = total + rows, samples + sampled, prompts or sampled < rows
            attention += attended(start, rows)
        return self._step(total, samples, attention, prompts)

    def with_attention(self, seconds: Callable[[StepModel, int, int], float]) -> StepModel:
        """Return the same model whose attention takes `seconds(model, start, rows)` for each chunk."""
        made = copy.copy(self)
        made._own_attention = seconds
        return made

    def _attended(self, start: int, rows: int) -> float:
        if self._own_attention is not None:
            return self._own_attention(self, start, rows)
        return self.full_attention(start, rows)

    def full_attention(self, start: int, rows: int) -> float:
        """Return the seconds of attention of a chunk of `rows` rows that read all of `start` positions and their
        own."""
        if rows == 1 and self._slot is not None:  # most calls of a simulation
            return self._slot * (start + 1)
        c, score = self.config, self._kv.prefill_score
        seconds = 0.0
        for window, layers in self._windows.items():
            slots = start + rows if window is None else min(start + rows, window + rows - 1)
            further = max(0, seen(start, rows, window) - slots)  # positions that rows behind the first see
            seconds += layers * slots * 2 * c.kv_heads * c.head_dim * self._read
            seconds += layers * further * c.heads * c.head_dim * score
        return seconds

    def _step(self, rows: int, samples: int, attention: float, prompts: bool = False) -> StepSeconds:
        c, beside = self.config, self.profile.overheads
        overhead = beside.step + c.layers * (beside.layer + beside.element * rows * c.hidden)
        overhead += c.layers * beside.prompt * prompts
        return StepSeconds(self.products(rows, samples), attention, overhead + beside.logit * samples * c.vocab_size)

    def decode(self, users: int = 1, context: int = 1, rows: int = 1) -> StepSeconds:
        """Return the seconds of a decode step of `users` sequences with `context` positions, `rows` tokens each."""
        each = self._attended(max(0, context - rows), rows)
        return self._step(users * rows, users * rows, users * each)

    def prefill(self, tokens: int, before: int = 0, chunk: int = PREFILL_ROWS) -> float:
        """Return the seconds of a prompt of `tokens` tokens behind `before` cached ones, in steps of `chunk` rows.

        This is the time to the first token of an unloaded server, without its HTTP.
        """
        total, at, end = 0.0, before, before + tokens
        while at < end:
            rows = min(chunk, end - at)
            total += self.of([(at, rows, int(at + rows == end))]).total
            at += rows
        return total

    def relative(self, rows: Iterable[int], users: int = 1, context: int = 1) -> Mapping[int, float]:
        """Return c(r), the time of a step of r rows a sequence over that of one row, for each r of `rows`."""
        one = self.decode(users, context).total
        return {each: self.decode(users, context, each).total / one for each in rows}


def _read_bytes(each: costs.Matrix, scheme: Scheme | None, storage: Storage, profile: MachineProfile) -> float:
    if profile.isa in (SHEET, UNREAD):
        return gpus.size(each, scheme, "fp8" in profile.key.isa)
    return costs.read_bytes(each.rows, each.columns, scheme, storage.dtype)


def of_gpu(gpu: GpuSpec) -> MachineProfile:
    """Return a profile by a GPU's data sheet: every efficiency is 1, and nothing is overhead. Times are limits."""
    rate, number = gpu.operations["bf16"], 4.0 / gpu.operations["bf16"]
    sizes = {"float32": 4.0, "bfloat16": 2.0, "int8": 1.0625, "fp8": 1.0625, "int4": 0.5625}
    attention = {name: AttentionCost.linear(size / gpu.bandwidth, number, number) for name, size in sizes.items()}
    dense = ProductCurve(2.0, (1, 4096), tuple(2.0 / gpu.bandwidth + 2.0 * n / rate for n in (1, 4096)))
    key = MachineKey(gpu.name, 1, 1, "fp8" if gpu.float8 else "", "")
    bandwidth, integer = Rate(gpu.bandwidth), Rate(gpu.operations["int8"])
    source = SHEET if gpu.verified else UNREAD
    return MachineProfile(
        key,
        source,
        "2026-01-01T00:00:00Z",
        bandwidth,
        integer,
        None,
        Rate(rate),
        {DENSE: dense},
        attention,
        NO_OVERHEADS,
    )
