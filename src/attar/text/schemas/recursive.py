"""Grammars in Lark's format whose rules come back to themselves, as rules of texts within a JSON string.

Every terminal is written as the lexer meets it there: quotation marks, backslashes and control characters have their
escape before them. Terminals are matched greedily, as Lark does.
"""

from __future__ import annotations

import json
import re

from attar.text.grammars import GrammarError
from attar.text.schemas.lark_reader import MAX_DEPTH, LarkReader, string_of

SPECIAL = ('"', "\\", *map(chr, range(0x20)))
"""Characters that a JSON string has as escapes alone."""

_PLAIN = r'[^"\\\x00-\x1f]'
_CLASS = re.compile(r"\[\^?\]?(?:\\.|[^\]\\\[&~])*\]")
_FLAGS = re.compile(r"\(\?([ims]*):")
_ESCAPED = re.compile(r"\\(?:[dDsSwW]|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|[nrtfv]|[^A-Za-z0-9])")
_NAMES = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v"}


def rules(text: str, prefix: str) -> list[str]:
    """Return the rules of a grammar in llguidance's dialect, of which `PREFIX_start` is the first. Raises GrammarError
    for what the grammar may not have within JSON."""
    return _Writer(text, prefix).write()


class _Writer(LarkReader):
    """Writes rules one after the other, those that are named."""

    def __init__(self, text: str, prefix: str) -> None:
        super().__init__(text)
        self._prefix = prefix
        self._wanted = ["start"]

    def write(self) -> list[str]:
        found: dict[str, str] = {}
        while self._wanted:
            if (name := self._wanted.pop()) in found:
                continue
            if (common := self.imported.get(name)) is not None:
                found[name] = f"/{within_string(common)}/"
            elif name not in self.rules:
                raise GrammarError(f"no rule is named {name[:40]!r}")
            else:
                self.at = self.rules[name]
                found[name] = self._choice(0)
                if not self.ends(self.at):
                    what = self.tokens[self.at].text[:40]
                    raise GrammarError(f"{what!r} was not expected in the rule {name[:40]!r}")
        return [f"{self._named(name)}: {made}" for name, made in found.items()]

    def _named(self, name: str) -> str:
        """Return a name of this grammar among those of others: a terminal's is in capitals."""
        made = f"{self._prefix}_{name}"
        return made.upper() if name.isupper() else made.lower()

    def _choice(self, depth: int) -> str:
        if depth > MAX_DEPTH:
            raise GrammarError("the rules are too deep within each other")
        found = [self._sequence(depth)]
        while self.take("|"):
            found.append(self._sequence(depth))
        return " | ".join(found)

    def _sequence(self, depth: int) -> str:
        parts = list[str]()
        while not self.ends(self.at) and not any(self.sign(self.at, each) for each in ("|", ")", "]", "->")):
            parts.append(self._atom(depth) + self._times())
        if self.take("->"):
            self.at += 1
        return " ".join(parts) or '""'

    def _times(self) -> str:
        for sign in "?*+":
            if self.take(sign):
                return sign
        if not self.take("~"):
            return ""
        low = high = self.number()
        if self.take(".."):
            high = self.number()
        return f"{{{low},{high}}}"

    def _atom(self, depth: int) -> str:
        token = self.tokens[self.at]
        self.at += 1
        match token.kind:
            case "string" if self.sign(self.at, "..") and self.kind(self.at + 1) == "string":
                first, last = string_of(token.text), string_of(self.tokens[self.at + 1].text)
                self.at += 2
                if len(first) != 1 or len(last) != 1 or first > last:
                    raise GrammarError("a range is of one character to a later one")
                return f"/{_one(f'[{_in_class(first)}-{_in_class(last)}]', False)}/"
            case "string" if token.text.endswith("i"):
                return f"/{''.join(_folded(char) for char in string_of(token.text))}/"
            case "string":
                return json.dumps(json.dumps(string_of(token.text), ensure_ascii=False)[1:-1], ensure_ascii=False)
            case "regex":
                body, _, flags = token.text[1:].rpartition("/")
                if set(flags) - set("imsu"):
                    raise GrammarError(f"the flags {flags[:20]!r} of an expression are not for recursive grammars")
                return f"/{within_string(body, ''.join(sorted(set(flags) - {'u'})))}/"
            case "name":
                name = token.text.lstrip("!?")
                self._wanted.append(name)
                return self._named(name)
        if token.text not in ("(", "["):
            raise GrammarError(f"{token.text[:40]!r} was not expected, or is not for grammars within JSON")
        inner = self._choice(depth + 1)
        if not self.take(")" if token.text == "(" else "]"):
            raise GrammarError("a bracket is not closed")
        return f"({inner})" + ("?" if token.text == "[" else "")


def within_string(expression: str, flags: str = "") -> str:
    """Return the regular expression, in Rust's syntax, of the JSON strings' insides whose texts match `expression`.
    Raises GrammarError for anchors, look-around and classes of classes."""
    made, at, dots = list[str](), 0, ["s" in flags]
    while at < len(expression):
        char = expression[at]
        if char == "\\":
            if (found := _ESCAPED.match(expression, at)) is None:
                raise GrammarError(f"{expression[at : at + 2]!r} is not for recursive grammars within JSON")
            made.append(_escape(found[0], dots[-1]))
        elif char == "[":
            if (found := _CLASS.match(expression, at)) is None:
                raise GrammarError(f"the class {expression[at : at + 20]!r} is not for recursive grammars within JSON")
            made.append(_one(found[0], dots[-1]))
        elif char == "(":
            found = _FLAGS.match(expression, at)
            if found is None and expression.startswith("(?", at):
                raise GrammarError(f"{expression[at : at + 4]!r} is not for recursive grammars within JSON")
            dots.append(dots[-1] or (found is not None and "s" in found[1]))
            made.append("(" if found is None else found[0])
        elif char in "^$":
            raise GrammarError(f"{char!r} is not for recursive grammars within JSON")
        else:
            found = None
            if char == ")" and len(dots) > 1:
                dots.pop()
            made.append(_one(".", dots[-1]) if char == "." else char if char not in SPECIAL else _literal(char))
        at += 1 if char not in "\\[(" or found is None else len(found[0])
    inner = "".join(made)
    kept = "".join(flag for flag in flags if flag != "s")
    return f"(?{kept}:{inner})" if kept else inner


def _escape(text: str, dots: bool) -> str:
    """Return an escape of an expression: a class, or one character."""
    name = text[1]
    if name in "dDsSwW":
        return _one(text, dots)
    char = _NAMES.get(name) or (chr(int(text[2:], 16)) if name in "xu" else name)
    return _literal(char) if char in SPECIAL else text if name not in "xu" else re.escape(char)


def _one(atom: str, dots: bool) -> str:
    """Return what matches one character of a class as JSON strings have it."""
    try:
        kind = re.compile(atom, re.DOTALL if dots else 0)
    except re.error as error:
        raise GrammarError(f"the class {atom[:20]!r}: {error}") from error
    inner = "[^\\n]" if atom == "." and not dots else "[\\s\\S]" if atom == "." else atom
    special = [_literal(char) for char in SPECIAL if kind.fullmatch(char)]
    return f"(?:{'|'.join([f'[{inner}&&{_PLAIN}]', *special])})"


def _literal(char: str) -> str:
    """Return the expression of the escape of a special character."""
    return re.sub(r"\\", r"\\\\", json.dumps(char)[1:-1])


def _folded(char: str) -> str:
    return _literal(char) if char in SPECIAL else f"(?i:{re.escape(char)})" if char != "/" else r"\/"


def _in_class(char: str) -> str:
    return f"\\x{ord(char):02x}" if ord(char) < 0x100 else char
