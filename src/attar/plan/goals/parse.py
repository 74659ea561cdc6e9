"""Goals of a plan, such as "kl<=0.02, ttft<=1s, tpot<=60ms, memory<=4GB", and the scenarios that stand for some.

A goal is a name, a bound and a limit with its unit. Latencies may end in _p50, _p95 or _p99; without one they are p95
under load, and those of an unloaded server where there is one user and no trace. `tpot` is a user's, and
`tokens_per_second` that of all users together. GB is 10^9 bytes, GiB 2^30. Torch-free.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from attar.errors import UserError
from attar.model.fields import nearest

MOST, LONGEST = 32, 2000  # goals, and characters of them all

SECONDS: Mapping[str, float] = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "min": 60.0}
SIZES: Mapping[str, float] = {
    "B": 1.0, "kB": 1e3, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30,
    "TiB": 2.0**40,
}  # fmt: skip
SHARES: Mapping[str, float] = {"": 1.0, "%": 0.01}
PLAIN: Mapping[str, float] = {"": 1.0}
QUANTILES = ("p50", "p95", "p99")


@dataclass(frozen=True, slots=True)
class Quantity:
    """A quantity that goals may limit: the bound that makes sense, units, and whether it has quantiles."""

    bound: Literal["<=", ">="]
    units: Mapping[str, float]
    unit: str  # for display: s, B or none
    quantiles: bool = False
    most: float = 1e18


QUANTITIES: Mapping[str, Quantity] = {
    "kl": Quantity("<=", PLAIN, ""),
    "top1": Quantity(">=", SHARES, "", most=1.0),
    "ttft": Quantity("<=", SECONDS, "s", quantiles=True),
    "tpot": Quantity("<=", SECONDS, "s", quantiles=True),
    "tokens_per_second": Quantity(">=", PLAIN, ""),
    "memory": Quantity("<=", SIZES, "B"),
    "size": Quantity("<=", SIZES, "B"),
}

SCENARIOS: Mapping[str, str] = {
    "latency": "ttft<=500ms, tpot<=50ms, kl<=0.1",
    "throughput": "kl<=0.1, ttft_p95<=10s",
    "long-context": "kl<=0.05, tpot<=200ms",
    "general": "kl<=0.05, ttft<=2s, tpot<=100ms",
    "quality": "kl<=0.005",
    "edge": "memory<=2GB, kl<=0.2, tpot<=200ms",
    "extreme": "memory<=1GB, kl<=1",
}
"""Each scenario is printed as the goals that it stands for."""

_GOAL = re.compile(
    r"\s*([A-Za-z_][A-Za-z0-9_-]*)\s*(<=|>=|=<|=>|<|>|==|=|≤|≥)\s*"
    r"([-+]?(?:nan|inf|[0-9.]+(?:e[-+]?[0-9]+)?))\s*([a-z%]*)\s*", re.IGNORECASE,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Goal:
    """One goal. `limit` is in seconds, bytes, a share, or as it is."""

    name: str
    limit: float
    quantile: str | None = None

    @property
    def quantity(self) -> Quantity:
        return QUANTITIES[self.name]

    @property
    def bound(self) -> str:
        return self.quantity.bound

    @property
    def label(self) -> str:
        """Return the name with its quantile."""
        return self.name if self.quantile is None else f"{self.name}_{self.quantile}"

    def excess(self, value: float) -> float:
        """Return how many times over the limit a value is: above 1 it is missed."""
        if self.bound == "<=":
            return value / self.limit
        return self.limit / value if value > 0 else math.inf

    def __str__(self) -> str:
        return f"{self.label}{self.bound}{shown(self.name, self.limit)}"


def shown(name: str, value: float) -> str:
    """Return a value of a quantity with its unit: 60 ms, 3.86 GB, 0.011, 92 %."""
    if not math.isfinite(value):
        return "-"
    unit = QUANTITIES[name].unit
    if unit == "s":
        return f"{value:.3g} s" if value >= 1 else f"{1e3 * value:.3g} ms"
    if unit == "B":
        for size, suffix in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
            if value >= size:
                return f"{value / size:.3g} {suffix}" if value < 1000 * size else f"{value / size:,.0f} {suffix}"
        return f"{value:.0f} B"
    if name == "top1":
        return f"{100 * value:.3g} %"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def parse(text: str) -> tuple[Goal, ...]:
    """Read goals with commas between them.

    Raises UserError: `option_malformed` for text that is no goal, `name_unknown` for unknown names and units, with near
    ones, `option_out_of_range` for a limit that is not above 0 and finite, and
    `option_conflict` for a bound on the wrong side and a quantity that is limited twice."""
    if len(text) > LONGEST:
        raise UserError("option_out_of_range", f"goals have at most {LONGEST} characters")
    parts = [part for part in text.split(",") if part.strip()]
    if not parts:
        raise UserError("option_missing", 'there is no goal: write them as "kl<=0.02, tpot<=60ms, memory<=4GB"')
    if len(parts) > MOST:
        raise UserError("option_out_of_range", f"a plan has at most {MOST} goals")
    goals = [_goal(part) for part in parts]
    for at, goal in enumerate(goals):
        if any(goal.label == other.label for other in goals[:at]):
            raise UserError("option_conflict", f"{goal.label} is limited twice: give one limit")
    return tuple(goals)


def scenario(name: str) -> str:
    """Return the goals that a scenario stands for. Raises UserError (`name_unknown`) that offers near names."""
    if name not in SCENARIOS:
        known = ", ".join(SCENARIOS)
        raise UserError("name_unknown", f"unknown scenario {name[:64]!r}: known are {known}{nearest(name, SCENARIOS)}")
    return SCENARIOS[name]


def _goal(part: str) -> Goal:
    match = _GOAL.fullmatch(part)
    if match is None:
        raise UserError("option_malformed", f"{part.strip()[:64]!r} is no goal: write it like tpot<=60ms")
    name, bound, number, unit = match.groups()
    name, quantile = _named(name)
    quantity = QUANTITIES[name]
    if bound in ("==", "="):
        raise UserError("option_malformed", f"{name}: a goal is a limit, {quantity.bound} and not {bound}")
    if ("<" in bound or bound == "≤") != (quantity.bound == "<="):
        raise UserError("option_conflict", f"{name}: {bound} asks for the worse side; write {name}{quantity.bound}...")
    try:
        value = float(number)
    except ValueError:
        raise UserError("option_malformed", f"{part.strip()[:64]!r}: {number[:32]!r} is no number") from None
    if unit not in quantity.units:
        known = ", ".join(each for each in quantity.units if each) or "none"
        said = f"the unit {unit!r}" if unit else "no unit"
        raise UserError("name_unknown", f"{name}: {said}; its units are {known}{nearest(unit, quantity.units)}")
    limit = value * quantity.units[unit]
    if math.isnan(limit) or not 0 < limit <= quantity.most:
        raise UserError(
            "option_out_of_range", f"{name}: a limit is above 0 and at most {quantity.most:g}, not {number[:32]}"
        )
    return Goal(name, limit, quantile)


def _named(word: str) -> tuple[str, str | None]:
    """Return a goal's name and quantile. Raises UserError that offers near names."""
    name, quantile = word.replace("-", "_"), None
    for each in QUANTILES:
        if name.endswith(f"_{each}"):
            name, quantile = name.removesuffix(f"_{each}"), each
    if name not in QUANTITIES:
        known = ", ".join(QUANTITIES)
        raise UserError("name_unknown", f"unknown goal {word[:64]!r}: known are {known}{nearest(name, QUANTITIES)}")
    if quantile is not None and not QUANTITIES[name].quantiles:
        raise UserError("option_unused", f"{name} has no quantiles: leave out _{quantile}")
    return name, quantile
