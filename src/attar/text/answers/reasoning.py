"""Reasoning sections: which markers a model has, whether a prompt ends inside a section, and the split of an answer.

A model has the markers that its chat template names, of the pairs in `PAIRS`. A section can stand only at the beginning
of an answer: later the same words are text. Up to `NEWLINES` line breaks beside a marker belong to the marker.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from attar.protocol.reasoning import ReasoningSection
from attar.text.answers.events import AnswerEvent, AnswerParser, ReasoningDelta, TextDelta
from attar.text.template import reads
from attar.text.tokenizer import Tokenizer

PAIRS = (
    ("<think>", "</think>"),  # DeepSeek-R1, Qwen3, QwQ, SmolLM3, GLM-4.5, Nemotron
    ("[THINK]", "[/THINK]"),  # Magistral
    ("<seed:think>", "</seed:think>"),  # Seed-OSS
    ("<|START_THINKING|>", "<|END_THINKING|>"),  # Command A Reasoning
    ("<reasoning>", "</reasoning>"),
)
NEWLINES = 2
SWITCHES = ("enable_thinking", "thinking")
"""Variables by which templates turn reasoning on and off: Qwen3's and GLM's, then DeepSeek-V3.1's and Granite's."""


def switched(template: str, enabled: bool) -> dict[str, bool]:
    """Return the variables that turn reasoning on or off: those that a template reads. For a template that reads none,
    the first one says that it is off; then a section that the prompt opens is to be closed."""
    found = dict.fromkeys((name for name in SWITCHES if reads(template, name)), enabled)
    return found if found or enabled else {SWITCHES[0]: False}


class Place(Enum):
    """Place of an answer's first character: where a section may begin, inside one, or behind it."""

    BEFORE = "before"
    INSIDE = "inside"
    BEHIND = "behind"


@dataclass(frozen=True, slots=True)
class ReasoningMarkers:
    """The texts that begin and end a model's reasoning section.

    `start_id` and `end_id` are their tokens, None where the vocabulary has no single token for one. `visible` are those
    of them that are special: a text shows them only if it is told to.
    """

    start: str
    end: str
    start_id: int | None = None
    end_id: int | None = None
    visible: tuple[int, ...] = ()

    @classmethod
    def of(cls, tokenizer: Tokenizer, template: str | None) -> ReasoningMarkers | None:
        """Return the markers that the chat template names; None where it names none."""
        for start, end in PAIRS:
            if template is not None and end in template:
                ids = tokenizer.token_to_id(start), tokenizer.token_to_id(end)
                special = tuple(each for each in ids if each is not None and each in tokenizer.special_ids)
                return cls(start, end, *ids, special)
        return None

    def place(self, rendered: str, continued: str | None = None) -> Place:
        """Return where an answer begins behind a rendered prompt. `continued` is the content of the assistant's message
        that the answer goes on from, None where a new turn was opened."""
        if continued is not None and continued.strip():
            inside = continued.rfind(self.start) > continued.rfind(self.end)
            return Place.INSIDE if inside else Place.BEHIND
        end = rendered.rstrip()
        if end.endswith(self.start):
            return Place.INSIDE
        return Place.BEHIND if end.endswith(self.end) else Place.BEFORE

    def section(self, place: Place, budget: int | None = None) -> ReasoningSection | None:
        """Return the section of an answer that begins at `place`, as the engine finds it by its tokens; None where
        there is none, and where a marker is no single token."""
        if place is Place.BEHIND or self.start_id is None or self.end_id is None:
            return None
        return ReasoningSection(self.start_id, self.end_id, place is Place.INSIDE, budget)


class ReasoningParser:
    """Splits an answer that begins at `place`: what lies in the section becomes `ReasoningDelta`, what follows goes to
    the parser `inner`.

    With `exact`, line breaks behind the end marker stay: a constraint holds from there.
    """

    def __init__(self, markers: ReasoningMarkers, place: Place, inner: AnswerParser, exact: bool = False) -> None:
        self._markers, self._place, self._inner = markers, place, inner
        self._after = 0 if exact else NEWLINES
        self._breaks = NEWLINES if place is Place.INSIDE else 0  # that may still be dropped here
        self._held = ""

    @property
    def inside(self) -> bool:
        """True where the text so far ends inside the section."""
        return self._place is Place.INSIDE

    def feed(self, text: str) -> list[AnswerEvent]:
        """Return the events that a further piece of the text completes."""
        if self._place is Place.BEHIND and not self._breaks:
            return self._inner.feed(text)
        self._held += text
        found: list[AnswerEvent] = []
        if self._place is Place.BEFORE:
            found += self._before()
        if self._place is Place.INSIDE:
            found += self._within()
        if self._place is Place.BEHIND:
            found += self._behind()
        return found

    def close(self) -> list[AnswerEvent]:
        """Return what was held back. A section that the answer's end cuts off is reasoning to its end."""
        held, self._held = self._held, ""
        if self._place is Place.INSIDE:
            found: list[AnswerEvent] = [ReasoningDelta(held)] if held else []
            return [*found, *self._inner.close()]
        return [*(self._inner.feed(held) if held else []), *self._inner.close()]

    def _before(self) -> list[AnswerEvent]:
        """Wait until the text begins with the start marker, or cannot any more."""
        start, begun = self._markers.start, _without_breaks(self._held, NEWLINES)
        if begun.startswith(start):
            self._place, self._held, self._breaks = Place.INSIDE, begun[len(start) :], NEWLINES
        elif not start.startswith(begun):
            self._place, self._breaks = Place.BEHIND, 0
        return []

    def _within(self) -> list[AnswerEvent]:
        self._drop_breaks()
        text, end = self._held, self._markers.end
        at = text.find(end)
        if at < 0:
            at = len(text) - _overlap(text, end)
            said = _before_breaks(text[:at])
            self._held = text[len(said) :]
        else:
            said = _before_breaks(text[:at])
            self._place, self._held, self._breaks = Place.BEHIND, text[at + len(end) :], self._after
        return [ReasoningDelta(said)] if said else []

    def _behind(self) -> list[AnswerEvent]:
        self._drop_breaks()
        text, self._held = self._held, ""
        return self._inner.feed(text) if text else []

    def _drop_breaks(self) -> None:
        """Drop line breaks at the beginning of what is held, as many as still may be."""
        rest = _without_breaks(self._held, self._breaks)
        self._breaks = 0 if rest else self._breaks - len(self._held)
        self._held = rest


def reasoning_and_text(events: Iterable[AnswerEvent]) -> tuple[str, str]:
    """Return the reasoning of events, and their text."""
    reasoning, text = list[str](), list[str]()
    for event in events:
        if isinstance(event, ReasoningDelta):
            reasoning.append(event.text)
        elif isinstance(event, TextDelta):
            text.append(event.text)
    return "".join(reasoning), "".join(text)


def _without_breaks(text: str, most: int) -> str:
    """Return the text without up to `most` line breaks at its beginning."""
    count = next((at for at, each in enumerate(text[:most]) if each != "\n"), min(most, len(text)))
    return text[count:]


def _before_breaks(text: str) -> str:
    """Return the text without up to NEWLINES line breaks at its end."""
    return text[: len(text) - (len(text[-NEWLINES:]) - len(text[-NEWLINES:].rstrip("\n")))]


def _overlap(text: str, marker: str) -> int:
    """Return the length of the longest beginning of the marker, not all of it, that the text ends with."""
    return next((size for size in range(min(len(marker) - 1, len(text)), 0, -1) if text.endswith(marker[:size])), 0)
