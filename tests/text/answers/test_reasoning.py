"""Reasoning is split from an answer the same way wherever its text is cut, and the markers come from the model."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from attar.text.answers.events import AnswerEvent, Plain, ReasoningDelta, TextDelta
from attar.text.answers.reasoning import Place, ReasoningMarkers, ReasoningParser
from attar.text.tokenizer import Tokenizer

MARKERS = ReasoningMarkers("<think>", "</think>")
PIECES = st.sampled_from(["<think>", "</think>", "\n", "\n\n", "<", "</", "</thin", "k>", "a", "b c", " ", "<think"])
TEXTS = st.lists(PIECES, max_size=8).map("".join)


def split(text: str, place: Place, cuts: Any = (), exact: bool = False) -> tuple[str, str, bool]:
    """The reasoning and the text of an answer that comes in pieces, and whether it ends inside the section."""
    parser, events = ReasoningParser(MARKERS, place, Plain(), exact), list[AnswerEvent]()
    edges = [0, *sorted(cuts), len(text)]
    for start, end in pairwise(edges):
        events += parser.feed(text[start:end])
    inside = parser.inside
    events += parser.close()
    reasoning = "".join(event.text for event in events if isinstance(event, ReasoningDelta))
    return reasoning, "".join(event.text for event in events if isinstance(event, TextDelta)), inside


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("place", Place)
@given(text=TEXTS, data=st.data())
@example(text="<think>\n\n</think>\n\nYes", data=None)
def test_any_cut_gives_the_same(place: Place, exact: bool, text: str, data: st.DataObject | None) -> None:
    cuts = range(len(text)) if data is None else data.draw(st.lists(st.integers(0, len(text)), max_size=6))
    assert split(text, place, cuts, exact) == split(text, place, (), exact)


@given(text=TEXTS)
def test_only_markers_and_line_breaks_beside_them_are_dropped(text: str) -> None:
    for place in Place:
        reasoning, answer, _ = split(text, place)
        kept = text.replace("\n", "")
        if place is not Place.BEHIND:
            start = kept.startswith("<think>") if place is Place.BEFORE else True
            kept = kept.replace("<think>", "", 1) if start and place is Place.BEFORE else kept
            kept = kept.replace("</think>", "", 1) if start else kept
        assert (reasoning + answer).replace("\n", "") == kept


@pytest.mark.parametrize(
    ("place", "text", "found"),
    [
        (Place.BEFORE, "<think>\nWell.\n</think>\n\nYes", ("Well.", "Yes")),
        (Place.BEFORE, "\n\n<think>Well.</think>Yes", ("Well.", "Yes")),
        (Place.BEFORE, "<think>\n\n</think>\n\nYes", ("", "Yes")),
        (Place.BEFORE, "Yes <think>no</think>", ("", "Yes <think>no</think>")),
        (Place.BEFORE, "<th", ("", "<th")),
        (Place.INSIDE, "\nWell,\n\n\nhm.\n</think>\nYes", ("Well,\n\n\nhm.", "Yes")),
        (Place.INSIDE, "cut off </thi", ("cut off </thi", "")),
        (Place.INSIDE, "a <think> b</think>c</think>", ("a <think> b", "c</think>")),
        (Place.BEHIND, "\n<think>a</think>", ("", "\n<think>a</think>")),
    ],
)
def test_answers_of_models(place: Place, text: str, found: tuple[str, str]) -> None:
    assert split(text, place, range(len(text)))[:2] == found


def test_line_breaks_of_a_constrained_answer_stay() -> None:
    assert split("a</think>\n\nb", Place.INSIDE, (), True)[:2] == ("a", "\n\nb")


@pytest.mark.parametrize(
    ("rendered", "continued", "place"),
    [
        ("<|im_start|>assistant\n", None, Place.BEFORE),
        ("<|im_start|>user\n<think><|im_end|>\n<|im_start|>assistant\n", None, Place.BEFORE),
        ("<|im_start|>assistant\n<think>\n", None, Place.INSIDE),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", None, Place.BEHIND),
        ("<|im_start|>assistant\n<think>\nSo", "<think>\nSo", Place.INSIDE),
        ("<|im_start|>assistant\n<think>a</think>So", "<think>a</think>So", Place.BEHIND),
        ("<|im_start|>assistant\nSo", "So", Place.BEHIND),
    ],
)
def test_where_an_answer_begins(rendered: str, continued: str | None, place: Place) -> None:
    assert MARKERS.place(rendered, continued) is place


def test_markers_are_those_that_the_template_names(demo: Any) -> None:
    tokenizer = Tokenizer.load(demo)
    assert ReasoningMarkers.of(tokenizer, "{{ messages }}") is None
    assert ReasoningMarkers.of(tokenizer, None) is None
    found = ReasoningMarkers.of(tokenizer, "{%- set content = content.split('</think>')[-1] %}")
    assert found == MARKERS  # which its vocabulary spells with several tokens
