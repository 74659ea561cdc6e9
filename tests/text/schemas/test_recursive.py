"""Grammars with recursion as rules of texts within JSON strings: what they take is what the grammar itself takes."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attar.protocol.grammar import Grammar
from attar.text import grammars
from attar.text.grammars import GrammarError, Vocabulary
from attar.text.schemas import regular
from attar.text.schemas.recursive import SPECIAL, rules, within_string

SUMS = r"""
start: sum
?sum: product (/[+-]/ product)*
product: atom ("*" atom)*
atom: NUMBER -> number | "(" sum ")" | "[" [sum ("," sum)~0..2] "]"
%import common.NUMBER
"""
LISTS = r"""
start: "(" item* ")"
item: WORD | TEXT | start LF?
TEXT: "\"" /[^"\\\n]*/ "\""
%import common.WORD
%import common.LF
"""
NESTED = 'start: "{" (start | quoted | LF)* "}" | "\\\\" start\nquoted: /"[^"{}]*"/ | "x".."z" | "END"i\nLF: /\\n/\n'
CASES: list[tuple[str, list[str], list[str]]] = [
    (LISTS, ['(ab"c d"(x))', '("é")', "(()\n)", "()"], ["(", '("a\n")', '(")', "()\n"]),
    (SUMS, ["1+2*(3-4.5)", "((7))", "[1,2,3]", "[]"], ["", "(1", "1+", "[1,2,3,4]", "a"]),
    (NESTED, ['{}', '{"a"{\n"b\t"}}', '\\{}', '{xyzENDend}', "\\\\{\n\n}"], ['{"a}', "{w}", "{}{}", "{\r}", "\\"]),
    ("start: start A | A\nA: /[^a\\s]/\n", ["b", '"\\x', "\x01é"], ["", "a", "b a", "\n"]),
    ('start: "a" start "b" | /./s | /[\\x00-\\x02\\t]/\n', ["a\nb", '"', "aa\x01bb", "\t"], ["ab", "aabb", ""]),
]  # fmt: skip


def takes(grammar: str, text: str) -> bool:
    vocabulary = Vocabulary.make([bytes([byte]) for byte in range(256)] + [b""], [256], [256])
    found = grammars.matcher(vocabulary, Grammar("lark", grammar))
    said = list(text.encode())
    return found.try_consume_tokens(said) == len(said) and found.is_accepting()


def within(text: str) -> str:
    """The text as it stands in a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def written(grammar: str) -> str:
    return "\n".join(['start: "{" x_start "}"', *rules(grammar, "x")]) + "\n"


@pytest.mark.parametrize("grammar, good, bad", CASES)
def test_the_rules_have_the_texts_of_the_grammar_escaped(grammar: str, good: list[str], bad: list[str]) -> None:
    with pytest.raises(regular.RecursionFound):
        regular.expression(grammar)
    made = written(grammar)
    for text in good + bad:
        assert takes(made, "{" + within(text) + "}") == (text in good), text


def test_raw_characters_are_no_escapes() -> None:
    made = written(NESTED)
    for raw in ('{{""}}', "{{\n}}", "{\\{}}"):
        assert not takes(made, raw)


EXPRESSIONS = (
    r'[^"a]*', r"\w+\s?", r'(?:a|"|\\)*', r".*", r"(?s:.)*é", r"\S{2,4}", r"[\t-\x22]+", r"\x61\"\/?b*",
    r"(a|b)?[\\\n]+",
)  # fmt: skip


@given(st.text('ab"\\\n\t\x01é/ .', max_size=6), st.sampled_from(EXPRESSIONS))
def test_an_expression_matches_escaped_what_it_matches_plain(text: str, expression: str) -> None:
    grammar = f"start: /{within_string(expression)}/\n"
    assert takes(grammar, within(text)) == bool(re.fullmatch(expression, text))


def test_every_special_character_has_its_escape() -> None:
    for char in SPECIAL:
        escape = "\\x" + f"{ord(char):02x}"
        assert takes(f"start: /{within_string('[' + escape + ']')}/\n", within(char))
        assert not takes(f"start: /{within_string('[^' + escape + ']')}/\n", within(char))


@pytest.mark.parametrize(
    "grammar, says",
    [
        ('start: "(" start ")" | nothing', "no rule"),
        ('start: "a" start | /^b$/', "is not for"),
        ('start: "a" start | /(?=b)/', "is not for"),
        (r'start: "a" start | /\bb/', "is not for"),
        (r'start: "a" start | /\p{L}/', "is not for"),
        ('start: "a" start | /[a&&b]/', "is not for"),
        ('start: "a" start | /b/x', "flags"),
        ('start: "a" start | ("b"', "bracket"),
        ('start: "a" start | "b".."a"', "range"),
        ("start: start " + "(" * 100 + '"a"' + ")" * 100, "too deep"),
        ('start: "a" start | ) "b"', "was not expected"),
    ],
)
def test_what_it_may_not_have_is_said(grammar: str, says: str) -> None:
    with pytest.raises(GrammarError, match=re.escape(says)):
        rules(grammar, "x")
