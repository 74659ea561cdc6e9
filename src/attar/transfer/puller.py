"""The side of a decode engine: it asks a prefill engine for the finished blocks of a prompt, and pulls them.

One connection is kept, and used by one thread. Whatever goes wrong ends it, and with it the question: the engine
computes what did not come. Nothing is asked for a while after that, so that a dead peer costs no request more than a
moment.

A replica that has just started asks another replica in the same way for what that one has cached.
"""

from __future__ import annotations

import contextlib
import logging
import time
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from attar.errors import UserError
from attar.transfer.credentials import Credentials
from attar.transfer.header import MAX_HEADER, BlockHeader, BlockMismatch, Names, Origin
from attar.transfer.wire import Address, Blocks, Hottest, Prefill, Prefixes, Wire, dial, greet

PAUSE_SECONDS = 2.0  # without questions, after one failed
CONNECT_SECONDS = 2.0
BLOCKS_SECONDS = 30.0  # for the blocks of one answer to come

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Pulled:
    """Counts of what was pulled, since the start."""

    blocks: int = 0
    bytes: int = 0
    refused: int = 0  # answers that were not what was asked for
    failed: int = 0  # answers that broke off, or never came
    busy: int = 0  # questions that the peer had no blocks for


class Puller:
    """The peer at an address, whose blocks are of `origin`. The calls are those of one thread, but for `usable`.

    Raises UserError and OSError as `Address.check`.
    """

    def __init__(self, address: Address, origin: Origin, credentials: Credentials | None = None) -> None:
        address.check(credentials)
        self._address, self._credentials = address, credentials
        self._origin, self._names = origin, Names(b"", origin)
        self.pulled = Pulled()
        self._wire: Wire | None = None
        self._paused = 0.0

    @property
    def usable(self) -> bool:
        """Whether the peer is asked now: nothing has failed of late."""
        return time.monotonic() >= self._paused

    def pull(
        self, ask: Prefill, tokens: array[int], views: Callable[[int], list[memoryview]], wanted: Callable[[], bool]
    ) -> int:
        """Ask for blocks, and fill the memory that `views` gives for each place in the prompt; return how many came,
        whole and in order. One more may have been written to, whose bytes mean nothing.

        `tokens` are those of the question. Once `wanted` is false, or anything is in doubt, no more are received.
        """
        count, size = 0, self._origin.tokens
        with self._doubting(wanted):
            wire = self._connected(wanted)
            until = time.monotonic() + ask.seconds
            wire.send(ask, until)
            answer = wire.receive(until)
            if not isinstance(answer, Blocks) or not 0 <= answer.count <= len(tokens) // size - ask.first:
                raise BlockMismatch("another number of blocks")
            self.pulled.busy += not answer.count
            chain, salt = self._names.chain(ask.block_salt, tokens, size), self._names.salt(ask.block_salt)
            until = time.monotonic() + BLOCKS_SECONDS
            for at in range(ask.first, ask.first + answer.count):
                header = BlockHeader.decode(bytes(wire.receive_frame(MAX_HEADER, until)))
                own = tokens[at * size : (at + 1) * size]
                header.check(self._origin, salt, chain[at - 1] if at else b"", own)
                wire.receive_block(views(at), until)
                count += 1
                self.pulled.blocks += 1
                self.pulled.bytes += self._origin.size
        return count

    def hottest(self, blocks: int, seconds: float, wanted: Callable[[], bool]) -> list[tuple[bytes, array[int]]]:
        """Ask a replica which beginnings of prompts were used last, of at most `blocks` blocks together; return the
        salt of the blocks and the tokens of each, the last used first. Empty where anything is in doubt."""
        found: list[tuple[bytes, array[int]]] = []
        until = time.monotonic() + seconds
        with self._doubting(wanted):
            wire = self._connected(wanted)
            wire.send(Hottest(blocks), until)
            answer = wire.receive(until)
            if not isinstance(answer, Prefixes):
                raise BlockMismatch("no prefixes")
            size = 4 * self._origin.tokens
            if not all(told and len(told) % size == 0 for _, told in answer.prefixes):
                raise BlockMismatch("a beginning that is not of whole blocks")
            found = [(salt, array("i", told)) for salt, told in answer.prefixes]
        return found

    def close(self) -> None:
        """Close the connection."""
        self._drop()

    @contextlib.contextmanager
    def _doubting(self, wanted: Callable[[], bool]) -> Iterator[None]:
        """Count, log and end what goes wrong within, and the connection with it; raise only what is unknown."""
        try:
            yield
        except BlockMismatch as error:
            logger.warning("the peer's answer is refused: %s", error)
            self.pulled.refused += 1
            self._fail()
        except (OSError, UserError) as error:
            if not wanted():
                self._drop()
                return
            logger.warning("the peer failed: %s", error)
            self.pulled.failed += 1
            self._fail()
        except BaseException:
            self._fail()
            raise

    def _connected(self, wanted: Callable[[], bool]) -> Wire:
        """Return the connection, after greetings where it is new."""
        if self._wire is None or self._wire.lost():
            self._drop()
            self._address.check(self._credentials)
            wire = dial(self._address, self._credentials, CONNECT_SECONDS)
            try:
                greet(wire, self._origin, time.monotonic() + CONNECT_SECONDS)
            except BaseException:
                wire.close()
                raise
            self._wire = wire
        self._wire.wanted = wanted
        return self._wire

    def _fail(self) -> None:
        self._drop()
        self._paused = time.monotonic() + PAUSE_SECONDS

    def _drop(self) -> None:
        if self._wire is not None:
            self._wire.close()
            self._wire = None
