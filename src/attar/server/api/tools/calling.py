"""What one request may call: tools, the choice among them, the model's syntax of calls, and the grammar that keeps it.

Routes make a `Calling` once the body is read. It gives the answer's grammar, the special tokens that its text must
show, a parser for each choice, and ids of calls.
"""

from __future__ import annotations

import secrets
import string
from dataclasses import dataclass, replace

from attar.protocol.grammar import Grammar
from attar.protocol.request import SamplingParams
from attar.text.answers.events import AnswerParser
from attar.text.tools.formats import GENERIC, ToolFormat
from attar.text.tools.parsers import parser
from attar.text.tools.tool import Tool, ToolChoice

LOOSENED = "X-Attar-Loosened-Tools"
"""Header of an answer: tools whose arguments are only held to be JSON objects."""

_NAMED = 16  # tools in the header
_LETTERS = string.ascii_letters + string.digits
_LENGTH = 24  # characters of a call's id, behind its prefix


@dataclass(frozen=True)
class Calling:
    """What one request may call.

    grammar: of the whole answer; None where no tool may be called. loosened: names of tools whose arguments it only
    holds to be JSON objects.
    """

    tools: tuple[Tool, ...] = ()
    choice: ToolChoice = ToolChoice("none")  # noqa: RUF009 - frozen
    form: ToolFormat = GENERIC
    grammar: Grammar | None = None
    loosened: tuple[str, ...] = ()

    def parser(self) -> AnswerParser:
        """Return the parser of one choice."""
        return parser(self.form, self.tools, self.choice)

    def new_id(self, prefix: str = "call_") -> str:
        """Return the id of a new call, in the length that the model's template wants."""
        length = self.form.id_length
        return (prefix if not length else "") + "".join(secrets.choice(_LETTERS) for _ in range(length or _LENGTH))

    def shown(self, params: SamplingParams, more: tuple[int, ...] = ()) -> SamplingParams:
        """Return parameters by which the text shows the special tokens of calls, and `more`."""
        special = (token for _, token in self.form.special) if self.grammar is not None else ()
        visible = tuple(dict.fromkeys((*special, *more)))
        return replace(params, visible_token_ids=visible) if visible else params

    def headers(self) -> dict[str, str]:
        """Return the headers of the answer: the names of loosened tools, as many as fit."""
        if not self.loosened:
            return {}
        more = len(self.loosened) - _NAMED
        return {LOOSENED: ", ".join(self.loosened[:_NAMED]) + (f", and {more} more" if more > 0 else "")}


NO_CALLS = Calling()
