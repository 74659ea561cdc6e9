"""Every request of an engine until it has ended, and the events that were not taken yet."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from attar.engine.requests.outputs import Choice, Request
from attar.protocol.messages import Embedding, Event, Failed, RequestStatus
from attar.sampling.sampler import BAD, BadLogits, SampledToken
from attar.scheduling.admission import Refused
from attar.scheduling.scheduler import Scheduler
from attar.scheduling.sequence import Sequence

logger = logging.getLogger(__name__)

SENTENCES = {
    "cancelled": "the request was cancelled",
    "deadline": "the request did not end before its deadline",
    "bad_logits": BAD,
    "grammar_limit": "the constraint grew past its limits along this answer: simplify it",
    "internal": "the engine failed on this request",
    "shutdown": "the engine is shutting down",
}


class RequestTable:
    """Requests by id, their choices by sequence id, and the events they give rise to.

    A request stays from `add` until its last event. A choice stays until the scheduler has released its sequence, which
    may be a step later.
    """

    def __init__(self, scheduler: Scheduler, clock: Callable[[], float]) -> None:
        self.requests: dict[str, Request] = {}
        self.choices: dict[str, Choice] = {}
        self.events: list[Event] = []
        self.own: dict[str, Callable[[Event], None]] = {}
        """Requests of the engine itself, by id, with what takes the event of their end; no other event is told."""
        self._late: list[tuple[Choice, SampledToken]] = []  # of the last step: their text is made while the next runs
        self._scheduler, self._clock = scheduler, clock

    def add(self, request: Request) -> None:
        """Queue every choice of a request. Raises Refused where the scheduler has no room."""
        self._scheduler.add([choice.sequence for choice in request.choices], self._clock())
        self.requests[request.id] = request
        request.open = len(request.choices)
        self.choices |= {choice.sequence.id: choice for choice in request.choices}

    def require_room(self, count: int) -> None:
        """Raise Refused where the scheduler's queue cannot take `count` more."""
        self._scheduler.require_room(count)

    def runs(self, id: str) -> bool:
        """Return whether a request of this id has not ended, or ends with the step under way."""
        return any(choice.request.id == id for choice in self.choices.values())

    def refuse(self, id: str, error: Exception) -> None:
        """Add the event that a request was refused."""
        if isinstance(error, ValueError):
            self.events.append(Failed(id, error.code if isinstance(error, Refused) else "invalid", str(error)))
        else:
            logger.error("request %s failed before it began", id, exc_info=error)
            self.events.append(Failed(id, "internal", SENTENCES["internal"]))

    def accept(self, choice: Choice, draw: SampledToken, later: bool) -> None:
        """Give a choice its next token. Its text waits until the next step runs, where `later` allows it and the text
        could not end its sequence."""
        if choice.take(draw) and later:
            self._late.append((choice, draw))
        else:
            self.events.append(choice.tell(draw))

    def tell_late(self) -> None:
        """Add the events of tokens that the last step left for later."""
        late, self._late = self._late, []
        for choice, draw in late:
            if choice.request.id in self.requests:
                try:
                    self.events.append(choice.tell(draw))
                except Exception:  # whatever it is, it concerns this request alone
                    logger.exception("sequence %s failed", choice.sequence.id)
                    self.fail(choice.request.id, "internal")

    def settle(self) -> list[Sequence]:
        """Add the events of sequences that the scheduler has ended; return these."""
        ended = self._scheduler.collect()
        if ended:
            self.tell_late()
        for sequence in ended:
            choice = self.choices.pop(sequence.id)
            if choice.request.id in self.requests:
                self._end(choice, sequence)
        return ended

    def _end(self, choice: Choice, sequence: Sequence) -> None:
        request = choice.request
        if sequence.ending != "finished":
            self.fail(request.id, str(sequence.ending))
            return
        try:
            self.events.append(choice.end(self._clock()))
        except BadLogits:
            self.fail(request.id, "bad_logits")
        except Exception:  # whatever it is, it concerns this request alone
            logger.exception("request %s failed at its end", request.id)
            self.fail(request.id, "internal")
        else:
            request.open -= 1
            if not request.open:
                del self.requests[request.id]

    def fail(self, id: str, code: str) -> None:
        """End a request and all its choices with a failure."""
        if (request := self.requests.get(id)) is not None:
            self.events.append(Failed(id, code, SENTENCES[code], request.report(self._clock())))
            self.drop(id)

    def fail_all(self, code: str) -> None:
        """End every request."""
        self.tell_late()
        for id in list(self.requests):
            self.fail(id, code)

    def drop(self, id: str) -> None:
        """End a request without further events."""
        if (request := self.requests.pop(id, None)) is not None:
            for choice in request.choices:
                self._scheduler.cancel(choice.sequence.id, self._clock())

    def told(self, ids: Iterable[str]) -> list[Event]:
        """Return the state of those of these requests that have not ended."""
        now = self._clock()
        return [RequestStatus(id, self.requests[id].report(now)) for id in ids if id in self.requests]

    def take(self) -> list[Event]:
        """Return the events since the last call, and forget them."""
        events, self.events = self.events, []
        if not self.own:
            return events
        found = list[Event]()
        for event in events:
            if isinstance(event, Embedding | Failed) and (done := self.own.pop(event.id, None)) is not None:
                done(event)
            else:
                found.append(event)
        return found
