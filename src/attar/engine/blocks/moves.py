"""The moves of finished blocks between an engine's cache and a disk cache, outside of its steps.

*In.* When a request has been queued, the tree and then the disk cache are asked for its prompt. The disk may continue
what the tree has. Then the request's sequences wait for those blocks (`scheduling/fetching.py`). The thread reads,
checks and copies them, one by one, into blocks that nothing else reads. The first doubt ends it: the rest is computed.

*Out.* What goes into the tree is saved in the background, the newest first, a few blocks at a time. The queue's length
is bounded. A loan of blocks ends once they are copied, before they are written.
"""

from __future__ import annotations

import logging
import select
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from attar.errors import UserError
from attar.kv.block_bytes import BlockBytes
from attar.kv.pages import PagedKV
from attar.scheduling.fetching import Fetch, Kept, Loan
from attar.scheduling.scheduler import Scheduler
from attar.scheduling.sequence import Sequence as Tokens
from attar.scheduling.sequence import Status
from attar.transfer.disk_cache import DiskCache
from attar.transfer.folder import PrivateFolder
from attar.transfer.header import Origin
from attar.transfer.worker import Worker

FETCH_SECONDS = 10.0  # that a request waits for blocks, at most
MAX_OFFERED = 256  # prompts' beginnings that wait to be saved; more are not saved
STAGED_BYTES, MAX_STAGED = 16 << 20, 8  # of blocks that are copied together before they are written, and blocks
WAIT_SECONDS = 0.01  # for blocks to be let go, where nothing else can be done
CLOSE_SECONDS = 5.0  # for blocks to be saved at the engine's end

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class SavedBlocks:
    """Where an engine saves its blocks: a locked folder, at most `limit` bytes, and the salts of all API keys.

    `model` and `settings` are those of `Origin`.
    """

    folder: PrivateFolder
    limit: int
    owners: tuple[bytes, ...]
    model: str
    settings: str


@dataclass(frozen=True, eq=False)
class _Filled:
    """The end of a fetch's job, of which the first `count` blocks are whole."""

    fetch: Fetch
    count: int


@dataclass(frozen=True, eq=False)
class _Saved:
    """The end of a save's job: nothing reads the blocks of `loan` any more, or, without one, the next may begin."""

    loan: Loan | None


class BlockMoves:
    """The moves of the blocks of `pages`, which `scheduler` manages. The calls are those of one thread."""

    def __init__(
        self, scheduler: Scheduler, pages: Sequence[PagedKV], saved: SavedBlocks, clock: Callable[[], float],
        seconds: float = FETCH_SECONDS,
    ) -> None:  # fmt: skip
        self.scheduler, self._clock, self._seconds = scheduler, clock, seconds
        if scheduler.sliding is not None:
            raise UserError(
                "kv_unsupported",
                "layers with a sliding window have blocks of their own, which are not saved: --cache-dir is for models "
                "whose layers all read the whole context",
            )
        self._bytes, self._size = BlockBytes(pages), scheduler.pool.size
        layout = self._bytes.layout_id
        origin = Origin(saved.model, saved.settings, layout, self._size, self._bytes.nbytes)
        self.disk = DiskCache(saved.folder, origin, saved.limit, saved.owners)
        self.worker = Worker()
        self.late = self.skipped = 0
        self._offered: deque[tuple[Kept, int]] = deque()  # with the first block that was not tried yet
        self._saving = False
        staged = min(MAX_STAGED, max(1, STAGED_BYTES // origin.size))
        self._staged = [bytearray(origin.size) for _ in range(staged)]
        scheduler.kept = deque()

    @property
    def descriptor(self) -> int:
        """The descriptor that becomes readable when `settle` has something to do."""
        return self.worker.descriptor

    @property
    def under_way(self) -> bool:
        """Whether the thread holds blocks of the cache."""
        return bool(self.scheduler.fetching.fetches or self.scheduler.fetching.loans)

    def consider(self, sequences: Collection[Tokens]) -> None:
        """Let newly queued sequences of one prompt wait for its blocks, where the disk has some that the tree lacks.

        An exception leaves them queued.
        """
        queued = [each for each in sequences if each.status is Status.QUEUED and not each.bypass]
        if not queued:
            return
        first, now = queued[0], self._clock()
        tokens = first.tokens[: self.scheduler.reusable(first)]
        names = self.disk.names.chain(first.salt, tokens, self._size)
        if not names or not self.disk.holds(names[0]):
            return
        match = self.scheduler.cache.match(first.salt, tokens[: len(names) * self._size])
        known = len(match.blocks)
        count = known + self.disk.reach(names, known)
        if count == known:
            return
        fetch = self.scheduler.fetch(queued, match, count, now + self._seconds, now)
        if fetch is not None:
            self.worker.put(lambda: self._fill(fetch, names), urgent=True)

    def wait(self) -> None:
        """Wait a moment for the thread to let go of blocks, where it holds any."""
        if self.under_way:
            select.select([self.descriptor], [], [], WAIT_SECONDS)

    def settle(self) -> None:
        """Take note of what the thread has done, and give it more to save."""
        for done in self.worker.take():
            if isinstance(done, _Filled):
                self.late += not done.fetch.wanted
                self.scheduler.received(done.fetch, done.count, self._clock())
            elif done.loan is not None:
                self.scheduler.fetching.give_back(done.loan)
            else:
                self._saving = False
        self._take_kept()
        while self._offered and not self._saving:
            try:
                self._save_next()
            except AssertionError:
                raise
            except Exception:
                logger.exception("blocks were not saved")
                self.skipped += 1

    def counts(self) -> tuple[int, ...]:
        """Return the counts of what was moved since the start, in the order of `messages.DISK_CACHE`."""
        moved, (entries, size) = self.disk.moved, self.disk.stored
        return (
            moved.loaded_blocks, moved.loaded_bytes, moved.saved_blocks, moved.saved_bytes, moved.refused, moved.failed,
            moved.dropped, self.skipped, self.late, entries, size,
        )  # fmt: skip

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Save what waits to be saved, for so many seconds at most, and end the thread."""
        end = self._clock() + seconds
        self.settle()
        while (self._saving or self._offered) and self._clock() < end:
            self.worker.wait(max(0.0, end - self._clock()))
            self.settle()
        self.worker.close(max(0.0, end - self._clock()))
        self.disk.close()

    def _take_kept(self) -> None:
        kept = self.scheduler.kept
        assert kept is not None
        while kept:
            self._offered.append((kept.popleft(), 0))
        most = MAX_OFFERED if self.disk.writable else 0
        while len(self._offered) > most:
            self._offered.popleft()
            self.skipped += 1

    def _save_next(self) -> None:
        """Have the next blocks saved, of the newest beginning that was offered; what was evicted meanwhile is not."""
        kept, first = self._offered.pop()
        names = self.disk.names.chain(kept.salt, kept.tokens, self._size)
        missing = [at for at in self.disk.missing(names) if at >= first]
        if not missing:
            return
        there = self.scheduler.cache.match(kept.salt, kept.tokens).blocks
        chosen = [at for at in missing if at < len(there)][: len(self._staged)]
        if chosen:
            self._offered.append((kept, chosen[-1] + 1))
            loan = self.scheduler.fetching.lend(there[: chosen[-1] + 1])
            self._saving = True
            self.worker.put(lambda: self._save(loan, kept, names, chosen))

    # ---- in the thread

    def _fill(self, fetch: Fetch, names: Sequence[bytes]) -> None:
        """Fill a fetch's blocks, as long as somebody waits for it and all is well."""
        count = 0
        try:
            for at, block in enumerate(fetch.filled, fetch.known):
                tokens = fetch.tokens[at * self._size : (at + 1) * self._size]
                if not fetch.wanted or (data := self.disk.load(names, at, fetch.salt, tokens)) is None:
                    break
                self._bytes.write(block, data)
                count += 1
        finally:
            self.worker.tell(_Filled(fetch, count))

    def _save(self, loan: Loan, kept: Kept, names: Sequence[bytes], chosen: Sequence[int]) -> None:
        """Copy blocks, give them back, and write them."""
        try:
            try:
                for at, out in zip(chosen, self._staged, strict=False):
                    self._bytes.read(loan.blocks[at], out)
            finally:
                self.worker.tell(_Saved(loan))
            for at, data in zip(chosen, self._staged, strict=False):
                tokens = kept.tokens[at * self._size : (at + 1) * self._size]
                self.disk.save(names, at, kept.owner, kept.salt, tokens, data)
        finally:
            self.worker.tell(_Saved(None))
