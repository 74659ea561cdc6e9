"""The moves of finished blocks between an engine's cache and a disk cache or another engine, outside of its steps.

*In.* When a request has been queued, the tree and then the disk cache are asked for its prompt. The disk may continue
what the tree has. Then the request's sequences wait for those blocks (`scheduling/fetching.py`). The thread reads,
checks and copies them, one by one, into blocks that nothing else reads. The first doubt ends it: the rest is computed.

*Out.* What goes into the tree is saved in the background, the newest first, a few blocks at a time. The queue's length
is bounded. A loan of blocks ends once they are copied, before they are written.

*Between engines.* A decode engine whose tree and disk lack blocks asks its prefill peer for them, and waits likewise;
a thread of its own pulls them. A prefill engine computes what peers ask for as a request of its own, and lends the
blocks to the thread that sends them (`transfer/listener.py`).

*Between replicas.* An engine that has just started takes blocks over from another (`handover.py`), which lends what its
tree has.
"""

from __future__ import annotations

import itertools
import logging
import select
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial

from attar.engine.blocks.handover import Handover, Listed, TakenOver, fill
from attar.errors import UserError
from attar.kv.block_bytes import BlockBytes
from attar.kv.pages import PagedKV
from attar.protocol.messages import Embed, Event, Failed
from attar.scheduling.fetching import Fetch, Kept, Loan
from attar.scheduling.scheduler import Scheduler
from attar.scheduling.sequence import Sequence as Tokens
from attar.scheduling.sequence import Status
from attar.transfer.credentials import Credentials
from attar.transfer.disk_cache import DiskCache
from attar.transfer.folder import PrivateFolder
from attar.transfer.header import Origin
from attar.transfer.listener import GivenBack, GivenUp, HottestAsked, LentBlocks, PrefillAsked, PrefillListener
from attar.transfer.puller import Pulled, Puller
from attar.transfer.wire import Address, Prefill
from attar.transfer.worker import Worker

FETCH_SECONDS = 10.0  # that a request waits for blocks, at most
PULL_SECONDS = 60.0  # the same for blocks that a peer has to compute
OWN = "\0peer "  # what ids of peers' prompts begin with, and no others
MIN_PULLED = 2  # blocks; fewer are computed sooner than asked for
MAX_PULLS = 4  # requests that wait for a peer; others compute their prompts
MAX_OFFERED = 256  # prompts' beginnings that wait to be saved; more are not saved
STAGED_BYTES, MAX_STAGED = 16 << 20, 8  # of blocks that are copied together before they are written, and blocks
WAIT_SECONDS = 0.01  # for blocks to be released, where nothing else can be done
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
class PeerBlocks:
    """The address at which a prefill engine answers, where `serves`, or a decode engine asks.

    `model` and `settings` are those of `Origin`. `credentials` are for addresses on networks. Of `replicas` each
    answers at its own address, computes nothing for others, and takes over blocks where it is told to.
    """

    address: Address
    serves: bool
    model: str
    settings: str
    credentials: Credentials | None = None
    replicas: bool = False


@dataclass(frozen=True, eq=False)
class _Filled:
    """The end of a fetch's job, of which the first `count` blocks are whole."""

    fetch: Fetch
    count: int
    pulled: bool = False


@dataclass(frozen=True, eq=False)
class _Saved:
    """The end of a save's job: nothing reads the blocks of `loan` any more, or, without one, the next may begin."""

    loan: Loan | None


class BlockMoves:
    """The moves of the blocks of `pages`, which `scheduler` manages. The calls are those of one thread.

    `saved` is the disk cache and `peer` the other engine, where there are such. `salt` gives the salt of blocks by
    adapter, salt of the API key and number of tokens. `compute` takes a request of the engine itself and calls a
    function with its end, and `cancel` cancels one. Raises UserError where blocks of this cache cannot be moved.
    """

    def __init__(
        self, scheduler: Scheduler, pages: Sequence[PagedKV], saved: SavedBlocks | None, peer: PeerBlocks | None,
        clock: Callable[[], float], salt: Callable[[str, bytes, int], bytes],
        compute: Callable[[Embed, Callable[[Event], None]], None], cancel: Callable[[str], None],
    ) -> None:  # fmt: skip
        if scheduler.tables.sliding is not None:
            raise UserError(
                "kv_unsupported",
                "layers with a sliding window have blocks of their own, which are not moved: --cache-dir and --role "
                "are for models whose layers all read the whole context",
            )
        self.scheduler, self._clock, self._seconds = scheduler, clock, FETCH_SECONDS
        self._salt, self._run, self._cancel = salt, compute, cancel
        self._numbers = itertools.count()  # of peers' prompts
        self._bytes, self._size = BlockBytes(pages), scheduler.pool.size
        layout, size = self._bytes.layout_id, self._bytes.nbytes
        self.worker, self.pulls = Worker(), Worker("pulls")
        self.late = self.skipped = self._pulling = 0
        self._offered: deque[tuple[Kept, int]] = deque()  # with the first block that was not tried yet
        self._saving = self._closing = False
        staged = min(MAX_STAGED, max(1, STAGED_BYTES // size))
        self._staged = [bytearray(size) for _ in range(staged if saved is not None else 0)]
        self.disk: DiskCache | None = None
        if saved is not None:
            origin = Origin(saved.model, saved.settings, layout, self._size, size)
            self.disk = DiskCache(saved.folder, origin, saved.limit, saved.owners)
            scheduler.tables.kept = deque()
        self.puller: Puller | None = None
        self.listener: PrefillListener | None = None
        self.handover: Handover | None = None
        if peer is not None:
            origin, tell = Origin(peer.model, peer.settings, layout, self._size, size), self.worker.tell
            if peer.serves:
                views, replicas = self._bytes.views, peer.replicas
                self.listener = PrefillListener(peer.address, origin, views, tell, peer.credentials, replicas)
                if replicas:
                    self.handover = Handover(scheduler, self._bytes, origin, self.pulls, tell)
            else:
                self.puller = Puller(peer.address, origin, peer.credentials)

    @property
    def descriptor(self) -> int:
        """The descriptor that becomes readable when `settle` has something to do."""
        return self.worker.descriptor

    @property
    def under_way(self) -> bool:
        """Whether the thread holds blocks of the cache."""
        return bool(self.scheduler.fetching.fetches or self.scheduler.fetching.loans)

    def consider(self, sequences: Collection[Tokens], salt: bytes, adapter: str) -> None:
        """Let newly queued sequences of one prompt wait for its blocks, where the disk or the peer has some that the
        tree lacks.

        `salt` is the API key's. A failure is logged, and leaves the sequences queued.
        """
        try:
            self._consider(sequences, salt, adapter)
        except AssertionError:
            raise
        except Exception:  # whatever it is: blocks that are not fetched are computed
            logger.exception("a request fetches nothing")

    def _consider(self, sequences: Collection[Tokens], salt: bytes, adapter: str) -> None:
        if self.disk is None and self.puller is None:
            return
        queued = [each for each in sequences if each.status is Status.QUEUED and not each.bypass]
        if not queued or queued[0].images:  # whose ids mean something in this process alone
            return
        first, now = queued[0], self._clock()
        most = self.scheduler.tables.reusable(first) // self._size
        if not most:
            return
        tokens = first.tokens[: most * self._size]
        match = self.scheduler.cache.match(first.salt, tokens)
        known = len(match.blocks)
        if self.disk is not None:
            names = self.disk.names.chain(first.salt, tokens, self._size)
            if (more := self.disk.reach(names, known)) > 0:
                fetch = self.scheduler.fetch(queued, match, known + more, now + self._seconds, now)
                if fetch is not None:
                    self.worker.put(partial(self._fill, fetch, names), urgent=True)
                return
        puller = self.puller
        if puller is None or not puller.usable or most - known < MIN_PULLED or self._pulling >= MAX_PULLS:
            return
        fetch = self.scheduler.fetch(queued, match, most, now + PULL_SECONDS, now)
        if fetch is not None:
            self._pulling += 1
            ask = Prefill(tokens.tobytes(), salt, first.salt, adapter, known, PULL_SECONDS)
            self.pulls.put(partial(self._pull, puller, fetch, ask))

    def wait(self) -> None:
        """Wait a moment for the thread to release blocks, where it holds any."""
        if self.under_way:
            select.select([self.descriptor], [], [], WAIT_SECONDS)

    def settle(self) -> None:
        """Take note of what the threads have done, and give them more to do."""
        for done in self.worker.take():
            match done:
                case _Filled():
                    self._pulling -= done.pulled
                    self.late += not (done.pulled or done.fetch.wanted)  # a count of the disk cache
                    self.scheduler.received(done.fetch, done.count, self._clock())
                case _Saved(loan=None):
                    self._saving = False
                case _Saved(loan=Loan() as loan):
                    self.scheduler.fetching.give_back(loan)
                case PrefillAsked() if not self._closing:  # else its thread gives up by itself: the listener is closed
                    self._compute(done)
                case HottestAsked():
                    done.reply.put(self.scheduler.cache.last_used(done.blocks))
                case Listed() if self.handover is not None:
                    self.handover.listed(done)
                case TakenOver() if self.handover is not None:
                    self.handover.taken_over(done)
                case GivenBack():
                    self.scheduler.fetching.give_back(done.lent.loan)
                case GivenUp():
                    self._give_up(done.asked)
        if self.disk is None:
            return
        self._take_kept()
        while self._offered and not self._saving:
            try:
                self._save_next(self.disk)
            except AssertionError:
                raise
            except Exception:  # whatever it is, it costs these blocks' saving alone: they can be computed again
                logger.exception("blocks were not saved")
                self.skipped += 1

    def _compute(self, asked: PrefillAsked) -> None:
        """Compute a peer's prompt as a request of the engine's own, unless what is cached will do, and lend the peer
        its blocks."""
        if asked.ask.cached:
            self._lend(asked, asked.ask.block_salt)
            return
        ask, id = asked.ask, f"{OWN}{next(self._numbers)}"

        def done(event: Event) -> None:
            if isinstance(event, Failed):
                asked.reply.put(None)
            else:
                self._lend(asked, self._salt(ask.adapter, ask.salt, len(asked.tokens)))

        asked.request = id
        self._run(Embed(id, tuple(asked.tokens), "last", ask.seconds, ask.adapter, ask.salt), done)

    def _lend(self, asked: PrefillAsked, salt: bytes) -> None:
        """Lend a peer the blocks of its prompt, which was computed with this salt."""
        if asked.gone:
            return
        lent = None
        try:
            if salt == asked.ask.block_salt:
                blocks = self.scheduler.cache.match(salt, asked.tokens, use=not asked.ask.cached).blocks
                lent = LentBlocks(blocks, self.scheduler.fetching.lend(blocks))
        finally:
            asked.reply.put(lent)

    def disk_counts(self) -> tuple[int, ...] | None:
        """Return the counts of the disk cache since the start, in the order of `messages.DISK_CACHE`; None without
        one."""
        if self.disk is None:
            return None
        moved, (entries, size) = self.disk.moved, self.disk.stored
        return (
            moved.loaded_blocks, moved.loaded_bytes, moved.saved_blocks, moved.saved_bytes, moved.refused, moved.failed,
            moved.dropped, self.skipped, self.late, entries, size,
        )  # fmt: skip

    def peer_counts(self) -> tuple[int, ...] | None:
        """Return the counts of blocks that engines have passed on, in the order of `messages.PREFILL_PEER`; None
        without a peer."""
        if self.puller is not None:
            pulled = self.puller.pulled
            return (pulled.blocks, pulled.bytes, 0, 0, pulled.refused, pulled.failed, pulled.busy)
        if self.listener is not None:
            sent, pulled = self.listener.sent, Pulled() if self.handover is None else self.handover.pulled
            return (
                pulled.blocks, pulled.bytes, sent.blocks, sent.bytes, sent.refused + pulled.refused,
                sent.failed + pulled.failed, pulled.busy,
            )  # fmt: skip
        return None

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Save what waits to be saved, for so many seconds at most, and end the threads. What a thread that hangs uses
        is left open: the folder is not another process's as long as this one may write there."""
        end, self._closing = self._clock() + seconds, True
        if self.listener is not None:
            self.listener.close()
        if self.handover is not None:
            self.handover.close()
        self.settle()
        while (self._saving or self._offered) and self._clock() < end:
            self.worker.wait(max(0.0, end - self._clock()))
            self.settle()
        if self.pulls.close(0.0) and self.puller is not None:
            self.puller.close()
        if self.worker.close(max(0.0, end - self._clock())) and self.disk is not None:
            self.disk.close()

    def _give_up(self, asked: PrefillAsked) -> None:
        """Cancel the prompt of a peer that does not wait any more, and take back what it was lent."""
        asked.gone = True
        self._cancel(asked.request)
        while not asked.reply.empty():
            if (lent := asked.reply.get_nowait()) is not None:
                self.scheduler.fetching.give_back(lent.loan)

    def _take_kept(self) -> None:
        kept = self.scheduler.tables.kept
        assert kept is not None
        while kept:
            self._offered.append((kept.popleft(), 0))
        most = MAX_OFFERED if self.disk is not None and self.disk.writable else 0
        while len(self._offered) > most:
            self._offered.popleft()
            self.skipped += 1

    def _save_next(self, disk: DiskCache) -> None:
        """Have the next blocks saved, of the newest beginning that was offered; what was evicted meanwhile is not."""
        kept, first = self._offered.pop()
        names = disk.names.chain(kept.salt, kept.tokens, self._size)
        missing = [at for at in disk.missing(names) if at >= first]
        if not missing:
            return
        there = self.scheduler.cache.match(kept.salt, kept.tokens).blocks
        chosen = [at for at in missing if at < len(there)][: len(self._staged)]
        if chosen:
            self._offered.append((kept, chosen[-1] + 1))
            loan = self.scheduler.fetching.lend(there[: chosen[-1] + 1])
            self._saving = True
            self.worker.put(partial(self._save, disk, loan, kept, names, chosen))

    # ---- in the threads

    def _pull(self, puller: Puller, fetch: Fetch, ask: Prefill) -> None:
        """Fill a fetch's blocks from the peer, as long as a sequence waits for it."""
        told = self.worker.tell
        fill(self._bytes, puller, fetch, ask, lambda: fetch.wanted, lambda n: told(_Filled(fetch, n, pulled=True)))

    def _fill(self, fetch: Fetch, names: Sequence[bytes]) -> None:
        """Fill a fetch's blocks, as long as somebody waits for it and all is well."""
        count, disk = 0, self.disk
        assert disk is not None
        try:
            for at, block in enumerate(fetch.filled, fetch.known):
                tokens = fetch.tokens[at * self._size : (at + 1) * self._size]
                if not fetch.wanted or (data := disk.load(names, at, fetch.salt, tokens)) is None:
                    break
                self._bytes.write(block, data)
                count += 1
        finally:
            self.worker.tell(_Filled(fetch, count))

    def _save(
        self, disk: DiskCache, loan: Loan, kept: Kept, names: Sequence[bytes], chosen: Sequence[int]
    ) -> None:  # fmt: skip
        """Copy blocks, give them back, and write them."""
        try:
            try:
                for at, out in zip(chosen, self._staged, strict=False):
                    self._bytes.read(loan.blocks[at], out)
            finally:
                self.worker.tell(_Saved(loan))
            for at, data in zip(chosen, self._staged, strict=False):
                tokens = kept.tokens[at * self._size : (at + 1) * self._size]
                disk.save(names, at, kept.owner, kept.salt, tokens, data)
        finally:
            self.worker.tell(_Saved(None))
