"""Record of predicted and measured quantities: a plan's own past error, and bands as wide as it.

Experiments of a plan add to it; the next plan prints the median error of each quantity, and widens its ranges to hold
nine of ten past measurements. Times count on the machine where they were measured, divergences on every one. The file
lies with the kept rates, under the same rules. Torch-free.
"""

from __future__ import annotations

import hashlib
import math
import statistics
from collections.abc import Iterable
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Final, Literal

import msgspec

from attar.errors import UserError
from attar.plan.goals.cells import Cell
from attar.plan.goals.search import Configuration, Workload
from attar.plan.rates import private
from attar.plan.rates.profile import MachineKey

FORMAT: Final = 1
FILE = "history.json"
MAX_BYTES, MOST = 4_000_000, 1000
ENOUGH = 3  # measurements from which ranges are widened
HELD = 0.9  # share of the past measurements that a widened range would have held
QUANTITIES = ("kl", "ttft_p95", "tpot_p95", "tokens_per_second")  # that are predicted and measured
EVERYWHERE = "every machine"


@dataclass(frozen=True, slots=True)
class Entry:
    """One quantity of one configuration, as predicted and as measured. of: what was measured, in words."""

    machine: str
    of: str
    quantity: str
    predicted: float
    measured: float

    def __post_init__(self) -> None:
        for value in (self.predicted, self.measured):
            if not math.isfinite(value) or value <= 0:
                raise ValueError(f"a quantity is above 0, not {value}")

    @property
    def error(self) -> float:
        """Return the logarithm of the larger of both over the smaller."""
        return abs(math.log(self.measured / self.predicted))


@dataclass(frozen=True, slots=True)
class _Saved:
    entries: tuple[Entry, ...]
    format: Literal[1] = FORMAT


class History:
    """The record in a folder. `problem`: why it can be neither read nor kept, None where all is well."""

    def __init__(self, folder: Path, key: MachineKey) -> None:
        """Read the record. One that cannot be read becomes the `problem`, and counts as empty."""
        self.path = folder / FILE
        self.problem: str | None = None
        self.machine = hashlib.sha256(repr(astuple(key)).encode()).hexdigest()[:16]
        self.entries: dict[tuple[str, str, str], Entry] = {}
        try:
            text = private.read(self.path, MAX_BYTES)
            found = () if text is None else msgspec.json.decode(text, type=_Saved).entries
            self._add(found)
        except (UserError, OSError, msgspec.MsgspecError, ValueError, RecursionError) as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self.problem = f"past errors of plans are neither known nor kept: {self.path}: {str(error)[:200]}"

    def _add(self, entries: Iterable[Entry]) -> None:
        for each in entries:
            place = each.machine, each.of, each.quantity
            self.entries.pop(place, None)  # the newest is the last
            self.entries[place] = each

    def add(self, model: str, work: Workload, pairs: Iterable[tuple[Configuration, Configuration]]) -> None:
        """Add what was measured, and keep the newest `MOST` entries. A failure becomes the `problem`."""
        if self.problem is not None:
            return
        for before, after in pairs:
            load = f"{work.users} x {work.prompt}+{work.answer}, trace of {len(work.trace)}"
            for name in QUANTITIES:
                predicted, measured = before.cells[name], after.cells[name]
                if measured.evidence != "measured" or not _positive(predicted) or not _positive(measured):
                    continue
                of = f"{model[:150]}: {after.name[:150]}" + ("" if name == "kl" else f", {after.rows} rows, {load}")
                place = EVERYWHERE if name == "kl" else self.machine
                self._add([Entry(place, of, name, predicted.value, measured.value)])
        kept = tuple(self.entries.values())[-MOST:]
        try:
            private.write(self.path, msgspec.json.encode(_Saved(kept)))
        except OSError as error:
            self._fail(error)

    def errors(self, quantity: str) -> list[float]:
        """Return the past errors of a quantity here, as `Entry.error`."""
        places = (self.machine, EVERYWHERE)
        return [each.error for each in self.entries.values() if each.quantity == quantity and each.machine in places]

    def factors(self) -> dict[str, float]:
        """Return for each quantity with enough measurements the factor that holds `HELD` of them."""
        found = {}
        for name in QUANTITIES:
            errors = sorted(self.errors(name))
            if len(errors) >= ENOUGH:
                found[name] = math.exp(errors[math.ceil(HELD * len(errors)) - 1])
        return found

    def sentence(self) -> str | None:
        """Return the past errors in words; None without any."""
        parts = []
        for name in QUANTITIES:
            if errors := self.errors(name):
                parts.append(f"{name} {math.exp(statistics.median(errors)) - 1:.0%} in {len(errors)}")
        return f"median past error here: {', '.join(parts)}" if parts else None


def _positive(cell: Cell) -> bool:
    return math.isfinite(cell.value) and cell.value > 0
