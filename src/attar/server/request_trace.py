"""Traces of requests, as /why reports them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any
from weakref import WeakValueDictionary

import msgspec

from attar.faults import point
from attar.protocol.messages import Embedding, Failed, Finished, Report
from attar.server.admission.rate_limits import Caller
from attar.server.engine_client.connection import AnswerEvent
from attar.server.errors import APIError

MAX_PROMPTS = 128  # prompts of a request that are reported: the first
REMEMBERED = 1000  # ended requests that /why can report


@dataclass(slots=True, weakref_slot=True)
class RequestTrace:
    """The trace of a request, as /why reports it. Times are monotonic."""

    id: str
    cache_salt: bytes
    arrived: float
    reports: list[Report | None]
    """One report a prompt, of the first MAX_PROMPTS; None where there is none yet."""
    outcome: str = "running"
    first: float | None = None
    ended: float | None = None
    generated: int = 0
    names: tuple[str, ...] = ()
    """The engine's ids of the prompts."""

    def told(self, now: float, running: Mapping[str, Report] | None = None) -> dict[str, Any]:
        """Return the trace for JSON. `running` are reports of the prompts that have not ended, by the engine's ids."""
        so_far = [(running or {}).get(name) for name in self.names] or [None] * len(self.reports)
        reports = [ended or report for ended, report in zip(self.reports, so_far, strict=True)]
        return {
            "id": self.id,
            "outcome": self.outcome,
            "seconds": (now if self.ended is None else self.ended) - self.arrived,
            "seconds_to_first_token": None if self.first is None else self.first - self.arrived,
            "generated_tokens": self.generated,
            "prompts": [None if report is None else msgspec.to_builtins(report) for report in reports],
        }

    def reader(self, prompts: Mapping[str, int]) -> Callable[[AnswerEvent], None]:
        """Make a function that records reports of events, late events included. `prompts`: index of the prompt by an
        event's id."""

        def read(event: AnswerEvent) -> None:
            if isinstance(event, Finished | Embedding | Failed) and event.report is not None:
                at = prompts[event.id]
                if at < len(self.reports):
                    self.reports[at] = event.report

        return read


class RequestTraces:
    """Traces of running requests, and of the last that have ended. Each is shown only to its own key."""

    def __init__(self) -> None:
        self._running: WeakValueDictionary[str, RequestTrace] = WeakValueDictionary()
        self._ended: OrderedDict[str, RequestTrace] = OrderedDict()

    def begin(self, caller: Caller, names: Iterable[str]) -> RequestTrace:
        """Begin the trace of a request, known for as long as it is referenced. The engine calls its prompts `names`."""
        kept = tuple(islice(names, MAX_PROMPTS))
        trace = RequestTrace(caller.id, caller.cache_salt, caller.arrived, [None] * len(kept), names=kept)
        self._running[trace.id] = trace
        return trace

    def remember(self, trace: RequestTrace) -> None:
        """Keep the trace of a request that has ended; the oldest is forgotten."""
        point("why.remember", trace.id)
        self._ended[trace.id] = trace
        if len(self._ended) > REMEMBERED:
            self._ended.popitem(last=False)

    def find(self, request: str, cache_salt: bytes) -> RequestTrace:
        """Return the trace of a request. Raises APIError where it is unknown, or another key's."""
        trace = self._running.get(request) or self._ended.get(request)
        if trace is None or trace.cache_salt != cache_salt:
            raise APIError("not_found", f"no such request is running, or among the last {REMEMBERED}")
        return trace
