"""State that all requests share: metrics, traces for /why, and Retry-After of a full server.

It lies below the dispatcher, which submits requests, and below the handlers, which read their events.
"""

from __future__ import annotations

import time

from attar.protocol.messages import Failed
from attar.server.admission.retry_after import Backoff
from attar.server.engine_client.client import EngineClient
from attar.server.errors import APIError
from attar.server.metrics import Metrics
from attar.server.request_trace import RequestTraces

PROMPT_ANSWER = 1.0  # seconds that a stream's status waits for the engine's first event
LATE_ANSWER = 10.0  # at most, where the engine may refuse the request: clients wait for a status too


class RequestContext:
    """Metrics, traces and back-off of the requests to one `engine`, and whether the server accepts no more."""

    def __init__(self, engine: EngineClient) -> None:
        self.engine = engine
        self.metrics, self.backoff, self.traces = Metrics(engine), Backoff(), RequestTraces()
        self.draining = False

    def patience(self) -> float:
        """Return the seconds that a stream's status waits: longer where the engine's queue may be full, since the
        engine refuses only between two steps."""
        places = self.engine.places
        if places.total <= places.size:
            return PROMPT_ANSWER
        return min(max(PROMPT_ANSWER, 2 * self.engine.heartbeat.longest), LATE_ANSWER)

    def full(self, message: str) -> APIError:
        """Make the refusal of a request for which there is no room, with a Retry-After."""
        places = self.engine.places
        waiting = len(self.engine.open) * places.total / max(1, places.total + places.running)
        return APIError("overloaded", message, retry_after=self.backoff.retry_after(time.monotonic(), waiting))

    def refusal(self, failed: Failed) -> APIError:
        """Translate the engine's failure for the client."""
        refusal = APIError.of(failed)
        return self.full(refusal.message) if refusal.code == "overloaded" else refusal
