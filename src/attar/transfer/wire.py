"""The connection between a decode engine and a prefill engine: messages, and blocks as raw bytes.

One side asks for the finished blocks of a prompt and pulls them; nothing is ever pushed into its memory. A message is a
frame (`framing.py`) of msgpack. A block is the frame of its header, then its bytes. Sizes are compared with what was
agreed on in the greeting before anything is allocated or read. Both sides greet first. Unequal greetings end the
connection, with both values named.

The sockets are Unix sockets in a folder that this user alone may enter, so that the operating system keeps others out.
Addresses on networks are refused.
"""

from __future__ import annotations

import os
import select
import socket
import stat
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from attar.errors import UserError
from attar.protocol import framing
from attar.protocol.framing import frame
from attar.transfer.header import PROTOCOL, BlockMismatch, Origin

MAX_MESSAGE = 16 << 20  # bytes; a prompt of a million tokens has four
LOOK_SECONDS = 0.1  # between two looks at whether an answer is still wanted
SCHEME = "unix:"


class Greeting(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="greeting"):
    """The first message of either side: the version of the protocol, and all that blocks depend on."""

    protocol: int
    origin: Origin

    @classmethod
    def of(cls, origin: Origin) -> Greeting:
        """Make the greeting of this side."""
        return cls(PROTOCOL, origin)

    def check(self, other: Greeting) -> None:
        """Raise BlockMismatch, with both values named, where the other side's blocks are of another kind."""
        if self.protocol != other.protocol:
            raise BlockMismatch(f"protocol {other.protocol}, not {self.protocol}")
        for name in Origin.__struct_fields__:
            mine, theirs = getattr(self.origin, name), getattr(other.origin, name)
            if mine != theirs:
                raise BlockMismatch(f"{name} {str(theirs)[:80]!r}, not {str(mine)[:80]!r}")


class Prefill(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="prefill"):
    """A question for the blocks of a prompt from number `first` on. `tokens` are those of all its whole blocks, as
    int32; they are to be computed within `seconds`. `salt` is the API key's, and `block_salt` that of the blocks."""

    tokens: bytes
    salt: bytes
    block_salt: bytes
    adapter: str
    first: int
    seconds: float


class Blocks(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="blocks"):
    """The answer: so many blocks follow. 0: there are none, for a reason such as `busy`."""

    count: int
    why: str = ""


Message = Greeting | Prefill | Blocks
_decoder = msgspec.msgpack.Decoder(Message)


class Gone(ConnectionError):
    """The other side has gone, or is too slow, or this side does not want the answer any more."""


class Wire:
    """One side of a connection. `wanted` tells, about ten times a second, whether to go on; each call has `until`, on
    the clock `time.monotonic`. Every call raises Gone, or OSError, where the other side fails."""

    def __init__(self, connected: socket.socket, wanted: Callable[[], bool] = lambda: True) -> None:
        connected.setblocking(False)
        self._socket, self.wanted = connected, wanted

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()

    def send(self, message: Message, until: float) -> None:
        """Send a message."""
        self.send_bytes(frame(msgspec.msgpack.encode(message), MAX_MESSAGE), until)

    def send_bytes(self, data: bytes | bytearray | memoryview, until: float) -> None:
        """Send bytes as they are."""
        view = memoryview(data)
        while len(view):
            try:
                view = view[self._socket.send(view) :]
            except BlockingIOError:
                self._wait(until, writing=True)

    def receive(self, until: float) -> Message:
        """Return the next message. Raises BlockMismatch for anything else, and for one that is too long."""
        try:
            return _decoder.decode(self.receive_frame(MAX_MESSAGE, until))
        except msgspec.MsgspecError:
            raise BlockMismatch("no message") from None

    def receive_frame(self, most: int, until: float) -> bytearray:
        """Return the body of a frame of at most `most` bytes. Raises BlockMismatch for a longer one, before anything
        is allocated."""
        head = bytearray(framing.HEAD)
        self.receive_into(head, until)
        size = int.from_bytes(head, "little")
        if size > most:
            raise BlockMismatch(f"a frame of {size} bytes is longer than {most}")
        body = bytearray(size)
        self.receive_into(body, until)
        return body

    def receive_into(self, out: bytearray, until: float) -> None:
        """Fill `out`."""
        view = memoryview(out)
        while len(view):
            try:
                got = self._socket.recv_into(view)
            except BlockingIOError:
                self._wait(until)
                continue
            if not got:
                raise Gone("the other side has gone")
            view = view[got:]

    def lost(self) -> bool:
        """Return whether the other side has closed the connection, or speaks out of turn."""
        return bool(select.select([self._socket], [], [], 0)[0])

    def _wait(self, until: float, writing: bool = False) -> None:
        own = [self._socket]
        while True:
            left = until - time.monotonic()
            if left <= 0:
                raise Gone("the other side is too slow")
            if not self.wanted():
                raise Gone("the blocks are not wanted any more")
            ready = select.select(own if not writing else (), own if writing else (), (), min(left, LOOK_SECONDS))
            if ready[0] or ready[1]:
                return


def socket_path(url: str) -> Path:
    """Return the path of a Unix socket from unix:PATH. Raises UserError for other addresses, and for a path that a
    socket cannot have."""
    if not url.startswith(SCHEME):
        message = f"--prefill-peer {url[:160]!r}: write unix:PATH. Addresses on networks are not supported yet"
        raise UserError("address_invalid", message)
    path = Path(url.removeprefix(SCHEME)).absolute()
    if len(os.fsencode(path)) > 100:  # the kernel's limit is 107
        raise UserError("address_invalid", f"--prefill-peer {url[:160]!r}: a socket's path has at most 100 bytes")
    return path


def check_folder(path: Path) -> None:
    """Raise UserError where the folder of a socket is not this user's alone, and OSError where there is none."""
    status = path.parent.lstat()
    private = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
    if not private or stat.S_IMODE(status.st_mode) & 0o077:
        raise UserError("file_unsafe", f"{path.parent} must belong to this user alone: mkdir -m 700 it")
