"""Grammars in Lark's format whose rules never come back to themselves, as one regular expression.

A JSON string can be kept to a regular expression, and not to a grammar: its escapes would have to be read before the
lexer of the grammar. So texts within JSON may be of a grammar that is regular. Each rule is put where it is named.
Terminals are not matched greedily: a text fits where it can be divided in any way.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import NamedTuple

from attar.text.grammars import GrammarError

MAX_EXPRESSION = 16 << 10  # characters
MAX_DEPTH = 64  # rules and brackets within each other

_TOKEN = re.compile(
    r"(?P<space>[ \t\r\n]+|//[^\n]*|\#[^\n]*)|(?P<string>\"(?:[^\"\\\n]|\\.)*\"i?)"
    r"|(?P<regex>/(?!/)(?:\\.|[^/\\\n])+/[a-z]*)|(?P<name>[!?]?[A-Za-z_][A-Za-z0-9_]*)|(?P<number>\d+)"
    r"|(?P<sign>\.\.|->|[:|()\[\]?*+~{},.%])"
)
_COMMON = {
    "DIGIT": "[0-9]", "HEXDIGIT": "[0-9a-fA-F]", "INT": "[0-9]+", "SIGNED_INT": "[+-]?[0-9]+",
    "DECIMAL": r"(?:[0-9]+\.[0-9]*|\.[0-9]+)", "LCASE_LETTER": "[a-z]", "UCASE_LETTER": "[A-Z]", "LETTER": "[A-Za-z]",
    "FLOAT": r"(?:[0-9]+[eE][+-]?[0-9]+|(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)", "WORD": "[A-Za-z]+",
    "NUMBER": r"(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?", "CNAME": "[A-Za-z_][A-Za-z0-9_]*",
    "SIGNED_NUMBER": r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?", "WS_INLINE": r"[ \t]+",
    "WS": r"[ \t\f\r\n]+", "CR": r"\r", "LF": r"\n", "NEWLINE": r"(?:\r?\n)+",
    "ESCAPED_STRING": r'"(?:[^"\\\n]|\\[^\n])*"', "SH_COMMENT": r"\#[^\n]*", "CPP_COMMENT": r"\/\/[^\n]*",
    "SQL_COMMENT": r"--[^\n]*",
}  # fmt: skip
"""Terminals of Lark's library `common`."""


class _Token(NamedTuple):
    kind: str
    text: str


def expression(text: str) -> str:
    """Return the regular expression, in Rust's syntax, of the texts of a grammar's rule `start`. Raises GrammarError
    for grammars that are not regular by their form, or have what no expression can say."""
    return _Grammar(text).rule("start", 0)


class _Grammar:
    """A grammar, whose rules are read when they are named."""

    def __init__(self, text: str) -> None:
        self._tokens = _tokens(text)
        self._at = 0
        self._rules: dict[str, int] = {}  # where the text of a rule begins
        self._made: dict[str, str] = {}
        self._open: list[str] = []
        self._find_rules()

    def _find_rules(self) -> None:
        tokens, at = self._tokens, 0
        while at < len(tokens):
            name = tokens[at].text.lstrip("!?")
            if tokens[at].text == "%":
                at = self._directive(at + 1)
                continue
            if tokens[at].kind != "name":
                raise GrammarError(f"a rule was expected at {tokens[at].text[:40]!r}")
            at += 1
            if self._is(at, ".") and self._kind(at + 1) == "number":  # its priority
                at += 2
            if not self._is(at, ":"):
                raise GrammarError(f"the rule {name[:40]!r} needs a colon, and has no attributes or parameters here")
            if name in self._rules or name in self._made:
                raise GrammarError(f"two rules are named {name[:40]!r}")
            self._rules[name] = at + 1
            at += 1
            while at < len(tokens) and not self._ends(at):
                at += 1

    def _ends(self, at: int) -> bool:
        """Return whether a rule's text ends before a token."""
        if self._at_end(at) or self._is(at, "%"):
            return True
        named = self._kind(at) == "name"
        return named and (self._is(at + 1, ":") or (self._is(at + 1, ".") and self._kind(at + 2) == "number"))

    def _directive(self, at: int) -> int:
        """Read `%import common.NAME`, and refuse others; return where it ends."""
        what = self._tokens[at].text if not self._at_end(at) else ""
        if what != "import" or not (self._word(at + 1) == "common" and self._is(at + 2, ".")):
            raise GrammarError(f"%{what[:20]} is not for grammars within JSON: only %import common.NAME is")
        name = own = self._word(at + 3)
        at += 4
        if self._is(at, "->"):
            own, at = self._word(at + 1), at + 2
        if name not in _COMMON:
            raise GrammarError(f"common has no terminal {name[:40]!r} here")
        self._made[own] = _COMMON[name]
        return at

    def rule(self, name: str, depth: int) -> str:
        """Return the expression of a rule."""
        if (made := self._made.get(name)) is not None:
            return made
        if name in self._open:
            raise GrammarError(f"the rule {name[:40]!r} comes back to itself: within JSON, repeat with * and + instead")
        if name not in self._rules:
            raise GrammarError(f"no rule is named {name[:40]!r}")
        if depth > MAX_DEPTH:
            raise GrammarError("the rules are too deep within each other")
        self._open.append(name)
        before, self._at = self._at, self._rules[name]
        made = self._made[name] = self._choice(depth + 1)
        if not self._ends(self._at):
            raise GrammarError(f"{self._tokens[self._at].text[:40]!r} was not expected in the rule {name[:40]!r}")
        self._at = before
        self._open.pop()
        return made

    def _choice(self, depth: int) -> str:
        """Read alternatives."""
        if depth > MAX_DEPTH:
            raise GrammarError("the rules are too deep within each other")
        found = [self._sequence(depth)]
        while self._take("|"):
            found.append(self._sequence(depth))
        return _bounded("|".join(found) if len(found) == 1 else f"(?:{'|'.join(found)})")

    def _sequence(self, depth: int) -> str:
        made = ""
        while not self._ends(self._at) and not any(self._is(self._at, sign) for sign in ("|", ")", "]", "->")):
            made = _bounded(made + self._repeated(self._atom(depth)))
        if self._take("->"):  # the name of an alternative
            self._at += 1
        return made

    def _atom(self, depth: int) -> str:
        token = self._tokens[self._at]
        self._at += 1
        match token.kind:
            case "string":
                if self._is(self._at, "..") and self._kind(self._at + 1) == "string":
                    first, last = _text(token.text), _text(self._tokens[self._at + 1].text)
                    self._at += 2
                    if len(first) != 1 or len(last) != 1 or first > last:
                        raise GrammarError("a range is of one character to a later one")
                    return f"[{_escaped(first)}-{_escaped(last)}]"
                plain = _escaped(_text(token.text))
                return f"(?i:{plain})" if token.text.endswith("i") else f"(?:{plain})"
            case "regex":
                body, _, flags = token.text[1:].rpartition("/")
                if set(flags) - set("imsxu"):
                    raise GrammarError(f"the flags {flags[:20]!r} of an expression are not known")
                flags = "".join(sorted(set(flags) - {"u"}))
                return f"(?{flags}:{body})"
            case "name":
                return f"(?:{self.rule(token.text.lstrip('!?'), depth)})"
        if token.text in ("(", "["):
            inner = self._choice(depth + 1)
            if not self._take(")" if token.text == "(" else "]"):
                raise GrammarError("a bracket is not closed")
            return f"(?:{inner})" + ("?" if token.text == "[" else "")
        raise GrammarError(f"{token.text[:40]!r} was not expected, or is not for grammars within JSON")

    def _repeated(self, atom: str) -> str:
        for sign in "?*+":
            if self._take(sign):
                return f"(?:{atom}){sign}"
        if self._take("~"):
            low = high = self._number()
            if self._take(".."):
                high = self._number()
            return f"(?:{atom}){{{low},{high}}}"
        return atom

    def _number(self) -> int:
        token = self._tokens[self._at] if not self._at_end(self._at) else _Token("", "")
        if token.kind != "number" or len(token.text) > 4:
            raise GrammarError("a count of repetitions has at most four digits")
        self._at += 1
        return int(token.text)

    def _take(self, sign: str) -> bool:
        found = self._is(self._at, sign)
        self._at += found
        return found

    def _is(self, at: int, sign: str) -> bool:
        return at < len(self._tokens) and self._tokens[at] == ("sign", sign)

    def _kind(self, at: int) -> str:
        return self._tokens[at].kind if at < len(self._tokens) else ""

    def _word(self, at: int) -> str:
        return self._tokens[at].text if self._kind(at) == "name" else ""

    def _at_end(self, at: int) -> bool:
        return at >= len(self._tokens)


def _tokens(text: str) -> list[_Token]:
    found, at = list[_Token](), 0
    while at < len(text):
        if (match := _TOKEN.match(text, at)) is None:
            raise GrammarError(f"{text[at : at + 20]!r} is not known in a grammar within JSON")
        kind = match.lastgroup or ""
        if kind != "space":
            found.append(_Token(kind, match[0]))
        at = match.end()
    return found


def _text(quoted: str) -> str:
    try:
        return str(json.loads(quoted.removesuffix("i")))
    except ValueError as error:
        raise GrammarError(f"the string {quoted[:40]} has an escape that JSON has not") from error


_SIGNS = frozenset(r"\/.+*?()|[]{}^$#&~-")
_ESCAPES: Mapping[str, str] = {"\n": r"\n", "\r": r"\r", "\t": r"\t", "\f": r"\f", "\v": r"\v"}


def _escaped(text: str) -> str:
    """Return the expression of one text."""
    return "".join(map(_escaped_char, text))


def _escaped_char(char: str) -> str:
    if char < " ":
        return _ESCAPES.get(char) or rf"\x{ord(char):02x}"
    return "\\" + char if char in _SIGNS else char


def _bounded(made: str) -> str:
    if len(made) > MAX_EXPRESSION:
        raise GrammarError(f"as one regular expression it has more than {MAX_EXPRESSION:,} characters")
    return made
