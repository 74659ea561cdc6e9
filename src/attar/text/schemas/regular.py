"""Grammars in Lark's format whose rules never come back to themselves, as one regular expression.

A JSON string can be kept to a regular expression, and not to a grammar: its escapes would have to be read before the
lexer of the grammar. So texts within JSON may be of a grammar that is regular. Each rule is put where it is named.
Terminals are not matched greedily: a text fits where it can be divided in any way.
"""

from __future__ import annotations

from collections.abc import Mapping

from attar.text.grammars import GrammarError
from attar.text.schemas.lark_reader import MAX_DEPTH, LarkReader, string_of

MAX_EXPRESSION = 16 << 10  # characters


class RecursionFound(GrammarError):
    """A rule comes back to itself, so that its texts are not those of a regular expression."""


def expression(text: str) -> str:
    """Return the regular expression, in Rust's syntax, of the texts of a grammar's rule `start`. Raises RecursionFound
    for grammars that are not regular by their form, GrammarError for those with what no expression can say."""
    return _Grammar(text).rule("start", 0)


class _Grammar(LarkReader):
    """A grammar as expressions."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._made = dict(self.imported)
        self._open: list[str] = []

    def rule(self, name: str, depth: int) -> str:
        """Return the expression of a rule."""
        if (made := self._made.get(name)) is not None:
            return made
        if name in self._open:
            raise RecursionFound(f"the rule {name[:40]!r} comes back to itself")
        if name not in self.rules:
            raise GrammarError(f"no rule is named {name[:40]!r}")
        if depth > MAX_DEPTH:
            raise GrammarError("the rules are too deep within each other")
        self._open.append(name)
        before, self.at = self.at, self.rules[name]
        made = self._made[name] = self._choice(depth + 1)
        if not self.ends(self.at):
            raise GrammarError(f"{self.tokens[self.at].text[:40]!r} was not expected in the rule {name[:40]!r}")
        self.at = before
        self._open.pop()
        return made

    def _choice(self, depth: int) -> str:
        """Read alternatives."""
        if depth > MAX_DEPTH:
            raise GrammarError("the rules are too deep within each other")
        found = [self._sequence(depth)]
        while self.take("|"):
            found.append(self._sequence(depth))
        return _bounded("|".join(found) if len(found) == 1 else f"(?:{'|'.join(found)})")

    def _sequence(self, depth: int) -> str:
        made = ""
        while not self.ends(self.at) and not any(self.sign(self.at, sign) for sign in ("|", ")", "]", "->")):
            made = _bounded(made + self._repeated(self._atom(depth)))
        if self.take("->"):  # the name of an alternative
            self.at += 1
        return made

    def _atom(self, depth: int) -> str:
        token = self.tokens[self.at]
        self.at += 1
        match token.kind:
            case "string":
                if self.sign(self.at, "..") and self.kind(self.at + 1) == "string":
                    first, last = string_of(token.text), string_of(self.tokens[self.at + 1].text)
                    self.at += 2
                    if len(first) != 1 or len(last) != 1 or first > last:
                        raise GrammarError("a range is of one character to a later one")
                    return f"[{_escaped(first)}-{_escaped(last)}]"
                plain = _escaped(string_of(token.text))
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
            if not self.take(")" if token.text == "(" else "]"):
                raise GrammarError("a bracket is not closed")
            return f"(?:{inner})" + ("?" if token.text == "[" else "")
        raise GrammarError(f"{token.text[:40]!r} was not expected, or is not for grammars within JSON")

    def _repeated(self, atom: str) -> str:
        for sign in "?*+":
            if self.take(sign):
                return f"(?:{atom}){sign}"
        if self.take("~"):
            low = high = self.number()
            if self.take(".."):
                high = self.number()
            return f"(?:{atom}){{{low},{high}}}"
        return atom


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
