"""Charts as PNGs by matplotlib, where it is installed, for pages that show pictures only.

`charts.laid_out` computes the positions, as for the page. Matplotlib serves as paper: one axes with the drawing's
coordinates, without its own scales, labels or legends. The colours are those of a light background.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from attar.charts.chart import (
    CHARACTER,
    COLOURS,
    TEXT,
    Chart,
    Mark,
    Piece,
    Point,
    Stroke,
    Text,
    kind_of,
    laid_out,
    shape_of,
)
from attar.errors import UserError

TITLE = 22  # height of a chart's title
LINE = 18  # height of a line of the legend
INCH = 96  # units of a drawing in an inch

COLOUR_OF = {"grid": "#ece8df", "axis": "#6d6a63", "soft": "#6d6a63", "tick": "#6d6a63", "name": "#6d6a63"} | {
    f"c{i}": light for i, (light, _) in enumerate(COLOURS)
}
"""Colours by class; all else is ink."""

WIDTHS = {"grid": 0.8, "axis": 1.0, "whisker": 1.4, "thin": 0.9}
"""Widths of strokes, by class."""

MARKERS = {"circle": "o", "square": "s", "triangle": "^", "diamond": "D", "down": "v", "cross": "P"}
"""Matplotlib's names of the shapes."""


def check(instead: str) -> None:
    """Raise ValueError, which names what to do `instead`, unless `save` can draw here: asked before the work."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError(
            "package_missing", f"PNGs need matplotlib, which is not installed: pip install 'attar[plot]', or {instead}"
        )


def save(charts: Sequence[Chart], path: Path, title: str = "") -> None:
    """Draw charts as one picture, side by side, with their titles above them, a title and one legend above all."""
    from matplotlib.figure import Figure  # type: ignore[import-not-found,unused-ignore]

    columns = 2 if len(charts) == 4 else min(3, len(charts))
    rows = math.ceil(len(charts) / columns)
    wide, tall = max(c.width for c in charts), max(c.height for c in charts) + TITLE
    legend = list(_legend(charts, columns * wide, title))
    top = max((each.y for each in legend if isinstance(each, Text)), default=0.0) + 8
    size = columns * wide + 8, top + rows * tall  # half of a tick's number may lie to the right of its axis
    figure: Any = Figure(figsize=(size[0] / INCH, size[1] / INCH))
    paper = figure.add_axes((0, 0, 1, 1))
    paper.set(xlim=(0, size[0]), ylim=(size[1], 0))
    paper.set_axis_off()
    for piece in legend:
        _draw(paper, piece, 0, 0)
    for i, chart in enumerate(charts):
        across, down = i % columns * wide, top + i // columns * tall + TITLE
        _draw(paper, Text("title", chart.title, 12, -4, "start"), across, down)
        for piece in laid_out(chart):
            _draw(paper, piece, across, down)
    figure.savefig(path, dpi=2 * INCH)


def _legend(charts: Sequence[Chart], width: float, title: str) -> Iterator[Piece]:
    """Yield the title, where there is one, and every series once, by its name, in lines of `width`."""
    x, y, seen = 12.0, float(LINE + TITLE * bool(title)), set[str]()
    if title:
        yield Text("title", title, x, LINE, "start")
    for each in (series for chart in charts for series in chart.series):
        if each.name in seen:
            continue
        seen.add(each.name)
        if x + 40 + CHARACTER * len(each.name) > width and x > 12:
            x, y = 12.0, y + LINE
        if each.style != "dots":
            yield Stroke(f"line {kind_of(each)}{' dashed' * each.dashed}", [(x, y - 4), (x + 24, y - 4)])
        if each.style != "line":
            kind = f"mark {kind_of(each)}{' hollow' * each.hollow}"
            yield Mark(kind, shape_of(each), x + 12, y - 4, each, Point(0, 0))
        yield Text("legend", each.name, x + 30, y, "start")
        x += 30 + CHARACTER * len(each.name) + 20


def _draw(paper: Any, piece: Piece, across: float, down: float) -> None:
    """Draw a piece on a matplotlib axes with the drawing's coordinates, shifted `across` and `down`."""
    from matplotlib.patheffects import withStroke  # type: ignore[import-not-found,unused-ignore]

    point = 72 / INCH  # matplotlib's unit of sizes
    kinds = piece.kind.split()
    colour = next((COLOUR_OF[kind] for kind in kinds if kind in COLOUR_OF), "#1d2129")
    if isinstance(piece, Stroke):
        paper.plot(
            [across + x for x, _ in piece.places], [down + y for _, y in piece.places], color=colour,
            linewidth=WIDTHS.get(kinds[-1], WIDTHS.get(kinds[0], 1.8)) * point,
            linestyle=(0, (2.8, 2.2)) if "dashed" in kinds else "-", alpha=0.4 if "faint" in kinds else 1,
        )  # fmt: skip
    elif isinstance(piece, Mark):
        paper.plot(
            [across + piece.x], [down + piece.y], color=colour, marker=MARKERS[piece.shape], markersize=8 * point,
            markerfacecolor="white" if "hollow" in kinds else colour, markeredgewidth=1.4 * point,
        )  # fmt: skip
    else:
        paper.text(
            across + piece.x, down + piece.y, piece.text.replace("$", r"\$"),  # else it would begin a formula
            color=colour, fontsize=(13 if kinds == ["title"] else TEXT - 1) * point,
            fontweight="bold" if kinds == ["title"] else "normal",
            horizontalalignment={"start": "left", "middle": "center", "end": "right"}[piece.anchor],
            verticalalignment="center" if piece.turned else "baseline", rotation=90 if piece.turned else 0,
            path_effects=[withStroke(linewidth=3 * point, foreground="white")] if kinds == ["label"] else None,
        )  # fmt: skip
