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

*Admission.* Sequences wait in a queue, which says when the first of them starts (`admission.py`). What a sequence holds
in the cache, and what the prefix tree keeps of it, is `block_tables.py`'s.

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

*Sharing.* The computed part of a prompt is in the tree after every chunk, so that later sequences find it there.

*Speculation.* The engine may give a decoding sequence drafts of its next tokens. A plan runs as many as there is room
for, behind the sequence's last token, and uses them up. The commit counts as computed only those that the sampled
tokens confirmed. The prefix tree sees computed tokens only, so never an unverified one. There are no drafts in steps
ahead.

*Eviction.* A sequence may drop keys before tokens of fixed index (`evicting.py`). A chunk ends before such a token, and
the plan that runs it evicts first.

*Images.* A running sequence may have to wait for the features of an image (`Sequence.reach`). No chunk crosses the
image's first token until then. It keeps its blocks, takes no budget, and all others go on. Where rows of an image see
each other, no chunk ends within one.

*Blocks from elsewhere.* A sequence may wait for blocks before it is queued, and others are lent to threads
(`fetching.py`).
"""

from __future__ import annotations

import itertools
import logging
from array import array
from bisect import insort
from collections.abc import Collection, Mapping

from attar.faults import point
from attar.kv.sparse_prefill import SparsePrefill
from attar.protocol.scheduler_config import SchedulerConfig
from attar.scheduling import evicting
from attar.scheduling.admission import Refused, WaitingQueue, by_rank
from attar.scheduling.block_pool import BlockPool
from attar.scheduling.block_tables import BlockTables
from attar.scheduling.deadlines import Deadlines
from attar.scheduling.draft_tree import DraftTree
from attar.scheduling.fetching import Fetch, Fetching
from attar.scheduling.prefix_cache import Match, PrefixCache
from attar.scheduling.sequence import Sequence, SequenceGroup, Status
from attar.scheduling.sliding import SlidingBlocks
from attar.scheduling.step_plan import Outcome, ScheduledTokens, StepPlan

_NOTHING_NEW = Outcome()

logger = logging.getLogger(__name__)


class Scheduler:
    """Sequences waiting and running over one pool of blocks. Times are seconds on any clock that does not go back.

    `whole`, `sliding` and `prefill` are those of `BlockTables`.
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
        self.pool, self.cache, self.limits = pool, cache, limits
        self.tables = BlockTables(pool, cache, limits.headroom, whole, sliding, prefill)
        self.queue = WaitingQueue(self.tables, limits)
        self.running: list[Sequence] = []  # in order of rank: the last is preempted first
        self.sequences: dict[str, Sequence] = {}  # all that have not ended, by id
        self.preemptions = 0
        self.evicted = 0  # tokens whose keys were dropped within running sequences
        self._ended: list[Sequence] = []
        self._deadlines = Deadlines(self.sequences)
        self._orders = itertools.count()
        self._steps: list[StepPlan] = []  # under way, in their order
        self.fetching = Fetching(pool, cache, self._queue_again)

    @property
    def waiting(self) -> list[Sequence]:
        """Return the sequences in the queue, in order of admission."""
        return self.queue.sequences

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
            self._deadlines.add(choice)
            self.queue.add(choice)

    def require_room(self, count: int) -> None:
        """Raise Refused where the queue cannot take `count` more."""
        self.queue.require_room(count, len(self.fetching.waiting))

    def cancel(self, id: str, now: float) -> None:
        """End a sequence, whatever its status. Unknown and forgotten ids are ignored."""
        if (sequence := self.sequences.get(id)) is not None:
            self._end(sequence, "cancelled", now)

    def expire(self, now: float) -> None:
        """End all sequences whose deadline has come."""
        self.fetching.expire(now)
        for sequence in self._deadlines.passed(now):
            self._end(sequence, "deadline", now)

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
            found = begun = self.fetching.begin(salt, tokens, known, until, self.tables.allocate)
        for sequence in sequences:
            assert sequence.status is Status.QUEUED
            self.queue.remove(sequence)
            sequence.enter(Status.FETCHING, now)
            found.sequences.append(sequence)
        return begun

    def prefetch(self, salt: bytes, tokens: array[int], match: Match) -> Fetch | None:
        """Return a fetch of a prompt's beginning that no sequence waits for; None where that needs more blocks than are
        free. `match` is what the tree has of it at this moment."""
        missing = self.pool.needed(len(tokens)) - len(match.blocks)
        if not 0 < missing <= self.pool.free:
            return None
        if not self.fetching.room(match.blocks, missing, bool(self.running), self.limits.headroom):
            return None
        return self.fetching.begin(salt, tokens, match.blocks, 0.0, self.tables.allocate)

    def received(self, fetch: Fetch, count: int, now: float) -> None:
        """End a fetch whose thread has released its blocks, the first `count` of them filled and verified. A failure
        to remember these is logged, and their sequences compute them."""
        try:
            self.fetching.end(fetch, count, now)
        except AssertionError:
            raise
        except Exception:  # whatever it is: blocks that the tree does not learn of are computed
            logger.exception("fetched blocks were lost")

    def collect(self) -> list[Sequence]:
        """Return the sequences that have ended since the last call. Each is returned once, with its `ending`."""
        ended, self._ended = self._ended, []
        return ended

    def wake(self) -> float | None:
        """Return the latest time of the next plan, where the last plan was empty and nothing else happens. It is None
        where no sequence is left."""
        opens = self.queue.opens() if self.waiting else None
        times = (self._deadlines.first(), self.fetching.wake, opens)
        return min((time for time in times if time is not None), default=None)

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
        missing = sum(max(0, self.tables.missing(sequence)) for sequence in self.running)
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
                self.tables.cover(sequence, sequence.reach(sequence.planned, 1))
                drafts, tree = self.tables.drafts(sequence, spare)
            except Exception as error:
                self._give_up(sequence, now, error)
                budget += 1  # its row's
                continue
            self._chunk(step, sequence, 1, drafts, tree)
            spare -= len(drafts)
        budget -= step.drafts
        for sequence in prefills:
            try:
                self.tables.cover(sequence, sequence.reach(sequence.planned, budget))
            except Exception as error:
                self._give_up(sequence, now, error)
                continue
            budget -= self._chunk(step, sequence, budget)
        whole_batch = self.limits.policy != "continuous"  # admitted at once, whatever the budget
        if self.queue.is_open(self.running, now):
            while self.waiting and len(self.running) < self.limits.together and (budget or whole_batch):
                sequence = self.waiting[0]
                try:
                    if not self.queue.admit(step, self.running, budget, now):
                        break
                except Exception as error:
                    self._give_up(sequence, now, error)
                    continue
                insort(self.running, sequence, key=by_rank)
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
                self.tables.take_branch(step, sequence, tree, chunk.kept(outcome.tokens)[-1])
            if sequence.status is Status.PREFILL:
                try:
                    point("scheduler.commit", sequence.id)
                    self.tables.keep(sequence, self._last(sequence))
                except Exception as error:
                    self._give_up(sequence, now, error)
                    continue
                if samples:
                    sequence.enter(Status.DECODE, now)
            self.tables.slide(sequence)
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
        self.tables.settle(step)

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
            if tree is not None:
                self.tables.hold_branches(step, tree)
            sequence.planned += rows
            sequence.inflight_tokens += rows == pending and sequence.max_tokens > 0
        return rows

    def _grow(self, step: StepPlan, now: float) -> None:
        """Give every running sequence blocks for all its tokens, best rank first, after the evictions that are due."""
        for sequence in tuple(self.running):
            due = sequence.due
            fresh = evicting.needed(sequence, self.pool) - len(sequence.spare) if due else 0
            needed = fresh if due else self.tables.missing(sequence)
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
                        self.evicted += self.tables.evict(step, sequence)
                    else:
                        sequence.blocks += self.tables.allocate(needed)
                except Exception as error:
                    self._give_up(sequence, now, error)

    def _preempt(self, step: StepPlan, sequence: Sequence, now: float) -> None:
        self._start_over(sequence, now)
        sequence.preemptions += 1
        self.preemptions += 1
        step.preempted.append(sequence)

    def _start_over(self, sequence: Sequence, now: float) -> None:
        """Take the blocks of a running sequence, which goes back to its place in the queue."""
        assert not sequence.under_way, "preempted under the runner"
        point("scheduler.preempt", sequence.id)
        self.tables.release(sequence, None)
        self.running.remove(sequence)
        sequence.enter(Status.PREEMPTED, now)
        self.queue.add(sequence)

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
                self.tables.release(sequence, self._last(sequence), keep)
            except AssertionError:
                raise
            except Exception:  # whatever it is, it concerns this sequence alone
                logger.exception("sequence %s failed at its end", sequence.id)
                sequence.ending = "internal"
            self.running.remove(sequence)
        elif sequence.status is Status.FETCHING:
            self.fetching.leave(sequence)
        else:
            self.queue.remove(sequence)
        sequence.enter(Status.ENDED, now)
        del self.sequences[sequence.id]
        self._ended.append(sequence)

    def _last(self, sequence: Sequence) -> StepPlan | None:
        """Return the last step under way, where it or one before it may use the sequence's blocks."""
        return self._steps[-1] if sequence.under_way else None

    def _queue_again(self, sequence: Sequence, now: float) -> None:
        """Queue a sequence that waited for blocks, in the order of its arrival."""
        sequence.enter(Status.QUEUED, now)
        self.queue.add(sequence)

    def check(self) -> None:
        """Assert every invariant of this module. Linear in the sequences: for tests."""
        places = [*self.waiting, *self.running, *self.fetching.waiting]
        assert len(places) == len(set(places)) == len(self.sequences), "a sequence in two places, or in none"
        assert set(places) == set(self.sequences.values()), "a place for a sequence that has ended"
        self.queue.check()
        assert self.running == sorted(self.running, key=by_rank), "the running are out of order"
        assert len(self.running) <= self.limits.together, "too many run"
        for sequence in self.sequences.values():
            sequence.check(self.pool.size)
            running = sequence.status in (Status.PREFILL, Status.DECODE)
            assert running == (sequence in self.running), "status and place differ"
            assert sequence.preemptions <= self.limits.max_preemptions, "preempted too often"
            within = sum(sequence in step.sequences for step in self._steps)
            assert sequence.under_way == within, "in a step that is over, or not in one that is under way"
            assert sequence.ending is None, "ended and still here"
        self.fetching.check(self.sequences.values())
        self.tables.check(self.running)
