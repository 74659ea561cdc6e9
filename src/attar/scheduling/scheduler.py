"""The choice of sequences for the next step, made on integers alone, so that a simulation can run it a million times.

A step is `plan`, run, `commit`. The plan says which tokens of which sequences to run; the runner runs them; the commit
takes the results. Between the two nothing that the plan names is freed. A sequence cancelled in between, or at its
deadline, ends at once, but its blocks are released with the commit, and its results are discarded.

*Ahead.* The next step can be decided while one is under way (`ahead`), for a device that begins it when the other is
done. A sequence that samples a token in the first has a row for it in the second, although the token is not known yet.
The end of an output by its length is known, and gets no row. Where the token turns out to be the last, that row is
discarded, like any row of a sequence that has ended. Everything else is decided as usual, except that no sequence is
preempted: if one would have to be, there is no step ahead. Steps are run and committed in their order, one at a time
ahead.

*Batching.* Every step is put together anew (iteration-level, "continuous" batching): first the pending token of each
sequence that decodes, then prompts in chunks, up to the step's token budget, then new sequences while there is budget
and memory. The other policies add one rule: new sequences start only when none is running, together.

*Admission* takes blocks for all tokens that a sequence has at once, so that afterwards only decoding asks for more.
Some blocks are left free for that (`headroom`). The queue is in order of priority and arrival, and strict: where the
first does not fit, no other is admitted. A sequence is passed at most `max_passed` times; after that it goes first.

*Preemption.* Where a running sequence cannot get a block, the last in order gives up its own and will start over; its
computed tokens go into the prefix tree first and are often still there. After `max_preemptions` of them a sequence is
admitted again only with all blocks that it can ever need, and never preempted again. So everything ends: any sequence
fits alone (`add` refuses others), every preemption is one of finitely many, and a step with anything running makes
progress. Each choice is a sequence and counts for itself: a request of n of them may be preempted n times as often.

*Starting over.* Rotary angles of some models change past a length, for all keys of a sequence (`Sequence.horizons`). A
sequence that outgrows its horizon gives up its blocks like a preempted one, which is not counted, and has another salt
from then on. It does so a few times at most.

*Faults.* An exception in the work for one sequence ends that sequence alone, as `internal`: its blocks are dropped and
the tree learns nothing from it. To that end every change is made in one go, after all code that may raise.

*Sparse attention.* Rows of outputs may read few keys, and rows of prompts read all. So the tree has tokens of outputs
only up to the length at which every row reads all (`whole`), and a sequence that starts over takes no more from it.
With sparse prefill (`prefill`), the last rows of a prompt read all, and would not in the middle of a longer one. So the
tree has no tokens from there on, and a prompt takes no others for its last.

*Sharing.* The computed part of a prompt is in the tree after every chunk. A sequence that would find more there after a
prompt now being computed waits for it, and no other overtakes it. So several choices of one prompt, or a burst of
requests with one long prefix, compute it once, and if the first is cancelled the next takes over by itself.

*Speculation.* The engine may give a decoding sequence drafts of its next tokens. A plan runs as many as there is room
for, behind the sequence's last token, and uses them up. The commit counts as computed only those that the sampled
tokens confirmed. The prefix tree sees computed tokens only, so never an unverified one. There are no drafts in steps
ahead. Drafts may be a tree (`draft_tree.py`), whose branches take blocks of their own for the step. If the tokens
follow such a branch, the commit gives the sequence that branch's blocks for its own: no key is moved.

*Groups.* Layers with a sliding window may have a pool and a table of their own (`sliding.py`). A sequence is admitted
only where both pools have room.

*Eviction.* A sequence may drop keys before tokens of fixed index (`evicting.py`). A chunk ends before such a token, and
the plan that runs it evicts first.

*Images.* A running sequence may have to wait for the features of an image (`Sequence.reach`). No chunk crosses the
image's first token until then. It keeps its blocks, takes no budget, and all others go on. Where rows of an image see
each other, no chunk and no match ends within one.

*Blocks from elsewhere.* A sequence may wait for blocks before it is queued, and others are lent to threads
(`fetching.py`). `kept` lists what went into the tree, where it is set.
"""

from __future__ import annotations

import heapq
import itertools
import logging
from array import array
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Collection, Mapping
from operator import attrgetter

from attar.faults import point
from attar.kv.sparse_prefill import SparsePrefill
from attar.plan.fit import kept_free
from attar.protocol.scheduler_config import SchedulerConfig
from attar.scheduling import evicting
from attar.scheduling.block_pool import BlockPool
from attar.scheduling.draft_tree import DraftTree, branches, cut, depth_of, depths
from attar.scheduling.fetching import Fetch, Fetching, Kept
from attar.scheduling.prefix_cache import NOTHING, Match, PrefixCache, common
from attar.scheduling.sequence import Sequence, SequenceGroup, Status
from attar.scheduling.sliding import Beside, SlidingBlocks
from attar.scheduling.step_plan import Copy, Outcome, ScheduledTokens, StepPlan

ADAPTER = 4  # bytes of a salt that name the adapter (`block_digests.salt_of`)
MANY_ENDED = 256  # deadlines of ended sequences that may be kept
_NOTHING_NEW = Outcome()
_rank = attrgetter("rank")

logger = logging.getLogger(__name__)


class Refused(ValueError):
    """The refusal of a sequence. `code` is one of `messages.FAILURES`."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class Scheduler:
    """Sequences waiting and running over one pool of blocks. Times are seconds on any clock that does not go back.

    `whole` is the greatest length at which rows of outputs read every key; None where they always do. `prefill` says
    which rows of prompts read few keys; None where none does. With `sliding`,
    which is `cache.beside`, layers with a sliding window have blocks of their own.
    """

    def __init__(
        self,
        pool: BlockPool,
        cache: PrefixCache,
        limits: SchedulerConfig,
        whole: int | None = None,
        sliding: SlidingBlocks | None = None,
        prefill: SparsePrefill | None = None,
    ) -> None:
        assert cache.beside is sliding
        self.prefill = prefill
        self.pool, self.cache, self.limits, self.whole, self.sliding = pool, cache, limits, whole, sliding
        self.waiting: list[Sequence] = []  # in order of admission
        self.running: list[Sequence] = []  # in order of rank: the last is preempted first
        self.sequences: dict[str, Sequence] = {}  # all that have not ended, by id
        self.preemptions = 0
        self.evicted = 0  # tokens whose keys were dropped within running sequences
        self._ended: list[Sequence] = []
        self._deadlines: list[tuple[float, str]] = []  # a heap; sequences in it may have ended
        self._orders = itertools.count()
        self._steps: list[StepPlan] = []  # under way, in their order
        self.fetching = Fetching(pool, cache, self._queue_again)
        self.kept: deque[Kept] | None = None
        """Beginnings that went into the tree, the newest last; its reader removes them. None: they are not wanted."""

    def add(self, choices: Collection[Sequence], now: float) -> None:
        """Take the choices of one request, all or none; all have the same prompt. Raises Refused: `too_long` where one
        could never fit, `full` where the queue cannot take them."""
        for choice in choices:
            point("scheduler.add", choice.id)
            assert choice.id not in self.sequences
            needed = self.pool.needed(choice.slots(choice.longest)) + evicting.reserve(choice, self.pool)
            if needed > self.pool.total:
                raise Refused(
                    "too_long",
                    f"{choice.prompt} tokens and up to {choice.max_tokens} more need {needed} cache blocks of "
                    f"{self.pool.size}; there are {self.pool.total}",
                )
        self.require_room(len(choices))
        group = SequenceGroup()
        for choice in choices:
            self.sequences[choice.id] = choice
            choice.group, choice.order = group, next(self._orders)
            choice.arrival = choice.since = now
            choice.overdue = self.limits.max_passed == 0
            if choice.deadline is not None:
                heapq.heappush(self._deadlines, (choice.deadline, choice.id))
            insort(self.waiting, choice, key=_rank)
        if len(self._deadlines) > 2 * len(self.sequences) + MANY_ENDED:  # else each stays until its deadline
            self._deadlines = sorted(entry for entry in self._deadlines if entry[1] in self.sequences)

    def require_room(self, count: int) -> None:
        """Raise Refused where the queue cannot take `count` more. Preempted sequences were admitted already and do not
        count."""
        waiting = sum(each.status is Status.QUEUED for each in self.waiting) + len(self.fetching.waiting)
        room = self.limits.max_waiting
        if waiting + count > room:
            raise Refused("full", f"{waiting} are waiting and the queue holds {room}: no room for {count}")

    def cancel(self, id: str, now: float) -> None:
        """End a sequence, whatever its status. Unknown and forgotten ids are ignored."""
        if (sequence := self.sequences.get(id)) is not None:
            self._end(sequence, "cancelled", now)

    def expire(self, now: float) -> None:
        """End all sequences whose deadline has come."""
        self.fetching.expire(now)
        while self._deadlines and self._deadlines[0][0] <= now:
            deadline, id = heapq.heappop(self._deadlines)
            sequence = self.sequences.get(id)
            if sequence is not None and sequence.deadline == deadline:
                self._end(sequence, "deadline", now)

    def reusable(self, sequence: Sequence) -> int:
        """Return how many of a sequence's first tokens may come from the tree, where it bypasses nothing."""
        alike = self._alike(sequence, len(sequence.tokens) - 1)  # the last has to be run, for its logits
        return alike if sequence.eviction is None else min(alike, sequence.eviction.reusable(sequence.prompt))

    def fetch(
        self, sequences: Collection[Sequence], match: Match, count: int, until: float, now: float
    ) -> Fetch | None:
        """Let queued sequences of one prompt wait for its first `count` blocks, until `until` at most.

        `match` is what the tree has of them at this moment. Returns a fetch whose blocks are to be filled; None where
        there is no room for them, or another fetch brings them.
        """
        salt, tokens = (first := next(iter(sequences))).salt, first.tokens[: count * self.pool.size]
        found = self.fetching.join(salt, tokens)
        begun = None
        if found is None:
            known = match.blocks
            missing = count - len(known)
            if missing < 1 or not self.fetching.room(known, missing, bool(self.running), self.limits.headroom):
                return None
            found = begun = self.fetching.begin(salt, tokens, known, until, self._allocate)
        for sequence in sequences:
            assert sequence.status is Status.QUEUED
            del self.waiting[bisect_left(self.waiting, sequence.rank, key=_rank)]
            sequence.enter(Status.FETCHING, now)
            found.sequences.append(sequence)
        return begun

    def received(self, fetch: Fetch, count: int, now: float) -> None:
        """End a fetch whose thread has released its blocks, the first `count` of them filled and verified. A failure
        to remember these is logged, and their sequences compute them."""
        try:
            self.fetching.end(fetch, count, now)
        except AssertionError:
            raise
        except Exception:
            logger.exception("fetched blocks were lost")

    def collect(self) -> list[Sequence]:
        """Return the sequences that have ended since the last call. Each is returned once, with its `ending`."""
        ended, self._ended = self._ended, []
        return ended

    def wake(self) -> float | None:
        """Return the latest time of the next plan, where the last plan was empty and nothing else happens. It is None
        where no sequence is left."""
        while self._deadlines and self._deadlines[0][1] not in self.sequences:
            heapq.heappop(self._deadlines)  # it has ended: waking for its deadline would find nothing to do, for ever
        times = [deadline for deadline, _ in self._deadlines[:1]]
        if (fetched := self.fetching.wake) is not None:
            times.append(fetched)
        if self.waiting:
            times.append(self._opens())
        return min(times, default=None)

    def plan(self, now: float) -> StepPlan:
        """Decide the next step. It may be empty: there is nothing to run, or nothing yet."""
        assert not self._steps, "the last step has not been committed"
        self.expire(now)
        return self._decide(now)

    def ahead(self, now: float) -> StepPlan | None:
        """Decide the step behind the one under way; None where a sequence would have to be preempted or to start
        over, or one with images waits. An empty one is not under way: nothing is to be committed."""
        assert len(self._steps) == 1, "ahead of one step"
        assert not self._steps[0].drafts, "nobody knows how many tokens it brings"
        self.expire(now)
        missing = sum(max(0, self._missing(sequence)) for sequence in self.running)
        if missing > self.pool.available or any(sequence.outgrown or sequence.due for sequence in self.running):
            return None
        if any(sequence.images for sequence in self.waiting):  # it may be admitted, and run nothing yet
            return None
        step = self._decide(now)
        if not step.chunks:
            assert not step.admitted
            self._steps.pop()
        return step

    def _decide(self, now: float) -> StepPlan:
        step = StepPlan()
        for sequence in tuple(self.running):
            if sequence.outgrown:
                try:
                    self._start_over(sequence, now)
                except Exception as error:
                    self._give_up(sequence, now, error)
                else:
                    step.started_over.append(sequence)
        self._grow(step, now)
        decoding = [sequence for sequence in self.running if sequence.pending == 1]
        prefills = [sequence for sequence in self.running if sequence.pending != 1]
        budget = self.limits.max_step_tokens - len(decoding)
        spare = min(budget, self.limits.max_drafts)
        for sequence in decoding:
            try:
                self._cover(sequence, sequence.reach(sequence.planned, 1))
                drafts, tree = self._drafts(sequence, spare)
            except Exception as error:
                self._give_up(sequence, now, error)
                budget += 1  # its row's
                continue
            self._chunk(step, sequence, 1, drafts, tree)
            spare -= len(drafts)
        budget -= step.drafts
        for sequence in prefills:
            try:
                self._cover(sequence, sequence.reach(sequence.planned, budget))
            except Exception as error:
                self._give_up(sequence, now, error)
                continue
            budget -= self._chunk(step, sequence, budget)
        whole_batch = self.limits.policy != "continuous"  # admitted at once, whatever the budget
        if self._open(now):
            while self.waiting and len(self.running) < self.limits.together and (budget or whole_batch):
                sequence = self.waiting[0]
                try:
                    if not self._admit(step, sequence, now, budget):
                        break
                except Exception as error:
                    self._give_up(sequence, now, error)
                    continue
                budget -= self._chunk(step, sequence, budget)
        # One that failed since has no blocks.
        step.evictions = [each for each in step.evictions if each.sequence.status is not Status.ENDED]
        for sequence in step.sequences:
            sequence.under_way += 1
        self._steps.append(step)
        return step

    def commit(self, step: StepPlan, outcomes: Mapping[str, Outcome], now: float) -> None:
        """Take the results of the first step under way.

        There is one for each chunk that samples, unless its sequence has ended meanwhile. Other sequences, admitted
        ones without a chunk among them, have one only if they failed.
        """
        assert step is self._steps[0], "steps are committed in their order"
        del self._steps[0]
        self.pool.drop(copy.source for copy in step.copies)
        for sequence in step.sequences:
            sequence.under_way -= 1
        for chunk in step.chunks:
            sequence, start, rows, samples, drafts, tree = chunk
            if sequence.status is Status.ENDED:
                continue
            outcome = outcomes[sequence.id] if samples else outcomes.get(sequence.id, _NOTHING_NEW)
            if outcome.failure is not None:
                self._end(sequence, outcome.failure, now, keep=False)
                continue
            kept = max(0, len(outcome.tokens) - 1) if drafts else 0  # the last token was no draft
            sequence.computed = start + rows - len(drafts) + kept
            sequence.planned += kept
            if tree is not None:
                _take_branch(step, sequence, tree, chunk.kept(outcome.tokens)[-1])
            if sequence.status is Status.PREFILL:
                try:
                    point("scheduler.commit", sequence.id)
                    self._keep(sequence)
                except Exception as error:
                    self._give_up(sequence, now, error)
                    continue
                if samples:
                    sequence.enter(Status.DECODE, now)
            if self.sliding is not None:
                self.sliding.slide(sequence)
            if samples:
                sequence.inflight_tokens -= sequence.max_tokens > 0
                sequence.tokens.extend(outcome.tokens)
                assert sequence.output <= sequence.max_tokens
                if outcome.finished or sequence.output == sequence.max_tokens:
                    self._end(sequence, "finished", now)
                else:
                    assert not sequence.under_way or len(outcome.tokens) == 1, "a step ahead has the row of one token"
        for sequence in (*step.admitted, *(each.sequence for each in step.evictions)):
            failure = outcomes.get(sequence.id, _NOTHING_NEW).failure
            if failure is not None and sequence.status is not Status.ENDED:  # the budget left it no chunk
                self._end(sequence, failure, now, keep=False)
        self.pool.drop(step.held)
        if self.sliding is not None:
            self.sliding.settle(step)

    def _cover(self, sequence: Sequence, tokens: int) -> None:
        """Give the sequence blocks of layers with a sliding window for its first `tokens` tokens."""
        if self.sliding is not None:
            self.sliding.cover(sequence, tokens)

    def _chunk(
        self,
        step: StepPlan,
        sequence: Sequence,
        budget: int,
        drafts: tuple[int, ...] = (),
        tree: DraftTree | None = None,
    ) -> int:
        """Plan up to `budget` of the sequence's pending tokens, and drafts behind the last of them; return the number
        of pending ones."""
        pending = sequence.pending
        rows = min(sequence.reach(sequence.planned, budget), sequence.cut) - sequence.planned
        if rows:
            samples = 1 + len(drafts) if rows == pending else 0
            step.chunks.append(ScheduledTokens(sequence, sequence.planned, rows + len(drafts), samples, drafts, tree))
            step.held += itertools.chain.from_iterable(tree.blocks if tree is not None else ())
            if self.sliding is not None and tree is not None:
                self.sliding.lend(step, list(itertools.chain.from_iterable(tree.sliding)))
            sequence.planned += rows
            sequence.inflight_tokens += rows == pending and sequence.max_tokens > 0
        return rows

    def _drafts(self, sequence: Sequence, budget: int) -> tuple[tuple[int, ...], DraftTree | None]:
        """Return the drafts that the sequence's step takes, with blocks for all of them; the others are dropped.

        They are as many as the budget allows, none past the last token that the sequence may run or past its horizon.
        No sequence loses a block for them. Blocks of drafts that turn out wrong stay: the next tokens use them.
        """
        drafts, parents = sequence.drafts, sequence.parents
        sequence.drafts, sequence.parents = (), ()
        longest = sequence.longest if not sequence.horizon else min(sequence.longest, sequence.horizon)
        drafts, parents = cut(drafts, parents, budget, min(longest, sequence.cut) - sequence.expected)
        if not drafts or sequence.status is not Status.DECODE:
            return (), None
        assert len(sequence.tokens) == sequence.expected, "drafts behind a token that is not known"
        missing = self.pool.needed(sequence.slots(sequence.expected + depth_of(drafts, parents))) - len(sequence.blocks)
        if missing > 0:
            if self._affordable(missing):
                sequence.blocks += self._allocate(missing)
            else:
                room = len(sequence.blocks) * self.pool.size - sequence.slots(sequence.expected)
                drafts, parents = cut(drafts, parents, budget, room)
        self._cover(sequence, sequence.expected + depth_of(drafts, parents))
        return (drafts, None) if not parents else self._branches(sequence, drafts, parents)

    def _branches(
        self, sequence: Sequence, drafts: tuple[int, ...], parents: tuple[int, ...]
    ) -> tuple[tuple[int, ...], DraftTree | None]:
        """Return a tree of drafts with blocks for its branches; the chain of its first branch where they are short."""
        own, *others = branches(parents)
        first, of = sequence.expected // self.pool.size, depths(parents)
        needed = [self.pool.needed(sequence.expected + of[rows[-1]]) - first for rows in others]
        count = sum(needed)
        if not self._affordable(count) or (self.sliding is not None and count > self.sliding.unpromised):
            return drafts[: len(own) - 1], None
        allocated, beside = self._allocate(count), list[int]()
        if self.sliding is not None:
            try:
                beside = self.sliding.allocate(count)
            except BaseException:
                self.pool.drop(allocated)
                raise
        return drafts, DraftTree(parents, first, _divided(allocated, needed), _divided(beside, needed))

    def _affordable(self, blocks: int) -> bool:
        """Return whether drafts may have so many blocks: those kept free are for what is certain."""
        return blocks + kept_free(self.pool.total, self.limits.headroom) <= self.pool.available

    def _missing(self, sequence: Sequence) -> int:
        """Return how many blocks the sequence lacks for all its expected tokens."""
        return self.pool.needed(sequence.slots(sequence.expected)) - len(sequence.blocks)

    def _grow(self, step: StepPlan, now: float) -> None:
        """Give every running sequence blocks for all its tokens, best rank first, after the evictions that are due."""
        for sequence in tuple(self.running):
            due = sequence.due
            needed = evicting.needed(sequence, self.pool) - len(sequence.spare) if due else self._missing(sequence)
            if (needed <= 0 and not due) or sequence.status in (Status.PREEMPTED, Status.ENDED):
                continue
            victim = None
            while needed > self.pool.available and victim is not sequence:
                # A sequence that may not be preempted has all its blocks, so this finds `sequence` itself at the
                # latest.
                victim = next(s for s in reversed(self.running) if s.preemptions < self.limits.max_preemptions)
                try:
                    self._preempt(step, victim, now)
                except Exception as error:
                    self._give_up(victim, now, error)
            if victim is not sequence:
                try:
                    point("scheduler.grow", sequence.id)
                    if due:
                        self._evict(step, sequence)
                    else:
                        sequence.blocks += self._allocate(needed)
                except Exception as error:
                    self._give_up(sequence, now, error)

    def _evict(self, step: StepPlan, sequence: Sequence) -> None:
        """Evict before the next row of a sequence; there are blocks for it."""
        before = sequence.dropped
        evicting.evict(step, sequence, self.pool, lambda n: self._taken(sequence, n))
        self.evicted += sequence.dropped - before
        sequence.evicted += sequence.dropped - before

    def _taken(self, sequence: Sequence, n: int) -> list[int]:
        """Take n blocks, first those that the sequence has in reserve."""
        own = sequence.spare[:n]
        found = own + self._allocate(n - len(own))
        del sequence.spare[:n]
        return found

    def _preempt(self, step: StepPlan, sequence: Sequence, now: float) -> None:
        self._start_over(sequence, now)
        sequence.preemptions += 1
        self.preemptions += 1
        step.preempted.append(sequence)

    def _start_over(self, sequence: Sequence, now: float) -> None:
        """Take the blocks of a running sequence, which goes back to its place in the queue."""
        assert not sequence.under_way, "preempted under the runner"
        point("scheduler.preempt", sequence.id)
        self._release(sequence)
        self.running.remove(sequence)
        sequence.enter(Status.PREEMPTED, now)
        insort(self.waiting, sequence, key=_rank)

    def _open(self, now: float) -> bool:
        """Return whether the policy admits sequences now."""
        if self.limits.policy == "continuous" or not self.waiting:
            return True
        return not self.running and now >= self._opens()

    def _opens(self) -> float:
        """Return when the policy admits the waiting sequences, if none is running then."""
        oldest = min(sequence.arrival for sequence in self.waiting)
        alone = self.limits.policy == "dynamic" and len(self.waiting) < self.limits.together
        return oldest + self.limits.max_delay if alone else oldest

    def _admit(self, step: StepPlan, sequence: Sequence, now: float, budget: int) -> bool:
        """Start the first sequence of the queue, of which this step runs `budget` tokens at most; return whether there
        was room for it."""
        point("scheduler.admit", sequence.id)
        match = NOTHING
        sequence.settle()
        if not sequence.bypass:
            alike = self.reusable(sequence)
            prompt = sequence.tokens[:alike]
            match = self.cache.match(sequence.salt, prompt)
            while (start := sequence.within(match.length)) is not None:
                match = self.cache.match(sequence.salt, prompt[:start])
            if self._soon_more(sequence.salt, prompt, match):
                return False
        room = self._room(sequence, match, budget)
        if room is None and match.source is not None:  # the block to copy from may be the one that is missing
            length = self._reached(sequence, match.blocks)
            whole = match.blocks[: length // self.pool.size]
            match = match._replace(length=length, blocks=whole, source=None, ended="no_room")
            room = self._room(sequence, match, budget)
        if room is None:
            return False
        blocks, beside = room
        own = len(blocks) - self._reserved(sequence)
        sequence.blocks, sequence.spare = match.blocks + blocks[:own], blocks[own:]
        sequence.computed = sequence.planned = match.length
        if match.source is not None:
            step.copies.append(Copy(match.source, blocks[0], match.length % self.pool.size, sequence))
        if self.sliding is not None and beside is not None:
            self.sliding.begin(step, sequence, match, beside)
        del self.waiting[0]
        for other in [other for other in self.waiting if other.order < sequence.order]:
            self._pass(other)
        if sequence.status is Status.QUEUED:
            sequence.reused, sequence.reuse_ended, sequence.differs_at = match.length, match.ended, match.differs_at
            if not sequence.group.counted:  # the first choice has just computed what the others find there
                sequence.group.counted = True
                self.cache.count(sequence.prompt, match)
        sequence.enter(Status.PREFILL, now)
        insort(self.running, sequence, key=_rank)
        step.admitted.append(sequence)
        return True

    def _reached(self, sequence: Sequence, blocks: list[int]) -> int:
        """Return how many tokens of these blocks a sequence can share in whole blocks."""
        length = len(blocks) * self.pool.size
        while True:
            length -= length % self.pool.size
            if self.sliding is not None:
                length = self.sliding.reach(blocks[: length // self.pool.size], length)
            if (start := sequence.within(length)) is None:
                return length
            length = start

    def _soon_more(self, salt: bytes, prompt: array[int], match: Match) -> bool:
        """Return whether a prompt being computed will bring a block more of this one into the tree, or all of it.
        Batches of the other policies start together, so there is nothing to wait for."""
        if self.limits.policy != "continuous":
            return False
        for other in self.running:
            if other.status is Status.PREFILL and other.salt == salt and not other.dropped:
                length = self._alike(other, common(prompt, other.tokens))
                if self.sliding is not None and other.computed >= length:
                    continue  # what it brings is there, less what was released behind its window
                whole = length == len(prompt)
                length -= length % self.cache.round_to
                if length - match.length >= (1 if whole else self.pool.size):
                    return True
        return False

    def _room(self, sequence: Sequence, match: Match, budget: int) -> tuple[list[int], Beside | None] | None:
        """Hold the matched blocks and allocate the others that the sequence needs. Returns the allocated ones, and what
        layers with a sliding window have beside the match; None, and nothing held, if there are too few."""
        if self.sliding is not None and not self.sliding.admits(sequence, match.source is not None):
            return None
        shared = match.blocks if match.source is None else [*match.blocks, match.source]
        tokens = sequence.longest if self._lasts(sequence) else len(sequence.tokens)
        needed = self.pool.needed(sequence.slots(tokens)) + self._reserved(sequence) - len(match.blocks)
        spare = kept_free(self.pool.total, self.limits.headroom) if self.running else 0
        self.pool.hold(shared)
        room, beside = None, None
        try:
            if needed + spare <= self.pool.available:
                if self.sliding is not None:
                    beside = self.sliding.take(match, sequence.reach(match.length, budget))
                room = self._allocate(needed)
        finally:
            if room is None:
                self.pool.drop(shared)
                if self.sliding is not None and beside is not None:
                    self.sliding.give_back(beside)
        return None if room is None else (room, beside)

    def _lasts(self, sequence: Sequence) -> bool:
        """Return whether a sequence, once admitted, is not preempted any more, and so has all blocks that it needs."""
        return sequence.preemptions >= self.limits.max_preemptions

    def _reserved(self, sequence: Sequence) -> int:
        """Return the blocks that a sequence to be admitted is given for its evictions."""
        return evicting.reserve(sequence, self.pool) if self._lasts(sequence) else 0

    def _allocate(self, n: int) -> list[int]:
        if n > self.pool.free:
            self.cache.evict(n - self.pool.free)
        return self.pool.allocate(n)

    def _pass(self, sequence: Sequence) -> None:
        """Count that a later arrival went before `sequence`."""
        del self.waiting[bisect_left(self.waiting, sequence.rank, key=_rank)]
        sequence.passed += 1
        sequence.overdue = sequence.passed >= self.limits.max_passed
        insort(self.waiting, sequence, key=_rank)

    def _alike(self, sequence: Sequence, length: int) -> int:
        """Return how many of its first `length` tokens have the keys and values of any sequence that begins alike.

        Those of an output do not where its rows read few keys: computed as another's prompt, they read all. Those of
        the end of a prompt do not where they would read few in the middle of another, nor
        those behind an eviction.
        """
        if sequence.eviction is not None:
            length = min(length, sequence.eviction.plain(sequence.prompt))
        if self.whole is not None:
            length = min(length, max(sequence.prompt, self.whole))
        return length if self.prefill is None else min(length, self.prefill.alike(sequence.prompt))

    def _keep(self, sequence: Sequence) -> None:
        """Put the sequence's computed tokens into the tree, as far as others can use them: before it drops any."""
        if sequence.dropped:
            return
        tokens = sequence.tokens[: self._alike(sequence, sequence.computed)]
        self.cache.insert(sequence.salt, tokens, sequence.blocks, self._let_go(sequence))
        if self.sliding is not None:
            self.sliding.remember(sequence, self.pool)
        whole = len(tokens) - len(tokens) % self.pool.size
        if self.kept is not None and whole > sequence.offered and not sequence.images:  # whose ids are this process's
            sequence.offered = whole
            self.kept.append(Kept(sequence.cache_salt[ADAPTER:], sequence.salt, tokens[:whole]))

    def _let_go(self, sequence: Sequence) -> Callable[[list[int]], None]:
        """Return the function that takes blocks given up: a step that may still use them releases them at its
        commit."""
        return self._steps[-1].held.extend if sequence.under_way else self.pool.drop

    def _release(self, sequence: Sequence, keep: bool = True) -> None:
        """Take the sequence's blocks away. With `keep` the tree remembers their tokens; if that raises, only the tree
        misses them."""
        try:
            if keep:
                point("scheduler.release", sequence.id)
                self._keep(sequence)
        finally:
            self._let_go(sequence)([*sequence.blocks, *sequence.pristine, *sequence.spare])
            if self.sliding is not None:
                self.sliding.release(sequence, self._steps[-1] if sequence.under_way else None)
            sequence.drafts, sequence.parents = (), ()
            sequence.blocks, sequence.computed, sequence.planned, sequence.inflight_tokens = [], 0, 0, 0
            sequence.pristine, sequence.spare, sequence.dropped = [], [], 0

    def _give_up(self, sequence: Sequence, now: float, error: Exception) -> None:
        """End the sequence after its own work raised an exception, which changed nothing or was undone.

        An AssertionError is raised again: where pool or tree violate an invariant the process ends, and a new one
        starts.
        """
        if isinstance(error, AssertionError):
            raise error
        logger.exception("sequence %s failed", sequence.id)
        sequence.ending = "internal"
        self._end(sequence, "internal", now, keep=False)

    def _end(self, sequence: Sequence, ending: str, now: float, keep: bool = True) -> None:
        """End the sequence. A failure to remember it in the tree is logged and ends it as `internal`."""
        sequence.ending = sequence.ending or ending
        if sequence.status in (Status.PREFILL, Status.DECODE):
            try:
                self._release(sequence, keep)
            except AssertionError:
                raise
            except Exception:
                logger.exception("sequence %s failed at its end", sequence.id)
                sequence.ending = "internal"
            self.running.remove(sequence)
        elif sequence.status is Status.FETCHING:
            self.fetching.leave(sequence)
        else:
            del self.waiting[bisect_left(self.waiting, sequence.rank, key=_rank)]
        sequence.enter(Status.ENDED, now)
        del self.sequences[sequence.id]
        self._ended.append(sequence)

    def _queue_again(self, sequence: Sequence, now: float) -> None:
        """Queue a sequence that waited for blocks, in the order of its arrival."""
        sequence.enter(Status.QUEUED, now)
        insort(self.waiting, sequence, key=_rank)

    def check(self) -> None:
        """Assert every invariant of this module. Linear in the sequences: for tests."""
        places = [*self.waiting, *self.running, *self.fetching.waiting]
        assert len(places) == len(set(places)) == len(self.sequences), "a sequence in two places, or in none"
        assert set(places) == set(self.sequences.values()), "a place for a sequence that has ended"
        assert self.waiting == sorted(self.waiting, key=_rank), "the queue is out of order"
        assert self.running == sorted(self.running, key=_rank), "the running are out of order"
        assert len(self.running) <= self.limits.together, "too many run"
        for sequence in self.sequences.values():
            sequence.check(self.pool.size)
            running = sequence.status in (Status.PREFILL, Status.DECODE)
            assert running == (sequence in self.running), "status and place differ"
            assert sequence.passed <= self.limits.max_passed, "passed too often"
            assert sequence.preemptions <= self.limits.max_preemptions, "preempted too often"
            within = sum(sequence in step.sequences for step in self._steps)
            assert sequence.under_way == within, "in a step that is over, or not in one that is under way"
            assert sequence.ending is None, "ended and still here"
        self.fetching.check(self.sequences.values())
        if self.sliding is not None:
            self.sliding.check(self.running, self.pool)


def _divided(blocks: list[int], counts: list[int]) -> tuple[tuple[int, ...], ...]:
    """Return the blocks as tuples of these lengths; nothing where there are no blocks."""
    each = iter(blocks)
    return tuple(tuple(itertools.islice(each, n)) for n in counts) if blocks else ()


def _take_branch(step: StepPlan, sequence: Sequence, tree: DraftTree, row: int) -> None:
    """Give the sequence the blocks of the branch that holds the last row that stays; the step releases its own."""
    branch = next(i for i, rows in enumerate(branches(tree.parents)) if row in rows)
    for place, block in enumerate(tree.blocks[branch - 1] if branch else (), tree.first):
        step.held.remove(block)
        step.held += sequence.blocks[place : place + 1]
        sequence.blocks[place : place + 1] = [block]
    for place, block in enumerate(tree.sliding[branch - 1] if branch and tree.sliding else (), tree.first):
        step.sliding_held.remove(block)
        step.sliding_held += sequence.sliding[place : place + 1]
        sequence.sliding[place : place + 1] = [block]
