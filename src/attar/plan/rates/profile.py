"""Machine profile: the rates of one machine as `attar bench --rates` measured them, and their file.

A profile is one JSON object with sorted keys. All times are in seconds, all rates are a second, sizes are bytes. A
spread is half the range of the repeated measurements, over their median. Torch-free.

    format      2
    key         what the rates hold for: machine, cores, threads, isa, kernels (`MachineKey`)
    isa         instruction set level of the kernels, such as avx512
    measured    date and time in UTC, such as 2026-11-27T13:05:00Z
    seconds     duration of the measurement
    bandwidth   {"value": bytes read, "spread": ...}
    int8        {"value": operations, ...} of four-byte dot products; a product and a sum are two operations
    tile        the same of AMX tiles, or null
    bf16        the same of products with bfloat16 weights, in float32
    products    {scheme: {"bytes", "rows": [...], "seconds": [...], "spread", "narrow": [...], "outputs"}}: seconds of
                a product of so many rows, and the bytes that it reads, both divided by the number of weights. bf16
                stands for dense weights. See `ProductCurve`
    attention   {KV scheme: {"groups": [...], "seconds": [...], "prefill_score", "spread"}}, see `AttentionCost`
    overheads   {"step", "layer", "element", "logit", "prompt"}, see `Overheads`
    bf16_tiles  {"value": operations, ...} of products in bfloat16 of 128 rows, where the processor has tiles, or null
"""

from __future__ import annotations

import datetime
import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Final, Literal

import msgspec

from attar.errors import UserError

FORMAT: Final = 2
MAX_BYTES = 10_000_000
MOST_CURVES, MOST_POINTS = 200, 64
VALID_DAYS = 30  # a machine's kernel, memory and neighbours change

DENSE = "bf16"
MEASURED_SCHEMES = (DENSE, "w8a8", "w4g128")
MEASURED_KV = ("float32", "bfloat16", "int8")


def _check(name: str, value: float, zero: bool = False) -> None:
    if not math.isfinite(value) or value < 0 or (value == 0 and not zero):
        raise ValueError(f"{name} is a number above 0, not {value}")


@dataclass(frozen=True, slots=True)
class MachineKey:
    """What a profile's rates hold for. They are measured again where any part differs.

    machine: processor's name, count and a hash of its features. cores: physical ones that the process may use.
    threads: those that kernels use. isa: ATTAR_CPU, or `highest`. kernels: a hash of the compiled extension.
    """

    machine: str
    cores: int
    threads: int
    isa: str
    kernels: str

    def __post_init__(self) -> None:
        if not 1 <= self.cores <= 1 << 20 or not 1 <= self.threads <= 1 << 20:
            raise ValueError("cores and threads are at least 1")


@dataclass(frozen=True, slots=True)
class Rate:
    """A measured rate a second, and its relative spread."""

    value: float
    spread: float = 0.0

    def __post_init__(self) -> None:
        _check("a rate", self.value)
        _check("a spread", self.spread, zero=True)


@dataclass(frozen=True, slots=True)
class ProductCurve:
    """Seconds of a product over the number of its weights, by the number of rows multiplied at once.

    bytes: those read of a weight, over the number of weights. seconds: in wide blocks. narrow: in narrow ones, where
    rounding the inputs and starting the threads are a larger part; () where they were not measured. outputs: of a
    matrix of wide and of narrow blocks, on average over input columns.
    """

    bytes: float
    rows: tuple[int, ...]
    seconds: tuple[float, ...]
    spread: float = 0.0
    narrow: tuple[float, ...] = ()
    outputs: tuple[float, float] = (2.0, 1.0)

    def __post_init__(self) -> None:
        _check("bytes", self.bytes)
        _check("a spread", self.spread, zero=True)
        if not 1 <= len(self.rows) <= MOST_POINTS or len(self.rows) != len(self.seconds):
            raise ValueError(f"a curve has 1 to {MOST_POINTS} rows, and seconds for each")
        if len(self.narrow) not in (0, len(self.rows)) or not 0 < self.outputs[1] < self.outputs[0] < math.inf:
            raise ValueError("a curve of narrow blocks has seconds for each number of rows, and fewer outputs")
        if self.rows[0] < 1 or any(a >= b for a, b in zip(self.rows, self.rows[1:], strict=False)):
            raise ValueError("rows of a curve rise from 1 or more")
        for each in (*self.seconds, *self.narrow):
            _check("seconds", each)

    def of(self, rows: float, outputs: float = math.inf) -> float:
        """Return the seconds of a product of `rows` rows, over its weights, of which each input column has so many.

        Between measured numbers of rows it is interpolated, beyond the last one proportional to rows. Between narrow
        and wide blocks it is interpolated by 1 / outputs; outside of them the nearer one holds.
        """
        wide = _between(self.rows, self.seconds, rows)
        if not self.narrow or outputs >= self.outputs[0]:
            return wide
        low, high = 1 / self.outputs[0], 1 / self.outputs[1]
        part = min(1.0, (1 / outputs - low) / (high - low))
        return wide * (1 - part) + _between(self.rows, self.narrow, rows) * part


def _between(known: tuple[int, ...], seconds: tuple[float, ...], rows: float) -> float:
    if rows > known[-1]:
        return seconds[-1] * rows / known[-1]
    return seconds[0] if rows <= known[0] else _on_line(known, seconds, rows)


def _on_line(known: tuple[int, ...], seconds: tuple[float, ...], x: float) -> float:
    """Return the seconds at x on the line through the two nearest known points."""
    at = min(max(bisect_left(known, x), 1), len(known) - 1)
    low, high = known[at - 1], known[at]
    part = (x - low) / (high - low)
    return seconds[at - 1] * (1 - part) + seconds[at] * part


@dataclass(frozen=True, slots=True)
class AttentionCost:
    """Seconds of attention on one KV scheme.

    seconds: of each key and value number that a decoding row reads, where `groups` query heads share each KV head. Few
    heads wait for memory and many for arithmetic, so this is no straight line. prefill_score: of each number of a query
    head at each position, in prompts, whose rows share what they read.
    """

    groups: tuple[int, ...]
    seconds: tuple[float, ...]
    prefill_score: float
    spread: float = 0.0

    def __post_init__(self) -> None:
        if not 2 <= len(self.groups) == len(self.seconds) <= MOST_POINTS:
            raise ValueError(f"attention has 2 to {MOST_POINTS} groups, and as many times")
        if self.groups[0] < 1 or any(b <= a for a, b in pairwise(self.groups)):
            raise ValueError("groups of query heads rise from 1")
        for name, value in (("prefill_score", self.prefill_score), ("spread", self.spread)):
            _check(name, value, zero=True)
        for value in self.seconds:
            _check("seconds", value)

    @classmethod
    def linear(cls, stored: float, score: float, prefill_score: float, spread: float = 0.0) -> AttentionCost:
        """Return the cost of reading a stored number, plus that of each number of a query head at each position."""
        groups = (1, 8)
        return cls(groups, tuple(stored + score * group / 2 for group in groups), prefill_score, spread)

    def stored(self, group: float) -> float:
        """Return the seconds of a stored number where so many query heads share a KV head, on a line through the two
        nearest measured groups."""
        return _on_line(self.groups, self.seconds, group)


@dataclass(frozen=True, slots=True)
class Overheads:
    """Seconds of a step beside products and attention.

    step: once. layer: once a layer. element: for each row, layer and number of the hidden state. logit: for each row
    and entry of the vocabulary. prompt: once a layer of a step with rows of prompts, which is not recorded.
    """

    step: float
    layer: float
    element: float
    logit: float
    prompt: float = 0.0

    def __post_init__(self) -> None:
        for name in ("step", "layer", "element", "logit", "prompt"):
            _check(name, getattr(self, name), zero=True)


NO_OVERHEADS = Overheads(0.0, 0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class MachineProfile:
    """Measured rates of one machine; the module's docstring has the units of every field."""

    key: MachineKey
    isa: str
    measured: str
    bandwidth: Rate
    int8: Rate
    tile: Rate | None
    bf16: Rate
    products: Mapping[str, ProductCurve]
    attention: Mapping[str, AttentionCost]
    overheads: Overheads
    seconds: float = 0.0
    bf16_tiles: Rate | None = None
    format: Literal[2] = FORMAT

    def __post_init__(self) -> None:
        if len(self.products) > MOST_CURVES or len(self.attention) > MOST_CURVES:
            raise ValueError(f"a profile has {MOST_CURVES} curves at most")
        for name, of in (("products", self.products), ("attention", self.attention)):
            if not of:
                raise ValueError(f"{name} are missing")
        self.when()

    def when(self) -> datetime.datetime:
        """Return when it was measured. Raises ValueError where that is no date and time."""
        found = datetime.datetime.fromisoformat(self.measured)
        if found.tzinfo is None:
            raise ValueError("the time of measurement has no zone")
        return found

    def too_old(self, now: datetime.datetime) -> bool:
        """Return whether the rates are older than `VALID_DAYS`, or from the future."""
        age = now - self.when()
        return not datetime.timedelta(days=-1) <= age <= datetime.timedelta(days=VALID_DAYS)


def encode(profile: MachineProfile) -> bytes:
    """Return a profile's file."""
    return msgspec.json.format(msgspec.json.encode(profile, order="sorted"), indent=1) + b"\n"


def decode(text: bytes) -> MachineProfile:
    """Read a profile's file. Raises UserError (`file_malformed`) for anything else, and for numbers out of range."""
    try:
        return msgspec.json.decode(text, type=MachineProfile)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise UserError("file_malformed", f"no machine profile of `attar bench --rates`: {str(error)[:200]}") from None


def read(path: Path) -> MachineProfile:
    """Read the profile in a file that a user names. Raises UserError, and OSError where it cannot be read."""
    with path.open("rb") as file:
        text = file.read(MAX_BYTES + 1)
    if len(text) > MAX_BYTES:
        raise UserError("file_too_large", f"{path}: a machine profile has at most {MAX_BYTES:,} bytes")
    try:
        return decode(text)
    except UserError as error:
        raise UserError(error.code, f"{path}: {error}") from None
