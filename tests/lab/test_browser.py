"""The lab's page in a real browser: by keyboard, in two colour schemes and three widths, and with hostile names."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from attar.lab import facts, formulas, page
from tests.lab.browser import Browser, need_chromium
from tests.lab.test_page import HOSTILE, hostile, rates, shape

LABS = (
    "size", "smoothing", "roofline", "paging", "speculation", "batching", "deployment", "attention", "rounding",
)  # fmt: skip
WIDTHS = (320, 390, 1280)
CLOSE = 1e-9

LOOK = (Path(__file__).parent / "look.js").read_text()


def data() -> dict[str, Any]:
    figures = {"kl_mean": (0.0114, 0.0104, 0.0124), "ear": (0.949, None, None)}
    found = facts.facts(shape(), rates(), "2026-11-27")
    return {**found, "outputs": [facts.output("gptq-w4g128", 1_100_000_000, 4.126, figures, 29.3)]}


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    need_chromium()
    with Browser(tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("lab") / "lab.html"
    path.write_text(page.html(data()))
    return path.as_uri()


def visit(browser: Browser, address: str) -> None:
    """Load a page anew, whatever was there."""
    browser.open("about:blank")
    browser.errors.clear()
    browser.requests.clear()
    browser.open(address)


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", WIDTHS)
def test_every_simulator_has_its_parts(browser: Browser, address: str, width: int, dark: bool) -> None:
    browser.show(width, dark=dark)
    for lab in LABS:
        visit(browser, f"{address}#{lab}")
        seen = browser.run(LOOK)
        assert browser.errors == []
        assert seen["wide"] <= 0, f"{lab} is too wide for {width}"
        assert [seen[each] for each in ("pale", "faint", "nameless", "twice")] == [[], [], [], []], lab
        assert [seen[each] for each in ("unlabelled", "small", "bare", "covered")] == [0] * 4, lab
        assert seen["cut"] == [], lab
        assert all(seen[each] for each in ("tables", "marks", "formulas", "sources", "omits")), lab
        assert not [each for each in seen["formulas"] if "NaN" in each or "undefined" in each], lab


def test_the_look_itself_sees(browser: Browser, address: str) -> None:
    browser.show(1280)
    visit(browser, address)
    browser.run("document.documentElement.style.setProperty('--soft', 'rgb(200, 200, 200)')")
    browser.run("document.documentElement.style.setProperty('--c0', 'rgb(240, 240, 240)')")
    browser.run("document.querySelector('#controls label').remove()")
    seen = browser.run(LOOK)
    assert all(seen[each] for each in ("pale", "faint", "nameless"))
    visit(browser, f"{address}#roofline")
    browser.run("document.querySelectorAll('.tick').forEach(each => each.remove())")
    browser.run("document.querySelectorAll('svg .label').forEach(each => each.parentElement.prepend(each))")
    browser.run("document.querySelector('#controls select').style.maxWidth = '5rem'")
    seen = browser.run(LOOK)
    assert all(seen[each] for each in ("bare", "covered", "cut"))


def test_nothing_is_loaded(browser: Browser, address: str) -> None:
    visit(browser, address)
    assert {each.partition("#")[0] for each in browser.requests} == {address}


def test_a_slider_by_key_changes_numbers_figure_and_address(browser: Browser, address: str) -> None:
    browser.show(1280)
    visit(browser, f"{address}#speculation")
    browser.press(*["Tab"] * 3)  # the link that skips, the chosen tab, the first slider
    assert browser.run("document.activeElement.id") == "c-K"
    assert browser.run("parseFloat(getComputedStyle(document.activeElement).outlineWidth)") > 0
    browser.press("ArrowRight", "ArrowRight", "ArrowLeft")
    assert browser.run("values.K") == 6
    assert browser.run("document.getElementById('c-K-box').value") == "6"
    expected = formulas.emitted_tokens(formulas.acceptance(0.8, 6))
    assert f"{expected:.5g}" in browser.run("document.querySelector('#formulas dd').textContent")
    browser.until("location.hash === '#speculation?K=6'")
    browser.until("document.getElementById('live').textContent.includes('K = 6')")
    browser.press("End")
    assert browser.run("values.K") == 16
    browser.press("Home")
    assert browser.run("values.K") == 0
    browser.press("Tab", "Tab", "Enter")  # past the number to its reset
    assert browser.run("values.K") == 5


def test_an_address_restores_a_view(browser: Browser, address: str) -> None:
    visit(browser, f"{address}#speculation?K=3&p=0.5&rows=flat&c=0")
    assert browser.run("[values.K, values.p, values.rows, values.c]") == [3, 0.5, "flat", 0]
    marks = browser.run("[...document.querySelectorAll('[data-series=chosen]')].map(e => [+e.dataset.x, +e.dataset.y])")
    assert marks == [[3, pytest.approx(formulas.emitted_tokens([0.5] * 3), rel=CLOSE)]]
    for wrong in ("#nowhere", "#speculation?K=1e999&p=x&rows=none", "#size?users=-5&as=__proto__", "#%E0%A4%A"):
        visit(browser, address + wrong)
        assert browser.errors == []
        assert browser.run("controls.every(c => c.options || values[c.id] >= c.min && values[c.id] <= c.max)")


def test_tabs_by_key(browser: Browser, address: str) -> None:
    visit(browser, address)
    browser.press("Tab", "Tab")
    assert browser.run("document.activeElement.id") == "tab-size"
    for lab in (*LABS[1:], LABS[0]):
        browser.press("ArrowRight")
        chosen = browser.run("[...document.querySelectorAll('[aria-selected=true]')].map(e => e.id)")
        assert chosen == [browser.run("document.activeElement.id")] == [f"tab-{lab}"]
    browser.press("End")
    assert browser.run("current.id") == LABS[-1]


def test_steps_start_paused_and_go_by_key(browser: Browser, address: str) -> None:
    browser.show(1280, reduced=True)
    visit(browser, f"{address}#attention")
    assert browser.run("document.querySelector('figure .unit').textContent.trim()") == "step 1 of 3"
    browser.run("[...document.querySelectorAll('figure button')].find(e => e.textContent === 'Step').focus()")
    browser.press("Enter", "Space")
    assert browser.run("document.querySelector('figure .unit').textContent.trim()") == "step 3 of 3"
    assert "1.5032" in browser.run("document.getElementById('figures').textContent")
    browser.show(1280)


def test_measured_points_lie_on_the_figures(browser: Browser, address: str) -> None:
    def marks(name: str) -> list[list[float]]:
        query = (
            f"[...document.querySelectorAll('.mark[data-series=\"{name}\"]')].map(e => [+e.dataset.x, +e.dataset.y])"
        )
        return browser.run(query)  # type: ignore[no-any-return]

    visit(browser, f"{address}#size")
    assert marks("stored outputs (receipts)") == [[4.126, 1.1]]
    visit(browser, f"{address}#roofline")
    by_rows = [[rows, pytest.approx(rows / seconds)] for rows, seconds in rates().rows]
    assert marks("measured here, by rows")[: len(by_rows)] == by_rows
    assert marks("measured outputs (attar bench)") == [[4.126, pytest.approx(1000 / 29.3)]]


def test_what_was_not_measured_is_said(browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "bare.html"
    path.write_text(page.html(facts.facts(shape(), None)))
    visit(browser, f"{path.as_uri()}#roofline")
    assert browser.errors == []
    assert "not measured" in browser.run("document.getElementById('sources').textContent")
    assert browser.run("document.querySelectorAll('.mark[data-x]').length") == 0
    path.write_text(page.html(facts.facts(None, None)))
    for lab in LABS:  # and without a model
        visit(browser, f"{path.as_uri()}#{lab}")
        assert browser.errors == []


def test_hostile_names_are_shown_as_text(browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "hostile.html"
    path.write_text(page.html(hostile()))
    for lab in LABS:
        visit(browser, f"{path.as_uri()}#{lab}")
        assert browser.errors == []
        assert len(browser.requests) == 1
        assert browser.run("[document.scripts.length, document.title]") == [2, page.TITLE]
        text = browser.run("document.body.innerText")
        assert "<script>alert(1)</script>" in text
        assert "\\u202e" in text
        everywhere = browser.run(
            "document.body.innerText + [...document.querySelectorAll('[aria-label]')].map(e => e.ariaLabel)"
        )
        assert not set(everywhere) & set("\u202e\u2028\u2029")
    assert json.loads(browser.run("document.getElementById('data').textContent"))["model"]["name"].startswith(
        HOSTILE[:20]
    )


def test_a_change_redraws_within_a_frame(browser: Browser, address: str) -> None:
    visit(browser, f"{address}#size")
    work = "(() => { const began = performance.now(); range(20, paint); return (performance.now() - began) / 20; })()"
    assert min(browser.run(work) for _ in range(5)) < 16
