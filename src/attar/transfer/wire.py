"""The connection between a decode engine and a prefill engine: messages, and blocks as raw bytes.

One side asks for the finished blocks of a prompt and pulls them; nothing is ever pushed into its memory. A message is a
frame (`framing.py`) of msgpack. A block is the frame of its header, its bytes, and XXH3 of these, which finds errors
of a link or of memory and proves nothing. Bytes go from one cache into the other. Sizes are compared with what was
agreed on in the greeting before anything is allocated or read. Both sides greet first. Unequal greetings end the
connection, with both values named.

A Unix socket lies in a folder that this user alone may enter, so that the operating system keeps others out. On a
network both sides prove who they are, before anything else is said (`credentials.py`).
"""

from __future__ import annotations

import os
import re
import select
import socket
import ssl
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import xxhash

from attar.errors import UserError
from attar.protocol import framing
from attar.protocol.framing import frame
from attar.transfer.credentials import CHALLENGE, Credentials
from attar.transfer.header import PROTOCOL, BlockMismatch, Origin

MAX_MESSAGE = 16 << 20  # bytes; a prompt of a million tokens has four
LOOK_SECONDS = 0.1  # between two looks at whether an answer is still wanted
AWAKE_SECONDS = 1e-4  # of looking at a socket before a thread sleeps
DECODE, PREFILL = "decode", "prefill"  # roles, as proofs name them
HOST = re.compile(r"[A-Za-z0-9.-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\]")
MAX_PARTS, TOGETHER = 512, 256 << 10  # parts of one call of the system, which takes 1,024, and bytes, about
CHECKSUM = 8  # bytes
MAX_FIRST = 64 << 10  # bytes of a message before the other side is known
UNIX, TLS = "unix:", "tls://"
WAITS = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


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
    int32; they are to be computed within `seconds`. `salt` is the API key's, and `block_salt` that of the blocks. Where
    only what is `cached` is wanted, nothing is computed, and `salt` and `adapter` are not looked at."""

    tokens: bytes
    salt: bytes
    block_salt: bytes
    adapter: str
    first: int
    seconds: float
    cached: bool = False


class Blocks(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="blocks"):
    """The answer: so many blocks follow. 0: there are none, for a reason such as `busy`."""

    count: int
    why: str = ""


class Hottest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="hottest"):
    """A replica's question for the prompts' beginnings that were used last, of at most `blocks` blocks together."""

    blocks: int


class Prefixes(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="prefixes"):
    """The answer: salt of the blocks, and tokens of whole blocks as int32, of each beginning; the last used first."""

    prefixes: tuple[tuple[bytes, bytes], ...]


class Challenge(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="challenge"):
    """Random bytes, new for each connection, that the other side answers with a `Proof`."""

    random: bytes


class Proof(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="proof"):
    """The proof that a side knows a key: `Credentials.proof`."""

    mac: bytes


Message = Greeting | Prefill | Blocks | Hottest | Prefixes | Challenge | Proof
_decoder = msgspec.msgpack.Decoder(Message)


class Gone(ConnectionError):
    """The other side has gone, or is too slow, or this side does not want the answer any more."""


class Wire:
    """One side of a connection. `wanted` tells, about ten times a second, whether to go on; each call has `until`, on
    the clock `time.monotonic`. Every call raises Gone, or OSError, where the other side fails."""

    def __init__(self, connected: socket.socket, wanted: Callable[[], bool] = lambda: True) -> None:
        connected.setblocking(False)  # faster than a timeout, with which Python waits before each call
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
            except WAITS as error:
                self._wait(until, writing=not isinstance(error, ssl.SSLWantReadError))

    def receive(self, until: float, most: int = MAX_MESSAGE) -> Message:
        """Return the next message. Raises BlockMismatch for anything else, and for more than `most` bytes."""
        try:
            found: Message = _decoder.decode(self.receive_frame(most, until))
            return found
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

    def receive_into(self, out: bytearray | memoryview, until: float) -> None:
        """Fill `out`."""
        view = memoryview(out)
        while len(view):
            try:
                got = self._socket.recv_into(view)
            except WAITS as error:
                self._wait(until, writing=isinstance(error, ssl.SSLWantWriteError))
                continue
            if not got:
                raise Gone("the other side has gone")
            view = view[got:]

    def send_block(self, header: bytes, parts: list[memoryview], until: float) -> None:
        """Send a block: its header, its parts, and a checksum of the parts."""
        checksum = xxhash.xxh3_64()
        for part in parts:
            checksum.update(part)
        self._move([memoryview(frame(header)), *parts, memoryview(checksum.digest())], until, sends=True)

    def receive_block(self, parts: list[memoryview], until: float) -> None:
        """Fill the parts of a block, whose header was received. Raises BlockMismatch where the checksum behind them is
        another."""
        sent, checksum = bytearray(CHECKSUM), xxhash.xxh3_64()
        self._move([*parts, memoryview(sent)], until, sends=False)
        for part in parts:
            checksum.update(part)
        if checksum.digest() != sent:
            raise BlockMismatch("another checksum")

    def _move(self, parts: list[memoryview], until: float, sends: bool) -> None:
        """Send or fill parts: many with one call of the system, where there is no TLS."""
        if isinstance(self._socket, ssl.SSLSocket):
            for part in parts:
                (self.send_bytes if sends else self.receive_into)(part, until)
            return
        for some in _together(parts):
            while some:
                try:
                    done = self._socket.sendmsg(some) if sends else self._socket.recvmsg_into(some)[0]
                except BlockingIOError:
                    self._wait(until, writing=sends)
                    continue
                if not done:
                    raise Gone("the other side has gone")
                at = 0
                while at < len(some) and done >= len(some[at]):
                    done, at = done - len(some[at]), at + 1
                del some[:at]
                if done:
                    some[0] = some[0][done:]

    def lost(self) -> bool:
        """Return whether the other side has closed the connection, or speaks out of turn."""
        return bool(select.select([self._socket], [], [], 0)[0])

    def _wait(self, until: float, writing: bool = False) -> None:
        """Wait until the socket can be read or written, awake for a moment: while blocks flow, both sides wait for each
        other after every few hundred KB, for less time than a sleeping thread needs to wake."""
        own = [self._socket]
        read, write = (own, ()) if not writing else ((), own)
        asleep = time.perf_counter() + AWAKE_SECONDS
        while time.perf_counter() < asleep:  # a look takes a microsecond, or long where Python's other threads work
            if any(select.select(read, write, (), 0)):
                return
        while True:
            left = until - time.monotonic()
            if left <= 0:
                raise Gone("the other side is too slow")
            if not self.wanted():
                raise Gone("the blocks are not wanted any more")
            if any(select.select(read, write, (), min(left, LOOK_SECONDS))):
                return


def _together(parts: list[memoryview]) -> Iterator[list[memoryview]]:
    """Yield the parts of a block, as many at a time as fill a socket's buffer: each call names all that are left."""
    some, size = list[memoryview](), 0
    for part in parts:
        some.append(part)
        size += len(part)
        if size >= TOGETHER or len(some) == MAX_PARTS:
            yield some
            some, size = [], 0
    if some:
        yield some


class Address(NamedTuple):
    """The place where a prefill engine answers: a Unix socket, or a host and a port."""

    path: Path | None = None
    host: str = ""
    port: int = 0

    @classmethod
    def parse(cls, url: str) -> Address:
        """Read unix:PATH or tls://HOST:PORT. Raises UserError for another form, and for a path that no socket can
        have."""
        told = f"--prefill-peer {url[:160]!r}"
        if url.startswith(UNIX):
            path = Path(url.removeprefix(UNIX)).absolute()
            if len(os.fsencode(path)) > 100:  # the kernel's limit is 107
                raise UserError("address_invalid", f"{told}: a socket's path has at most 100 bytes")
            return cls(path)
        host, _, port = url.removeprefix(TLS).rpartition(":")
        if not url.startswith(TLS) or not HOST.fullmatch(host) or not port.isdecimal() or not 0 < int(port) < 65536:
            raise UserError("address_invalid", f"{told}: write unix:PATH, or tls://HOST:PORT for another machine")
        return cls(None, host.strip("[]"), int(port))

    def check(self, credentials: Credentials | None) -> None:
        """Raise UserError where the folder of a socket is not this user's alone, and where a network's address comes
        without credentials; OSError where there is no folder."""
        if self.path is None:
            if credentials is None:
                message = "a prefill peer on a network needs --peer-key-file, --peer-ca, --peer-cert and --peer-name"
                raise UserError("option_missing", message)
            return
        status = self.path.parent.lstat()
        private = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
        if not private or stat.S_IMODE(status.st_mode) & 0o077:
            raise UserError("file_unsafe", f"{self.path.parent} must belong to this user alone: mkdir -m 700 it")


def dial(address: Address, credentials: Credentials | None, seconds: float) -> Wire:
    """Connect to a prefill engine, and let both sides prove who they are where that is needed. Raises OSError, and
    BlockMismatch for another key."""
    until = time.monotonic() + seconds
    if address.path is not None:
        connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    else:
        connected = socket.create_connection((address.host, address.port), seconds)
    try:
        connected.settimeout(seconds)
        if address.path is not None:
            connected.connect(str(address.path))
            return Wire(connected)
        assert credentials is not None
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected = credentials.asks.wrap_socket(connected, server_hostname=credentials.name)
        wire = Wire(connected)
        prove(wire, credentials, DECODE, until)
        return wire
    except BaseException:
        connected.close()
        raise


def greet(wire: Wire, origin: Origin, until: float) -> None:
    """Greet the other side, as it does. Raises BlockMismatch where its blocks are of another kind."""
    mine = Greeting.of(origin)
    wire.send(mine, until)
    theirs = wire.receive(until, MAX_FIRST)
    if not isinstance(theirs, Greeting):
        raise BlockMismatch("no greeting")
    mine.check(theirs)


def prove(wire: Wire, credentials: Credentials, role: str, until: float) -> None:
    """Prove to the other side that this one knows the key, and the reverse. Raises BlockMismatch where it does not."""
    other, mine = PREFILL if role == DECODE else DECODE, os.urandom(CHALLENGE)
    wire.send(Challenge(mine), until)
    theirs = wire.receive(until, MAX_FIRST)
    if not isinstance(theirs, Challenge) or len(theirs.random) != CHALLENGE or theirs.random == mine:
        raise BlockMismatch("no challenge")
    wire.send(Proof(credentials.proof(role, mine, theirs.random)), until)
    proof = wire.receive(until, MAX_FIRST)
    if not isinstance(proof, Proof) or not credentials.accepts(proof.mac, other, theirs.random, mine):
        raise BlockMismatch("another key")
