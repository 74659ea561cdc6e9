"""Grammars in Lark's format as tokens, for rules that become rules of texts within JSON strings."""

from __future__ import annotations

import json
import re
from typing import NamedTuple

from attar.text.grammars import GrammarError

MAX_DEPTH = 64  # rules and brackets within each other

_TOKEN = re.compile(
    r"(?P<space>[ \t\r\n]+|//[^\n]*|\#[^\n]*)|(?P<string>\"(?:[^\"\\\n]|\\.)*\"i?)"
    r"|(?P<regex>/(?!/)(?:\\.|[^/\\\n])+/[a-z]*)|(?P<name>[!?]?[A-Za-z_][A-Za-z0-9_]*)|(?P<number>\d+)"
    r"|(?P<sign>\.\.|->|[:|()\[\]?*+~{},.%])"
)
COMMON = {
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


class Token(NamedTuple):
    """A word of a grammar."""

    kind: str
    text: str


class LarkReader:
    """A grammar, whose rules are read when they are named: `rules` has where the text of each begins, and `imported`
    the expressions of terminals of Lark's library. `at` is the next token. Raises GrammarError."""

    def __init__(self, text: str) -> None:
        self.tokens = _words(text)
        self.at = 0
        self.rules: dict[str, int] = {}  # where the text of a rule begins
        self.imported: dict[str, str] = {}
        self._find_rules()

    def _find_rules(self) -> None:
        tokens, at = self.tokens, 0
        while at < len(tokens):
            name = tokens[at].text.lstrip("!?")
            if tokens[at].text == "%":
                at = self._directive(at + 1)
                continue
            if tokens[at].kind != "name":
                raise GrammarError(f"a rule was expected at {tokens[at].text[:40]!r}")
            at += 1
            if self.sign(at, ".") and self.kind(at + 1) == "number":  # its priority
                at += 2
            if not self.sign(at, ":"):
                raise GrammarError(f"the rule {name[:40]!r} needs a colon, and has no attributes or parameters here")
            if name in self.rules or name in self.imported:
                raise GrammarError(f"two rules are named {name[:40]!r}")
            self.rules[name] = at + 1
            at += 1
            while at < len(tokens) and not self.ends(at):
                at += 1

    def ends(self, at: int) -> bool:
        """Return whether a rule's text ends before a token."""
        if self._past(at) or self.sign(at, "%"):
            return True
        named = self.kind(at) == "name"
        return named and (self.sign(at + 1, ":") or (self.sign(at + 1, ".") and self.kind(at + 2) == "number"))

    def _directive(self, at: int) -> int:
        """Read `%import common.NAME`, and refuse others; return where it ends."""
        what = self.tokens[at].text if not self._past(at) else ""
        if what != "import" or not (self._word(at + 1) == "common" and self.sign(at + 2, ".")):
            raise GrammarError(f"%{what[:20]} is not for grammars within JSON: only %import common.NAME is")
        name = own = self._word(at + 3)
        at += 4
        if self.sign(at, "->"):
            own, at = self._word(at + 1), at + 2
        if name not in COMMON:
            raise GrammarError(f"common has no terminal {name[:40]!r} here")
        self.imported[own] = COMMON[name]
        return at

    def number(self) -> int:
        """Take a count of repetitions."""
        token = self.tokens[self.at] if not self._past(self.at) else Token("", "")
        if token.kind != "number" or len(token.text) > 4:
            raise GrammarError("a count of repetitions has at most four digits")
        self.at += 1
        return int(token.text)

    def take(self, sign: str) -> bool:
        """Take the next token where it is this sign; return whether it was."""
        found = self.sign(self.at, sign)
        self.at += found
        return found

    def sign(self, at: int, sign: str) -> bool:
        """Return whether a token is this sign."""
        return at < len(self.tokens) and self.tokens[at] == ("sign", sign)

    def kind(self, at: int) -> str:
        """Return what a token is: string, regex, name, number or sign; empty behind the last."""
        return self.tokens[at].kind if at < len(self.tokens) else ""

    def _word(self, at: int) -> str:
        return self.tokens[at].text if self.kind(at) == "name" else ""

    def _past(self, at: int) -> bool:
        return at >= len(self.tokens)


def _words(text: str) -> list[Token]:
    found, at = list[Token](), 0
    while at < len(text):
        if (match := _TOKEN.match(text, at)) is None:
            raise GrammarError(f"{text[at : at + 20]!r} is not known in a grammar within JSON")
        kind = match.lastgroup or ""
        if kind != "space":
            found.append(Token(kind, match[0]))
        at = match.end()
    return found


def string_of(quoted: str) -> str:
    """Return the text of a quoted string. Raises GrammarError for escapes that JSON lacks."""
    try:
        return str(json.loads(quoted.removesuffix("i")))
    except ValueError as error:
        raise GrammarError(f"the string {quoted[:40]} has an escape that JSON has not") from error
