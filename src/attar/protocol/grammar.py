"""A constraint on an answer, as a value: every text it may be, by a schema, an expression or a grammar.

Plain text travels from the client to the engine. What it means, and what of it can be kept, is `text/grammars.py`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from attar.errors import UserError
from attar.protocol.request import SamplingParams

GrammarKind = Literal["json_object", "json_schema", "regex", "choice", "lark", "gbnf"]

MAX_GRAMMAR = 1 << 20  # bytes of UTF-8
DECIDE_ON_THE_END = ("ignore_eos", "min_tokens")  # parameters that no request with a constraint may set
_WHITESPACE = re.compile(r"(\[( |\\n|\\t|\\r|\n|\t|\r)+\](\?|\{0,([0-9]|[1-5][0-9]|6[0-4])\})?)?")
WHITESPACE = _WHITESPACE.pattern
"""Patterns of white space at one place, as a regular expression: a set of characters, at most so many times."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """The texts that an answer may be.

    `text` is JSON for `json_schema`, a JSON list of strings for `choice`, empty for `json_object`, and else the
    expression or grammar itself. `whitespace` says what may stand between the tokens of JSON: `[CHARACTERS]{0,N}` of
    space, tab and line breaks, N at most 64, or nothing where it is empty; by default one space behind `:` and `,`.
    Raises UserError (`grammar_invalid`) for an unknown kind, a text that is too large or not Unicode, and other
    whitespace.
    """

    kind: GrammarKind
    text: str = ""
    whitespace: str | None = None

    def __post_init__(self) -> None:
        if self.kind not in get_args(GrammarKind):
            raise UserError("grammar_invalid", f"a constraint is one of {', '.join(get_args(GrammarKind))}")
        try:
            size = len(self.text.encode())
        except UnicodeEncodeError as error:
            raise UserError("grammar_invalid", "the constraint holds a lone surrogate, which is not Unicode") from error
        if size > MAX_GRAMMAR:
            raise UserError("grammar_invalid", f"the constraint has {size} bytes, more than {MAX_GRAMMAR}")
        if self.whitespace is not None and not _WHITESPACE.fullmatch(self.whitespace):
            message = f"whitespace must be a bounded set of spaces, such as [ \\n]{{0,8}}, not {self.whitespace[:40]!r}"
            raise UserError("grammar_invalid", message)

    @classmethod
    def of(cls, constraint: Constraint) -> Grammar:
        """Make the grammar of a constraint: itself, or that of a JSON schema as a mapping or a Pydantic model. Raises
        UserError."""
        if isinstance(constraint, Grammar):
            return constraint
        if isinstance(constraint, Mapping) or hasattr(constraint, "model_json_schema"):
            return cls.json_schema(constraint)
        raise UserError("grammar_invalid", "a constraint is a Grammar, a JSON schema as a dict, or a Pydantic model")

    @classmethod
    def json_object(cls, whitespace: str | None = None) -> Grammar:
        """Make the constraint of any JSON object."""
        return cls("json_object", "", whitespace)

    @classmethod
    def json_schema(cls, schema: Any, whitespace: str | None = None) -> Grammar:
        """Make the constraint of a JSON schema: its text, a mapping or bool, or a Pydantic model. Raises UserError."""
        if isinstance(schema, str):
            text = schema
        else:
            make = getattr(schema, "model_json_schema", None)
            try:
                text = json.dumps(make() if make else schema, ensure_ascii=False)
            except (TypeError, ValueError, RecursionError) as error:
                raise UserError("grammar_invalid", f"the schema is not JSON: {error}") from error
        return cls("json_schema", text, whitespace)

    @classmethod
    def choice(cls, texts: Sequence[Any]) -> Grammar:
        """Make the constraint of one of several texts. Raises UserError where there are none, or one is empty."""
        if isinstance(texts, str) or not texts or any(not isinstance(text, str) or text == "" for text in texts):
            raise UserError("grammar_invalid", "a choice is a list of texts, none of them empty")
        return cls("choice", json.dumps(list(texts), ensure_ascii=False))

    @classmethod
    def of_text(cls, text: str) -> Grammar:
        """Make the constraint of a grammar in GBNF, whose rules have `::=`, or in Lark's format."""
        return cls("gbnf" if "::=" in text else "lark", text)

    def digest(self, *parts: bytes) -> bytes:
        """Return the SHA-256 of the constraint, and of other `parts`."""
        fields = (self.kind.encode(), self.text.encode(), repr(self.whitespace).encode(), *parts)
        return hashlib.sha256(b"".join(len(field).to_bytes(8, "little") + field for field in fields)).digest()

    def check(self, params: SamplingParams) -> None:
        """Raise UserError (`option_conflict`) for parameters that contradict a constraint, which decides on the end."""
        for name in DECIDE_ON_THE_END:
            if getattr(params, name):
                raise UserError("option_conflict", f"{name} conflicts with a constraint, which decides on the end")


Constraint = Grammar | Mapping[str, Any] | type
"""What Python code may give as a constraint: a `Grammar`, a JSON schema, or a Pydantic model."""
