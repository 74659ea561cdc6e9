"""The server's end of the socket between the two processes: frames of bytes to events."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Callable, Sequence
from typing import cast

import msgspec

from attar.protocol import framing
from attar.protocol.messages import (
    MAX_FRAME,
    Beat,
    CachedBlocks,
    Delta,
    Embedding,
    Failed,
    Finished,
    Ready,
    RequestStatus,
    Stats,
    StepTimes,
)


class PromptScores(msgspec.Struct, frozen=True, tag="prompt_logprobs"):
    """A `PromptLogprobs` in its encoded form: tens of bytes a token, where decoded values would take hundreds."""

    id: str
    logprobs: msgspec.Raw

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "logprobs", self.logprobs.copy())  # the bytes are the receive buffer's


AnswerEvent = Delta | PromptScores | Finished | Embedding | Failed
Event = AnswerEvent | Ready | Stats | CachedBlocks | StepTimes | Beat | RequestStatus


class Connection(asyncio.Protocol):
    """A connection to the engine's socket. `arrived` gets the events of each frame. Unreadable data ends the
    connection, and `wrong` gets the reason."""

    _transport: asyncio.Transport

    def __init__(
        self, arrived: Callable[[Sequence[Event]], None], lost: Callable[[], None], wrong: Callable[[str], None]
    ) -> None:
        self._arrived, self._lost, self._wrong = arrived, lost, wrong
        self._decoder = msgspec.msgpack.Decoder(list[Event])
        self._buffer = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by its class
        # The folder may have been cleaned away, and made again by another user, with a socket of the same name.
        peer = transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        if int.from_bytes(peer[4:8], sys.byteorder) != os.geteuid():
            self.give_up("another user's process listens at the engine's socket")

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while True:
            try:
                if (body := framing.take(self._buffer, MAX_FRAME)) is None:
                    return
                events = self._decoder.decode(body)
            except (msgspec.MsgspecError, framing.FrameTooLong) as error:
                what = "too long" if isinstance(error, framing.FrameTooLong) else "not of events"
                self.give_up(f"a frame is {what}")
                return
            self._arrived(events)

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost()

    def write(self, data: bytes) -> None:
        self._transport.write(data)

    def close(self) -> None:
        self._transport.close()

    def give_up(self, why: str) -> None:
        """End the connection at once."""
        self._wrong(why)
        self._transport.abort()
