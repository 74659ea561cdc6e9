"""Calls of an answer, whole, from the events of its parser."""

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
