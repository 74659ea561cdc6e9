"""Compressed outputs as the report shows them: their receipts and headers.

Receipts are untrusted input. Whatever is drawn or compared here is checked to be the number or the text that it should
be; all else stays text, which the page escapes.

Two outputs compare only where the same text was predicted by the same original under the same protocol. A receipt does
not name its text, but the original's perplexity on it, to the last digit, identifies it as well as a name
(`measured_on`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from attar.checkpoints.inspect import inspect
from attar.checkpoints.receipts import receipt
from attar.checkpoints.receipts.place import receipt_path
from attar.checkpoints.sources import hub
from attar.checkpoints.strict_io import CheckpointError
from attar.errors import UserError

TARGETS = {"bits": "{:g} bits a weight", "size": "{:,.0f} bytes", "kl": "a KL of {:g}"}
"""Phrases for an allocation's target, by its key in receipts."""

MOST, LEAST = 1e100, 1e-100
"""Bounds of a valid figure's magnitude: larger ones are invalid, smaller ones are zero, so that charts stay within
float64."""

_IN_A_BLOCK = re.compile(r"(?P<stack>.*?)\.(?P<layer>\d{1,9})\.(?P<kind>.+)")
_PRUNED = re.compile(r"(s\d|\d+:\d|p\d)")


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure and the ends of its 95 % interval, where it has one."""

    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True)
class Layer:
    """Relative squared errors of one linear, as stored and as the plain method would store it."""

    name: str
    scheme: str
    measure: str
    error: float
    rtn_error: float

    @property
    def layer(self) -> int | None:
        """Return the index of the block that the linear belongs to, None outside a block."""
        found = _IN_A_BLOCK.fullmatch(self.name)
        return None if found is None else int(found["layer"])

    @property
    def pruned(self) -> bool:
        """Return whether the linear has pruned weights. The plain method then prunes the smallest, else it rounds each
        to the nearest code."""
        return _PRUNED.match(self.scheme) is not None

    @property
    def kind(self) -> str:
        """Return the name within a block, experts taken together: `mlp.down_proj`."""
        found = _IN_A_BLOCK.fullmatch(self.name)
        return self.name if found is None else re.sub(r"\.\d+\.", ".*.", found["kind"])


@dataclass(frozen=True, slots=True)
class Choice:
    """Measurements of an allocation for one group of linears: the KL of the model with only that group compressed, for
    each candidate scheme, and the chosen scheme."""

    layer: int
    linears: tuple[str, ...]
    kl: tuple[float, ...]
    chosen: str

    @property
    def kind(self) -> str:
        """Return the last names of the linears, each once: `q_proj, k_proj, v_proj`."""
        return ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in self.linears))


@dataclass(frozen=True, slots=True)
class Allocation:
    """The receipt of an allocation. `uniform` are (bits a weight, KL) of each candidate scheme used everywhere; `bits`
    and `kl` are the choice's, `kl_unrefined` its KL before refinement, all on the same tokens."""

    target: str
    candidates: tuple[str, ...]
    tokens: int
    bits: float
    kl: float
    kl_unrefined: float
    uniform: tuple[tuple[float, float], ...]
    groups: tuple[Choice, ...]
    without: tuple[str, ...] = ()  # parts of the recipe that the measurements left out


@dataclass(frozen=True, slots=True)
class Tried:
    """A recipe that was tried, and the mean KL of its output on the tokens held out for the selection."""

    recipe: str
    bits: float
    kl: Figure


@dataclass(frozen=True, slots=True)
class Selection:
    """The receipt of a selection among recipes, by mean KL on `tokens` tokens; `left_out` are (recipe, reason). Where
    only one recipe was left, none was tried."""

    tokens: int
    tried: tuple[Tried, ...]
    left_out: tuple[tuple[str, str], ...]

    @property
    def kept(self) -> Tried | None:
        return min(self.tried, key=lambda each: each.kl.value, default=None)


@dataclass(frozen=True, slots=True)
class Tuning:
    """Gain of tuning: the mean KL on `tokens` held-out tokens of the calibration text, before and after."""

    tokens: int
    before: float
    after: float


@dataclass(frozen=True, slots=True)
class Speed:
    """Tokens a second, as measured by `attar bench`."""

    decode: float
    prefill: float
    batch: int
    threads: int
    isa: str

    @staticmethod
    def of(report: Mapping[str, Any], place: str) -> Speed:
        """Read the output of `attar bench --json`. Raises ValueError, naming `place`, for anything else."""
        decode, prefill = (_finite(report.get(key)) for key in ("decode_tok_s", "prefill_tok_s"))
        batch, threads, isa = report.get("batch"), report.get("threads"), report.get("isa")
        if decode is None or prefill is None or not isinstance(batch, int) or not isinstance(threads, int):
            raise UserError("file_wrong_kind", f"{place} is not what `attar bench --json` prints")
        return Speed(decode, prefill, batch, threads, str(isa))


@dataclass(frozen=True, eq=False)
class Compressed:
    """One output. `label` is its name beside others; `receipt` is the whole JSON object."""

    path: Path
    label: str
    recipe: str
    architecture: str
    bytes: int
    bits_per_weight: float
    figures: Mapping[str, Figure]
    layers: tuple[Layer, ...]
    receipt: Mapping[str, Any]
    speed: Speed | None = None
    allocation: Allocation | None = None
    selection: Selection | None = None
    tuning: Tuning | None = None
    warnings: tuple[str, ...] = ()  # about texts that say too little
    tasks: Mapping[str, Figure] = field(default_factory=dict)  # by task and figure, such as `piqa acc`
    images: Mapping[str, Figure] = field(default_factory=dict)  # on texts behind images

    @property
    def measured_on(self) -> tuple[object, ...] | None:
        """Return a key that is equal where figures compare; None where nothing was measured against the original."""
        evaluation, source = self.receipt["evaluation"], self.receipt["source"]
        if "kl_mean" not in self.figures:
            return None
        protocol = evaluation.get("protocol")
        protocol = protocol if isinstance(protocol, dict) else {}
        cut = (str(protocol.get(key)) for key in ("context", "stride", "bos"))
        return (str(source.get("sha256")), evaluation.get("ppl_base"), evaluation.get("tokens"), *cut)

    @property
    def gain(self) -> float | None:
        """Return the geometric mean over linears of the error over the plain one's. None where there is nothing to
        compare, or all were stored the plain way."""
        if all(each.error == each.rtn_error for each in self.layers):
            return None
        pairs = [(each.error, each.rtn_error) for each in self.layers if min(each.error, each.rtn_error) >= LEAST]
        logs = [math.log(error) - math.log(plain) for error, plain in pairs]
        return math.exp(sum(logs) / len(logs)) if logs else None


def read(output: str | Path, speed: Speed | None = None) -> Compressed:
    """Read a compressed folder or GGUF file. Raises CheckpointError where it has no receipt or a damaged one."""
    path = hub.resolve(output)
    found = receipt.read_receipt(path)
    if found is None:
        raise CheckpointError("receipt_invalid", f"{path}: {receipt.missing(path)}")
    value, seen = found.value, inspect(path)
    place = str(receipt_path(path))
    for key in ("recipe", "evaluation", "source", "versions"):
        if not isinstance(value[key], dict):
            raise _damaged(place, key)
    recipe = value["recipe"].get("recipe")
    bits = _finite(value["bits_per_weight"])
    if bits is None:
        raise _damaged(place, "bits_per_weight")
    recipe = recipe if isinstance(recipe, str) else "unnamed recipe"
    allocation = None
    if "allocation" in value:
        allocation = _allocation(value["allocation"], place)
        recipe = f"{recipe.partition('-')[0]}, {allocation.bits:.2f} bits chosen"
    layers, warnings = value["layers"], value.get("warnings", [])
    if not isinstance(layers, list):
        raise _damaged(place, "layers")
    if not isinstance(warnings, list) or not all(isinstance(each, str) for each in warnings):
        raise _damaged(place, "warnings")
    return Compressed(
        path, recipe, recipe, seen.architecture, seen.bytes, bits, _figures(value["evaluation"], place),
        tuple(_layer(each, place) for each in layers), value, speed, allocation,
        _selection(value["selection"], place) if "selection" in value else None,
        _tuning(value["tune"], place) if "tune" in value else None,
        tuple(warnings),
        _tasks(value.get("tasks", {}), place),
        _images(value.get("images", {}), place),
    )  # fmt: skip


def tell_apart(outputs: Sequence[Compressed]) -> list[Compressed]:
    """Return the outputs with distinct labels: the recipe where that suffices, else with the folder's name, else the
    path."""
    labels = [each.recipe for each in outputs]
    if len(set(labels)) < len(labels):
        labels = [f"{each.recipe} ({each.path.name})" for each in outputs]
    if len(set(labels)) < len(labels):
        labels = [str(each.path) for each in outputs]
    return [replace(each, label=label) for each, label in zip(outputs, labels, strict=True)]


def front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Return the indices of the points (x, y) on the Pareto front, both the smaller the better, from left to right. A
    point is beaten by one that is at least as good in both and better in one."""
    kept: list[int] = []
    for i in sorted(range(len(points)), key=lambda i: points[i]):
        last = points[kept[-1]] if kept else None
        if last is None or points[i][1] < last[1] or points[i] == last:
            kept.append(i)
    return kept


def _finite(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= MOST:
        return None
    return float(value)


def _figures(evaluation: Mapping[str, Any], place: str, within: str = "evaluation") -> dict[str, Figure]:
    """Return every figure that was measured, by name."""
    intervals = evaluation.get("intervals")
    intervals = intervals if isinstance(intervals, dict) else {}
    figures = {}
    for name, value in evaluation.items():
        if name in ("intervals", "protocol") or value is None:
            continue
        number = _finite(value)
        if number is None:
            raise _damaged(place, f"{within}.{name}")
        pair = intervals.get(name)
        ends = [_finite(end) for end in pair] if isinstance(pair, list) else []
        figures[name] = Figure(number, *ends) if len(ends) == 2 and None not in ends else Figure(number)
    return figures


def _tasks(value: object, place: str) -> dict[str, Figure]:
    """Return every figure of recorded tasks, named by its task and itself."""
    if not isinstance(value, dict) or not all(isinstance(each, dict) for each in value.values()):
        raise _damaged(place, "tasks")
    told = ("items", "shots", "version")  # about the task
    return {
        f"{task} {name}": figure
        for task, each in value.items()
        for name, figure in _figures({key: each[key] for key in each if key not in told}, place).items()
    }


def _images(value: object, place: str) -> dict[str, Figure]:
    """Return the figures on texts behind images, by name."""
    if not isinstance(value, dict):
        raise _damaged(place, "images")
    return _figures({name: each for name, each in value.items() if name != "warnings"}, place, "images")


@contextmanager
def _reading(place: str, what: str) -> Iterator[None]:
    """Raise CheckpointError, naming a part of a receipt, where what is read within is not what it should be."""
    try:
        yield
    except (AssertionError, KeyError, TypeError, AttributeError, ValueError):
        raise _damaged(place, what) from None


def _layer(value: object, place: str) -> Layer:
    with _reading(place, "layers"):
        assert isinstance(value, dict)
        error, rtn_error = _number(value["error"]), _number(value["rtn_error"])
        assert min(error, rtn_error) >= 0
        return Layer(
            _text(value["name"]), _text(value["scheme"]), str(value.get("measure", "weight")), error, rtn_error
        )


def _allocation(value: object, place: str) -> Allocation:
    """Read an allocation's receipt. Raises CheckpointError where a part is not what `compression.search.allocate`
    writes."""
    with _reading(place, "allocation"):
        assert isinstance(value, dict)
        candidates = tuple(map(_text, value["ladder"]))
        ((kind, most),) = value["target"].items()
        target = TARGETS[kind].format(_number(most))
        uniform = tuple((_number(each["bits"]), _number(each["kl"])) for each in value["uniform"])
        groups = []
        for each in value["groups"]:
            names, kl = tuple(map(_text, each["linears"])), tuple(map(_number, each["kl"]))
            chosen = _text(each["chosen"])
            assert names
            assert chosen in candidates
            assert len(kl) == len(candidates)
            groups.append(Choice(int(_number(each["layer"])), names, kl, chosen))
        bits, whole, unrefined = (_number(value[key]) for key in ("bits", "kl", "kl_unrefined"))
        without = tuple(map(_text, value.get("without", [])))
        tokens = int(_number(value["tokens"]))
        return Allocation(target, candidates, tokens, bits, whole, unrefined, uniform, tuple(groups), without)


def _selection(value: object, place: str) -> Selection:
    """Read a selection's receipt. Raises CheckpointError where a part is not what `compression.search.best` writes."""
    with _reading(place, "selection"):
        assert isinstance(value, dict)
        tried = []
        for each in value["tried"]:
            ends = [None if each[end] is None else _number(each[end]) for end in ("low", "high")]
            figure = Figure(_number(each["kl"]), *ends) if None not in ends else Figure(_number(each["kl"]))
            tried.append(Tried(_text(each["recipe"]), _number(each["bits_per_weight"]), figure))
        left_out = tuple((_text(each["recipe"]), _text(each["why"])) for each in value.get("left_out", []))
        assert tried or left_out
        return Selection(int(_number(value["tokens"])), tuple(tried), left_out)


def _tuning(value: object, place: str) -> Tuning:
    """Read tuning's receipt. Raises CheckpointError where a part is not what `compression.training.tune` writes."""
    with _reading(place, "tune"):
        assert isinstance(value, dict)
        return Tuning(int(_number(value["held_out_tokens"])), _number(value["kl_before"]), _number(value["kl_after"]))


def _text(value: object) -> str:
    assert isinstance(value, str)
    return value


def _number(value: object) -> float:
    found = _finite(value)
    assert found is not None
    return found


def _damaged(place: str, what: str) -> CheckpointError:
    return CheckpointError("receipt_invalid", f"{place}: the receipt is damaged: `{what}` is not what it should be")
