"""Output items of an answer, made of its events, and the events of a stream that tell of them.

Each item opens with `response.output_item.added` and ends with `response.output_item.done`. A message, and reasoning,
has one part, which opens and ends within; a call's arguments, or its input, have deltas of their own.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import msgspec

from attar.server.api.logprobs import Content
from attar.server.api.responses.custom import InputReader
from attar.server.api.responses.raw import RawMessages
from attar.text.answers.events import AnswerEvent, CallArguments, CallEnd, CallStart, ReasoningDelta, TextDelta
from attar.text.tools.calling import NO_CALLS

Event = dict[str, Any]

NO_SPACES: Mapping[str, tuple[str, str]] = {}
_PREFIXES = {"message": "msg_", "function_call": "fc_", "custom_tool_call": "ctc_", "reasoning": "rs_"}


class Output:
    """The output of one answer: `items`, as JSON. `call_id` makes the ids of calls. `spaces` has namespace and name of
    functions that have one, by the names that the model knows; `custom` are the names of custom tools. `scores` has the
    log probabilities of the tokens behind the events that were added: a message gets those of its text. `raw`
    takes all tokens, where the answer tells them."""

    def __init__(
        self, call_id: Callable[[], str] = NO_CALLS.new_id, spaces: Mapping[str, tuple[str, str]] = NO_SPACES,
        scores: Content | None = None, custom: Collection[str] = (), raw: RawMessages | None = None,
    ) -> None:  # fmt: skip
        self.items: list[dict[str, Any]] = []
        self.scores, self.raw = scores, raw
        self._call_id, self._spaces, self._custom = call_id, spaces, custom
        self._input = InputReader()  # of the open call of a custom tool
        self._scored: list[bytes] = []  # of the open message
        self._pieces: list[str] = []
        self._open: str | None = None  # the type of the last item, until it ends

    def add(self, events: Iterable[AnswerEvent]) -> Iterator[Event]:
        """Take events of the answer; yield those of the stream."""
        for event in events:
            if self.scores is not None and not isinstance(event, TextDelta):
                self.scores.take()  # those of markers, and of what has none in this API
            match event:
                case TextDelta(text):
                    yield from self._said("message", text)
                case ReasoningDelta(text):
                    yield from self._said("reasoning", text)
                case CallStart(_, name) if name in self._custom:
                    self._input = InputReader()
                    yield from self._begun("custom_tool_call", input="", call_id=self._call_id(), name=name)
                case CallStart(_, name):
                    space, own = self._spaces.get(name, (None, name))
                    named = {"name": own} if space is None else {"name": own, "namespace": space}
                    yield from self._begun("function_call", arguments="", call_id=self._call_id(), **named)
                case CallArguments(_, text) if self._open == "custom_tool_call":
                    if text := self._input.push(text):
                        self._pieces.append(text)
                        yield self._of_item("response.custom_tool_call_input.delta", delta=text)
                case CallArguments(_, text):
                    self._pieces.append(text)
                    yield self._of_item("response.function_call_arguments.delta", delta=text)
                case CallEnd():
                    yield from self._ended("completed")

    def close(self, complete: bool) -> Iterator[Event]:
        """End the output; yield the last events of its items. An answer without any item has an empty message. The last
        item is `incomplete` where the answer is."""
        if not self.items:
            yield from self._begun("message")
        if self._open == "message" and self.scores is not None:
            self._scored.append(self.scores.take())
        yield from self._ended("completed" if complete else "incomplete")

    def _said(self, kind: str, text: str) -> Iterator[Event]:
        if self._open != kind:
            yield from self._begun(kind)
        self._pieces.append(text)
        if kind == "message":
            if self.scores is not None:
                self._scored.append(self.scores.take())
            yield self._of_part("response.output_text.delta", delta=text, logprobs=_array(self._scored[-1:]))
        else:
            yield self._of_part("response.reasoning_text.delta", delta=text)

    def _begun(self, kind: str, **fields: Any) -> Iterator[Event]:
        yield from self._ended("completed")
        item: dict[str, Any] = {
            "id": _PREFIXES[kind] + secrets.token_hex(16), "type": kind, "status": "in_progress", **fields,
        }  # fmt: skip
        if kind == "message":
            item |= {"role": "assistant", "content": []}
        elif kind == "reasoning":
            item |= {"summary": [], "content": []}
        self.items.append(item)
        self._open = kind
        yield {"type": "response.output_item.added", "output_index": len(self.items) - 1, "item": dict(item)}
        if kind in ("message", "reasoning"):
            yield self._of_part("response.content_part.added", part=_part(kind, ""))

    def _ended(self, status: str) -> Iterator[Event]:
        """End the open item, if any."""
        kind = self._open
        if kind is None:
            return
        item, text = self.items[-1], "".join(self._pieces)
        self._pieces.clear()
        self._open = None
        if kind == "function_call":
            item["arguments"] = text
            yield self._of_item("response.function_call_arguments.done", arguments=text)
        elif kind == "custom_tool_call":
            item["input"] = text
            yield self._of_item("response.custom_tool_call_input.done", input=text)
        else:
            part = _part(kind, text, self._scored)
            item["content"] = [part]
            if kind == "message":
                yield self._of_part("response.output_text.done", text=text, logprobs=part["logprobs"])
            else:
                yield self._of_part("response.reasoning_text.done", text=text)
            yield self._of_part("response.content_part.done", part=part)
            self._scored.clear()
        item["status"] = status
        yield {"type": "response.output_item.done", "output_index": len(self.items) - 1, "item": item}

    def _of_item(self, kind: str, **fields: Any) -> Event:
        return {"type": kind, "item_id": self.items[-1]["id"], "output_index": len(self.items) - 1, **fields}

    def _of_part(self, kind: str, **fields: Any) -> Event:
        return self._of_item(kind, content_index=0, **fields)


def _part(kind: str, text: str, scores: Iterable[bytes] = ()) -> dict[str, Any]:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "annotations": [], "logprobs": _array(scores), "text": text}


def _array(items: Iterable[bytes]) -> msgspec.Raw:
    """Return a JSON array of items, of which each piece has some."""
    return msgspec.Raw(b"[%b]" % b",".join(filter(None, items)))
