"""Calls of tools in an answer's text, read as it streams.

A parser looks at one character after another, so its events do not depend on how the text is cut. It holds back what
may be a marker, and a call up to its name; arguments pass as they come. A call that breaks off before its name is text.
One that breaks within its arguments has no end, and what follows is text. White space beside a call belongs to it.

`reading.py` reads the calls of each format; this module knows when one may begin.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence

from attar.text.answers.events import AnswerEvent, AnswerParser, CallArguments, CallEnd, CallStart, Plain, TextDelta
from attar.text.tools.formats import PYTHON_TAG, ToolFormat
from attar.text.tools.json_text import SPACE
from attar.text.tools.reading import FENCE, NotACall, Output, read_bare, read_calls
from attar.text.tools.tool import Tool, ToolChoice
from attar.text.tools.xml.reading import read_tagged

MAX_SPACE = 8  # characters of white space that are held back, as a call may follow

_STARTS = {"llama3_json": "{", "pythonic": "[", "generic": "{"}  # of an answer that is a call


def parser(form: ToolFormat, tools: Sequence[Tool], choice: ToolChoice) -> AnswerParser:
    """Return a parser of one answer by a model whose calls have this format. Without tools, or where none may be
    called, all is text."""
    if choice.mode == "none" or not tools:
        return Plain()
    return CallParser(form, {tool.name: tool for tool in choice.of(tools)}, form.bare and choice.mode == "auto")


class CallParser:
    """Splits an answer into text and calls of tools, which are given by their names; with `bare` also calls without the
    format's marker."""

    def __init__(self, form: ToolFormat, tools: Mapping[str, Tool], bare: bool = False) -> None:
        self._form, self._tools, self._names, self._bare = form, tools, frozenset(tools), bare
        self._markers = tuple(each for each in (form.opening, PYTHON_TAG * (form.name == "llama3_json")) if each)
        self._fences = (FENCE,) if bare else ()
        # The first character of an answer that calls.
        self._start = "{" if bare else "" if form.opening else _STARTS.get(form.name, "")
        self._out = _Events()
        self._reader: Generator[None, str, str] | None = None
        self._space, self._held = "", ""  # held back in text: white space, and what may become a marker
        self._beside = True  # nothing but white space was said since the answer or a call began
        self._first = True  # the same, and no call either
        self._waiting: list[str] = []  # characters to look at, the next one last

    def feed(self, text: str) -> list[AnswerEvent]:
        """Return the events that a further piece of the text completes."""
        self._waiting += reversed(text)
        while self._waiting:
            char = self._waiting.pop()
            if self._reader is None:
                self._take(char)
            else:
                self._read(char)
        return self._out.taken()

    def close(self) -> list[AnswerEvent]:
        """Return what was held back. The end of a complete call may be missing, as models leave it out."""
        if self._reader is not None:
            self._reader = None
            if not (self._out.ended and self._is_end(self._out.held)):
                self._out.say(self._out.held)
        elif self._held or not self._beside or self._first:
            self._out.say(self._space + self._held)
        return self._out.taken()

    def _is_end(self, text: str) -> bool:
        """Return whether a text behind the arguments of a call is the beginning of its end."""
        rest = text.strip(SPACE).lstrip("}])" + SPACE)
        return not rest or any(end.startswith(rest) for end in (self._form.closing, *self._fences))

    def _take(self, char: str) -> None:
        """Look at a character of the text outside of calls."""
        if char in SPACE and not self._held:
            self._space += char
            if len(self._space) > MAX_SPACE:
                self._say(self._space[0])
                self._space = self._space[1:]
            return
        self._held += char
        if self._first and self._beside and self._held == self._start:
            self._begin(marked=False)
        elif self._held in self._markers:
            self._begin(marked=True)
        elif self._held in self._fences:
            self._begin(marked=False)
        elif not any(marker.startswith(self._held) for marker in self._markers + self._fences):
            again = self._held[1:]
            self._say(self._space + self._held[0], beside=False)
            self._space = self._held = ""
            self._waiting += reversed(again)

    def _say(self, text: str, beside: bool = True) -> None:
        self._out.say(text)
        self._beside = self._beside and beside

    def _begin(self, marked: bool) -> None:
        """Begin to read calls, of which a marker or the first characters have come."""
        held, first = self._space + self._held, self._held
        self._out.begin(held)
        self._space = self._held = ""
        if self._bare and not marked:
            self._reader = read_bare(self._form, self._names, self._out, first)
        elif self._form.tags is not None:
            self._reader = read_tagged(self._form, self._tools, self._out)
        else:
            self._reader = read_calls(self._form, self._names, self._out, "" if marked else first)
        next(self._reader)

    def _read(self, char: str) -> None:
        """Give a character to the reader of calls."""
        assert self._reader is not None
        self._out.held += char
        try:
            self._reader.send(char)
        except StopIteration as end:
            self._reader, self._beside, self._first = None, True, False
            self._waiting += reversed(end.value)  # what belongs to the calls no more
        except NotACall:
            self._reader = None
            held, started = self._out.held, self._out.started
            self._beside = self._first = False
            kept = 0 if started else len(held) - len(held.lstrip(SPACE)) + 1  # of a marker that is none
            self._out.say(held[:kept])
            self._waiting += reversed(held[kept:])


class _Events(Output):
    """The events of an answer, neighbouring pieces joined."""

    def __init__(self) -> None:
        self.held = ""
        self.started = self.ended = False
        self._events: list[AnswerEvent] = []
        self._pieces: list[str] = []
        self._of: int | None = None  # the call that the pieces are arguments of; None for text
        self._calls = 0

    def begin(self, held: str) -> None:
        """Begin a stretch of calls, of which `held` was read."""
        self.held, self.started, self.ended = held, False, False

    def start(self, name: str) -> None:
        self._flush()
        self._events.append(CallStart(self._calls, name))
        self.held, self.started, self.ended = "", True, False

    def arguments(self, text: str) -> None:
        if self._of != self._calls:
            self._flush()
            self._of = self._calls
        self._pieces.append(text)
        self.held = ""

    def end(self) -> None:
        self._flush()
        self._events.append(CallEnd(self._calls))
        self._calls += 1
        self.held, self.ended = "", True

    def speak(self) -> None:
        self.held, self.started, self.ended = "", True, True

    def say(self, text: str) -> None:
        if self._of is not None:
            self._flush()
        if text:
            self._pieces.append(text)
        self.held = ""

    def taken(self) -> list[AnswerEvent]:
        """Return the events since the last time."""
        self._flush(False)
        events, self._events = self._events, []
        return events

    def _flush(self, done: bool = True) -> None:
        if text := "".join(self._pieces):
            self._events.append(TextDelta(text) if self._of is None else CallArguments(self._of, text))
        self._pieces = []
        if done:
            self._of = None
