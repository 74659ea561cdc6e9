"""Charts of points and lines as data, and the layout that every renderer draws.

A chart is data (`Chart`), and `laid_out` computes the position of everything in it. `svg.py` draws that for a page and
`png.py` as a picture, so both have the same scales and labels. The colours are the palette of Okabe and Ito, which
colour-blind readers can distinguish. Shapes repeat what colours say, and labels stand beside their points.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
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
    zero: bool = False  # it begins at 0

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
    """Return tick values: 1, 2 and 5 of each power of ten. Over many powers these become 1 and 3, then the powers
    alone; over less than half a power they are round steps."""
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
    at = [axis.at(v) for v in (*values, *(axis.ends or ()), *(0.0,) * axis.zero) if _fits(v, axis)] or [0.0, 1.0]
    low, high = min(at), max(at)
    span = (high - low) or (0.3 if axis.log else abs(high) * 0.2 or 1.0)
    return 0.0 if axis.zero else low - room * span, high + room * span


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
        marks = log_ticks(10**low, 10**high) if axis.log else ticks(low, high, 6 if chart.width > 300 else 4)
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
