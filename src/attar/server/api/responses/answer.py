"""Answers of /v1/responses, whole and as streams.

A stream's events are numbered. Its last is `response.completed`, `response.incomplete` (the answer met a limit) or
`response.failed`; each has the whole answer so far.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import msgspec

from attar.faults import point
from attar.protocol.messages import Delta, Failed, Finished
from attar.protocol.request import SamplingParams
from attar.server.api.answering import AnswerReader
from attar.server.api.logprobs import Turns, values
from attar.server.api.responses.output import Event, Output
from attar.server.api.responses.schemas import ResponseReasoning, ResponsesBody, TextOptions
from attar.server.api.responses.tools import told_choice
from attar.server.errors import INTERNAL, APIError
from attar.server.http import sse
from attar.server.request_handler import RequestHandler

PREFIX = "resp_"

Keep = Callable[[str, bytes, Sequence[Mapping[str, Any]]], bool]

encode = msgspec.json.encode


def new_id(request: str) -> str:
    """Return the id of the answer to a request: that of the request, and 128 random bits that no log has."""
    return PREFIX + request + secrets.token_hex(16)


class Answer:
    """The answer to `body` by `model`, whose text `reader` splits for `output`. `keep`, where it is stored, takes its
    id, its JSON and its items, and returns whether there was room."""

    def __init__(
        self, request: RequestHandler, body: ResponsesBody, params: SamplingParams, model: str, reader: AnswerReader,
        output: Output, keep: Keep | None = None,
    ) -> None:  # fmt: skip
        self.id = new_id(request.caller.id)
        self._request, self._body, self._params, self._model = request, body, params, model
        self._reader, self._keep = reader, keep
        self._output = output
        self._turns = Turns(request.wanted)
        self._number = self._given = 0  # of events: encoded, and given away

    async def whole(self) -> list[bytes]:
        """Return the answer as one object, in pieces. Raises APIError."""
        made = b""
        async for events in self._request.events(whole=True):
            for event in events:
                if isinstance(event, Delta | Finished):
                    async for _ in self._said(event):
                        pass
                if isinstance(event, Finished):
                    point("responses.whole", self._request.caller.id)
                    made = self._ended(event.reason, event.completion_tokens)
                elif isinstance(event, Failed):
                    raise self._request.context.refusal(event)
        return [made]

    async def stream(self) -> AsyncIterator[bytes]:
        """Yield the answer as server-sent events."""
        begun = self._told("in_progress")
        first = self._events([{"type": f"response.{name}", "response": begun} for name in ("created", "in_progress")])
        self._given = self._number
        yield first
        async for events in self._request.events():
            pieces = []
            for event in events:
                if isinstance(event, Delta | Finished):
                    pieces += [self._events([each]) async for each in self._said(event)]
                if isinstance(event, Finished):
                    told = msgspec.Raw(self._ended(event.reason, event.completion_tokens))
                    kind = "response." + _status(event.reason)
                    pieces.append(self._events([{"type": kind, "response": told}]))
                elif isinstance(event, Failed):
                    pieces.append(self._failed(APIError.of(event)))
            if pieces:
                self._given = self._number
                yield b"".join(pieces)

    async def _said(self, event: Delta | Finished) -> AsyncIterator[Event]:
        """Take more of the text, or its end; yield events of the stream."""
        output, reader = self._output, self._reader
        if isinstance(event, Finished):
            for each in chain(output.add(reader.close(0)), output.close(event.reason != "length")):
                yield each
            return
        point("responses.delta", event.id)
        if output.raw is not None:
            output.raw.add(event.token_ids)
        if event.logprobs and output.scores is not None:
            for token in event.logprobs:
                output.scores.add(token)
            await self._turns.after(values(event.logprobs))
        for each in output.add(reader.read(0, event)):
            yield each

    def failed(self) -> bytes:
        """Return the last event of a stream that an exception ends, whose events in the making are lost."""
        self._number = self._given
        return self._failed(APIError("internal", INTERNAL))

    def _failed(self, refusal: APIError) -> bytes:
        error = {"code": _code(refusal), "message": refusal.message}
        return self._events([{"type": "response.failed", "response": self._told("failed", error=error)}])

    def _events(self, events: Iterable[Event]) -> bytes:
        """Encode events, each with the next number."""
        found = []
        for event in events:
            found.append(sse.event(encode({**event, "sequence_number": self._number}), event["type"]))
            self._number += 1
        return b"".join(found)

    def _ended(self, reason: str, tokens: int) -> bytes:
        """Return the answer that has ended, as JSON, and keep it where it is stored."""
        request = self._request
        usage = {
            "input_tokens": request.prompt_tokens,
            "input_tokens_details": {"cached_tokens": request.reused, "cache_write_tokens": 0},
            "output_tokens": tokens,
            "output_tokens_details": {"reasoning_tokens": self._reader.reasoning_tokens},
            "total_tokens": request.prompt_tokens + tokens,
        }
        more: dict[str, Any] = {"completed_at": int(time.time())}
        if reason == "length":
            more = {"incomplete_details": {"reason": "max_output_tokens"}}
        if self._output.raw is not None:
            more |= self._output.raw.told()
        told = self._told(_status(reason), **more, usage=usage)
        made = encode(told)
        if self._keep is not None and not self._keep(self.id, made, self._output.items):
            made = encode({**told, "store": False})
        return made

    def _told(self, status: str, **more: Any) -> dict[str, Any]:
        """Return the answer as it stands, for JSON."""
        body, params = self._body, self._params
        return {
            "id": self.id, "object": "response", "created_at": self._request.created, "status": status,
            "background": False, "completed_at": None, "error": None, "incomplete_details": None,
            "instructions": body.instructions, "max_output_tokens": body.max_output_tokens, "model": self._model,
            "output": list(self._output.items), "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": (body.reasoning or ResponseReasoning()).told(),
            "service_tier": "default", "store": self._keep is not None, "temperature": params.temperature,
            "text": (body.text or TextOptions()).told(), "tool_choice": told_choice(body.tool_choice),
            "tools": [tool.told() for tool in body.tools or ()],
            "top_logprobs": body.top_logprobs or 0, "top_p": params.top_p, "truncation": "disabled", "usage": None,
            "metadata": body.metadata or {}, **more,
        }  # fmt: skip


def _status(reason: str) -> str:
    """Return the status of an answer that has ended."""
    return "incomplete" if reason == "length" else "completed"


def _code(refusal: APIError) -> str:
    """Return OpenAI's code of a failure in the middle of an answer, of which there are few."""
    if refusal.kind.status == 429:
        return "rate_limit_exceeded"
    return "invalid_prompt" if refusal.kind.status == 400 else "server_error"
