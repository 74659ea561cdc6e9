"""Custom tools of the Responses API: tools whose input is text rather than a JSON object.

A model knows such a tool as a function with one argument, the text `input`. The grammar of calls keeps it to a regular
expression where the tool has one, or to a grammar in Lark's format. One that is regular by its form becomes an
expression (`text/schemas/regular.py`). Others become rules of texts within JSON (`text/schemas/recursive.py`).
"""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from attar.server.api.body import Ignored
from attar.text.schemas import recursive, regular
from attar.text.tools.tool import NAME

MAX_PATTERN = 16 << 10  # characters of a regular expression
MAX_GRAMMARS = 32 << 10  # characters of a request's grammars in Lark's format, which are read in the event loop

_HEAD = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_TEXT = re.compile(
    r'(?:[^"\\]|\\[^u]|\\u(?![dD][89abAB])[0-9a-fA-F]{4}'
    r"|\\u[dD][89abAB][0-9a-fA-F]{2}(?:\\u[0-9a-fA-F]{4}|(?=[^\\]|\\[^u])))*+"
)
"""The text of a JSON string without a last escape that is incomplete, or of which a second half may follow."""


class AnyText(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="text"):
    """Any text."""


class TextByGrammar(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="type", tag="grammar"):
    """Text that a regular expression in Rust's syntax matches as a whole, or by a grammar in Lark's format."""

    syntax: Literal["regex", "lark"]
    definition: Annotated[str, Meta(min_length=1, max_length=MAX_PATTERN)]

    def expression(self) -> str | None:
        """Return the regular expression of the text, or None for a grammar with recursion. Raises GrammarError for one
        that is no grammar of text within JSON."""
        if self.syntax != "lark":
            return self.definition
        try:
            return regular.expression(self.definition)
        except regular.RecursionFound:
            recursive.rules(self.definition, "input")
            return None


class ResponseCustom(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="type", tag="custom"):
    """A tool whose input is text."""

    name: Annotated[str, Meta(pattern=f"^{NAME}$", title="FunctionName")]
    description: str | None = None
    format: AnyText | TextByGrammar | None = None
    cache_control: Ignored = None

    def arguments(self) -> tuple[dict[str, Any], str | None]:
        """Return the schema of its arguments, as the model knows them, and the grammar of its input where no regular
        expression has its texts. Raises GrammarError as `expression` does."""
        text: dict[str, Any] = {"type": "string"}
        grammar = None
        if isinstance(self.format, TextByGrammar):
            if (pattern := self.format.expression()) is not None:
                text["pattern"] = f"^(?:{pattern})$"
            else:
                grammar = self.format.definition
        schema = {
            "type": "object", "properties": {"input": text}, "required": ["input"], "additionalProperties": False,
        }  # fmt: skip
        return schema, grammar

    @property
    def strict(self) -> bool:
        """Whether calls that cannot be kept to the schema are refused: an input has no other place."""
        return True

    def told(self) -> dict[str, Any]:
        """Return the tool as answers repeat it."""
        format = msgspec.to_builtins(self.format or AnyText())
        return {"type": "custom", "name": self.name, "description": self.description, "format": format}


class InputReader:
    """Reads the input of a custom tool out of the arguments of a call, which come in pieces."""

    def __init__(self) -> None:
        self._held = ""  # what is not read yet
        self._inside = False

    def push(self, text: str) -> str:
        """Take more of the arguments; return more of the input. Lone surrogates become U+FFFD."""
        self._held += text
        if not self._inside:
            if (found := _HEAD.match(self._held)) is None:
                return ""
            self._held, self._inside = self._held[found.end() :], True
        found = _TEXT.match(self._held)
        assert found is not None
        self._held = self._held[found.end() :]
        read: str = json.loads(f'"{found[0]}"', strict=False)
        return read.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def arguments(text: str) -> str:
    """Return an input as the arguments of the call that the model knows."""
    return json.dumps({"input": text}, ensure_ascii=False)
