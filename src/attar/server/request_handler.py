"""One request under way: the engine's events, and the time that each part took.

Endpoints differ in how they read a request and write an answer; what they share in between is here.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence

from attar.faults import point
from attar.protocol.messages import Delta, Failed, Finished
from attar.server.admission.rate_limits import Caller
from attar.server.engine_client.connection import AnswerEvent
from attar.server.engine_client.response_stream import ResponseStream
from attar.server.errors import APIError
from attar.server.request_context import RequestContext

logger = logging.getLogger(__name__)


class RequestHandler:
    """Handles a request in the engine. `prompts` are its prompts; choice c of prompt p is number p * n + c.

    The reader must close it at the end, in any case.
    """

    def __init__(
        self,
        caller: Caller,
        prompts: Sequence[tuple[int, ...]],
        n: int,
        stream: ResponseStream,
        context: RequestContext,
    ) -> None:
        self.caller, self.prompts, self.n, self.stream = caller, prompts, n, stream
        self.created = int(time.time())
        self.prompt_tokens = sum(map(len, prompts))
        self.reused = 0
        self._context, self._trace = context, context.traces.begin(caller, stream.prompts)
        self._last: dict[tuple[str, int], float] = {}
        self._unheard = set(stream.prompts)
        self._peeked: list[AnswerEvent] = []
        self._left = False
        self._outcome = ""
        self._served = True
        self._finished = False
        self._reported = self._trace.reader(stream.prompts)
        stream.late = self._late

    def number(self, event: Delta | Finished) -> int:
        """Return the number of an event's choice in the whole answer."""
        return self.stream.prompts[event.id] * self.n + event.choice

    async def admitted(self) -> None:
        """Wait a little for the engine's first event, so that a refusal can still set the answer's status."""
        try:
            async with asyncio.timeout(self._context.patience()):
                self._peeked = await self._take()
        except TimeoutError:
            return
        if isinstance(self._peeked[0], Failed):
            raise self.refusal(self._peeked[0])

    def refusal(self, failed: Failed) -> APIError:
        """Translate the engine's failure for the client."""
        return self._context.refusal(failed)

    def leave(self) -> None:
        """Cancel for a client that disconnected, perhaps after the engine has finished and before all is written."""
        self._left = True
        self.stream.cancel()

    def wanted(self) -> None:
        """Note, between two slices of writing, that the reader is at work. Raises APIError once the answer is
        unwanted."""
        self.stream.reading()
        code = "cancelled" if self._left else self.stream.failure
        if code in ("cancelled", "slow_reader"):
            raise self.refusal(Failed(self.caller.id, code, ""))

    async def events(self, whole: bool = False) -> AsyncIterator[list[AnswerEvent]]:
        """Yield all events, in lists that arrived together. A `whole` answer is never dropped for unread events."""
        self.stream.whole |= whole
        if self._peeked:
            yield self._peeked
        while events := await self._take():
            yield events

    def close(self) -> None:
        """End the request. If the engine has not ended it, it is cancelled. If its end was never taken, the outcome is
        an internal error, unless the stream failed before: its end may also end the task that reads it."""
        outcome = self.stream.failure or "internal"
        self.stream.close()
        if not self._finished:
            self._outcome, self._served = outcome, False
            self._finish(time.monotonic())

    async def _take(self) -> list[AnswerEvent]:
        if events := await self.stream.take():
            point("work.take", self.caller.id)
            self._note(events)
        return events

    def _late(self, event: AnswerEvent) -> None:
        """Count an event that never reaches the reader: its tokens were generated all the same."""
        if isinstance(event, Delta):
            self._generated(len(event.token_ids))
        self._reported(event)

    def _generated(self, tokens: int) -> None:
        self._trace.generated += tokens
        self._context.metrics.generated_tokens.inc(tokens)
        if self.caller.account is not None:
            self.caller.account.use(tokens)

    def _note(self, events: Sequence[AnswerEvent]) -> None:
        """Count events in metrics, and record them for /why."""
        point("metrics.observe", self.caller.id)
        now, metrics, trace = time.monotonic(), self._context.metrics, self._trace
        for event in events:
            if event.id in self._unheard and not isinstance(event, Failed):
                self._unheard.remove(event.id)
                metrics.prompt_tokens.inc(len(self.prompts[self.stream.prompts[event.id]]))
            if isinstance(event, Delta):
                tokens = len(event.token_ids)
                self._generated(tokens)  # as they come: rates need finer steps than an answer
                key = (event.id, event.choice)
                last = self._last.get(key)
                if trace.first is None:
                    trace.first = now
                    metrics.ttft.observe(now - self.caller.arrived)
                if last is not None:
                    for _ in range(tokens):
                        metrics.inter_token.observe((now - last) / tokens)
                self._last[key] = now
                continue
            self._reported(event)
            if isinstance(event, Finished):
                self._outcome = event.reason
                self.reused += 0 if event.report is None else event.report.reused_tokens
            elif isinstance(event, Failed):
                self._outcome, self._served = event.code, False
                if event.code == "full" and self.caller.account is not None:
                    self.caller.account.forgive(self.prompt_tokens)
        if self.stream.ended:
            self._finish(now)

    def _finish(self, now: float) -> None:
        self._finished = True
        # Its account is settled; no reference cycle remains for the collector, which would stall every stream.
        self.stream.late = self._reported
        caller, context, trace = self.caller, self._context, self._trace
        trace.outcome, trace.ended = self._outcome or "stop", now
        if self._served:  # a refusal is quick, and would make a full server look like a fast one
            context.metrics.end_to_end.observe(now - caller.arrived)
            context.backoff.served(now)
        context.metrics.ended.labels(trace.outcome).inc()
        context.traces.remember(trace)
        logger.info(
            "%s ended (%s): %d tokens in, %d reused, %d out, %.3f s",
            caller.id, trace.outcome, self.prompt_tokens, self.reused, trace.generated, now - caller.arrived,
        )  # fmt: skip
