"""The side of a prefill engine: it answers for the finished blocks of prompts, which others pull.

Each connection has a thread, which asks the engine's thread to compute a prompt and then reads the blocks that it was
lent. A loan ends when the last block is sent, and also when the other side goes, is too slow, or after `LEASE_SECONDS`:
always by the thread that reads, once it has released them.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import queue
import socket
import ssl
import threading
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from attar.errors import UserError
from attar.transfer.credentials import Credentials
from attar.transfer.header import BlockHeader, BlockMismatch, Names, Origin
from attar.transfer.wire import (
    LOOK_SECONDS,
    PREFILL,
    Address,
    Blocks,
    Gone,
    Hottest,
    Prefill,
    Prefixes,
    Wire,
    greet,
    prove,
)

MAX_CONNECTIONS = 16
GREETING_SECONDS = 2.0
CLOSE_SECONDS = 1.0  # for a thread to end: one that frees memory while the program ends aborts it
KEEPALIVE_SECONDS = 60  # without a byte, after which TCP asks whether the other host is still there
LEASE_SECONDS = 30.0  # that blocks are held for one answer, at most
MAX_SECONDS = 600.0  # of computing one prompt, at most

T = TypeVar("T")

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class PrefillAsked:
    """A prompt that the engine's thread is to compute; `reply` gets the blocks that it lends, or None.

    `gone` and `request` belong to the engine's thread: whether nobody waits any more, and the id of its request.
    """

    ask: Prefill
    tokens: array[int]
    reply: queue.SimpleQueue[LentBlocks | None] = field(default_factory=queue.SimpleQueue)
    gone: bool = False
    request: str = ""


@dataclass(eq=False)
class HottestAsked:
    """A replica's question which beginnings of prompts were used last; `reply` gets salts and tokens."""

    blocks: int
    reply: queue.SimpleQueue[list[tuple[bytes, array[int]]]] = field(default_factory=queue.SimpleQueue)


@dataclass(frozen=True, eq=False)
class LentBlocks:
    """Blocks of the cache, a prompt's first ones, and what their loan is called."""

    blocks: list[int]
    loan: Any


@dataclass(frozen=True, eq=False)
class GivenUp:
    """News for the engine's thread: nobody waits for a prompt any more."""

    asked: PrefillAsked


@dataclass(frozen=True, eq=False)
class GivenBack:
    """News for the engine's thread: nothing reads these blocks any more."""

    lent: LentBlocks


@dataclass(slots=True)
class Sent:
    """Counts of what was sent, since the start."""

    blocks: int = 0
    bytes: int = 0
    refused: int = 0  # connections whose blocks are of another kind
    failed: int = 0  # answers that broke off


class PrefillListener:
    """A socket at `address` whose peers pull blocks of `origin`. `views` gives a block's memory, and `tell` leaves news
    for the engine's thread. Peers that are `replicas` of the engine may ask for what it has cached, whoever's that is,
    and not for more.

    Raises UserError as `Address.check` and where another process listens there, and OSError.
    """

    def __init__(
        self, address: Address, origin: Origin, views: Callable[[int], list[memoryview]], tell: Callable[[Any], None],
        credentials: Credentials | None = None, replicas: bool = False,
    ) -> None:  # fmt: skip
        address.check(credentials)
        self._replicas = replicas
        self._address, self._credentials = address, credentials
        self._origin, self._views, self._tell = origin, views, tell
        self.sent = Sent()
        self._connections: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []  # of connections; one may end a moment after its connection
        self._closed = False
        self._listener = _listen(address)
        self._accepting = threading.Thread(target=self._accept, name="prefill-peers", daemon=True)
        self._accepting.start()

    def close(self) -> None:
        """Accept no more, break off what is under way, and wait a moment for the threads that read blocks."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for each in list(self._connections):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        if self._address.path is not None:
            self._address.path.unlink(missing_ok=True)
        for thread in (self._accepting, *self._threads):
            thread.join(CLOSE_SECONDS)

    def _accept(self) -> None:
        while not self._closed:
            try:
                connected, _ = self._listener.accept()
            except OSError:
                if self._closed:
                    return
                time.sleep(LOOK_SECONDS)  # no descriptor is left, say
                continue
            if len(self._connections) >= MAX_CONNECTIONS:
                connected.close()
                continue
            self._connections.add(connected)
            thread = threading.Thread(target=self._serve, args=(connected,), name="prefill-peer", daemon=True)
            self._threads = [each for each in self._threads if each.is_alive()]
            thread.start()
            self._threads.append(thread)

    def _serve(self, connected: socket.socket) -> None:
        wire: Wire | None = None
        try:
            until = time.monotonic() + GREETING_SECONDS
            wire = self._known(connected, until)
            greet(wire, self._origin, until)
            while True:
                self._answer(wire, wire.receive(math.inf))
        except BlockMismatch as error:
            logger.warning("a peer is refused: %s", error)
            self.sent.refused += 1
        except Gone:
            pass
        except (ssl.SSLError, PermissionError) as error:
            logger.warning("a peer is refused: %s", getattr(error, "reason", None) or error)
            self.sent.refused += 1
        except OSError as error:
            logger.info("a peer has gone: %s", error.strerror)
        except Exception:  # whatever it is, it ends this connection alone
            logger.exception("a peer's question failed")
        finally:
            self._connections.discard(connected)
            (connected if wire is None else wire).close()

    def _known(self, connected: socket.socket, until: float) -> Wire:
        """Return a connection whose other side is known."""
        if self._credentials is None:
            return Wire(connected, lambda: not self._closed)
        connected.settimeout(GREETING_SECONDS)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # else a host that lost power keeps its place
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_SECONDS)
        secured = self._credentials.answers.wrap_socket(connected, server_side=True)
        try:
            self._credentials.check_client(secured.getpeercert())
            wire = Wire(secured, lambda: not self._closed)
            prove(wire, self._credentials, PREFILL, until)
        except BaseException:
            secured.close()
            raise
        return wire

    def _answer(self, wire: Wire, ask: object) -> None:
        """Have a prompt computed, or looked up, and send its blocks."""
        if isinstance(ask, Hottest) and self._replicas:
            self._tell_hottest(wire, ask)
            return
        if not isinstance(ask, Prefill) or not 0 < ask.seconds <= MAX_SECONDS or ask.first < 0:
            raise BlockMismatch("no question")
        if ask.cached is not self._replicas:
            raise BlockMismatch("no question for this engine")
        size = self._origin.tokens
        if len(ask.tokens) % (4 * size) or not 0 <= ask.first < len(ask.tokens) // (4 * size):
            raise BlockMismatch("a prompt that is not of whole blocks")
        asked = PrefillAsked(ask, array("i", ask.tokens))
        lent = self._computed(wire, asked)
        try:
            count = 0 if lent is None else max(0, len(lent.blocks) - ask.first)
            until = time.monotonic() + LEASE_SECONDS
            wire.send(Blocks(count, "" if count else "busy"), until)
            if lent is not None and count:
                self._send(wire, asked, lent, until)
        except (OSError, Gone):
            self.sent.failed += 1
            raise
        finally:
            if lent is not None:
                self._tell(GivenBack(lent))

    def _computed(self, wire: Wire, asked: PrefillAsked) -> LentBlocks | None:
        """Wait until the engine's thread has computed a prompt; return the blocks that it lends. Raises Gone where the
        other side goes meanwhile."""
        self._tell(asked)
        try:
            return self._reply(wire, asked.reply, asked.ask.seconds)
        except Gone:
            self._tell(GivenUp(asked))  # that thread also takes back what it has lent by then
            raise

    def _tell_hottest(self, wire: Wire, ask: Hottest) -> None:
        """Say which beginnings of prompts were used last."""
        asked = HottestAsked(ask.blocks)
        self._tell(asked)
        found = self._reply(wire, asked.reply, LEASE_SECONDS)
        told = tuple((salt, tokens.tobytes()) for salt, tokens in found)
        wire.send(Prefixes(told), time.monotonic() + LEASE_SECONDS)

    def _reply(self, wire: Wire, reply: queue.SimpleQueue[T], seconds: float) -> T:
        """Wait for the engine's thread. Raises Gone where the other side goes meanwhile."""
        until = time.monotonic() + seconds
        while True:
            with contextlib.suppress(queue.Empty):
                return reply.get(timeout=LOOK_SECONDS)
            if self._closed or wire.lost() or time.monotonic() > until:
                raise Gone("nobody waits for the answer")

    def _send(self, wire: Wire, asked: PrefillAsked, lent: LentBlocks, until: float) -> None:
        names, size = Names(b"", self._origin), self._origin.tokens
        chain, salt = names.chain(asked.ask.block_salt, asked.tokens, size), names.salt(asked.ask.block_salt)
        for at in range(asked.ask.first, len(lent.blocks)):
            tokens = asked.tokens[at * size : (at + 1) * size]
            header = BlockHeader.of(self._origin, salt, chain[at - 1] if at else b"", tokens)
            wire.send_block(header.encode(), self._views(lent.blocks[at]), until)
            self.sent.blocks += 1
            self.sent.bytes += self._origin.size


def _listen(address: Address) -> socket.socket:
    """Listen at an address. A socket that a dead process left there is removed."""
    if (path := address.path) is None:
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        return socket.create_server((address.host, address.port), family=family, backlog=MAX_CONNECTIONS)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with contextlib.suppress(ConnectionRefusedError, FileNotFoundError):
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
                other.connect(str(path))
            raise UserError("output_locked", f"{path}: another process listens there")
        if path.is_socket():
            path.unlink()
        before = os.umask(0o177)
        try:
            listener.bind(str(path))
        finally:
            os.umask(before)
        listener.listen(MAX_CONNECTIONS)
    except BaseException:
        listener.close()
        raise
    return listener
