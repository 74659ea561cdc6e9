"""Charts of points and lines, as SVG that stands in a page; `pictures.py` draws the same charts as PNG.

A chart is data (`Chart`), and `laid_out` computes the position of everything in it. Both renderers draw just that, so
that a picture has the page's scales and labels. Marks carry `data-x` and `data-y`, so that a test can compare every
drawn number with the figure it came from. Colours are CSS variables that the page sets for its light and its dark theme
(the palette of Okabe and Ito, which colour-blind readers can distinguish). Shapes repeat what colours say, and labels
stand beside their points.

Not done: interaction. The hover text of each mark is the browser's own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal, TypeAlias

COLOURS = (
    ("#0072b2", "#5db4ec"),
    ("#c44e00", "#f0894a"),
    ("#00805a", "#35c79b"),
    ("#a3428b", "#dd8fc4"),
    ("#7a6500", "#d9bf3d"),
    ("#2f3f9e", "#98a4f5"),
)
"""Colours on a light and on a dark background, in the order in which series take them."""

SOFT = -1
"""The colour index of a series that is shown only for comparison."""

SHAPES = ("circle", "square", "triangle", "diamond", "down", "cross")

Style = Literal["dots", "line", "both"]

CHARACTER = 6.6  # average width of one at the size of labels
TEXT = 11  # size of labels
MANY = 64  # points of a line from which it is thin


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
    colour: int = 0  # index into COLOURS, or SOFT
    style: Style = "both"
    hollow: bool = False
    dashed: bool = False
    labelled: bool = False  # whether the labels are drawn, not only shown on hover


@dataclass(frozen=True, slots=True)
class Axis:
    label: str
    log: bool = False
    whole: bool = False  # ticks at integers only
    ends: tuple[float, float] | None = None  # values that it includes besides the drawn ones, so that charts compare

    def at(self, value: float) -> float:
        return math.log10(value) if self.log else value


@dataclass(frozen=True, slots=True)
class Chart:
    """Series on two axes. A point that does not fit a logarithmic axis is not drawn."""

    title: str
    x: Axis
    y: Axis
    series: Sequence[Series]
    width: int = 400
    height: int = 290
    beside: int = 12  # free space right of the axes, for labels at the ends of lines

    def drawn(self, series: Series) -> list[Point]:
        return [p for p in series.points if _fits(p.x, self.x) and _fits(p.y, self.y)]


def _fits(value: float, axis: Axis) -> bool:
    """Return whether an axis can show the value, with room to both sides within float64."""
    return abs(value) <= 1e120 and (value >= 1e-120 or not axis.log)


def ticks(low: float, high: float, count: int = 6) -> list[float]:
    """Return about `count` round numbers between `low` and `high`."""
    span = high - low
    if not span > 0:
        return [low]
    power = 10.0 ** math.floor(math.log10(span / count))
    step = next(power * s for s in (1, 2, 2.5, 5, 10, 20) if span / (power * s) <= count)
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Return tick values: 1, 2 and 5 of each power of ten.

    Over many powers these become 1 and 3, then the powers alone; over less than half a power they are round steps.
    """
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
    """Return a short text of the number for a tick or a label."""
    if value and not 1e-3 <= abs(value) < 1e5:
        mantissa, exponent = f"{value:.4e}".split("e")
        mantissa = mantissa.rstrip("0").rstrip(".")
        raised = str(int(exponent)).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
        return f"10{raised}" if mantissa == "1" else f"{mantissa}·10{raised}"
    return f"{value:.6g}"


@dataclass(frozen=True, slots=True)
class _Frame:
    """Map of values to positions in the drawing."""

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
    """Return the ends of an axis that holds all values, with the fraction `room` of its length free at both."""
    at = [axis.at(v) for v in (*values, *(axis.ends or ())) if _fits(v, axis)] or [0.0, 1.0]
    low, high = min(at), max(at)
    span = (high - low) or (0.3 if axis.log else abs(high) * 0.2 or 1.0)
    return low - room * span, high + room * span


@dataclass(frozen=True, slots=True)
class Stroke:
    """A line through positions. `kind` holds its CSS classes: its role (grid, axis, line, whisker), and its style."""

    kind: str
    places: Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Mark:
    kind: str
    shape: str
    x: float
    y: float
    series: Series
    point: Point


@dataclass(frozen=True, slots=True)
class Text:
    """A text. `anchor` says which part of it stands at x, and y is its base line. A `turned` text reads upwards, with
    its middle at (x, y)."""

    kind: str
    text: str
    x: float
    y: float
    anchor: Literal["start", "middle", "end"] = "middle"
    turned: bool = False


Piece: TypeAlias = Stroke | Mark | Text


def laid_out(chart: Chart) -> list[Piece]:
    """Return all that is drawn, in order, in a space of `chart.width` by `chart.height`, y downwards."""
    shown = [(series, chart.drawn(series)) for series in chart.series]
    points = [p for _, some in shown for p in some]
    ys = [v for p in points for v in (p.y, p.low, p.high) if v is not None and _fits(v, chart.y)]
    named = any(series.labelled and series.style != "line" for series in chart.series)
    frame = _Frame(
        58, chart.width - chart.beside, 14, chart.height - 38,
        _ends([p.x for p in points], chart.x, 0.09 if named else 0.03), _ends(ys, chart.y, 0.09 if named else 0.06),
    )  # fmt: skip
    found = list(_axes(chart, frame))
    for series, some in shown:
        found += _series(chart, series, some, frame)
    return [*found, *_labels(shown, chart, frame)]


def _axes(chart: Chart, frame: _Frame) -> Iterator[Piece]:
    for axis, along_x in ((chart.x, True), (chart.y, False)):
        low, high = frame.x if along_x else frame.y
        few = 6 if chart.width > 300 else 4
        marks = log_ticks(10**low, 10**high) if axis.log else ticks(low, high, few)
        if axis.whole:
            marks = [t for t in marks if t == int(t)]
        for mark in marks:
            if along_x:
                at = frame.px(axis.at(mark))
                yield Stroke("grid", ((at, frame.top), (at, frame.bottom)))
                yield Text("tick", number(mark), at, frame.bottom + 14)
            else:
                at = frame.py(axis.at(mark))
                yield Stroke("grid", ((frame.left, at), (frame.right, at)))
                yield Text("tick", number(mark), frame.left - 5, at + 3.5, "end")
    yield Stroke("axis", ((frame.left, frame.top), (frame.left, frame.bottom), (frame.right, frame.bottom)))
    across, up = (frame.left + frame.right) / 2, (frame.top + frame.bottom) / 2
    yield Text("name", chart.x.label + ", logarithmic" * chart.x.log, across, chart.height - 7)
    yield Text("name", chart.y.label + ", logarithmic" * chart.y.log, 10, up, turned=True)


def _series(chart: Chart, series: Series, points: Sequence[Point], frame: _Frame) -> Iterator[Piece]:
    kind, shape = kind_of(series), shape_of(series)
    where = [(frame.px(chart.x.at(p.x)), frame.py(chart.y.at(p.y)), p) for p in points]
    if series.style != "dots" and len(where) > 1:
        faint = " faint" * series.labelled  # a labelled series is read by its points
        faint += " thin" * (len(where) > MANY)
        places = [(x, y) for x, y, _ in sorted(where, key=lambda each: each[0])]
        yield Stroke(f"line {kind}{' dashed' * series.dashed}{faint}", places)
    if series.style == "line":
        return
    for x, y, point in where:
        ends = [frame.py(chart.y.at(end)) for end in (point.low, point.high) if end is not None and _fits(end, chart.y)]
        if len(ends) == 2:
            yield Stroke(f"whisker {kind}", [(x, end) for end in ends])
        yield Mark(f"mark {kind}{' hollow' * series.hollow}", shape, x, y, series, point)


def kind_of(series: Series) -> str:
    """Return the CSS class of a series' colour."""
    return "soft" if series.colour == SOFT else f"c{series.colour % len(COLOURS)}"


def shape_of(series: Series) -> str:
    """Return the shape of a series' marks: one for each colour. When colours repeat, each takes the next shape."""
    number = max(series.colour, 0)
    return SHAPES[(number + number // len(COLOURS)) % len(SHAPES)]


def svg(chart: Chart) -> str:
    """Return the chart as one <svg> element. All text in it is escaped."""
    label = escape(f"{chart.title}: {chart.y.label} against {chart.x.label}", quote=True)
    drawn = "".join(map(_element, laid_out(chart)))
    return f'<svg viewBox="0 0 {chart.width} {chart.height}" role="img" aria-label="{label}">{drawn}</svg>'


def _element(piece: Piece) -> str:
    if isinstance(piece, Stroke):
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in piece.places)
        return f'<path class="{piece.kind}" d="M{path}"/>'
    if isinstance(piece, Text):
        place = f'x="{piece.x:.1f}" y="{piece.y:.1f}"'
        if piece.turned:
            place = f'transform="translate({piece.x:.0f} {piece.y:.0f}) rotate(-90)"'
        return f'<text class="{piece.kind}" {place} text-anchor="{piece.anchor}">{escape(piece.text)}</text>'
    point, name = piece.point, piece.series.name
    title = f"{point.label or name}: {point.y:.4g} at {point.x:.6g}"
    if point.low is not None and point.high is not None:
        title += f", interval {point.low:.4g} to {point.high:.4g}"
    return (
        f'<path class="{piece.kind}" d="{_shape(piece.shape, piece.x, piece.y)}" '
        f'data-series="{escape(name, quote=True)}" data-x="{point.x!r}" data-y="{point.y!r}">'
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


def _labels(shown: Sequence[tuple[Series, Sequence[Point]]], chart: Chart, frame: _Frame) -> Iterator[Text]:
    """Yield labels beside their points, each at the first of some positions where it covers nothing. A label without
    such a position is left to the hover text."""
    taken = [
        (x - 5, y - 5, x + 5, y + 5)
        for _, points in shown
        for x, y in ((frame.px(chart.x.at(p.x)), frame.py(chart.y.at(p.y))) for p in points)
    ]
    for series, points in shown:
        if not series.labelled:
            continue
        for point in (each for each in points if each.label):
            x, y = frame.px(chart.x.at(point.x)), frame.py(chart.y.at(point.y))
            wide = CHARACTER * len(point.label)
            places: tuple[tuple[Literal["start", "middle", "end"], float, float], ...] = (
                ("start", x + 8, y + 4), ("start", x + 6, y - 7), ("start", x + 6, y + 15), ("end", x - 8, y + 4),
                ("end", x - 6, y - 7), ("end", x - 6, y + 15), ("middle", x, y - 10), ("middle", x, y + 19),
            )  # fmt: skip
            if series.style == "line":
                places = places[:1]  # at the line's end: elsewhere it would name another line
            for anchor, at, base in places:
                left = at - {"start": 0.0, "end": wide, "middle": wide / 2}[anchor]
                box = (left, base - TEXT + 1, left + wide, base + 2)
                inside = box[0] > frame.left and box[2] < chart.width - 2 and box[1] > 0 and box[3] < frame.bottom
                if inside and not any(_overlap(box, other) for other in taken):
                    taken.append(box)
                    yield Text("label", point.label, at, base, anchor)
                    break


def _overlap(a: tuple[float, ...], b: tuple[float, ...]) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def key(series: Sequence[Series]) -> str:
    """Return the legend as HTML."""
    items = []
    for each in series:
        kind, drawn = kind_of(each), ""
        if each.style != "dots":
            drawn += f'<path class="line {kind}{" dashed" if each.dashed else ""}" d="M0 7H24"/>'
        if each.style != "line":
            shape = _shape(shape_of(each), 12, 7)
            drawn += f'<path class="mark {kind}{" hollow" if each.hollow else ""}" d="{shape}"/>'
        items.append(
            f'<span><svg class="sample" viewBox="0 0 24 14" aria-hidden="true">{drawn}</svg>{escape(each.name)}</span>'
        )
    return f'<p class="key">{"".join(items)}</p>'
