"""Events of an answer, and the parsers that split the text of one choice into them.

A parser sees text in pieces of any length. Joined, its events are the same for any cut of that text. It drops nothing
that the model said: what does not parse as a call comes out as text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class TextDelta:
    """A piece of the answer's text."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """A piece of what the model says before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """The beginning of a call of the tool `name`. Calls are numbered from 0 within one answer."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of the JSON text of a call's arguments. Joined, the pieces are one JSON object."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """The end of a call, whose arguments are complete."""

    index: int


AnswerEvent = TextDelta | ReasoningDelta | CallStart | CallArguments | CallEnd


class AnswerParser(Protocol):
    """Splits the text of one choice into events."""

    def feed(self, text: str) -> list[AnswerEvent]:
        """Return the events that a further piece of the text completes."""
        ...

    def close(self) -> list[AnswerEvent]:
        """Return what was held back: the answer has ended, by itself or by a limit. Called once, at the end."""
        ...


class Plain:
    """A parser for answers without markers: all is text."""

    def feed(self, text: str) -> list[AnswerEvent]:
        """Return the text as one event; none for an empty piece."""
        return [TextDelta(text)] if text else []

    def close(self) -> list[AnswerEvent]:
        """Return nothing: no text is held back."""
        return []
