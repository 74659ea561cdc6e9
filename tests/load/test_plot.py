"""Plots: a page that needs nothing else, with every point on it."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from attar.charts import png
from attar.load import plot
from tests.errors import user_error


def run(rate: float, **more: Any) -> dict[str, Any]:
    latency = {"p50": rate / 10, "p95": rate / 5, "p99": rate / 4, "mean": rate / 10, "max": rate}
    return {
        "label": f"{rate:g}/s", "rate": rate, "clients": None, "requests": 10, "seconds": 5.0,
        "output_tok_s": 30 * rate, "ttft": latency, "tpot": latency, "e2e": latency,
    } | more  # fmt: skip


class Balanced(HTMLParser):
    """Checks that what is opened is closed, and collects the tags."""

    EMPTY = frozenset({"meta"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in self.EMPTY:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.EMPTY:
            assert self.open.pop() == tag


def test_a_page_stands_alone_and_has_every_point() -> None:
    runs = [run(rate, goodput={"requests_s": rate}) for rate in (1.0, 2.0, 4.0)]
    page = plot.html(runs, "a <title>", "table & more")
    parser = Balanced()
    parser.feed(page)
    assert parser.open == []
    tags = [tag for tag, _ in parser.seen]
    assert tags.count("figure") == 5
    points = [attributes for _, attributes in parser.seen if "data-x" in attributes]
    assert len(points) == 3 * (3 * 3 + 1 + 1)
    shown = [(each["data-x"], each["data-y"]) for each in points if each["data-series"] == "output"]
    assert shown == [("1.0", "30.0"), ("2.0", "60.0"), ("4.0", "120.0")]
    assert not {"script", "link", "img", "iframe"} & set(tags)
    assert not re.search(r"https?://|url\(|src=", page)
    assert "a &lt;title&gt;" in page
    assert "table &amp; more" in page


def test_a_run_without_answers_leaves_a_gap() -> None:
    runs = [run(1.0), run(2.0, ttft=None, tpot=None, e2e=None)]
    page = plot.html(runs, "t", "")
    assert "nan" not in page
    assert plot.html([run(1.0, ttft=None, tpot=None, e2e=None, output_tok_s=0.0)], "t", "")


def test_what_stands_on_the_axis() -> None:
    assert plot.loads([run(1.0), run(3.0)]) == ([1.0, 3.0], "requests/s offered")
    assert plot.loads([run(1.0, clients=8)]) == ([8.0], "clients")
    assert plot.loads([run(1.0) | {"rate": None}]) == ([2.0], "requests/s offered")


def test_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "load.html"
    plot.check(page)
    plot.save(page, [run(1.0)], "t", "table")
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")
    with user_error("output_invalid"):
        plot.check(tmp_path / "load.pdf")
    with user_error("file_not_found"):
        plot.check(tmp_path / "none" / "load.html")
    (tmp_path / "folder.html").mkdir()
    with user_error("file_not_permitted", "folder.html"):
        plot.check(tmp_path / "folder.html")
    with monkeypatch.context() as patch:  # not for root, who may write anywhere
        patch.setattr(plot.os, "access", lambda what, mode: what not in (page, tmp_path))
        for path in (page, tmp_path / "new.html"):
            with user_error("file_not_permitted"):
                plot.check(path)
    monkeypatch.setattr(png.importlib.util, "find_spec", lambda name: None)
    with user_error("package_missing"):
        plot.check(tmp_path / "load.png")


def test_a_png_where_matplotlib_is(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    plot.save(tmp_path / "load.png", [run(1.0), run(2.0)], "t", "")
    assert (tmp_path / "load.png").read_bytes().startswith(b"\x89PNG")
