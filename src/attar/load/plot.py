"""Charts of latency and throughput against load, as one self-contained HTML page, or as a PNG by matplotlib.

The page holds inline SVG: it opens anywhere, offline, for as long as browsers exist, and prints.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from attar.charts import png
from attar.charts.chart import Axis, Chart, Point, Series
from attar.charts.svg import STYLE, THEMES, key, svg
from attar.errors import UserError

Run = Mapping[str, Any]

PAGE = (
    "  body{font:15px/1.45 system-ui,sans-serif;margin:2em auto;max-width:62em;padding:0 1em;"
    "color:var(--ink);background:var(--paper)}h1{font-size:1.3em}pre{overflow-x:auto}"
    "main{display:grid;gap:1em;grid-template-columns:repeat(auto-fit,minmax(min(100%,25em),1fr))}"
    "figure{margin:0;padding:.7em;background:var(--card);border:1px solid var(--line)}figure>svg{max-width:100%}"
)


def charts(runs: Sequence[Run]) -> list[Chart]:
    """Return everything that is drawn, over the load of each run; a run without answers has no point."""
    xs, load = loads(runs)

    def chart(title: str, unit: str, lines: Mapping[str, Sequence[float | None]]) -> Chart:
        series = [
            Series(name, [Point(x, y) for x, y in zip(xs, line, strict=True) if y is not None], i, dashed=i > 0)
            for i, (name, line) in enumerate(lines.items())
        ]
        return Chart(title, Axis(load, zero=True), Axis(unit, zero=True), series, 460, 260)

    drawn = []
    for name, title in (("ttft", "Time to first token"), ("tpot", "Time per output token"), ("e2e", "End to end")):
        by = {q: [run[name][q] * 1e3 if run[name] else None for run in runs] for q in ("p50", "p95", "p99")}
        drawn.append(chart(title, "ms", by))
    drawn.append(chart("Output", "tokens/s", {"output": [run["output_tok_s"] for run in runs]}))
    if all("goodput" in run for run in runs):
        drawn.append(chart("Goodput", "requests/s", {"goodput": [run["goodput"]["requests_s"] for run in runs]}))
    return drawn


def loads(runs: Sequence[Run]) -> tuple[list[float], str]:
    """Return the runs' positions on the horizontal axis, and the axis's label."""
    if all(run["clients"] is not None for run in runs):
        return [float(run["clients"]) for run in runs], "clients"
    return [run["rate"] or run["requests"] / run["seconds"] for run in runs], "requests/s offered"


def html(runs: Sequence[Run], title: str, table: str) -> str:
    """Return the page. `table` is the text that goes below the charts."""
    drawn = charts(runs)
    figures = "\n".join(f"<figure><b>{escape(each.title)}</b>{svg(each)}</figure>" for each in drawn)
    return (
        f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>{escape(title)}</title>\n'
        f"<style>\n{THEMES}\n{PAGE}\n{STYLE}\n</style>\n<h1>{escape(title)}</h1>\n{key(drawn[0].series)}\n"
        f"<main>\n{figures}\n</main>\n<pre>{escape(table)}</pre>\n</html>\n"
    )


def save(path: Path, runs: Sequence[Run], title: str, table: str) -> None:
    """Write a .html or .png file. Raises ValueError on other endings, and where PNG needs what is not installed."""
    check(path)
    if path.suffix == ".html":
        path.write_text(html(runs, title, table), encoding="utf-8")
    else:
        png.save(charts(runs), path, title)


def check(path: Path) -> None:
    """Raise ValueError or OSError unless `save` can write such a file. Callers check before a run, not after it."""
    if path.suffix not in (".html", ".png"):
        raise UserError("output_invalid", f"a plot is a .html or a .png file, not {path.name!r}")
    if path.suffix == ".png":
        png.check("plot to .html")
    if not path.parent.is_dir():
        raise UserError("file_not_found", f"{path}: there is no folder {path.parent}: make it first")
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UserError("file_not_permitted", f"{path} cannot be written")
