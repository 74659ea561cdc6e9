"""Blocks on their way into the cache and out of it, on integers: who holds them meanwhile, and who waits for them.

*In.* A sequence whose prompt continues elsewhere (on disk, in another engine) waits for those blocks before it is
admitted (`Status.FETCHING`). It has no place in a batch. A `Fetch` holds the blocks of the tree that precede them, and
private ones that a transfer thread fills. Once the thread has released them, the filled ones go into the tree. Then
the sequence is queued, in its old order, and its admission finds them like any others. Where fewer blocks come, or
none, the rest is computed, to the same bits.

*Time.* A fetch has a deadline. At that time its sequences are queued. The blocks stay until the thread, which may
still write to them, releases them. The same holds for a fetch whose sequences have all ended. So no block is ever
written that the pool has given to another.

*Ahead.* A fetch may also begin without sequences, for prompts to come. It has no deadline, and nothing joins it.

*Out.* A `Loan` holds blocks of the tree, from a prompt's first on, while a thread reads them.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from attar.plan.fit import kept_free
from attar.scheduling.block_pool import BlockPool
from attar.scheduling.prefix_cache import PrefixCache
from attar.scheduling.sequence import Sequence, Status

PART = 2  # at most one in so many blocks of the pool is on its way in at a time


@dataclass(eq=False, slots=True)
class Fetch:
    """Blocks of a prompt's beginning, of which the first `known` are the tree's and the others are being filled."""

    salt: bytes
    tokens: array[int]  # of all of them
    blocks: list[int]
    known: int
    until: float  # time at which nobody waits any more
    sequences: list[Sequence] = field(default_factory=list)

    @property
    def wanted(self) -> bool:
        """Return whether a sequence still waits for it."""
        return bool(self.sequences)

    @property
    def filled(self) -> list[int]:
        """Return the blocks that are to be filled, in order."""
        return self.blocks[self.known :]


@dataclass(eq=False, slots=True)
class Loan:
    """Blocks of the tree that a thread reads: those of a prompt's beginning."""

    blocks: list[int]


@dataclass(frozen=True, slots=True)
class Kept:
    """A prompt's beginning, of whole blocks, that went into the tree. `owner` is the salt of its API key."""

    owner: bytes
    salt: bytes
    tokens: array[int]


class Fetching:
    """The fetches and loans of a scheduler. `requeue` puts a sequence in its place in the queue."""

    def __init__(self, pool: BlockPool, cache: PrefixCache, requeue: Callable[[Sequence, float], None]) -> None:
        self._pool, self._cache, self._requeue = pool, cache, requeue
        self.fetches: list[Fetch] = []
        self.loans: list[Loan] = []

    @property
    def waiting(self) -> list[Sequence]:
        """Return the sequences that wait for blocks."""
        return [sequence for fetch in self.fetches for sequence in fetch.sequences]

    @property
    def wake(self) -> float | None:
        """Return the first deadline of a fetch that is waited for."""
        return min((fetch.until for fetch in self.fetches if fetch.wanted), default=None)

    def join(self, salt: bytes, tokens: array[int]) -> Fetch | None:
        """Return a fetch under way that brings all whole blocks of these tokens; None where there is none."""
        for fetch in self.fetches:
            if fetch.wanted and fetch.salt == salt and fetch.tokens[: len(tokens)] == tokens:
                return fetch
        return None

    def room(self, known: list[int], count: int, running: bool, headroom: float) -> bool:
        """Return whether `count` blocks may be filled, once the `known` ones before them are held."""
        pool = self._pool
        cached = sum(not pool.holders(block) for block in known)
        under_way = sum(len(fetch.filled) for fetch in self.fetches)
        spare = kept_free(pool.total, headroom) if running else 0
        return under_way + count <= max(1, pool.total // PART) and cached + count + spare <= pool.available

    def begin(
        self, salt: bytes, tokens: array[int], known: list[int], until: float, allocate: Callable[[int], list[int]]
    ) -> Fetch:
        """Hold the tree's blocks of the first tokens, and take private ones for the rest; there is `room`. What raises
        changes nothing."""
        self._pool.hold(known)
        try:
            filled = allocate(self._pool.needed(len(tokens)) - len(known))
        except BaseException:
            self._pool.drop(known)
            raise
        fetch = Fetch(salt, tokens, [*known, *filled], len(known), until)
        self.fetches.append(fetch)
        return fetch

    def end(self, fetch: Fetch, count: int, now: float) -> None:
        """End a fetch whose thread has released its blocks, of which it has filled and verified the first `count`. The
        tree gains these. What raises there loses them, and nothing else."""
        self.fetches.remove(fetch)
        tokens = fetch.tokens[: (fetch.known + count) * self._pool.size]
        try:
            if count:
                self._cache.insert(fetch.salt, tokens, fetch.blocks)
        finally:
            self._pool.drop(fetch.blocks)
            for sequence in fetch.sequences:
                sequence.fetched = count * self._pool.size
                self._requeue(sequence, now)
            fetch.sequences = []

    def expire(self, now: float) -> None:
        """Queue the sequences whose blocks have not come in time."""
        for fetch in self.fetches:
            if fetch.wanted and fetch.until <= now:
                late, fetch.sequences = fetch.sequences, []
                for sequence in late:
                    self._requeue(sequence, now)

    def leave(self, sequence: Sequence) -> None:
        """Take note that a sequence has ended while it waited."""
        (fetch,) = (fetch for fetch in self.fetches if sequence in fetch.sequences)
        fetch.sequences.remove(sequence)

    def lend(self, blocks: list[int]) -> Loan:
        """Hold blocks of the tree, a prompt's first ones, for a thread that reads them."""
        self._pool.hold(blocks)
        loan = Loan(blocks)
        self.loans.append(loan)
        return loan

    def give_back(self, loan: Loan) -> None:
        """End a loan whose thread has released its blocks."""
        self.loans.remove(loan)
        self._pool.drop(loan.blocks)

    def check(self, sequences: Collection[Sequence]) -> None:
        """Assert every invariant of this module. For tests."""
        waiting = self.waiting
        assert len(waiting) == len(set(waiting)), "a sequence waits for two fetches"
        assert set(waiting) == {each for each in sequences if each.status is Status.FETCHING}, "waiting for no fetch"
        private = [block for fetch in self.fetches for block in fetch.filled]
        assert len(private) == len(set(private)), "a block is filled by two fetches"
        for block in private:
            assert not self._pool.kept(block), "a block in the tree is being filled"
            assert self._pool.holders(block) == 1, "a block being filled is read by another"
