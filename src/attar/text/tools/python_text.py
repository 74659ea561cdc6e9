"""Arguments in Python's syntax, `a=1, b="x")`, made JSON a character at a time.

Values are literals: strings in either quotes, numbers, True, False, None, lists, tuples and dictionaries, with JSON's
spelling of the three words as well. No Python is evaluated. A tuple becomes a list.
"""

from __future__ import annotations

import json

from attar.text.tools.json_text import DEPTH, SPACE, complete, number

MAX_NAME = 256  # characters of a parameter's name
NOT_IN_NAMES = frozenset(" \t\n\r=,()[]{}\"'\\:")

_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_SIMPLE = {"n": "\\n", "t": "\\t", "r": "\\r", "b": "\\b", "f": "\\f", "\\": "\\\\", '"': '\\"', "'": "'", "/": "/",
           "a": "\\u0007", "v": "\\u000b", "\n": ""}  # fmt: skip
_SIZES = {"x": 2, "u": 4, "U": 8}
_PAIRS = {")": "(", "]": "[", "}": "{"}


class PythonArguments:
    """The arguments of a call behind its `(`. `done` says that the `)` of the call was taken."""

    def __init__(self) -> None:
        self.done = False
        self._open = ["call"]
        self._state = "first name"
        self._word = self._number = self._escape = self._quote = ""

    def push(self, char: str) -> str | None:
        """Take one character; return the JSON text that it adds, None where it cannot follow. Nothing may follow then,
        or once it is done."""
        match self._state:
            case "string" | "key string":
                return self._in_string(char)
            case "escape" | "key escape":
                return self._in_escape(char)
            case "name":
                return self._in_name(char)
            case "word":
                return self._in_word(char)
            case "number":
                if (following := number(self._number, char)) is not None:
                    self._number = following
                    return char
                if not complete(self._number):
                    return None
                self._state = "after"
        return "" if char in SPACE else self._structure(char)

    def _structure(self, char: str) -> str | None:
        state, innermost = self._state, self._open[-1]
        may_end = state == "after" or state.startswith("first") or state in ("item", "key", "next name")
        if may_end and (_PAIRS.get(char) == innermost or (char == ")" and innermost == "call")):
            return self._closed(state)
        if state == "after":
            self._state = {"call": "next name", "{": "key"}.get(innermost, "item")
            return "" if char == "," else None
        if state in ("first name", "next name"):
            if char in NOT_IN_NAMES:
                return None
            self._state, self._word = "name", char
            return '{"' + _escaped(char) if state == "first name" else ', "' + _escaped(char)
        if state in ("colon", "equals"):
            self._state = "value"
            return ": " if char == (":" if state == "colon" else "=") else None
        comma = ", " if state in ("item", "key") else ""  # before an item that has come: Python allows one at the end
        if state in ("key", "first key"):
            self._state, self._quote = "key string", char
            return comma + '"' if char in "\"'" else None
        begun = self._value(char)
        return None if begun is None else comma + begun

    def _value(self, char: str) -> str | None:
        if char in "\"'":
            self._state, self._quote = "string", char
            return '"'
        if char in "[({":
            self._open.append(char)
            self._state = "first key" if char == "{" else "first item"
            return None if len(self._open) > DEPTH else ("{" if char == "{" else "[")
        if (begun := number("", char)) is not None:
            self._state, self._number = "number", begun
            return char
        self._state, self._word = "word", char
        return "" if any(word.startswith(char) for word in _WORDS) else None

    def _closed(self, state: str) -> str:
        opened = self._open.pop()
        self._state, self.done = "after", opened == "call"
        if opened == "call":
            return "{}" if state == "first name" else "}"
        return "}" if opened == "{" else "]"

    def _in_name(self, char: str) -> str | None:
        if char in SPACE or char == "=":
            self._state = "value" if char == "=" else "equals"
            return '": ' if char == "=" else '"'
        self._word += char
        return None if char in NOT_IN_NAMES or len(self._word) > MAX_NAME else _escaped(char)

    def _in_word(self, char: str) -> str | None:
        self._word += char
        if not any(word.startswith(self._word) for word in _WORDS):
            return None
        if self._word not in _WORDS:
            return ""
        self._state = "after"
        return _WORDS[self._word]

    def _in_string(self, char: str) -> str:
        key = self._state == "key string"
        if char == self._quote:
            self._state = "colon" if key else "after"
            return '"'
        if char == "\\":
            self._state, self._escape = ("key escape" if key else "escape"), ""
            return ""
        return _escaped(char)

    def _in_escape(self, char: str) -> str | None:
        self._escape += char
        kind, digits = self._escape[0], self._escape[1:]
        if kind not in _SIZES:
            self._end_of_escape()
            return _SIMPLE.get(kind, "\\\\" + _escaped(kind))
        if digits and char not in "0123456789abcdefABCDEF":
            return None
        if len(digits) < _SIZES[kind]:
            return ""
        self._end_of_escape()
        code = int(digits, 16)
        if code > 0x10FFFF or (kind == "U" and 0xD800 <= code < 0xE000):
            return None
        return f"\\u{code:04x}" if code < 0x10000 else chr(code)

    def _end_of_escape(self) -> None:
        self._state = self._state.removesuffix("escape") + "string"


def _escaped(char: str) -> str:
    """Return a character as it stands within a JSON string."""
    return json.dumps(char, ensure_ascii=False)[1:-1]
