"""Charts: every mark where its value says, ticks few and round, text escaped, labels that cover nothing."""

from __future__ import annotations

import math
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attar.charts import chart as charts
from attar.charts.chart import Axis, Chart, Point, Series
from attar.charts.svg import key, svg

HOSTILE = "<script>alert(1)</script>\"'&"
HALF_A_PIXEL = 0.06  # how far a mark may lie from its value: coordinates have one decimal


def drawn(chart: Chart) -> ElementTree.Element:
    return ElementTree.fromstring(svg(chart))


def marks(chart: Chart) -> list[tuple[str, float, float, float, float]]:
    """(series, x, y, place, place) of every mark; the path of a circle begins at its left end."""
    found = []
    for node in drawn(chart).iter("path"):
        if "data-x" in node.attrib:
            x, y = node.attrib["d"].split("a")[0].removeprefix("M").split()
            data = node.attrib
            found.append((data["data-series"], float(data["data-x"]), float(data["data-y"]), float(x) + 4, float(y)))
    return found


def test_marks_lie_where_their_values_say() -> None:
    points = [Point(1.0, 0.1), Point(2.0, 0.01), Point(3.0, 0.001)]
    found = marks(Chart("t", Axis("x"), Axis("y", log=True), [Series("s", points)]))
    assert [each[:3] for each in found] == [("s", p.x, p.y) for p in points]
    (_, _, _, x1, y1), (_, _, _, x2, y2), (_, _, _, x3, y3) = found
    assert x3 - x2 == pytest.approx(x2 - x1, abs=2 * HALF_A_PIXEL)
    assert y3 - y2 == pytest.approx(y2 - y1, abs=2 * HALF_A_PIXEL)
    assert y1 < y3


def test_ticks_stand_at_their_numbers() -> None:
    """The same scale draws both: a mark at a tick's value has the tick's place."""
    chart = Chart("t", Axis("x"), Axis("y", log=True), [Series("s", [Point(10.0, 0.1), Point(20.0, 0.001)])])
    texts = {node.text: node.attrib for node in drawn(chart).iter("text")}
    (_, _, _, x, y), _ = marks(chart)
    assert float(texts["10"]["x"]) == pytest.approx(x, abs=2 * HALF_A_PIXEL)
    assert float(texts["0.1"]["y"]) - 3.5 == pytest.approx(y, abs=2 * HALF_A_PIXEL)


def test_no_two_series_look_alike() -> None:
    """With more of them than colours or shapes."""
    drawn = [Series("s", [], number) for number in range(len(charts.COLOURS) * len(charts.SHAPES))]
    assert len({(charts.kind_of(each), charts.shape_of(each)) for each in drawn}) == len(drawn)


def test_what_an_axis_has_no_place_for_is_left_out() -> None:
    points = [Point(1.0, 0.0), Point(2.0, math.nan), Point(3.0, 0.5)]
    assert [m[1] for m in marks(Chart("t", Axis("x"), Axis("y", log=True), [Series("s", points)]))] == [3.0]
    assert drawn(Chart("t", Axis("x"), Axis("y", log=True), [Series("s", [])])) is not None


def test_a_chart_holds_the_ends_that_it_is_given() -> None:
    narrow = Chart(
        "t", Axis("x"), Axis("y", log=True, ends=(1e-4, 1.0)), [Series("s", [Point(0, 0.01), Point(1, 0.02)])]
    )
    _, _, _, _, y = marks(narrow)[0]
    top, bottom = 14, narrow.height - 38
    assert y == pytest.approx((top + bottom) / 2, abs=1)


def test_an_axis_may_begin_at_zero() -> None:
    """Places then count as values do, from the axis on."""
    axes = Axis("x", zero=True), Axis("y", zero=True)
    chart = Chart("t", *axes, [Series("s", [Point(1.0, 50.0), Point(2.0, 100.0)])])
    (_, _, _, x1, y1), (_, _, _, x2, y2) = marks(chart)
    left, bottom = 58, chart.height - 38
    assert x2 - left == pytest.approx(2 * (x1 - left), abs=3 * HALF_A_PIXEL)
    assert bottom - y2 == pytest.approx(2 * (bottom - y1), abs=3 * HALF_A_PIXEL)
    assert {"0", "100"} <= {node.text for node in drawn(chart).iter("text")}


def test_an_interval_is_a_line_and_a_hover_text() -> None:
    chart = Chart("t", Axis("x"), Axis("y"), [Series("s", [Point(1, 2, "a", 1.5, 2.5), Point(2, 3, "b")])])
    assert sum("whisker" in node.attrib.get("class", "") for node in drawn(chart).iter("path")) == 1
    titles = [node.text for node in drawn(chart).iter("title")]
    assert titles == ["a: 2 at 1, interval 1.5 to 2.5", "b: 3 at 2"]


def test_text_is_escaped_everywhere() -> None:
    series = Series(HOSTILE, [Point(1, 2, HOSTILE), Point(2, 1, HOSTILE)], labelled=True)
    chart = Chart(HOSTILE, Axis(HOSTILE), Axis(HOSTILE), [series])
    for text in (svg(chart), key([series])):
        assert "<script" not in text
        root = ElementTree.fromstring(text)
        assert {node.tag for node in root.iter()} <= {"svg", "path", "text", "title", "p", "span"}
    assert HOSTILE in drawn(chart).attrib["aria-label"]


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=12))
def test_labels_cover_nothing(where: list[tuple[float, float]]) -> None:
    chart = Chart("t", Axis("x"), Axis("y"), [Series("s", [Point(x, y, "a label") for x, y in where], labelled=True)])
    boxes = []
    for node in drawn(chart).iter("text"):
        if node.attrib["class"] == "label":
            at, base = float(node.attrib["x"]), float(node.attrib["y"])
            wide = charts.CHARACTER * len("a label")
            left = at - {"start": 0, "end": wide, "middle": wide / 2}[node.attrib["text-anchor"]]
            boxes.append((left, base - charts.TEXT + 1, left + wide, base + 2))
    for i, a in enumerate(boxes):
        for b in boxes[:i]:
            shared = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
            assert min(shared) <= 2 * HALF_A_PIXEL


def labels(chart: Chart) -> list[str | None]:
    return [node.text for node in drawn(chart).iter("text") if node.attrib["class"] == "label"]


def test_neighbours_in_the_last_corner_are_both_labelled() -> None:
    """Where the best of a trade-off lie: small in both, beside another of nearly its size."""
    where = {"rtn-w3g128": (3.96, 0.23), "gptq-w4g128": (4.552, 0.0106), "guided-w4g128": (4.576, 0.0089)}
    points = [Point(x, y, label) for label, (x, y) in where.items()]
    chart = Chart("t", Axis("x"), Axis("y", log=True), [Series("s", points, labelled=True)])
    assert labels(chart) == list(where)


def test_a_line_is_named_at_its_end_or_not_at_all() -> None:
    """Lines that nearly meet there: a name that moved would stand beside the next line."""
    heights = {"a line": 1.0, "near": 0.985, "other": 0.5}
    lines = [Series("s", [Point(0, y), Point(1, y, name)], -1, "line", labelled=True) for name, y in heights.items()]
    chart = Chart("t", Axis("x"), Axis("y"), lines, beside=60)
    found = charts.laid_out(chart)
    first, _, last = [each.places[-1] for each in found if isinstance(each, charts.Stroke) and "line" in each.kind]
    named = [each for each in found if isinstance(each, charts.Text) and each.kind == "label"]
    assert [each.text for each in named] == ["a line", "other"]
    assert [each.y - 4 for each in named] == [pytest.approx(first[1]), pytest.approx(last[1])]
    assert all(first[0] < each.x < chart.width for each in named)


@given(st.floats(-1e6, 1e6), st.floats(1e-2, 1e9))
def test_ticks_are_few_and_inside(low: float, span: float) -> None:
    high = low + span
    found = charts.ticks(low, high)
    assert len(found) <= 8
    if len(found) > 1:
        step = (found[-1] - found[0]) / (len(found) - 1)
        assert found[0] >= low - 1e-6 * step
        assert found[-1] <= high + 1e-6 * step


@given(st.floats(1e-9, 1e3), st.floats(1.05, 1e8))
def test_logarithmic_ticks_are_few_and_inside(low: float, factor: float) -> None:
    found = charts.log_ticks(low, low * factor)
    assert len(found) <= 9
    assert all(low * (1 - 1e-6) <= t <= low * factor * (1 + 1e-6) for t in found)
    assert len(set(map(charts.number, found))) == len(found)


def test_numbers_are_short() -> None:
    shown = {0.0: "0", 12.0: "12", 0.001: "0.001", 1e-5: "10⁻⁵", 3e-4: "3·10⁻⁴", 2.5e6: "2.5·10⁶", 0.125: "0.125"}
    assert {value: charts.number(value) for value in shown} == shown
