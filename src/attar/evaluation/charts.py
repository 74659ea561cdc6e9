"""Charts of points and lines: as SVG that stands in a page, or as PNG where matplotlib is installed.

A chart is data (`Chart`), so that both renderers draw the same one, and a test can compare every drawn number with the
figure it came from: marks carry `data-x` and `data-y`. Colours are CSS variables that the page sets for its light and
its dark theme (Okabe and Ito's, which stay apart for colour-blind people); shapes repeat what colours say, and labels
stand beside their points. Not done: anything interactive. A hover text on each mark is the browser's own.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, Literal

COLOURS = (
    ("#0072b2", "#5db4ec"),
    ("#c44e00", "#f0894a"),
    ("#00805a", "#35c79b"),
    ("#a3428b", "#dd8fc4"),
    ("#7a6500", "#d9bf3d"),
    ("#2f3f9e", "#98a4f5"),
)
"""On light and on dark paper, in the order in which series take them."""

SOFT = -1
"""The colour of what is only there to compare with."""

SHAPES = ("circle", "square", "triangle", "diamond", "down", "cross")

Style = Literal["dots", "line", "both"]

CHARACTER = 6.1  # width of one at the size of labels, on average
TEXT = 11  # size of labels


@dataclass(frozen=True, slots=True)
class Point:
    """A mark; `low` and `high` are the ends of its interval along y."""

    x: float
    y: float
    label: str = ""
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True)
class Series:
    name: str
    points: Sequence[Point]
    colour: int = 0  # of COLOURS, or SOFT
    style: Style = "both"
    hollow: bool = False
    dashed: bool = False
    labelled: bool = False  # whether the labels are drawn, not only shown on hover


@dataclass(frozen=True, slots=True)
class Axis:
    label: str
    log: bool = False
    whole: bool = False  # ticks at whole numbers alone
    ends: tuple[float, float] | None = None  # values that it holds besides those drawn, so that charts compare

    def at(self, value: float) -> float:
        return math.log10(value) if self.log else value


@dataclass(frozen=True, slots=True)
class Chart:
    """Series on two axes. A point that a logarithmic axis has no place for is left out of the drawing."""

    title: str
    x: Axis
    y: Axis
    series: Sequence[Series]
    width: int = 400
    height: int = 290

    def drawn(self, series: Series) -> list[Point]:
        return [p for p in series.points if _fits(p.x, self.x) and _fits(p.y, self.y)]


def _fits(value: float, axis: Axis) -> bool:
    """Whether an axis has a place for it, with room to both sides within float64."""
    return abs(value) <= 1e120 and (value >= 1e-120 or not axis.log)


def ticks(low: float, high: float, count: int = 6) -> list[float]:
    """Round numbers from `low` to `high`, both of which they may leave outside: about `count` of them."""
    span = high - low
    if not span > 0:
        return [low]
    power = 10.0 ** math.floor(math.log10(span / count))
    step = next(power * s for s in (1, 2, 5, 10, 20) if span / (power * s) <= count)
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 of each power of ten; over more than three powers those alone; over less than half, round steps."""
    decades = math.log10(high / low)
    if decades < 0.4:
        return ticks(low, high, 4)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    every = math.ceil(decades / 7)
    digits = (1, 2, 5) if decades < 1.7 else (1, 3) if decades < 3.8 else (1,)
    found = [d * 10.0**p for p in powers if p % every == 0 or len(digits) > 1 for d in digits]
    found = [t for t in found if low * (1 - 1e-9) <= t <= high * (1 + 1e-9)]
    return found if len(found) > 2 else ticks(low, high, 4)


def number(value: float) -> str:
    """A tick's or a label's number, short."""
    if value and not 1e-3 <= abs(value) < 1e5:
        mantissa, exponent = f"{value:.4e}".split("e")
        mantissa = mantissa.rstrip("0").rstrip(".")
        raised = str(int(exponent)).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
        return f"10{raised}" if mantissa == "1" else f"{mantissa}·10{raised}"
    return f"{value:.6g}"


@dataclass(frozen=True, slots=True)
class _Frame:
    """Where values lie on paper."""

    left: float
    right: float
    top: float
    bottom: float
    x: tuple[float, float]  # ends of the axes, as `Axis.at` gives them
    y: tuple[float, float]

    def px(self, at: float) -> float:
        return self.left + (at - self.x[0]) / (self.x[1] - self.x[0]) * (self.right - self.left)

    def py(self, at: float) -> float:
        return self.bottom - (at - self.y[0]) / (self.y[1] - self.y[0]) * (self.bottom - self.top)


def _ends(values: Sequence[float], axis: Axis, room: float) -> tuple[float, float]:
    """The ends of an axis that holds all values, with `room` of its length left free at both."""
    at = [axis.at(v) for v in (*values, *(axis.ends or ())) if _fits(v, axis)] or [0.0, 1.0]
    low, high = min(at), max(at)
    span = (high - low) or (0.3 if axis.log else abs(high) * 0.2 or 1.0)
    return low - room * span, high + room * span


def svg(chart: Chart) -> str:
    """The chart as one <svg> element. All text that it is given is escaped."""
    shown = [(series, chart.drawn(series)) for series in chart.series]
    points = [p for _, some in shown for p in some]
    ys = [v for p in points for v in (p.y, p.low, p.high) if v is not None and _fits(v, chart.y)]
    labelled = any(series.labelled for series in chart.series)
    frame = _Frame(
        58, chart.width - 12, 14, chart.height - 38,
        _ends([p.x for p in points], chart.x, 0.09 if labelled else 0.03), _ends(ys, chart.y, 0.06),
    )  # fmt: skip
    parts = [*_axes(chart, frame)]
    for series, some in shown:
        parts += _series(chart, series, some, frame)
    parts += _labels(shown, chart, frame)
    label = escape(f"{chart.title}: {chart.y.label} against {chart.x.label}", quote=True)
    return f'<svg viewBox="0 0 {chart.width} {chart.height}" role="img" aria-label="{label}">{"".join(parts)}</svg>'


def _axes(chart: Chart, frame: _Frame) -> Iterator[str]:
    for axis, along_x in ((chart.x, True), (chart.y, False)):
        low, high = frame.x if along_x else frame.y
        few = 6 if chart.width > 300 else 4
        marks = log_ticks(10**low, 10**high) if axis.log else ticks(low, high, few)
        if axis.whole:
            marks = [t for t in marks if t == int(t)]
        for mark in marks:
            if along_x:
                x, y = frame.px(axis.at(mark)), frame.bottom + 14
                path, anchor = f"M{x:.1f} {frame.top}V{frame.bottom}", "middle"
            else:
                x, y = frame.left - 5, frame.py(axis.at(mark))
                path, anchor = f"M{frame.left} {y:.1f}H{frame.right}", "end"
                y += 3.5
            yield f'<path class="grid" d="{path}"/>'
            yield f'<text class="tick" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{number(mark)}</text>'
    yield f'<path class="axis" d="M{frame.left} {frame.top}V{frame.bottom}H{frame.right}"/>'
    middle = (frame.left + frame.right) / 2
    scale = ", logarithmic" if chart.x.log else ""
    yield (
        f'<text class="name" x="{middle:.0f}" y="{chart.height - 7}" text-anchor="middle">'
        f"{escape(chart.x.label)}{scale}</text>"
    )
    scale = ", logarithmic" if chart.y.log else ""
    up = (frame.top + frame.bottom) / 2
    yield (
        f'<text class="name" transform="translate(10 {up:.0f}) rotate(-90)" text-anchor="middle">'
        f"{escape(chart.y.label)}{scale}</text>"
    )


def _series(chart: Chart, series: Series, points: Sequence[Point], frame: _Frame) -> Iterator[str]:
    kind = "soft" if series.colour == SOFT else f"c{series.colour % len(COLOURS)}"
    where = [(frame.px(chart.x.at(p.x)), frame.py(chart.y.at(p.y)), p) for p in points]
    if series.style != "dots" and len(where) > 1:
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y, _ in sorted(where, key=lambda each: each[0]))
        faint = " faint" if series.labelled else ""  # what has labels is read by its points
        yield f'<path class="line {kind}{" dashed" if series.dashed else ""}{faint}" d="M{path}"/>'
    if series.style == "line":
        return
    shape = SHAPES[max(series.colour, 0) % len(SHAPES)]
    for x, y, point in where:
        ends = [end for end in (point.low, point.high) if end is not None and _fits(end, chart.y)]
        if len(ends) == 2:
            low, high = (frame.py(chart.y.at(end)) for end in ends)
            yield f'<path class="whisker {kind}" d="M{x:.1f} {low:.1f}V{high:.1f}"/>'
        title = f"{point.label or series.name}: {point.y:.4g} at {point.x:.6g}"
        if point.low is not None and point.high is not None:
            title += f", interval {point.low:.4g} to {point.high:.4g}"
        yield (
            f'<path class="mark {kind}{" hollow" if series.hollow else ""}" d="{_shape(shape, x, y)}" '
            f'data-series="{escape(series.name, quote=True)}" data-x="{point.x!r}" data-y="{point.y!r}">'
            f"<title>{escape(title)}</title></path>"
        )


def _shape(shape: str, x: float, y: float, size: float = 4.0) -> str:
    s = size
    return {
        "circle": f"M{x - s:.1f} {y:.1f}a{s} {s} 0 1 0 {2 * s} 0a{s} {s} 0 1 0 {-2 * s} 0z",
        "square": f"M{x - s * 0.9:.1f} {y - s * 0.9:.1f}h{s * 1.8}v{s * 1.8}h{-s * 1.8}z",
        "triangle": f"M{x - s * 1.15:.1f} {y + s:.1f}h{s * 2.3}l{-s * 1.15} {-s * 2.1}z",
        "diamond": f"M{x - s * 1.25:.1f} {y:.1f}l{s * 1.25} {-s * 1.25}l{s * 1.25} {s * 1.25}l{-s * 1.25} {s * 1.25}z",
        "down": f"M{x - s * 1.15:.1f} {y - s:.1f}h{s * 2.3}l{-s * 1.15} {s * 2.1}z",
        "cross": f"M{x - s:.1f} {y - s * 0.4:.1f}h{s * 0.6}v{-s * 0.6}h{s * 0.8}v{s * 0.6}h{s * 0.6}v{s * 0.8}"
        f"h{-s * 0.6}v{s * 0.6}h{-s * 0.8}v{-s * 0.6}h{-s * 0.6}z",
    }[shape]


def _labels(shown: Sequence[tuple[Series, Sequence[Point]]], chart: Chart, frame: _Frame) -> Iterator[str]:
    """Labels beside their points, each at the first of some places where it covers nothing; where there is none, the
    hover text has to do."""
    taken = [
        (x - 5, y - 5, x + 5, y + 5)
        for _, points in shown
        for x, y in ((frame.px(chart.x.at(p.x)), frame.py(chart.y.at(p.y))) for p in points)
    ]
    for series, points in shown:
        if not series.labelled:
            continue
        for point in points:
            x, y = frame.px(chart.x.at(point.x)), frame.py(chart.y.at(point.y))
            wide = CHARACTER * len(point.label)
            places = (
                ("start", x + 8, y + 4), ("start", x + 6, y - 7), ("start", x + 6, y + 15), ("end", x - 8, y + 4),
                ("end", x - 6, y - 7), ("end", x - 6, y + 15), ("middle", x, y - 10), ("middle", x, y + 19),
            )  # fmt: skip
            for anchor, at, base in places:
                left = at - {"start": 0.0, "end": wide, "middle": wide / 2}[anchor]
                box = (left, base - TEXT + 1, left + wide, base + 2)
                inside = box[0] > frame.left and box[2] < frame.right + 10 and box[1] > 0 and box[3] < frame.bottom
                if inside and not any(_overlap(box, other) for other in taken):
                    taken.append(box)
                    place = f'x="{at:.1f}" y="{base:.1f}" text-anchor="{anchor}"'
                    yield f'<text class="label" {place}>{escape(point.label)}</text>'
                    break


def _overlap(a: tuple[float, ...], b: tuple[float, ...]) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def key(series: Sequence[Series]) -> str:
    """The legend, as HTML."""
    items = []
    for each in series:
        kind = "soft" if each.colour == SOFT else f"c{each.colour % len(COLOURS)}"
        drawn = ""
        if each.style != "dots":
            drawn += f'<path class="line {kind}{" dashed" if each.dashed else ""}" d="M0 7H24"/>'
        if each.style != "line":
            shape = _shape(SHAPES[max(each.colour, 0) % len(SHAPES)], 12, 7)
            drawn += f'<path class="mark {kind}{" hollow" if each.hollow else ""}" d="{shape}"/>'
        items.append(
            f'<span><svg class="sample" viewBox="0 0 24 14" aria-hidden="true">{drawn}</svg>{escape(each.name)}</span>'
        )
    return f'<p class="key">{"".join(items)}</p>'


def check_png() -> None:
    """Raise ValueError unless `png` can draw here: asked before the work, not after it."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("PNGs need matplotlib, which is not installed: `pip install matplotlib`, or leave out --png")


def png(charts: Sequence[Chart], path: Path) -> None:
    """The same charts as one picture, side by side."""
    from matplotlib.figure import Figure  # type: ignore[import-not-found,unused-ignore]

    columns = 2 if len(charts) == 4 else min(3, len(charts))
    rows = math.ceil(len(charts) / columns)
    figure: Any = Figure(figsize=(5 * columns, 3.6 * rows), layout="constrained")
    places = list(figure.subplots(rows, columns, squeeze=False).flat)
    for place, chart in zip(places, charts, strict=False):
        _plot(place, chart)
    for place in places[len(charts) :]:
        place.set_axis_off()
    figure.savefig(path, dpi=140)


def _plot(place: Any, chart: Chart) -> None:
    markers = {"circle": "o", "square": "s", "triangle": "^", "diamond": "D", "down": "v", "cross": "P"}

    def plain(text: str) -> str:
        return text.replace("$", r"\$")  # which would begin a formula

    named: set[str] = set()
    for series in chart.series:
        points = sorted(chart.drawn(series), key=lambda p: p.x)
        colour = "#8a867d" if series.colour == SOFT else COLOURS[series.colour % len(COLOURS)][0]
        place.plot(
            [p.x for p in points], [p.y for p in points], color=colour,
            label="_" if series.name in named else plain(series.name),
            linestyle="none" if series.style == "dots" else "--" if series.dashed else "-",
            marker="" if series.style == "line" else markers[SHAPES[max(series.colour, 0) % len(SHAPES)]],
            markerfacecolor="none" if series.hollow else colour, markersize=5,
        )  # fmt: skip
        named.add(series.name)
        if series.labelled:
            place.margins(x=0.15)
        for i, p in enumerate(points):
            if p.low is not None and p.high is not None:
                place.vlines(p.x, p.low, p.high, colors=colour, linewidth=1)
            if series.labelled:
                place.annotate(
                    plain(p.label), (p.x, p.y), (5, 4 if i % 2 else -9), textcoords="offset points", fontsize=7
                )
    place.set(xlabel=plain(chart.x.label), ylabel=plain(chart.y.label))
    place.set_title(plain(chart.title), fontsize=10)
    for axis, side, ends in ((chart.x, place.xaxis, place.get_xlim), (chart.y, place.yaxis, place.get_ylim)):
        if axis.log:
            (place.set_xscale if side is place.xaxis else place.set_yscale)("log")
            low, high = ends()
            shown = log_ticks(low, high)
            side.set_ticks(shown, [number(tick) for tick in shown])
            side.set_ticks([], minor=True)
    place.grid(alpha=0.25)
    if len(named) > 1:
        place.legend(fontsize=7)
