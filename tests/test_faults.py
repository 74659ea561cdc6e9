"""The table of fault points: what can be armed and how, and that each name is one place, which some test makes fail."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest

from attar import faults
from attar.faults import POINTS, Fault, InjectedFault, parse, point
from tests.errors import user_error

SOURCE = Path(faults.__file__).parent


def test_every_name_is_one_place_in_the_source() -> None:
    found = [
        name
        for file in sorted(SOURCE.rglob("*.py"))
        if file.name != "faults.py"
        for name in re.findall(r'\bpoint\(\s*"([^"]*)"', file.read_text())
    ]
    assert sorted(found) == sorted(POINTS)
    assert len(POINTS) >= 40


@pytest.mark.parametrize("page", ["docs/serving.md", "docs/architecture.md"])
def test_a_page_says_how_many_there_are(page: str) -> None:
    assert re.findall(r"(\d+) places", (SOURCE.parents[1] / page).read_text()) == [str(len(POINTS))]


def test_every_point_is_made_to_fail_by_a_test() -> None:
    from tests.engine.test_faults import CASES as OF_THE_ENGINE
    from tests.engine.test_faults import IN_THE_PROCESS
    from tests.engine.test_speculation import POINT as OF_DRAFTS
    from tests.server.models.test_pool import POINT as OF_MODELS
    from tests.server.test_faults import CASES as OF_THE_SERVER

    assert {*OF_THE_ENGINE, IN_THE_PROCESS, OF_DRAFTS, OF_MODELS, *OF_THE_SERVER} == set(POINTS)


def hits(name: str, *keys: str) -> list[bool]:
    """Which of these raise."""
    found = []
    for key in keys:
        try:
            point(name, key)
        except InjectedFault:
            found.append(True)
        else:
            found.append(False)
    return found


def test_nothing_is_armed() -> None:
    assert hits("http.parse", "a", "b") == [False, False]


def test_a_fault_comes_when_it_is_due() -> None:
    faults.arm(Fault("http.parse", after=2, times=2, every=3))
    assert [at for at, raised in enumerate(hits("http.parse", *"abcdefghijkl")) if raised] == [2, 5]
    faults.arm(Fault("http.parse", every=4, times=0))
    assert [at for at, raised in enumerate(hits("http.parse", *"abcdefghijkl")) if raised] == [0, 4, 8]
    assert hits("http.door", "a") == [False]


def test_a_fault_with_a_key_is_of_one_request() -> None:
    fault = Fault("sse.write", after=1, key="4f")
    faults.arm(fault)
    assert hits("sse.write", "4f1", "5f", "", "4f1", "4f1") == [False, False, False, True, False]
    assert (fault.hits, fault.fired) == (3, 1)


def test_what_the_environment_says(caplog: pytest.LogCaptureFixture) -> None:
    one, two = parse("sampler.draw:after=3:times=0:every=2:key=a-b, http.parse")
    assert (one.name, one.after, one.times, one.every, one.key) == ("sampler.draw", 3, 0, 2, "a-b")
    assert (two.name, two.after, two.times, two.every, two.key) == ("http.parse", 0, 1, 1, "")
    faults.arm_from(None)
    faults.arm_from("")
    assert not caplog.records
    faults.arm_from("http.parse")
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "http.parse" in caplog.text
    assert hits("http.parse", "") == [True]


@pytest.mark.parametrize(
    "text, says",
    [
        ("http.pars", "name_unknown"),
        ("", "name_unknown"),
        ("http.parse:after", "option_malformed"),
        ("http.parse:after=-1", "option_malformed"),
        ("http.parse:key=", "option_malformed"),
        ("http.parse:every=0", "option_out_of_range"),
    ],
)
def test_what_cannot_be_armed(text: str, says: str) -> None:
    with user_error(says):
        parse(text)
