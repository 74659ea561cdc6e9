"""Answers of requests that the engine works for: whole or as a stream, and ended once the client has disconnected."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable

from fastapi import Request
from fastapi.responses import Response

from attar.protocol.messages import Delta
from attar.server.http import sse
from attar.server.request_handler import RequestHandler
from attar.text.answers.events import AnswerEvent, AnswerParser, CallEnd, Plain, ReasoningDelta
from attar.text.answers.reasoning import ReasoningParser
from attar.text.tools.calling import NO_CALLS, Calling


class AnswerReader:
    """Splits the texts of an answer's choices into events; `make` makes the parser of each choice.

    `reasons` says whether parsers look for reasoning, whose tokens are counted in `reasoning_tokens`, markers included.
    Without `shown` its events are left out. `calling` gives ids of calls.
    """

    def __init__(
        self, make: Callable[[], AnswerParser] = Plain, reasons: bool = False, shown: bool = True,
        calling: Calling = NO_CALLS,
    ) -> None:  # fmt: skip
        self._make, self.reasons, self._shown, self.calling = make, reasons, shown, calling
        self._parsers: dict[int, AnswerParser] = {}
        self._called: set[int] = set()
        self.reasoning_tokens = 0

    def read(self, number: int, delta: Delta) -> list[AnswerEvent]:
        """Return the events that more text of a choice completes."""
        if (parser := self._parsers.get(number)) is None:
            parser = self._parsers[number] = self._make()
        before = _inside(parser)
        events = self._noted(number, parser.feed(delta.text))
        if before or _inside(parser):
            self.reasoning_tokens += len(delta.token_ids)
        return self._told(events)

    def close(self, number: int) -> list[AnswerEvent]:
        """Return the events that the end of a choice completes."""
        parser = self._parsers.pop(number, None)
        return [] if parser is None else self._told(self._noted(number, parser.close()))

    def reason(self, number: int, reason: str) -> str:
        """Return why a choice ended: `tool_calls` for one that ended by itself behind a complete call."""
        return "tool_calls" if reason == "stop" and number in self._called else reason

    def _noted(self, number: int, events: list[AnswerEvent]) -> list[AnswerEvent]:
        if any(isinstance(event, CallEnd) for event in events):
            self._called.add(number)
        return events

    def _told(self, events: list[AnswerEvent]) -> list[AnswerEvent]:
        return events if self._shown else [each for each in events if not isinstance(each, ReasoningDelta)]


def _inside(parser: AnswerParser) -> bool:
    return isinstance(parser, ReasoningParser) and parser.inside


async def whole(request: Request, handler: RequestHandler, answer: Awaitable[Iterable[bytes | bytearray]]) -> Response:
    """Answer with one object, whose pieces `answer` makes. Raises what it raises."""
    try:
        async with sse.while_connected(request.receive, handler.leave):
            pieces = await answer
    finally:
        handler.close()
    return sse.whole(pieces)


async def stream(
    request: Request, handler: RequestHandler, pieces: AsyncIterator[bytes], failed: bytes | Callable[[], bytes],
    ping: bytes = sse.COMMENT, kind: type[sse.EventStream] = sse.EventStream,
) -> Response:  # fmt: skip
    """Answer with a stream once the engine has let the request in. Raises APIError where it does not."""
    try:
        async with sse.while_connected(request.receive, handler.leave):
            await handler.admitted()
        return kind(pieces, handler.leave, handler.close, failed, handler.caller.id, ping)
    except BaseException:
        handler.close()
        raise
