"""Charts of latency and throughput against load, as one self-contained HTML page, or as a PNG by matplotlib.

The page holds inline SVG: it opens anywhere, offline, for as long as browsers exist, and prints.
"""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 460, 260, 62, 40, 28, 14
COLOURS = {"p50": "#0072b2", "p95": "#a65e00", "p99": "#a3195b", "output": "#0072b2", "goodput": "#00714f"}
DASHES = {"p95": "7 3", "p99": "2 3"}  # distinguishable without colour

Run = Mapping[str, Any]
Series = Mapping[str, Sequence[float]]

STYLE = (
    "body{font:15px/1.45 system-ui,sans-serif;margin:2em auto;max-width:60em;padding:0 1em;color:#222;background:#fff}"
    "svg{max-width:100%;height:auto;margin:.5em 1em 1em 0}pre{overflow-x:auto;background:#f6f6f6;padding:1em}"
    "text{font:12px system-ui,sans-serif;fill:#333}h1{font-size:1.3em}"
)


def charts(runs: Sequence[Run]) -> list[tuple[str, str, Series]]:
    """Return (title, unit, name -> one value a run) of every chart."""
    shown: list[tuple[str, str, Series]] = []
    for name, title in (("ttft", "Time to first token"), ("tpot", "Time per output token"), ("e2e", "End to end")):
        by = {q: [run[name][q] * 1e3 if run[name] else math.nan for run in runs] for q in ("p50", "p95", "p99")}
        shown.append((title, "ms", by))
    shown.append(("Output", "tokens/s", {"output": [run["output_tok_s"] for run in runs]}))
    if all("goodput" in run for run in runs):
        goodput = [run["goodput"]["requests_s"] for run in runs]
        shown.append(("Goodput", "requests/s", {"goodput": goodput}))
    return shown


def loads(runs: Sequence[Run]) -> tuple[list[float], str]:
    """Return the runs' positions on the horizontal axis, and the axis's label."""
    if all(run["clients"] is not None for run in runs):
        return [float(run["clients"]) for run in runs], "clients"
    return [run["rate"] or run["requests"] / run["seconds"] for run in runs], "requests/s offered"


def html(runs: Sequence[Run], title: str, table: str) -> str:
    """Return the page. `table` is the text below the charts."""
    xs, axis = loads(runs)
    drawn = "\n".join(svg(xs, axis, *chart) for chart in charts(runs))
    return (
        f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>{escape(title)}</title>\n'
        f"<style>{STYLE}</style>\n<h1>{escape(title)}</h1>\n{drawn}\n<pre>{escape(table)}</pre>\n</html>\n"
    )


def svg(xs: Sequence[float], axis: str, title: str, unit: str, series: Series) -> str:
    """Return one chart: a line a series, points with their values on hover, axes from 0."""
    values = [value for line in series.values() for value in line if math.isfinite(value)]
    right, top = ticks(max(xs))[-1], ticks(max(values, default=1.0))[-1]

    def at(x: float, y: float) -> tuple[float, float]:
        wide, high = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
        return LEFT + x / right * wide, TOP + (1 - y / top) * high

    parts = [f'<text x="{LEFT}" y="16" font-weight="bold">{escape(title)}, {unit}</text>']
    for tick in ticks(top):
        _, y = at(0, tick)
        parts.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>')
    for tick in ticks(right):
        x, _ = at(tick, 0)
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{tick:g}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text x="{middle:.0f}" y="{HEIGHT - 6}" text-anchor="middle">{escape(axis)}</text>')
    for i, (name, line) in enumerate(series.items()):
        colour = COLOURS[name]
        points = [(x, y, *at(x, y)) for x, y in zip(xs, line, strict=True) if math.isfinite(y)]
        path = " ".join(f"{px:.1f},{py:.1f}" for _, _, px, py in sorted(points))
        dash = f' stroke-dasharray="{DASHES[name]}"' if name in DASHES else ""
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>')
        for x, y, px, py in points:
            hover = f"<title>{escape(name)} at {x:g} {escape(axis)}: {y:.4g} {unit}</title>"
            parts.append(f'<circle cx="{px:.1f}" cy="{py:.1f}" r="3.5" fill="{colour}">{hover}</circle>')
        if len(series) > 1:
            x = WIDTH - RIGHT - 42 * (len(series) - i) + 8
            parts.append(f'<text x="{x}" y="16" style="fill:{colour}">{name}</text>')
    label = escape(f"{title} against {axis}", quote=True)
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" role="img" aria-label="{label}">{"".join(parts)}</svg>'


def ticks(top: float) -> list[float]:
    """Return four to ten round numbers from 0 to at least `top`."""
    if not top > 0:
        return [0.0, 1.0]
    power = 10.0 ** math.floor(math.log10(top))
    step = next(power * s for s in (0.1, 0.2, 0.5, 1.0, 2.0) if top / (power * s) <= 8)
    return [i * step for i in range(math.ceil(top / step - 1e-9) + 1)]


def save(path: Path, runs: Sequence[Run], title: str, table: str) -> None:
    """Write a .html or .png file. Raises ValueError for other suffixes, and for PNG without matplotlib."""
    if path.suffix == ".html":
        path.write_text(html(runs, title, table), encoding="utf-8")
        return
    if path.suffix != ".png":
        raise ValueError(f"a plot is a .html or a .png file, not {path.name!r}")
    check(path)
    _png(path, runs, title)


def check(path: Path) -> None:
    """Raise ValueError or OSError unless `save` can write such a file. Callers check before a run, not after it."""
    if path.suffix not in (".html", ".png"):
        raise ValueError(f"a plot is a .html or a .png file, not {path.name!r}")
    if path.suffix == ".png" and importlib.util.find_spec("matplotlib") is None:
        raise ValueError("a PNG needs matplotlib, which is not installed: pip install 'attar[plot]', or plot to .html")
    if not path.parent.is_dir():
        raise ValueError(f"{path}: there is no folder {path.parent}: make it first")
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError(f"{path} cannot be written")


def _png(path: Path, runs: Sequence[Run], title: str) -> None:
    from matplotlib.figure import Figure  # type: ignore[import-not-found,unused-ignore]

    shown, (xs, axis) = charts(runs), loads(runs)
    figure: Any = Figure(figsize=(11, 3.2 * math.ceil(len(shown) / 2)), layout="constrained")
    figure.suptitle(title)
    for place, (name, unit, series) in zip(figure.subplots(math.ceil(len(shown) / 2), 2).flat, shown, strict=False):
        for label, line in series.items():
            place.plot(xs, line, "o-", color=COLOURS[label], label=label, clip_on=False)
        place.set(title=name, xlabel=axis, ylabel=unit, xlim=(0, None), ylim=(0, None))
        place.legend()
    figure.savefig(path, dpi=120)
