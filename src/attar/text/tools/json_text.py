"""Recognition of JSON, a character at a time: is this text still the beginning of an object, and where does it end?

The state is a stack of open brackets and a place within the grammar of RFC 8259, so a character costs the same wherever
it stands.
"""

from __future__ import annotations

DEPTH = 512  # brackets that may be open at once
SPACE = " \t\n\r"

_DIGITS = "0123456789"
_WORDS = {"t": "true", "f": "false", "n": "null"}
_COMPLETE = ("zero", "integer", "fraction", "exponent")  # states of a number that may end


class JsonObject:
    """The text of one JSON object, taken in characters. `done` says that the object is complete."""

    def __init__(self) -> None:
        self.done = False
        self._open: list[str] = []
        self._state = "object"
        self._left = ""  # of a word, or hexadecimal digits still to come

    def push(self, char: str) -> bool:
        """Take one character; return whether the text is still the beginning of an object. Nothing may follow where it
        is not, or once it is done."""
        state = self._state
        if state in ("string", "key string"):
            return self._in_string(char)
        if state.startswith("number "):
            if (following := number(state[7:], char)) is not None:
                self._state = f"number {following}"
                return True
            if state[7:] not in _COMPLETE:
                return False
            state = self._state = "after"
        if state == "word":
            if char != self._left[0]:
                return False
            self._left = self._left[1:]
            self._state = "word" if self._left else "after"
            return True
        if state.endswith("escape") or state.endswith("hex"):
            return self._in_escape(char)
        return (char in SPACE and bool(self._open)) or self._structure(char)

    def _in_string(self, char: str) -> bool:
        if char == '"':
            self._state = "colon" if self._state == "key string" else "after"
        elif char == "\\":
            self._state = self._state.removesuffix("string") + "escape"
        return char >= " "

    def _in_escape(self, char: str) -> bool:
        key = "key " if self._state.startswith("key ") else ""
        if self._state.endswith("escape"):
            self._left = "0000" if char == "u" else ""
            self._state = key + ("hex" if char == "u" else "string")
            return char in '"\\/bfnrtu'
        self._left = self._left[1:]
        if not self._left:
            self._state = key + "string"
        return char in "0123456789abcdefABCDEF"

    def _structure(self, char: str) -> bool:
        state = self._state
        if state == "after" and char in "]}":
            return self._closed(char)
        if state == "after":
            self._state = "key" if self._open[-1] == "{" else "value"
            return char == ","
        if state in ("first key", "key"):
            if char == "}" and state == "first key":
                return self._closed(char)
            self._state = "key string"
            return char == '"'
        if state == "colon":
            self._state = "value"
            return char == ":"
        if state == "first value" and char == "]":
            return self._closed(char)
        return self._value(char)

    def _value(self, char: str) -> bool:
        if self._state == "object" and char != "{":
            return False
        if char in "{[":
            self._open.append(char)
            self._state = "first key" if char == "{" else "first value"
            return len(self._open) <= DEPTH
        if char == '"':
            self._state = "string"
        elif char in _WORDS:
            self._state, self._left = "word", _WORDS[char][1:]
        elif (begun := number("", char)) is not None:
            self._state = f"number {begun}"
        else:
            return False
        return True

    def _closed(self, char: str) -> bool:
        if self._open.pop() + char not in ("{}", "[]"):
            return False
        self._state, self.done = "after", not self._open
        return True


def number(state: str, char: str) -> str | None:
    """Return the state of a number after a further character; None where it does not belong to the number. Empty is the
    state before the first."""
    if char in _DIGITS:
        if state in ("", "minus"):
            return "zero" if char == "0" else "integer"
        if state in ("integer", "fraction", "exponent"):
            return state
        return {"point": "fraction", "e": "exponent", "sign": "exponent"}.get(state)
    if char == "-" and state == "":
        return "minus"
    if char == "." and state in ("zero", "integer"):
        return "point"
    if char in "eE" and state in ("zero", "integer", "fraction"):
        return "e"
    return "sign" if char in "+-" and state == "e" else None


def complete(state: str) -> bool:
    """Return whether a number in this state may end."""
    return state in _COMPLETE
