"""Readers of calls, one for each format: generators that are sent a character at a time.

A reader tells an `Output` what it finds, and returns characters that it read too many. It raises NotACall where the
text is none. Spaces, names and ids have limits, so that little is ever held back.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Protocol

from attar.text.tools.formats import ARGS, CALL_ID, ToolFormat
from attar.text.tools.json_text import SPACE, JsonObject
from attar.text.tools.python_text import PythonArguments

MAX_NAME = 64
MAX_SPACE = 64
MAX_ID = 128
MAX_INFO = 8  # white space behind the language of a block

KEYS = ("arguments", "parameters")
FENCE, LANGUAGE = "```", "json"  # of a block that may hold a call

Reader = Generator[None, str, str]

_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "/": "/", "\\": "\\", '"': '"'}


class NotACall(Exception):
    """The text is not one of a call, or no more."""


class Output(Protocol):
    """What a reader tells. `held` are characters read since the last event, which it may clear."""

    held: str

    def start(self, name: str) -> None:
        """A call of this tool begins."""

    def arguments(self, text: str) -> None:
        """A piece of the call's arguments, as JSON."""

    def end(self) -> None:
        """The call's arguments are complete."""

    def speak(self) -> None:
        """The answer's text begins or ends here: what was read before is not text."""

    def say(self, text: str) -> None:
        """A piece of the answer's text."""


def read_calls(form: ToolFormat, names: frozenset[str], out: Output, first: str) -> Reader:
    """Return the reader of an answer's calls behind the opening marker. Where there is none, `first` is the first
    character of the calls, read already."""
    return _Calls(form, names, out).read(first)


def read_bare(form: ToolFormat, names: frozenset[str], out: Output, first: str) -> Reader:
    """Return the reader of calls without a marker. `first` was read already: the `{` of an answer, or a `FENCE`."""
    return _Calls(form, names, out).bare(first)


class _Calls:
    """One stretch of calls."""

    def __init__(self, form: ToolFormat, names: frozenset[str], out: Output) -> None:
        self._form, self._names, self._out = form, names, out

    def read(self, first: str) -> Reader:
        char = first or (yield from self._skip())
        match self._form.name:
            case "llama3_json":
                return (yield from self._objects(char, ";"))
            case "pythonic":
                yield from self._python(char)
            case "generic":
                yield from self._generic(char)
            case _ if char in "[{":
                yield from self._body(char)
            case "mistral_args" | "mistral":
                yield from self._named(char)
                return ""
            case _:
                raise NotACall
        if self._form.closing:
            yield from self._expect(self._form.closing, (yield from self._skip()))
        return ""

    def bare(self, first: str) -> Reader:
        """Read objects of nothing but a tool's name and arguments, one behind another, up to the end of their block."""
        if first == FENCE:
            yield from self._info()
            yield from self._expect("{", (yield from self._skip()))
        while True:
            yield from self._exact_object()
            behind = ""
            while (char := (yield)) in SPACE:
                behind += char
                if len(behind) > MAX_SPACE:
                    return behind + char
            if char == FENCE[0] and first == FENCE:
                yield from self._expect(FENCE, char)
                return ""
            if char != "{":
                return behind + char

    def _info(self) -> Generator[None, str, None]:
        """Read the rest of the line that opens a block of JSON."""
        char = yield
        if char == LANGUAGE[0]:
            yield from self._expect(LANGUAGE, char)
            char = yield
        for _ in range(MAX_INFO):
            if char not in " \t\r":
                break
            char = yield
        yield from self._expect("\n", char)

    def _exact_object(self) -> Generator[None, str, None]:
        """Read a call behind its `{`, with the two keys that it must have, in their order."""
        yield from self._expect('"name"', (yield from self._skip()))
        yield from self._expect(":", (yield from self._skip()))
        name = yield from self._string((yield from self._skip()), MAX_NAME)
        if name not in self._names:
            raise NotACall
        yield from self._expect(",", (yield from self._skip()))
        if (yield from self._string((yield from self._skip()), MAX_NAME)) not in KEYS:
            raise NotACall
        yield from self._expect(":", (yield from self._skip()))
        yield from self._arguments(name, (yield from self._skip()))
        yield from self._expect("}", (yield from self._skip()))

    def _skip(self) -> Generator[None, str, str]:
        """Return the next character that is no space."""
        for _ in range(MAX_SPACE + 1):
            char = yield
            if char not in SPACE:
                return char
        raise NotACall

    def _expect(self, text: str, char: str) -> Generator[None, str, None]:
        """Read a text whose first character, or what stands there, is `char`."""
        for at, wanted in enumerate(text):
            if at:
                char = yield
            if char != wanted:
                raise NotACall

    def _string(self, char: str, most: int) -> Generator[None, str, str]:
        """Return the content of a string without escapes."""
        if char != '"':
            raise NotACall
        content = ""
        while (char := (yield)) != '"':
            content += char
            if len(content) > most or char == "\\" or char < " ":
                raise NotACall
        return content

    def _body(self, char: str) -> Generator[None, str, None]:
        """Read one object, or a list of some."""
        if char == "{":
            yield from self._object()
            return
        if char != "[":
            raise NotACall
        while True:
            yield from self._expect("{", (yield from self._skip()))
            yield from self._object()
            if (char := (yield from self._skip())) == "]":
                return
            if char != ",":
                raise NotACall

    def _objects(self, char: str, separator: str) -> Reader:
        """Read objects; return what comes behind the last."""
        yield from self._expect("{", char)
        while True:
            yield from self._object()
            behind = ""
            while (char := (yield)) in SPACE or char == separator:
                behind += char
                if len(behind) > MAX_SPACE:
                    return behind + char
            if char != "{":
                return behind + char

    def _object(self) -> Generator[None, str, None]:
        """Read a call behind its `{`."""
        name, given = "", False
        while True:
            key = yield from self._string((yield from self._skip()), MAX_NAME)
            yield from self._expect(":", (yield from self._skip()))
            char = yield from self._skip()
            if key == "name" and not name:
                name = yield from self._string(char, MAX_NAME)
                if name not in self._names:
                    raise NotACall
            elif key in KEYS and name and not given:
                given = True
                yield from self._arguments(name, char)
            elif key in ("id", "type"):
                yield from self._string(char, MAX_ID)
            else:
                raise NotACall
            if (char := (yield from self._skip())) == "}":
                break
            if char != ",":
                raise NotACall
        if not name:
            raise NotACall
        if not given:
            self._out.start(name)
            self._out.arguments("{}")
            self._out.end()

    def _arguments(self, name: str, char: str) -> Generator[None, str, None]:
        """Read the arguments of a call, of which `char` is the first character."""
        if char != "{":
            raise NotACall
        found = JsonObject()
        self._out.start(name)
        while True:
            if not found.push(char):
                raise NotACall
            self._out.arguments(char)
            if found.done:
                break
            char = yield
        self._out.end()

    def _named(self, char: str) -> Generator[None, str, None]:
        """Read a name, perhaps an id, and arguments, each behind its marker."""
        name = ""
        while char != "[":
            name += char
            if len(name) > MAX_NAME:
                raise NotACall
            char = yield
        if name.strip(SPACE) not in self._names:
            raise NotACall
        if (char := (yield)) == CALL_ID[1]:
            yield from self._expect(CALL_ID[1:], char)
            for _ in range(MAX_ID + 1):
                if (char := (yield)) == "[":
                    break
            yield from self._expect(ARGS, char)
        else:
            yield from self._expect(ARGS[1:], char)
        yield from self._arguments(name.strip(SPACE), (yield from self._skip()))

    def _python(self, char: str) -> Generator[None, str, None]:
        """Read a list of calls in Python's syntax."""
        yield from self._expect("[", char)
        while True:
            name, char = "", (yield from self._skip())
            while char != "(":
                name += char
                if len(name) > MAX_NAME:
                    raise NotACall
                char = yield
            if name not in self._names:
                raise NotACall
            self._out.start(name)
            found = PythonArguments()
            while not found.done:
                if (piece := found.push((yield))) is None:
                    raise NotACall
                self._out.arguments(piece)
            self._out.end()
            if (char := (yield from self._skip())) == "]":
                return
            if char != ",":
                raise NotACall

    def _generic(self, char: str) -> Generator[None, str, None]:
        """Read an answer that is JSON: a response in words, or a list of calls."""
        yield from self._expect("{", char)
        key = yield from self._string((yield from self._skip()), MAX_NAME)
        yield from self._expect(":", (yield from self._skip()))
        char = yield from self._skip()
        if key == "response":
            yield from self._words(char)
        elif key == "tool_calls" and char == "[":
            yield from self._body(char)
        else:
            raise NotACall
        yield from self._expect("}", (yield from self._skip()))

    def _words(self, char: str) -> Generator[None, str, None]:
        """Read a response, and say what its JSON string says."""
        yield from self._expect('"', char)
        self._out.speak()
        while (char := (yield)) != '"':
            self._out.say((yield from self._escape()) if char == "\\" else char)
        self._out.speak()

    def _escape(self) -> Generator[None, str, str]:
        """Return the character that an escape stands for, of which the backslash was read."""
        if (char := (yield)) != "u":
            if char not in _ESCAPES:
                raise NotACall
            return _ESCAPES[char]
        code = yield from self._hexadecimal()
        if 0xD800 <= code < 0xDC00:  # half of a pair
            yield from self._expect("\\u", (yield))
            code = (code - 0xD800 << 10) + (yield from self._hexadecimal()) - 0xDC00 + 0x10000
            if not 0x10000 <= code <= 0x10FFFF:
                raise NotACall
        elif 0xDC00 <= code < 0xE000:
            raise NotACall
        return chr(code)

    def _hexadecimal(self) -> Generator[None, str, int]:
        digits = ""
        for _ in range(4):
            char = yield
            if char not in "0123456789abcdefABCDEF":
                raise NotACall
            digits += char
        return int(digits, 16)
