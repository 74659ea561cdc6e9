"""Calls among the events of an answer as the pieces of OpenAI's chunks, and the header about their tools."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

from attar.text.answers.events import AnswerEvent, CallArguments, CallStart
from attar.text.answers.made_calls import MadeCall
from attar.text.tools.calling import Calling

encode = msgspec.json.encode

LOOSENED = "X-Attar-Loosened-Tools"
"""Header of an answer: tools whose arguments are only held to be JSON objects."""

_NAMED = 16  # tools in the header


def deltas(
    events: Iterable[AnswerEvent], said: Callable[[list[AnswerEvent]], bytes], new_id: Callable[[], str]
) -> list[bytes]:
    """Return the `delta` of each chunk that the events make: one for a stretch of text, which `said` writes, one for
    the beginning of a call, and one for each piece of its arguments."""
    found: list[bytes] = []
    text: list[AnswerEvent] = []

    def flush() -> None:
        if text:
            found.append(said(text))
            text.clear()

    for event in events:
        if isinstance(event, CallStart):
            flush()
            call = {"index": event.index, **MadeCall(event.name).told(new_id)}
            found.append(b'{"tool_calls":[%b]}' % encode(call))
        elif isinstance(event, CallArguments):
            flush()
            piece = b'{"tool_calls":[{"index":%d,"function":{"arguments":%b}}]}'
            found.append(piece % (event.index, encode(event.text)))
        else:
            text.append(event)
    flush()
    return found


def headers(calling: Calling) -> dict[str, str]:
    """Return the headers of an answer: the names of loosened tools, as many as fit."""
    if not calling.loosened:
        return {}
    more = len(calling.loosened) - _NAMED
    return {LOOSENED: ", ".join(calling.loosened[:_NAMED]) + (f", and {more} more" if more > 0 else "")}
