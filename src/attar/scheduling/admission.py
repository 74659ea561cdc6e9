"""The queue of waiting sequences, and how the first of them starts.

*Admission* takes blocks for all tokens that a sequence has at once, so that afterwards only decoding asks for more.
Some blocks are left free for that (`headroom`). The queue is in order of priority and arrival, and strict: where the
first does not fit, no other is admitted. A sequence is passed at most `max_passed` times; after that it goes first.

*Sharing.* A sequence that would find more in the prefix tree after a prompt now being computed waits for it, and no
other overtakes it. So several choices of one prompt, or a burst of requests with one long prefix, compute it once, and
if the first is cancelled the next takes over by itself.

*Groups.* Where layers with a sliding window have a pool of their own (`sliding.py`), a sequence is admitted only where
both pools have room.

*Images.* Where rows of an image see each other, no match ends within one.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections.abc import Sequence as List
from operator import attrgetter

from attar.faults import point
from attar.plan.fit import kept_free
from attar.protocol.scheduler_config import SchedulerConfig
from attar.scheduling import evicting
from attar.scheduling.block_tables import BlockTables
from attar.scheduling.prefix_cache import NOTHING, Match, common
from attar.scheduling.sequence import Sequence, Status
from attar.scheduling.sliding import Beside
from attar.scheduling.step_plan import Copy, StepPlan

by_rank = attrgetter("rank")  # the sort key of sequences


class Refused(ValueError):
    """The refusal of a sequence. `code` is one of `messages.FAILURES`."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class WaitingQueue:
    """The sequences that wait for their first or next run, in order of admission. Their blocks come from `tables`."""

    def __init__(self, tables: BlockTables, limits: SchedulerConfig) -> None:
        self.sequences: list[Sequence] = []
        self._tables, self._limits = tables, limits
        self._pool, self._cache, self._sliding = tables.pool, tables.cache, tables.sliding

    def add(self, sequence: Sequence) -> None:
        """Put a sequence in its place."""
        insort(self.sequences, sequence, key=by_rank)

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence of the queue."""
        del self.sequences[bisect_left(self.sequences, sequence.rank, key=by_rank)]

    def require_room(self, count: int, beside: int) -> None:
        """Raise Refused where the queue cannot take `count` more; `beside` wait elsewhere and count too. Preempted
        sequences were admitted already and do not count."""
        waiting = sum(each.status is Status.QUEUED for each in self.sequences) + beside
        room = self._limits.max_waiting
        if waiting + count > room:
            raise Refused("full", f"{waiting} are waiting and the queue holds {room}: no room for {count}")

    def opens(self) -> float:
        """Return when the policy admits the waiting sequences, if none is running then. There are some."""
        oldest = min(sequence.arrival for sequence in self.sequences)
        alone = self._limits.policy == "dynamic" and len(self.sequences) < self._limits.together
        return oldest + self._limits.max_delay if alone else oldest

    def is_open(self, running: List[Sequence], now: float) -> bool:
        """Return whether the policy admits sequences now."""
        if self._limits.policy == "continuous" or not self.sequences:
            return True
        return not running and now >= self.opens()

    def admit(self, step: StepPlan, running: List[Sequence], budget: int, now: float) -> bool:
        """Start the first sequence of the queue, of which `step` runs `budget` tokens at most; return whether there
        was room for it. The caller adds it to those that run. What raises changes nothing."""
        sequence = self.sequences[0]
        point("scheduler.admit", sequence.id)
        match = NOTHING
        sequence.settle()
        if not sequence.bypass:
            alike = self._tables.reusable(sequence)
            prompt = sequence.tokens[:alike]
            match = self._cache.match(sequence.salt, prompt)
            while (start := sequence.within(match.length)) is not None:
                match = self._cache.match(sequence.salt, prompt[:start])
            if self._soon_more(running, sequence.salt, prompt, match):
                return False
        room = self._room(running, sequence, match, budget)
        if room is None and match.source is not None:  # the block to copy from may be the one that is missing
            length = self._reached(sequence, match.blocks)
            whole = match.blocks[: length // self._pool.size]
            match = match._replace(length=length, blocks=whole, source=None, ended="no_room")
            room = self._room(running, sequence, match, budget)
        if room is None:
            return False
        blocks, beside = room
        own = len(blocks) - self._reserved(sequence)
        sequence.blocks, sequence.spare = match.blocks + blocks[:own], blocks[own:]
        sequence.computed = sequence.planned = match.length
        if match.source is not None:
            step.copies.append(Copy(match.source, blocks[0], match.length % self._pool.size, sequence))
        if self._sliding is not None and beside is not None:
            self._sliding.begin(step, sequence, match, beside)
        del self.sequences[0]
        for other in [other for other in self.sequences if other.order < sequence.order]:
            self._pass(other)
        if sequence.status is Status.QUEUED:
            sequence.reused, sequence.reuse_ended, sequence.differs_at = match.length, match.ended, match.differs_at
            if not sequence.group.counted:  # the first choice has just computed what the others find there
                sequence.group.counted = True
                self._cache.count(sequence.prompt, match)
        sequence.enter(Status.PREFILL, now)
        step.admitted.append(sequence)
        return True

    def check(self) -> None:
        """Assert every invariant of the queue. For tests."""
        assert self.sequences == sorted(self.sequences, key=by_rank), "the queue is out of order"
        for sequence in self.sequences:
            assert sequence.status in (Status.QUEUED, Status.PREEMPTED), "status and place differ"
            assert sequence.passed <= self._limits.max_passed, "passed too often"

    def _reached(self, sequence: Sequence, blocks: list[int]) -> int:
        """Return how many tokens of these blocks a sequence can share in whole blocks."""
        length = len(blocks) * self._pool.size
        while True:
            length -= length % self._pool.size
            if self._sliding is not None:
                length = self._sliding.reach(blocks[: length // self._pool.size], length)
            if (start := sequence.within(length)) is None:
                return length
            length = start

    def _soon_more(self, running: List[Sequence], salt: bytes, prompt: array[int], match: Match) -> bool:
        """Return whether a prompt being computed will bring a block more of this one into the tree, or all of it.
        Batches of the other policies start together, so there is nothing to wait for."""
        if self._limits.policy != "continuous":
            return False
        for other in running:
            if other.status is Status.PREFILL and other.salt == salt and not other.dropped:
                length = self._tables.alike(other, common(prompt, other.tokens))
                if self._sliding is not None and other.computed >= length:
                    continue  # what it brings is there, less what was released behind its window
                whole = length == len(prompt)
                length -= length % self._cache.round_to
                if length - match.length >= (1 if whole else self._pool.size):
                    return True
        return False

    def _room(
        self, running: List[Sequence], sequence: Sequence, match: Match, budget: int
    ) -> tuple[list[int], Beside | None] | None:
        """Hold the matched blocks and allocate the others that the sequence needs. Returns the allocated ones, and what
        layers with a sliding window have beside the match; None, and nothing held, if there are too few."""
        if self._sliding is not None and not self._sliding.admits(sequence, match.source is not None):
            return None
        shared = match.blocks if match.source is None else [*match.blocks, match.source]
        tokens = sequence.longest if self._lasts(sequence) else len(sequence.tokens)
        needed = self._pool.needed(sequence.slots(tokens)) + self._reserved(sequence) - len(match.blocks)
        spare = kept_free(self._pool.total, self._limits.headroom) if running else 0
        self._pool.hold(shared)
        room, beside = None, None
        try:
            if needed + spare <= self._pool.available:
                if self._sliding is not None:
                    beside = self._sliding.take(match, sequence.reach(match.length, budget))
                room = self._tables.allocate(needed)
        finally:
            if room is None:
                self._pool.drop(shared)
                if self._sliding is not None and beside is not None:
                    self._sliding.give_back(beside)
        return None if room is None else (room, beside)

    def _lasts(self, sequence: Sequence) -> bool:
        """Return whether a sequence, once admitted, is not preempted any more, and so has all blocks that it needs."""
        return sequence.preemptions >= self._limits.max_preemptions

    def _reserved(self, sequence: Sequence) -> int:
        """Return the blocks that a sequence to be admitted is given for its evictions."""
        return evicting.reserve(sequence, self._pool) if self._lasts(sequence) else 0

    def _pass(self, sequence: Sequence) -> None:
        """Count that a later arrival went before `sequence`."""
        self.remove(sequence)
        sequence.passed += 1
        sequence.overdue = sequence.passed >= self._limits.max_passed
        self.add(sequence)
