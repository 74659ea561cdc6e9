"""Calls among the events of an answer: whole, and as the pieces of OpenAI's chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import msgspec

from attar.text.answers.events import AnswerEvent, CallArguments, CallStart

encode = msgspec.json.encode


@dataclass(slots=True)
class MadeCall:
    """A call that a model made; `arguments` is JSON text, incomplete where the answer broke off."""

    name: str
    arguments: str = ""

    def input(self) -> dict[str, Any] | None:
        """Return the arguments as an object; None where the answer broke off within them."""
        try:
            found = msgspec.json.decode(self.arguments)
        except msgspec.DecodeError:
            return None
        return found if isinstance(found, dict) else None

    @property
    def text(self) -> str:
        """The call as JSON text, as far as it goes. APIs whose calls are objects have no other place for one that broke
        off."""
        return f'{{"name": {encode(self.name).decode()}, "arguments": {self.arguments}'

    def told(self, new_id: Callable[[], str]) -> dict[str, Any]:
        """Return the call in OpenAI's shape."""
        return {"id": new_id(), "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


def calls(events: Iterable[AnswerEvent]) -> list[MadeCall]:
    """Return the calls of all events of an answer."""
    found: list[MadeCall] = []
    pieces: list[list[str]] = []
    for event in events:
        if isinstance(event, CallStart):
            found.append(MadeCall(event.name))
            pieces.append([])
        elif isinstance(event, CallArguments):
            pieces[event.index].append(event.text)
    for call, texts in zip(found, pieces, strict=True):
        call.arguments = "".join(texts)
    return found


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
