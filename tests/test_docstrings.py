"""Docstrings stand alone: the first line has its own subject, or is an imperative."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(importlib.util.find_spec("attar").origin).parent  # type: ignore[union-attr, arg-type]
FILES = sorted(PACKAGE.rglob("*.py"))
BANNED = re.compile(
    r"(Of|Those|These|The same|As|That|What there is|Likewise|Which|Whose|Beside|Besides|Once more|Also)\b"
)


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Line and text of every docstring in Python source, of attributes too."""
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", None)
        if not isinstance(body, list):  # of a lambda, say
            continue
        for before, statement in zip([None, *body], body, strict=False):
            value = statement.value if isinstance(statement, ast.Expr) else None
            documents = before is None or isinstance(before, ast.Assign | ast.AnnAssign)
            if documents and isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield statement.lineno, value.value


def offenders(source: str) -> list[str]:
    """Docstrings that lean on the definition before them, as `line: first line`."""
    found = []
    for line, text in docstrings(source):
        first = text.strip().split("\n")[0]
        if BANNED.match(first) or (not first[:1].isupper() and not first.startswith("`")):
            found.append(f"{line}: {first}")
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_docstrings_stand_alone(path: Path) -> None:
    assert offenders(path.read_text()) == []


@pytest.mark.parametrize(
    "first",
    ["Of a norm.", "Those of some outputs.", "The same on a card.", "As of `Listed`.", "That of a device.", "of it"],
)
def test_the_check_itself_sees(first: str) -> None:
    assert len(offenders(f'def f():\n    """{first}"""\n')) == 1
    assert len(offenders(f'x = 1\n"""{first}"""\n')) == 1


def test_the_check_itself_lets_pass() -> None:
    assert offenders('"""Offsets of rows."""\ndef f():\n    """Return the rows."""\n    "of no meaning"\n') == []
