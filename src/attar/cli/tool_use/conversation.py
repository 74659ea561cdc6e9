"""Turns of `attar chat` with tools: answers that call, the user's word on each call, results, and answers to those.

A call is shown before it runs, with control characters escaped. It runs where the user says yes, or named its tool in
advance. Without a terminal there is nobody to ask, so all other calls are refused.
"""

from __future__ import annotations

import json
import secrets
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from attar.cli.terminal import dimmed, print_pieces, tell
from attar.cli.tool_use.functions import Functions
from attar.errors import UserError
from attar.text.answers.events import AnswerEvent, AnswerParser, CallArguments, CallEnd, CallStart, TextDelta
from attar.text.tools.constraints import constraint
from attar.text.tools.formats import detect
from attar.text.tools.generic import plain
from attar.text.tools.history import for_template
from attar.text.tools.parsers import parser
from attar.text.tools.tool import ToolChoice

if TYPE_CHECKING:
    from attar.engine.llm import LLM
    from attar.protocol.request import Completion, SamplingParams

MAX_ROUNDS = 16  # answers to one turn of the user
SHOWN = 400  # characters of a call's arguments, or of its result
REFUSED = "Refused: the user did not allow this call."


@dataclass(frozen=True)
class Call:
    """A complete call of an answer."""

    id: str
    name: str
    arguments: str

    def told(self) -> dict[str, Any]:
        """Return the call as messages have it."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


class _Recorder:
    """A parser that keeps what another one found."""

    def __init__(self, inner: AnswerParser) -> None:
        self._inner = inner
        self.events: list[AnswerEvent] = []

    def feed(self, text: str) -> list[AnswerEvent]:
        found = self._inner.feed(text)
        self.events += found
        return found

    def close(self) -> list[AnswerEvent]:
        found = self._inner.close()
        self.events += found
        return found

    def text(self) -> str:
        return "".join(event.text for event in self.events if isinstance(event, TextDelta))

    def calls(self) -> list[Call]:
        """Return the complete calls."""
        found: list[Call] = []
        name, pieces = "", list[str]()
        for event in self.events:
            if isinstance(event, CallStart):
                name, pieces = event.name, []
            elif isinstance(event, CallArguments):
                pieces.append(event.text)
            elif isinstance(event, CallEnd):
                found.append(Call("call_" + secrets.token_hex(12), name, "".join(pieces)))
        return found


class ToolChat:
    """A model that may call `functions`. Calls of tools in `allowed` run without a question. Raises UserError for names
    that are no functions, and where the model has no chat template."""

    def __init__(self, llm: LLM, functions: Functions, allowed: Collection[str], ask: Callable[[str], bool]) -> None:
        self._llm, self._functions, self._allowed, self._ask = llm, functions, allowed, ask
        self._form = detect(llm.tokenizer, llm.tokenizer.chat_template(tools=True))
        found = constraint(self._form, functions.tools, ToolChoice(), llm.prove)
        assert found is not None
        self._grammar = found.grammar

    def turn(self, messages: list[dict[str, Any]], params: SamplingParams, **template: Any) -> Completion:
        """Answer the last message, with calls and their results in between; all of it is added to `messages`. Raises
        UserError where calls do not end."""
        for _ in range(MAX_ROUNDS):
            answer, said, calls = self._answer(messages, params, template)
            told: dict[str, Any] = {"role": "assistant", "content": said}
            messages.append(told | ({"tool_calls": [call.told() for call in calls]} if calls else {}))
            if not calls:
                return answer
            for call in calls:
                result = self._run(call)
                messages.append({"role": "tool", "tool_call_id": call.id, "name": call.name, "content": result})
        raise UserError("answer_invalid", f"the model calls tools again and again: {MAX_ROUNDS} answers to one turn")

    def _answer(
        self, messages: Sequence[dict[str, Any]], params: SamplingParams, template: dict[str, Any]
    ) -> tuple[Completion, str, list[Call]]:
        form, tools = self._form, self._functions.tools
        said = for_template(messages, form.id_length, form.arguments_as_text)
        if form.name == "generic":
            said = plain(said, tools)
        else:
            template = {**template, "tools": [tool.template_form() for tool in tools]}
        inner = parser(form, tools, ToolChoice())
        recorder = _Recorder(self._llm.reasoning_parser(self._llm.encode_chat(said, **template), inner=inner))
        own = replace(params, visible_token_ids=tuple(token for _, token in form.special))
        stream = self._llm.stream_chat(said, own, constraint=self._grammar, **template)
        return print_pieces(dimmed(stream, recorder)), recorder.text(), recorder.calls()

    def _run(self, call: Call) -> str:
        """Return the result of a call, or that it was refused."""
        shown = f"{call.name}({escaped(call.arguments)})"
        if call.name not in self._allowed and not self._ask(shown):
            tell(f"refused: {shown}")
            return REFUSED
        tell(f"running: {shown}")
        result = self._functions.call(call.name, json.loads(call.arguments))
        tell(f"result: {escaped(result)}")
        return result


def allowed_names(given: str | None, functions: Functions) -> frozenset[str]:
    """Return the names of a comma-separated list. Raises UserError for one that is no function."""
    names = frozenset(each.strip() for each in given.split(",")) if given else frozenset()
    known = [tool.name for tool in functions.tools]
    for name in sorted(names - set(known)):
        raise UserError("name_unknown", f"--yes-tools: no function {escaped(name)!r}, but {', '.join(known)}")
    return names


def ask_terminal(shown: str) -> bool:
    """Ask the user about a call; without a terminal the answer is no."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return False
    print(f"{shown}\nrun it? [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def escaped(text: str) -> str:
    """Return the beginning of a text on one line, without characters that a terminal obeys."""
    kept = "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text[:SHOWN])
    return kept + ("..." if len(text) > SHOWN else "")
