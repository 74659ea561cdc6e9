"""Charts as PNGs: of the size of what is laid out, whatever their texts are."""

from __future__ import annotations

from pathlib import Path

import pytest

from attar.charts import png
from attar.charts.chart import SOFT, Axis, Chart, Point, Series
from tests.errors import user_error


def test_a_png_needs_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(png.importlib.util, "find_spec", lambda name: None)
    with user_error("package_missing"):
        png.check("draw none")


def test_a_png_where_matplotlib_is(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    series = [
        Series("$x^", [Point(1, 2, "$_{", 1, 3), Point(2, 0.1, "b")], labelled=True),
        Series("line", [Point(1, 1)], SOFT, "line"),
        Series("", [Point(1, 1), Point(2, 2)], 2, dashed=True, hollow=True),
    ]
    charts = [Chart("$", Axis("$"), Axis("y", log=True), series)] * 4
    for title, above in (("", 0), ("$", png.TITLE)):
        png.save(charts, tmp_path / "x.png", title)
        head = (tmp_path / "x.png").read_bytes()[:24]
        assert head.startswith(b"\x89PNG")
        wide, tall = (int.from_bytes(head[at : at + 4], "big") for at in (16, 20))
        assert wide == 2 * (2 * 400 + 8)
        assert tall == pytest.approx(2 * (2 * (290 + png.TITLE) + png.LINE + above + 8), abs=1)
