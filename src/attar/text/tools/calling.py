"""What one request may call: tools, the choice among them, the model's syntax of calls, and the grammar that keeps it.

The server and `LLM.chat` both make a `Calling`. It gives the answer's grammar, the special tokens that its text must
show, a parser for each choice, and ids of calls.
"""

from __future__ import annotations

import secrets
import string
from collections.abc import Sequence
from dataclasses import dataclass, replace

from attar.protocol.grammar import Grammar
from attar.protocol.request import SamplingParams
from attar.text.answers.events import AnswerParser
from attar.text.tools.calls_or_json import calls_or_json
from attar.text.tools.constraints import Prove, constraint
from attar.text.tools.formats import GENERIC, ToolFormat
from attar.text.tools.parsers import parser
from attar.text.tools.tool import Tool, ToolChoice

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

    @classmethod
    def of(
        cls, form: ToolFormat, tools: Sequence[Tool], choice: ToolChoice, prove: Prove, final: Grammar | None = None,
        field: str = "constraint",
    ) -> Calling:  # fmt: skip
        """Return what an answer may call, once its grammar is proven. An answer without calls satisfies `final`, a
        grammar of JSON that is the request's `field`. Raises ToolError as `constraint` does."""
        if choice.mode == "none" or not tools:
            return NO_CALLS
        if final is None:
            found = constraint(form, tools, choice, prove)
        else:
            form = replace(form, bare=False)  # JSON that was asked for may look like a call
            found = calls_or_json(form, tools, choice, prove, final, field)
        assert found is not None
        return cls(tuple(tools), choice, form, found.grammar, found.loosened)

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


NO_CALLS = Calling()
