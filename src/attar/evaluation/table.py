"""The cost table of compression, as `compress`, `demo` and `eval` print it: plain text, so that logs can hold it.

A column that no row fills is left out. Figures come with the half width of their interval where they have one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from attar.checkpoints.inspect import inspect
from attar.metrics.measure import Report


@dataclass(frozen=True, slots=True)
class Row:
    """One model. `figures` are those of `metrics.measure.Report.to_dict` (a receipt's evaluation has the same form)."""

    name: str
    bytes: int | None = None
    bits_per_weight: float | None = None
    figures: Mapping[str, Any] | None = None
    tokens_per_second: float | None = None

    @staticmethod
    def of(name: str, model: str | Path, report: Report | None = None, tokens_per_second: float | None = None) -> Row:
        """Return the row of a checkpoint (folder, Hub id or `demo`), with the figures measured on it."""
        seen = inspect(model)
        figures = None if report is None else report.to_dict()
        return Row(name, seen.bytes, seen.bits_per_weight, figures, tokens_per_second)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def figure(self, name: str) -> float | None:
        value = (self.figures or {}).get(name)
        return None if value is None else float(value)


def size(count: int) -> str:
    """Return bytes as text, in powers of ten as for disks and downloads."""
    value = float(count)
    for unit in ("B", "kB", "MB"):
        if value < 999.5:
            return f"{value:.0f} B" if unit == "B" else f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} GB" if value < 999.5 else f"{value:.0f} GB"


def _with_interval(row: Row, name: str) -> str | None:
    if (value := row.figure(name)) is None:
        return None
    pair = ((row.figures or {}).get("intervals") or {}).get(name)
    return f"{value:.3g}" + ("" if pair is None else f" ± {(pair[1] - pair[0]) / 2:.1g}")


def _number(value: float | None, form: str) -> str | None:
    return None if value is None else format(value, form)


_COLUMNS: Mapping[str, Callable[[Row], str | None]] = {
    "size": lambda row: None if row.bytes is None else size(row.bytes),
    "bits/weight": lambda row: _number(row.bits_per_weight, ".3f"),
    "perplexity": lambda row: _number(row.figure("ppl"), ".3f"),
    "KL mean": lambda row: _with_interval(row, "kl_mean"),
    "KL 99.9 %": lambda row: _number(row.figure("kl_p999"), ".3g"),
    "top-1": lambda row: _number(row.figure("top1"), ".2%"),
    "tokens/s": lambda row: _number(row.tokens_per_second, ".1f"),
}


def cost_table(rows: Sequence[Row]) -> str:
    """Return one line a model below a header, names to the left and figures to the right."""
    names = ["model", *(name for name, cell in _COLUMNS.items() if any(cell(row) is not None for row in rows))]
    cells = [[row.name, *(_COLUMNS[name](row) or "-" for name in names[1:])] for row in rows]
    widths = [max(map(len, column)) for column in zip(names, *cells, strict=True)]
    return "\n".join("  ".join(_aligned(line, widths)) for line in [names, ["-" * width for width in widths], *cells])


def _aligned(line: Sequence[str], widths: Sequence[int]) -> list[str]:
    """Align the first cell to the left, the others to the right."""
    return [line[0].ljust(widths[0]), *(text.rjust(width) for text, width in zip(line[1:], widths[1:], strict=True))]
