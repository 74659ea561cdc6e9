"""Items of an answer: whatever its events are, the stream tells of each item what the item says in the end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from attar.server.api.responses.output import Output
from attar.text.answers.events import AnswerEvent, CallArguments, CallEnd, CallStart, ReasoningDelta, TextDelta

TEXTS = st.lists(st.text(min_size=1, max_size=4), max_size=4)


@st.composite
def answers(draw: st.DrawFn) -> list[AnswerEvent]:
    """Events of an answer, as parsers give them; the last call may be cut off."""
    found: list[AnswerEvent] = []
    calls = 0
    for kind in draw(st.lists(st.sampled_from(["text", "reasoning", "call"]), max_size=6)):
        pieces = draw(TEXTS)
        if kind == "text":
            found += map(TextDelta, pieces)
        elif kind == "reasoning":
            found += map(ReasoningDelta, pieces)
        else:
            found += [CallStart(calls, f"f{calls}"), *(CallArguments(calls, piece) for piece in pieces), CallEnd(calls)]
            calls += 1
    if found and isinstance(found[-1], CallEnd) and draw(st.booleans()):
        found.pop()
    return found


def wanted(events: list[AnswerEvent]) -> Iterator[tuple[str, str]]:
    """The items by their types and texts: what follows in the same manner is one."""
    kind, text = "", ""
    for event in events:
        now = {TextDelta: "message", ReasoningDelta: "reasoning"}.get(type(event), "function_call")
        if kind and (now != kind or isinstance(event, CallStart)):
            yield kind, text
            text = ""
        kind = now
        text += getattr(event, "text", "")
    yield kind or "message", text


def text_of(item: dict[str, Any]) -> str:
    return (
        str(item["arguments"]) if item["type"] == "function_call" else "".join(part["text"] for part in item["content"])
    )


@given(answers(), st.booleans())
def test_a_stream_tells_of_its_items(events: list[AnswerEvent], complete: bool) -> None:
    output = Output()
    told = [*output.add(events), *output.close(complete)]
    assert [(item["type"], text_of(item)) for item in output.items] == list(wanted(events))
    assert len({item["id"] for item in output.items}) == len(output.items)
    open_end = not events or not isinstance(events[-1], CallEnd)
    last = "incomplete" if open_end and not complete else "completed"
    assert [item["status"] for item in output.items] == ["completed"] * (len(output.items) - 1) + [last]
    assert [event["item"] for event in told if event["type"].endswith("item.done")] == output.items
    for at, item in enumerate(output.items):
        mine = [event for event in told if event["output_index"] == at]
        assert [mine[0]["type"], mine[-1]["type"]] == ["response.output_item.added", "response.output_item.done"]
        assert mine[0]["item"]["status"] == "in_progress"
        assert {event.get("item_id", item["id"]) for event in mine} == {item["id"]}
        assert "".join(event["delta"] for event in mine if event["type"].endswith("delta")) == text_of(item)
        (done,) = (event for event in mine if event["type"].endswith(("text.done", "arguments.done")))
        assert done.get("text", done.get("arguments")) == text_of(item)
    assert [event["output_index"] for event in told] == sorted(event["output_index"] for event in told)


def test_an_answer_without_events_is_an_empty_message() -> None:
    output = Output()
    list(output.close(True))
    (item,) = output.items
    assert (item["type"], item["role"], text_of(item)) == ("message", "assistant", "")
