"""Grammars in Lark's format as regular expressions: the same texts as llguidance takes by the grammar itself."""

from __future__ import annotations

import re

import pytest

from attar.protocol.grammar import Grammar
from attar.text import grammars
from attar.text.grammars import GrammarError, Vocabulary
from attar.text.schemas.regular import MAX_EXPRESSION, expression

PATCH = r"""
start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?

hunk: add_hunk | delete_hunk | update_hunk
add_hunk: "*** Add File: " filename LF add_line+
delete_hunk: "*** Delete File: " filename LF
update_hunk: "*** Update File: " filename LF change_move? change?

filename: /(.+)/
add_line: "+" /(.*)/ LF -> line

change_move: "*** Move to: " filename LF
change: (change_context | change_line)+ eof_line?
change_context: ("@@" | "@@ " /(.+)/) LF
change_line: ("+" | "-" | " ") /(.*)/ LF
eof_line: "*** End of File" LF

%import common.LF
"""
ADDED = "*** Begin Patch\n*** Add File: a/b.py\n+print('hi')\n+\n*** End Patch"
CHANGED = '*** Begin Patch\n*** Update File: a \\ b\n*** Move to: c\n@@ def f():\n-x = "1"\n+x = 2\n y\n*** End Patch\n'
CASES: list[tuple[str, list[str], list[str]]] = [
    (PATCH, [ADDED, CHANGED], ["", ADDED[1:], ADDED.replace("+p", "p"), ADDED + "\n\n", CHANGED.replace("@@ d", "@d")]),
    ('start: "a.b" ("," WORD)* [tail]\ntail: "!" ~ 2..3 // so many\n%import common.WORD\n',
     ["a.b", "a.b,xy,z!!", "a.b!!!"], ["axb", "a.b,", "a.b!", "a.b!!!!"]),
    ('?start: /[a-c]+/i "x" | "Y"i\n', ["aBx", "y", "Y"], ["dx", "aX", "ay"]),
    ('start: A B?\nA.2: "0".."9"\nB: /\\/\\d{2}/ # a fraction\n', ["7", "7/12"], ["a", "7/1", "77"]),
    ('start: "\\"\\\\\\n" | /a.c/s\n', ['"\\\n', "a\nc"], ["a", "ac"]),
]  # fmt: skip


def takes(text: str, grammar: str) -> bool:
    vocabulary = Vocabulary.make([bytes([byte]) for byte in range(256)] + [b""], [256], [256])
    found = grammars.matcher(vocabulary, Grammar("lark", grammar))
    said = list(text.encode())
    return found.try_consume_tokens(said) == len(said) and found.is_accepting()


@pytest.mark.parametrize("grammar, good, bad", CASES)
def test_the_expression_has_the_texts_of_the_grammar(grammar: str, good: list[str], bad: list[str]) -> None:
    made = re.compile(expression(grammar))
    for text in good + bad:
        assert bool(made.fullmatch(text)) == (text in good), text
    lark = re.sub(r"\[tail\]|~ 2\.\.3|\.2:", lambda at: {"[tail]": "tail?", ".2:": ":"}.get(at[0], "{2,3}"), grammar)
    lark = lark.replace("?start", "start").replace("# a fraction", "")
    for text in good + bad:
        assert takes(text, lark) == (text in good), text


@pytest.mark.parametrize(
    "grammar, says",
    [
        ('start: "(" start ")" | "x"', "comes back"),
        ('start: a\na: b\nb: "x" a?', "comes back"),
        ("start: a", "no rule"),
        ('other: "x"', "no rule"),
        ('start: "x"\nstart: "y"', "two rules"),
        ('start: "a"\n%ignore " "', "%ignore"),
        ("%import common.XYZ\nstart: XYZ", "common has no"),
        ("%import python.NAME\nstart: NAME", "%import"),
        ('start: %json {"type": "string"}', "not"),
        ('start: "a', "not known"),
        ('start: ("a"', "bracket"),
        ('start: "ab".."c"', "range"),
        ('start: a{"x"}\na{b}: b', "no rule"),
        ('start: "\\x41"', "escape"),
        ("start: /a/l", "flags"),
        ("start: <|eos|>", "not known"),
        ("start[lazy]: /a/", "attributes"),
        ('start: "a" ~ 12345', "four digits"),
        ("start: " + "(" * 100 + '"x"' + ")" * 100, "deep"),
        ("start: a99\na0: \"x\"\n" + "\n".join(f"a{at + 1}: a{at}" for at in range(99)), "deep"),
        ("start: a30\na0: \"x\"\n" + "\n".join(f"a{at + 1}: a{at} a{at}" for at in range(30)), "more than"),
        ("start: " + '"x" ' * MAX_EXPRESSION, "more than"),
        ("~", "expected"),
    ],
)  # fmt: skip
def test_what_no_expression_can_say_is_refused(grammar: str, says: str) -> None:
    with pytest.raises(GrammarError, match=says):
        expression(grammar)
