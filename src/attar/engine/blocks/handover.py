"""What a new engine takes over from another replica: the blocks of prompts that were used last there.

The other replica says which beginnings of prompts those are, the last used first. They are fetched one after another
into free blocks, and go into the tree as any fetched blocks do. Nothing waits for them: the engine has been ready
before. Requests that come meanwhile compute what is not there yet. At most one in `PART` blocks of the cache is taken
over, nothing is evicted for them, and after `SECONDS` it ends. Whatever goes wrong ends it too; what was verified by
then stays.
"""

from __future__ import annotations

import logging
import time
from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from attar.errors import UserError
from attar.kv.block_bytes import BlockBytes
from attar.scheduling.fetching import PART, Fetch
from attar.scheduling.scheduler import Scheduler
from attar.transfer.header import Origin
from attar.transfer.puller import Pulled, Puller
from attar.transfer.wire import Address, Prefill
from attar.transfer.worker import Worker

SECONDS = 10.0  # from the order to the last block

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Listed:
    """News for the engine's thread: salts and tokens of what the other replica has."""

    prefixes: list[tuple[bytes, array[int]]]


@dataclass(frozen=True, eq=False)
class TakenOver:
    """News for the engine's thread: nothing writes to a fetch's blocks any more, of which the first `count` are
    whole."""

    fetch: Fetch
    count: int


class Handover:
    """The takeover of blocks of `origin` by the cache that `scheduler` manages. The calls are those of the engine's
    thread. `pulls` is the thread that fills blocks, and `tell` leaves news for `listed` and `taken_over`."""

    def __init__(
        self, scheduler: Scheduler, blocks: BlockBytes, origin: Origin, pulls: Worker, tell: Callable[[object], None]
    ) -> None:
        self.pulled = Pulled()
        self._scheduler, self._bytes, self._origin = scheduler, blocks, origin
        self._pulls, self._tell = pulls, tell
        self._puller: Puller | None = None  # while it is under way
        self._left: deque[tuple[bytes, array[int]]] = deque()
        self._done: list[tuple[bytes, array[int]]] = []
        self._until, self._closed = 0.0, False

    def begin(self, path: Path) -> None:
        """Begin to take over what the replica has whose listener is at `path`, unless that is under way."""
        most = min(self._scheduler.pool.free, self._scheduler.pool.total // PART)
        if self._puller is not None or not most:
            return
        try:
            puller = Puller(Address(path), self._origin)
        except (UserError, OSError) as error:
            logger.warning("nothing is taken over from another replica: %s", error)
            return
        puller.pulled = self.pulled  # which counts all of them
        self._puller, self._until = puller, time.monotonic() + SECONDS
        self._pulls.put(partial(self._list, puller, most))

    def listed(self, told: Listed) -> None:
        """Fetch what the other replica has."""
        self._left.extend(told.prefixes)
        self._go_on()

    def taken_over(self, told: TakenOver) -> None:
        """Put a fetch's blocks into the tree, and go on with the next unless something failed."""
        self._scheduler.received(told.fetch, told.count, time.monotonic())
        self._done.append((told.fetch.salt, told.fetch.tokens))
        if self._puller is not None and not self._puller.usable:
            self._left.clear()
        self._go_on()

    def close(self) -> None:
        """End what is under way, within a moment."""
        self._closed = True

    def _wanted(self) -> bool:
        return not self._closed and time.monotonic() < self._until

    def _go_on(self) -> None:
        """Fetch the next beginning of which the tree lacks blocks; end where none is left, or no room, or no time."""
        puller, cache = self._puller, self._scheduler.cache
        assert puller is not None
        while self._left and self._wanted():
            salt, tokens = self._left.popleft()
            match = cache.match(salt, tokens, use=False)
            known = len(match.blocks)
            if known * self._origin.tokens == len(tokens):
                continue
            if (fetch := self._scheduler.prefetch(salt, tokens, match)) is None:
                break
            ask = Prefill(tokens.tobytes(), b"", salt, "", known, SECONDS, cached=True)
            self._pulls.put(partial(self._pull, puller, fetch, ask))
            return
        for salt, tokens in reversed(self._done):  # the last used there is the last used here
            cache.match(salt, tokens)
        logger.info("blocks taken over from another replica: %d", self.pulled.blocks)
        self._left.clear()
        self._done.clear()
        self._puller = None
        self._pulls.put(puller.close)

    # ---- in the thread

    def _list(self, puller: Puller, most: int) -> None:
        found: list[tuple[bytes, array[int]]] = []
        try:
            found = puller.hottest(most, SECONDS, self._wanted)
        finally:
            self._tell(Listed(found))

    def _pull(self, puller: Puller, fetch: Fetch, ask: Prefill) -> None:
        fill(self._bytes, puller, fetch, ask, self._wanted, lambda count: self._tell(TakenOver(fetch, count)))


def fill(
    blocks: BlockBytes, puller: Puller, fetch: Fetch, ask: Prefill, wanted: Callable[[], bool],
    done: Callable[[int], None],
) -> None:  # fmt: skip
    """Fill a fetch's blocks from a peer as long as they are `wanted`. `done` is called in any case, with the number of
    blocks that are whole."""
    count = 0
    try:
        if wanted():
            count = puller.pull(ask, fetch.tokens, lambda at: blocks.views(fetch.blocks[at]), wanted)
    finally:
        done(count)
