"""Tools in Ollama's shape: calls whose arguments are objects, and results that name their tool or their call."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from attar.server.api.body import Ignored
from attar.server.errors import APIError
from attar.text.answers.events import AnswerEvent, CallArguments, CallEnd, CallStart
from attar.text.answers.made_calls import MadeCall
from attar.text.tools.calling import Calling
from attar.text.tools.openai import MAX_CALLS, Call, CalledFunction, CallId, FunctionName


class OllamaCalled(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    name: FunctionName
    arguments: dict[str, Any]
    description: Ignored = None
    index: Ignored = None


class OllamaCall(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A call of an earlier answer."""

    function: OllamaCalled
    id: CallId | None = None
    type: Ignored = None


OllamaCalls = Annotated[list[OllamaCall], Meta(max_length=MAX_CALLS)]


class OpenCalls:
    """The calls of a conversation that have no result yet. A result without an id is that of the first such call, or of
    the first one of its tool."""

    def __init__(self) -> None:
        self._made = 0
        self._open: dict[str, str] = {}  # names of tools, by the id of the call

    def add(self, made: Iterable[OllamaCall]) -> list[Call]:
        """Return calls in OpenAI's shape; those without an id get one."""
        found = []
        for each in made:
            self._made += 1
            identity = each.id or f"call_{self._made}"
            self._open[identity] = each.function.name
            arguments = msgspec.json.encode(each.function.arguments).decode()
            found.append(Call(id=identity, function=CalledFunction(each.function.name, arguments)))
        return found

    def answered(self, identity: str | None, name: str | None) -> str:
        """Return the id of the call that a result belongs to. Raises APIError where there is none."""
        if identity is None:
            identity = next((each for each, of in self._open.items() if name in (None, of)), None)
        if identity is None:
            raise APIError("invalid_value", "messages: a message of role tool belongs to no call before it", "messages")
        self._open.pop(identity, None)
        return identity


class CompleteCalls:
    """The calls of an answer in Ollama's shape, each told once it is complete."""

    def __init__(self, calling: Calling) -> None:
        self._calling = calling
        self._name: str | None = None  # of the call that has not ended
        self._arguments: list[str] = []

    def add(self, events: Iterable[AnswerEvent]) -> list[dict[str, Any]]:
        """Return the calls that more events complete."""
        found = []
        for event in events:
            match event:
                case CallStart(name=name):
                    self._name, self._arguments = name, []
                case CallArguments(text=text):
                    self._arguments.append(text)
                case CallEnd(index=index):
                    made = self._made()
                    function = {"index": index, "name": made.name, "arguments": made.input() or {}}
                    found.append({"id": self._calling.new_id(), "function": function})
                    self._name = None
        return found

    def rest(self) -> str:
        """Return the call that broke off, if any, as text: Ollama's calls are whole objects."""
        return "" if self._name is None else self._made().text

    def _made(self) -> MadeCall:
        return MadeCall(self._name or "", "".join(self._arguments))
