"""One request under way: the engine's events, its trace for /why, and the state that all requests share.

Endpoints differ in how they read a request and write an answer; what they share in between is here.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any
from weakref import WeakValueDictionary

import msgspec

from attar.faults import point
from attar.protocol.messages import Delta, Embedding, Failed, Finished, Report
from attar.server.admission.rate_limits import Caller
from attar.server.admission.retry_after import RetryAfter
from attar.server.engine_client.client import EngineClient
from attar.server.engine_client.connection import AnswerEvent
from attar.server.engine_client.response_stream import ResponseStream
from attar.server.errors import FULL, APIError
from attar.server.metrics import EngineMetrics, HttpMetrics, Metrics
from attar.server.replicas.group import ReplicaGroup
from attar.server.replicas.metrics import ReplicaMetrics

PROMPT_ANSWER = 1.0  # seconds that a stream's status waits for the engine's first event
LATE_ANSWER = 10.0  # at most, where the engine may refuse the request: clients wait for a status too
MAX_PROMPTS = 128  # prompts of a request that are reported: the first
NAME_DIGITS = 32  # of a request's id
REMEMBERED = 1000  # ended requests that /why can report

logger = logging.getLogger(__name__)


@dataclass(slots=True, weakref_slot=True)
class RequestTrace:
    """The trace of a request, as /why reports it. Times are monotonic."""

    id: str
    cache_salt: bytes
    arrived: float
    reports: dict[str, Report | None]
    """One report a prompt, of the first MAX_PROMPTS, by the engine's ids; None where there is none yet."""
    outcome: str = "running"
    first: float | None = None
    ended: float | None = None
    generated: int = 0
    replays: int = 0  # times that another engine went on with one of its prompts
    given: str = ""  # the client's own id of the request
    prompt_tokens: int = 0
    max_tokens: int = 0  # of the prompts and all choices together, at most

    def told(self, now: float, running: Mapping[str, Report] | None = None) -> dict[str, Any]:
        """Return the trace for JSON. `running` are reports of the prompts that have not ended, by the engine's ids."""
        reports = [ended or (running or {}).get(name) for name, ended in self.reports.items()]
        return {
            "id": self.id,
            "outcome": self.outcome,
            "seconds": (now if self.ended is None else self.ended) - self.arrived,
            "seconds_to_first_token": None if self.first is None else self.first - self.arrived,
            "generated_tokens": self.generated,
            "replays": self.replays,
            "prompts": [None if report is None else msgspec.to_builtins(report) for report in reports],
        }

    def read(self, event: AnswerEvent) -> None:
        """Record an event's report; late events have one too."""
        if isinstance(event, Finished | Embedding | Failed) and event.report is not None and event.id in self.reports:
            self.reports[event.id] = event.report


class RequestTraces:
    """Traces of running requests, and of the last that have ended. Each is shown only to its own key."""

    def __init__(self) -> None:
        self._running: WeakValueDictionary[str, RequestTrace] = WeakValueDictionary()
        self._ended: OrderedDict[str, RequestTrace] = OrderedDict()

    def begin(self, caller: Caller, names: Iterable[str]) -> RequestTrace:
        """Begin the trace of a request, known for as long as it is referenced. The engine calls its prompts `names`."""
        reports = dict.fromkeys(islice(names, MAX_PROMPTS))
        trace = RequestTrace(caller.id, caller.cache_salt, caller.arrived, reports, given=caller.given)
        self._running[caller.id] = trace
        return trace

    def running(self, cache_salt: bytes) -> list[RequestTrace]:
        """Return the traces of a key's running requests, in the order in which they came."""
        found = [each for each in self._running.values() if each.cache_salt == cache_salt]
        return sorted((each for each in found if each.outcome == "running"), key=lambda each: each.arrived)

    @property
    def open(self) -> int:
        """The number of running requests, of all keys."""
        return sum(each.outcome == "running" for each in self._running.values())

    def remember(self, trace: RequestTrace) -> None:
        """Keep the trace of a request that has ended; the oldest is forgotten."""
        point("why.remember", trace.id)
        self._ended[trace.id] = trace
        if len(self._ended) > REMEMBERED:
            self._ended.popitem(last=False)

    def find(self, request: str, cache_salt: bytes) -> RequestTrace:
        """Return the trace of a request by its id, its answer's, or its client's own, of which the last counts. Raises
        APIError where it is unknown, or another key's."""
        own = request.rpartition("-")[2].removeprefix("msg_")  # of an answer's id
        if own.startswith("resp_"):  # further digits of it belong to the answer alone
            own = own.removeprefix("resp_")[:NAME_DIGITS]
        trace = self._running.get(own) or self._ended.get(own)
        if trace is None or trace.cache_salt != cache_salt:
            known = [each for each in (*self._ended.values(), *self._running.values()) if each.given == request]
            trace = next((each for each in reversed(known) if each.cache_salt == cache_salt), None)
        if trace is None:
            raise APIError("not_found", f"no such request is running, or among the last {REMEMBERED}")
        return trace


class RequestContext:
    """State that all requests to one `engine`, or a group of them, share: metrics, traces for /why, Retry-After, and
    whether the server accepts no more. `http`: metrics of HTTP, of a server that has several engines. `times`: whether
    answers tell how long they took."""

    def __init__(
        self, engine: EngineClient | ReplicaGroup, http: HttpMetrics | None = None, times: bool = False
    ) -> None:  # fmt: skip
        self.engine, self.times = engine, times
        reported = EngineMetrics(engine) if isinstance(engine, EngineClient) else ReplicaMetrics(engine)
        self.metrics, self.backoff, self.traces = Metrics(reported, http), RetryAfter(), RequestTraces()
        self.draining = False

    @property
    def takes_images(self) -> bool:
        """Whether the model takes images."""
        return self.engine.ready is not None and self.engine.ready.images

    def patience(self) -> float:
        """Return the seconds that a stream's status waits: longer where the engine's queue may be full, since the
        engine refuses only between two steps."""
        places = self.engine.places
        if places.total <= places.size:
            return PROMPT_ANSWER
        return min(max(PROMPT_ANSWER, 2 * self.engine.heartbeat.longest), LATE_ANSWER)

    def full(self) -> APIError:
        """Make the refusal of a request for which there is no room, with a Retry-After."""
        places = self.engine.places
        waiting = len(self.engine.open) * places.total / max(1, places.total + places.running)
        seconds = self.backoff.retry_after(time.monotonic(), waiting)
        return APIError("overloaded", FULL, retry_after=max(seconds, math.ceil(self.engine.full_for)))

    def refusal(self, failed: Failed) -> APIError:
        """Translate the engine's failure for the client."""
        return self.full() if failed.code == "full" else APIError.of(failed)


class RequestHandler:
    """Handles a request in the engine. `prompts` are its prompts; choice c of prompt p is number p * n + c.

    The reader must close it at the end, in any case.
    """

    def __init__(
        self, caller: Caller, prompts: Sequence[tuple[int, ...]], n: int, stream: ResponseStream,
        context: RequestContext,
    ) -> None:  # fmt: skip
        self.caller, self.prompts, self.n, self.stream = caller, prompts, n, stream
        self.created = int(time.time())
        self.prompt_tokens = sum(map(len, prompts))
        self.reused = 0
        self.context, self._trace = context, context.traces.begin(caller, stream.prompts)
        self._trace.prompt_tokens = self._trace.max_tokens = self.prompt_tokens
        self._last: dict[tuple[str, int], float] = {}
        self._unheard = set(stream.prompts)
        self._peeked: list[AnswerEvent] = []
        self._left = False
        self._outcome = ""
        self._served = True
        self._finished = False
        stream.late = self._late

    def expect(self, tokens: int) -> None:
        """Note how many tokens all choices may generate together."""
        self._trace.max_tokens = self.prompt_tokens + tokens

    @property
    def reports(self) -> list[Report | None]:
        """The engine's reports of the prompts that have ended."""
        return list(self._trace.reports.values())

    def number(self, event: Delta | Finished) -> int:
        """Return the number of an event's choice in the whole answer."""
        return self.stream.prompts[event.id] * self.n + event.choice

    async def admitted(self) -> None:
        """Wait a little for the engine's first event, so that a refusal can still set the answer's status."""
        try:
            async with asyncio.timeout(self.context.patience()):
                self._peeked = await self._take()
        except TimeoutError:
            return
        if isinstance(self._peeked[0], Failed):
            raise self.context.refusal(self._peeked[0])

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
            raise self.context.refusal(Failed(self.caller.id, code, ""))

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
        self._trace.read(event)

    def _generated(self, tokens: int) -> None:
        self._trace.generated += tokens
        self.context.metrics.generated_tokens.inc(tokens)
        if self.caller.account is not None:
            self.caller.account.use(tokens)

    def _note(self, events: Sequence[AnswerEvent]) -> None:
        """Count events in metrics, and record them for /why."""
        point("metrics.observe", self.caller.id)
        now, metrics, trace = time.monotonic(), self.context.metrics, self._trace
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
            self._trace.read(event)
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
        self.stream.late = self._trace.read
        caller, context, trace = self.caller, self.context, self._trace
        trace.outcome, trace.ended, trace.replays = self._outcome or "stop", now, self.stream.replays
        if self._served:  # a refusal is quick, and would make a full server look like a fast one
            context.metrics.end_to_end.observe(now - caller.arrived)
            context.backoff.served(now)
        context.metrics.ended.labels(trace.outcome).inc()
        context.traces.remember(trace)
        logger.info(
            "%s ended (%s): %d tokens in, %d reused, %d out, %.3f s",
            caller.id, trace.outcome, self.prompt_tokens, self.reused, trace.generated, now - caller.arrived,
        )  # fmt: skip
