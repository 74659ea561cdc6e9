"""What attar's processes exchange through Ray: bytes that msgspec has made. Ray pickles only the bytes object.

An order goes to a replica's `answer`, whose stream yields lists of the request's events. A replica's `watch` yields
what is not of one request. The lists hold what had gathered, so one item of a stream may have several tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from attar.protocol.framing import FrameTooLong
from attar.protocol.messages import MAX_FRAME, Beat, CachedBlocks, Embed, Ready, RequestStatus, Stats, StepTimes, Submit
from attar.server.engine_client.connection import AnswerEvent

State = Ready | Stats | CachedBlocks | StepTimes | Beat
"""Events of an engine that are not of one request."""


class Order(msgspec.Struct, frozen=True):
    """A request for the replica of this id; an empty id leaves the choice to the request router."""

    command: Submit | Embed
    replica: str = ""


class Told(msgspec.Struct, frozen=True):
    """What a replica tells: its engine was `lost`, then these events came."""

    events: tuple[State, ...] = ()
    lost: bool = False


_ORDERS = msgspec.msgpack.Decoder(Order)
_TOLD = msgspec.msgpack.Decoder(Told)
_EVENTS = msgspec.msgpack.Decoder(list[AnswerEvent])
_REPORTS = msgspec.msgpack.Decoder(list[RequestStatus])


def encode(message: Order | Told | Sequence[AnswerEvent] | Sequence[RequestStatus]) -> bytes:
    """Return a message as bytes. Raises FrameTooLong where there are more than MAX_FRAME of them."""
    data = msgspec.msgpack.encode(message)
    if len(data) > MAX_FRAME:
        raise FrameTooLong(f"a message of {len(data)} bytes is longer than {MAX_FRAME}")
    return data


def order(data: bytes) -> Order:
    """Return an order. Raises ValueError for other bytes."""
    return _ORDERS.decode(_sized(data))


def told(data: bytes) -> Told:
    """Return what a replica told. Raises ValueError for other bytes."""
    return _TOLD.decode(_sized(data))


def events(data: bytes) -> list[AnswerEvent]:
    """Return the events of a request. Raises ValueError for other bytes."""
    return _EVENTS.decode(_sized(data))


def reports(data: bytes) -> list[RequestStatus]:
    """Return reports on requests. Raises ValueError for other bytes."""
    return _REPORTS.decode(_sized(data))


def _sized(data: bytes) -> bytes:
    if len(data) > MAX_FRAME:
        raise FrameTooLong(f"a message of {len(data)} bytes is longer than {MAX_FRAME}")
    return data
