"""Charts as PNGs: of the size of what is laid out, whatever their texts are."""

from __future__ import annotations

from pathlib import Path

import pytest

from attar.evaluation import pictures
from attar.evaluation.charts import SOFT, Axis, Chart, Point, Series


def test_a_png_needs_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="PNGs need matplotlib, which is not installed"):
        pictures.check()


def test_a_png_where_matplotlib_is(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    series = [
        Series("$x^", [Point(1, 2, "$_{", 1, 3), Point(2, 0.1, "b")], labelled=True),
        Series("line", [Point(1, 1)], SOFT, "line"),
        Series("", [Point(1, 1), Point(2, 2)], 2, dashed=True, hollow=True),
    ]
    pictures.png([Chart("$", Axis("$"), Axis("y", log=True), series)] * 4, tmp_path / "x.png")
    head = (tmp_path / "x.png").read_bytes()[:24]
    assert head.startswith(b"\x89PNG")
    wide, tall = (int.from_bytes(head[at : at + 4], "big") for at in (16, 20))
    assert wide == 2 * (2 * 400 + 8)
    assert tall == pytest.approx(2 * (2 * (290 + pictures.TITLE) + pictures.LINE + 8), abs=1)
