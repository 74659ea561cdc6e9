"""Stop strings: streamed in any pieces, the result is that of a search over the whole text."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attar.sampling.stop_strings import StopChecker

TEXT = st.text("ab👩\u200d\u0301", max_size=24)
STOPS = st.lists(st.text("ab👩\u200d\u0301", min_size=1, max_size=5), max_size=4)


def search(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The definition, slowly: the shortest prefix that ends with a stop string; of several the longest."""
    for end in range(1, len(text) + 1):
        hits = [stop for stop in stops if text[:end].endswith(stop)]
        if hits:
            longest = max(hits, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(TEXT, STOPS, st.lists(st.integers(0, 24)))
def test_equals_a_search_over_the_whole_text(text: str, stops: list[str], cuts: list[int]) -> None:
    edges = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    checker = StopChecker(stops)
    shown = ""
    expected, stop = search(text, stops)
    for start, end in pairwise(edges):
        shown += checker.push(text[start:end])
        assert expected.startswith(shown)
        if checker.stopped is not None:
            break
    shown += checker.flush()
    assert (shown, checker.stopped) == (expected, stop)


@given(TEXT, STOPS)
def test_holds_back_only_what_may_become_a_stop(text: str, stops: list[str]) -> None:
    checker = StopChecker(stops)
    seen = shown = ""
    for char in text:
        seen += char
        shown += checker.push(char)
        if checker.stopped is not None:
            break
        held = seen[len(shown) :]
        assert held == "" or any(stop.startswith(held) for stop in stops)


def test_a_stop_that_spans_pieces() -> None:
    checker = StopChecker(["</end>"])
    assert [checker.push(piece) for piece in ("Hi <", "/e", "nd", "> there")] == ["Hi ", "", "", ""]
    assert checker.stopped == "</end>"


@pytest.mark.parametrize("size", [1, 2, 9])
def test_the_stop_that_completes_first_wins(size: int) -> None:
    text = "x abcde bc"
    for stops, shown in ((["abcde", "bc"], "x a"), (["bc", "abc"], "x "), (["cd", "b"], "x a")):
        checker = StopChecker(stops)
        pieces = iter(range(0, len(text), size))
        got = ""
        while checker.stopped is None:
            at = next(pieces)
            got += checker.push(text[at : at + size])
        assert got == shown


def test_a_false_start_is_released_at_the_end() -> None:
    checker = StopChecker(["\n\nUser:"])
    assert checker.push("answer\n\nUse") == "answer"
    assert checker.flush() == "\n\nUse"
    assert checker.flush() == ""


def test_nothing_to_stop_at_holds_nothing() -> None:
    checker = StopChecker(())
    assert checker.push("abc") == "abc"
    assert checker.flush() == ""


def test_a_bare_string_is_a_mistake() -> None:
    with pytest.raises(AssertionError):
        StopChecker("ab")
