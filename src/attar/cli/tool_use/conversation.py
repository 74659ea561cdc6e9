"""Turns of `attar chat` with tools: answers that call, the user's word on each call, results, and answers to those.

A call is shown before it runs, with control characters escaped. It runs where the user says yes, or named its tool in
advance. Without a terminal there is nobody to ask, so all other calls are refused.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from attar.cli.terminal import dimmed, print_pieces, tell
from attar.cli.tool_use.functions import Functions
from attar.errors import UserError

if TYPE_CHECKING:
    from attar.engine.llm.llm import LLM
    from attar.protocol.request import Completion, SamplingParams, ToolCall

MAX_ROUNDS = 16  # answers to one turn of the user
SHOWN = 400  # characters of a call's arguments, or of its result
REFUSED = "Refused: the user did not allow this call."


class ToolChat:
    """A model that may call `functions`. Calls of tools in `allowed` run without a question. Raises UserError for names
    that are no functions, and where the model has no chat template."""

    def __init__(self, llm: LLM, functions: Functions, allowed: Collection[str], ask: Callable[[str], bool]) -> None:
        self._llm, self._functions, self._allowed, self._ask = llm, functions, allowed, ask
        llm.tokenizer.chat_template(tools=True)  # a model that cannot chat says so before the first turn

    def turn(self, messages: list[dict[str, Any]], params: SamplingParams, **template: Any) -> Completion:
        """Answer the last message, with calls and their results in between; all of it is added to `messages`. Raises
        UserError where calls do not end."""
        for _ in range(MAX_ROUNDS):
            stream = self._llm.chat_events(messages, params, tools=self._functions.tools, **template)
            answer = print_pieces(dimmed(stream))
            answer = replace(answer, tool_calls=tuple(call for call in answer.tool_calls if call.complete))
            messages.append(answer.message())
            if not answer.tool_calls:
                return answer
            for call in answer.tool_calls:
                result = self._run(call)
                messages.append({"role": "tool", "tool_call_id": call.id, "name": call.name, "content": result})
        raise UserError("answer_invalid", f"the model calls tools again and again: {MAX_ROUNDS} answers to one turn")

    def _run(self, call: ToolCall) -> str:
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
