"""What became of requests, as /why tells it."""

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
from attar.server.errors import Refusal

MAX_PROMPTS = 128  # of a request that are told of: of an embedding the first
REMEMBERED = 1000  # requests that /why can tell of when they have ended


@dataclass(slots=True, weakref_slot=True)
class RequestTrace:
    """What became of a request, as /why tells it. Times are monotonic."""

    id: str
    salt: bytes
    arrived: float
    reports: list[Report | None]
    """Of its prompts, of those of an embedding the first."""
    outcome: str = "running"
    first: float | None = None
    ended: float | None = None
    generated: int = 0
    names: tuple[str, ...] = ()
    """What the engine calls them."""

    def told(self, now: float, running: Mapping[str, Report] | None = None) -> dict[str, Any]:
        """For JSON. `running` are reports of those that have not ended, by the engine's names."""
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
        """Takes the reports out of events, also of those that come when nobody reads the answer any more. `prompts`:
        which of them an event's id names."""

        def read(event: AnswerEvent) -> None:
            if isinstance(event, Finished | Embedding | Failed) and event.report is not None:
                at = prompts[event.id]
                if at < len(self.reports):
                    self.reports[at] = event.report

        return read


class RequestTraces:
    """Those of the requests that run, and of the last that have ended. Each is told only to whoever has its key."""

    def __init__(self) -> None:
        self._running: WeakValueDictionary[str, RequestTrace] = WeakValueDictionary()
        self._ended: OrderedDict[str, RequestTrace] = OrderedDict()

    def begin(self, caller: Caller, names: Iterable[str]) -> RequestTrace:
        """A request of `caller` runs, for as long as somebody holds the trace. The engine calls its prompts `names`."""
        kept = tuple(islice(names, MAX_PROMPTS))
        trace = RequestTrace(caller.id, caller.salt, caller.arrived, [None] * len(kept), names=kept)
        self._running[trace.id] = trace
        return trace

    def remember(self, trace: RequestTrace) -> None:
        """Its request has ended; the oldest is forgotten."""
        point("why.remember", trace.id)
        self._ended[trace.id] = trace
        if len(self._ended) > REMEMBERED:
            self._ended.popitem(last=False)

    def find(self, request: str, salt: bytes) -> RequestTrace:
        """Raises Refusal where nobody knows of the request, or it was another's."""
        trace = self._running.get(request) or self._ended.get(request)
        if trace is None or trace.salt != salt:
            raise Refusal("not_found", f"no such request is running, or among the last {REMEMBERED}")
        return trace
