"""The lab's page: one HTML file that loads nothing, with its data inside or fetched from the server that gives it.

Names, labels and ids in the data are untrusted. JSON stands in a `<script type="application/json">`, where only `<` can
end the element or begin a comment: every `<`, U+2028 and U+2029 is escaped. The page makes text nodes of them, never
markup, and shows characters that reorder text by their number. Torch-free.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.resources
import json
import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from attar.charts.svg import STYLE, THEMES

SCRIPTS = ("formulas", "draw", "size", "smoothing", "roofline", "paging", "speculation", "batching", "small", "shell")
"""The parts of the page's script, in their order."""

TITLE = "attar lab"  # marks a page that the next may replace

_SPACES = re.compile(r" ?([{}()\[\],;:=<>?*&|]) ?")
_MARKS = re.compile(r"\\.|\$\{|[\"'`{}]", re.DOTALL)
_ESCAPES = {ord("<"): "\\u003c", 0x2028: "\\u2028", 0x2029: "\\u2029"}


def embedded(data: Mapping[str, Any]) -> str:
    """Return data as JSON that may stand in a script element. Raises ValueError for numbers that JSON lacks."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.translate(_ESCAPES).encode("utf-8", "replace").decode()  # lone surrogates of receipts


@cache
def script() -> str:
    """Return the page's script, without comments and without spaces that no token needs."""
    return "".join(['"use strict";', *(squeezed(_read(f"{name}.js")) for name in SCRIPTS)])


def squeezed(source: str) -> str:
    """Return JavaScript without lines of comments, indents, and spaces beside brackets and commas.

    Strings and templates stay as they are, with all that stands in a template's braces. Regular expressions must hold
    neither quotes nor such spaces, and every statement ends in a semicolon or a brace.
    """
    code = re.sub(r"(?m)^\s*//.*\n|\s+//[^\n\"'`]*$", "", source)
    made, at = [], 0
    for start, end in _literals(code):
        made += [_SPACES.sub(r"\1", re.sub(r"\s+", " ", code[at:start])), code[start:end]]
        at = end
    return "".join([*made, _SPACES.sub(r"\1", re.sub(r"\s+", " ", code[at:]))])


def _literals(code: str) -> Iterator[tuple[int, int]]:
    """Yield begin and end of each string and outermost template."""
    inside: list[str] = []  # quotes that are open, and braces within templates
    begin = 0
    for match in _MARKS.finditer(code):
        mark, last = match[0], inside[-1] if inside else ""
        if mark[0] == "\\":
            continue
        if last in ("'", '"', "`"):
            if mark == last:
                inside.pop()
                if not inside:
                    yield begin, match.end()
            elif last == "`" and mark == "${":
                inside.append("{")
        elif mark in ("'", '"', "`"):
            begin = begin if inside else match.start()
            inside.append(mark)
        elif inside and mark in ("{", "${"):
            inside.append("{")
        elif inside and mark == "}":
            inside.pop()


def policy(connects: bool) -> str:
    """Return the page's content security policy: it may run its own script and, on a server, connect to that."""
    digest = base64.b64encode(hashlib.sha256(script().encode()).digest()).decode()
    rest = "base-uri 'none'; form-action 'none'"
    if connects:
        rest = f"connect-src 'self'; {rest}; frame-ancestors 'none'"
    return f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; {rest}"


def html(data: Mapping[str, Any], connects: bool = False) -> str:
    """Return the page with `data` inside. One that `connects` has its policy in the answer's header instead."""
    meta = "" if connects else f'<meta http-equiv="Content-Security-Policy" content="{policy(False)}">\n'
    parts = {
        "@POLICY@": meta, "@STYLE@": f"{THEMES}\n{STYLE}\n{_read('style.css')}", "@DATA@": embedded(data),
        "@SCRIPT@": script(),
    }  # fmt: skip
    page, rest = "", _read("page.html")
    for mark, text in parts.items():  # in their order in the page: what was inserted is never searched for marks
        before, _, rest = rest.partition(mark)
        page += before + text
    return page + rest


def _read(name: str) -> str:
    return importlib.resources.files("attar.lab").joinpath("page", name).read_text(encoding="utf-8")
