"""Outbox of the engine's process: events to the server, as frames."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections.abc import Sequence

from attar.engine.requests.table import SENTENCES
from attar.faults import point
from attar.protocol.messages import Beat, CachedBlocks, Event, Failed, Ready, RequestStatus, Stats, StepTimes, encode

logger = logging.getLogger(__name__)


class Outbox:
    """Output queue to one server: whole frames, in order, from either thread.

    The socket does not block: bytes that it does not take wait here. So the lock is held for moments only, and neither
    thread can hold up the other, however slowly the server reads. The first frame is queued from the start: no beat
    precedes it.
    """

    def __init__(self, server: socket.socket, first: bytes) -> None:
        server.setblocking(False)
        self._server, self._waiting, self._lock = server, bytearray(first), threading.Lock()

    @property
    def waiting(self) -> int:
        """Bytes that the socket has not taken."""
        return len(self._waiting)

    def put(self, frames: bytes = b"") -> None:
        """Send waiting bytes, then `frames`, as far as the socket takes them. Raises OSError for a closed one."""
        with self._lock:
            self._waiting += frames
            self._send()

    def beat(self, frame: bytes) -> None:
        """Send a beat as `put` does, unless bytes wait: a server that does not read needs no beats."""
        with self._lock:
            if not self._waiting:
                self._waiting += frame
            self._send()

    def close(self) -> None:
        """Close the socket; waiting bytes are lost."""
        with self._lock:
            self._server.close()

    def _send(self) -> None:
        if self._waiting:
            with contextlib.suppress(BlockingIOError):
                del self._waiting[: self._server.send(self._waiting)]


def framed(events: Sequence[Event], lost: set[str]) -> bytes:
    """Encode one frame, or, where that is impossible, one an event. An event too large for a frame becomes its
    request's failure: the id joins `lost`, and nothing more is sent about it."""
    try:
        for event in events:
            if not isinstance(event, Ready | Stats | CachedBlocks | StepTimes | Beat | RequestStatus):
                point("events.encode", event.id)
        return encode(events)
    except Exception as error:
        if len(events) > 1:
            return b"".join(framed([event], lost) for event in events if getattr(event, "id", "") not in lost)
        (event,) = events
        assert not isinstance(event, Ready | Stats | CachedBlocks | StepTimes | Beat | RequestStatus), "these are short"
        lost.add(event.id)
        if isinstance(error, ValueError):
            return encode([Failed(event.id, "too_long", "the answer is too long to be sent")])
        logger.error("what is to be said of request %s cannot be encoded", event.id, exc_info=error)
        return encode([Failed(event.id, "internal", SENTENCES["internal"])])
