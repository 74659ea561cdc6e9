"""Predicted quantities of a configuration, each with its range and where it comes from. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from attar.plan.goals.quality import Quality
from attar.plan.goals.simulate import Latencies
from attar.plan.goals.techniques import Changed, Technique
from attar.plan.rates.step_time import Evidence, StepModel, weakest
from attar.plan.vision import EncodingTime


@dataclass(frozen=True, slots=True)
class Cell:
    """One predicted quantity: its value, its range, and where it comes from."""

    value: float
    low: float
    high: float
    evidence: Evidence


@dataclass(frozen=True, slots=True)
class TowerSpread:
    """Relative errors that the time of a vision tower adds to times and rates of requests with images."""

    ttft: float = 0.0
    tpot: float = 0.0
    rate: float = 0.0
    evidence: Evidence = "exact"

    @classmethod
    def of(cls, encoding: EncodingTime | None, found: Latencies, answer: int, loaded: bool) -> TowerSpread:
        """Take the share that the tower has in each time. Alone, a user waits for it before the first token only; among
        several, images of all are computed between the tokens of each."""
        if encoding is None:
            return cls()
        busy = min(1.0, encoding.seconds * found.tokens_per_second / answer)
        first = min(1.0, encoding.seconds / found.ttft["p50"])
        ttft, tpot = (max(first, busy), busy) if loaded else (first, 0.0)
        return cls(ttft * encoding.spread, tpot * encoding.spread, busy * encoding.spread, encoding.evidence)


def cells_of(
    cost: Quality | None, memory: int, size: int, model: StepModel | Changed, found: Latencies,
    technique: Technique | None = None, tower: TowerSpread = TowerSpread(),
) -> dict[str, Cell]:  # fmt: skip
    """Return every quantity of a configuration with its range and label.

    With drafts, `found` are the latencies of steps: each brings several tokens.
    """
    near = 1 + model.spread
    fewest, tokens, most = (1.0, 1.0, 1.0) if technique is None else technique.tokens

    def label(error: float) -> Evidence:
        return weakest((model.evidence, tower.evidence)) if error else model.evidence

    def timed(value: float) -> Cell:
        wide = near + tower.ttft
        return Cell(value, value / wide, value * wide, label(tower.ttft))

    def each_token(value: float) -> Cell:
        wide = near + tower.tpot
        return Cell(value / tokens, value / wide / most, value * wide / fewest, label(tower.tpot))

    rate, wide = found.tokens_per_second, near + tower.rate
    cells = {
        "memory": Cell(memory, memory, memory, "exact"),
        "size": Cell(size, size, size, "exact"),
        "tokens_per_second": Cell(rate * tokens, rate * fewest / wide, rate * most * wide, label(tower.rate)),
        **{f"ttft_{name}": timed(value) for name, value in found.ttft.items()},
        **{f"tpot_{name}": each_token(value) for name, value in found.tpot.items()},
    }
    if cost is not None:
        cells["kl"] = Cell(cost.kl, cost.low, cost.high, cost.evidence)
        agrees: Evidence = cost.evidence if cost.top1 is not None else weakest((cost.evidence, "fitted"))
        cells["top1"] = Cell(cost.agreement, cost.agreement, cost.agreement, agrees)
    else:
        cells["kl"] = Cell(math.inf, 0.0, math.inf, "unverified")
        cells["top1"] = Cell(0.0, 0.0, 1.0, "unverified")
    return cells


def widened(cells: Mapping[str, Cell], factors: Mapping[str, float]) -> dict[str, Cell]:
    """Return cells whose ranges reach as far as past errors did. Exact ones stay."""
    found = dict(cells)
    for name, cell in cells.items():
        factor = factors.get(name) or factors.get(f"{name.rpartition('_')[0]}_p95", 1.0)
        if cell.evidence != "exact" and factor > 1 and math.isfinite(cell.value):
            found[name] = Cell(
                cell.value, min(cell.low, cell.value / factor), max(cell.high, cell.value * factor), cell.evidence
            )
    return found
