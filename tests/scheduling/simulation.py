"""The real scheduler, pool and prefix tree, driven through random lives of an engine under a virtual clock.

A seed makes everything: sizes and limits, the requests (with prefixes in common, salts, priorities, deadlines, several
choices, bypass, some that can never fit), when they come and are cancelled, steps that fail for some, what happens
while a step is under way, in half of all lives steps that are planned ahead of one under way, on a device that may be
late with both, in half of all lives a group of layers with a sliding window, whose blocks are their own, in many others
requests that drop keys, in half of those without windows blocks that threads fill and read, in a fourth prompts with
images, whose features are late, and in a third of all lives faults at the named points (`attar/faults.py`). Only the
model is fake: its next token is a function of the sequence's seed and of all tokens before it, by way of a cache of
fake keys and values. Each slot holds a digest of salt and tokens up to its own, slots of free blocks are wiped, and
what a step reads must be what the sequence alone would have written.

After every event these hold:

 1. free + active + cached blocks are all blocks, and each block's state follows from its owners (`owners`)
 2. a block's holders are as many as sequences and copies that use it (`owners`)
 3. no block has two roles: one place in one sequence's table, one node of the tree (`owners`)
 4. the free list has every free block once (`BlockPool.check`)
 5. a block of the tree contains what its path says, computed and verified (`tags`)
 6. holders never increase along a path, and the tree is well formed (`PrefixCache.check`)
 7. no sequence is in two queues or none, its integers agree (`Scheduler.check`, `Sequence.check`)
 8. no more run than may, a step has no more tokens than its budget, and whoever decodes has a row of it (`planned`)
 9. whoever's deadline has come has ended when a step is planned (`deadlines`)
10. nobody is passed, or preempted, more often than the limits say (`planned`)
11. every slot that is read holds what the sequence wrote, and is written once a step, however late (`run`)
12. tokens are those of the solo run (`emitted`)
13. an ended sequence never gains a token (`emitted`)
14. no block is evicted while a sequence uses it (`advance`)
15. a plan is empty only where nothing may run yet, and nobody gives way to one ahead (`planned`)
16. whoever fails was made to: by a step, or by a fault, one sequence or one request's arrival a fault (`check`)
17. 2, 5, 11 and 21 hold of sliding blocks too, of which a row reads its window alone (`SlidingBlocks.check`, `run`)
18. no row of an image runs before its features are there, and images are held by sequences and tree alone (`planned`)
19. a block that a thread fills is nobody else's, and one that it reads stays as it was (`Fetching.check`, `let_go`)

and in the end:

19. every request has ended exactly once, finished ones with their whole answer (`drain`)
20. within a bounded number of steps (`drain`)
21. no block is active, and after a flush all are free, and no image is held (`drain`)

`python -m tests.scheduling.simulation --seeds 20000` runs many; `--first 4711 --seeds 1` replays one.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import random
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import NamedTuple
from unittest.mock import patch

import attar.scheduling.admission
import attar.scheduling.block_pool
import attar.scheduling.block_tables
import attar.scheduling.deadlines
import attar.scheduling.fetching
import attar.scheduling.prefix_cache
import attar.scheduling.scheduler
import attar.scheduling.sliding
from attar import faults
from attar.kv.eviction import Eviction
from attar.kv.sparse_prefill import SparsePrefill
from attar.plan.sliding import SlidingLimits
from attar.protocol.messages import REUSE_ENDS
from attar.protocol.scheduler_config import SchedulerConfig
from attar.scheduling import draft_tree
from attar.scheduling.image_ids import ImageIds, ImageSpan, number_of, row_ids
from attar.scheduling.sequence import Sequence, Status
from attar.scheduling.step_plan import Evicted, ScheduledTokens, StepPlan

END = 0  # the token that ends an answer
FEW, FEW_OF_PROMPT = -1, -2  # no tokens: they mark digests of rows that read few keys
SINK = -3  # it marks sinks, by how far they were turned
POINTS = [name for name in faults.POINTS if name.startswith(("scheduler.", "radix.", "pool."))]
VOCABULARY = 4  # few, so that random prompts have beginnings in common
EVENTS = 80


def digest(before: int, token: int) -> int:
    """Of all tokens up to this one. Hashes of integers are the same in every process."""
    return hash((before, token))


def begin(cache_salt: bytes) -> int:
    return hash(tuple(cache_salt))


def turned(state: int | None, dropped: int) -> int:
    """A sink that stands behind so many dropped tokens."""
    return hash((state, SINK, dropped))


def choose(state: int, seed: int) -> int:
    """The fake model's next token."""
    number = (hash((state, seed)) >> 8) % 48
    return END if number == 0 else number % VOCABULARY or 1


@dataclass(eq=False)
class Asked:
    """A sequence with all it will ever be: its tokens when run alone, and the digest at each."""

    sequence: Sequence
    seed: int
    tokens: list[int]
    whole: int | None = None  # the scheduler's
    prefill: SparsePrefill | None = None  # likewise
    digests: dict[int, list[int]] = field(default_factory=dict)  # by horizon
    passed: int = 0
    preempted: int = 0
    gained: int | None = None
    """Output tokens at the moment it was cancelled or had ended."""
    endings: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        salt, horizons = self.sequence.cache_salt, self.sequence.horizons
        states = {at: begin(salt + at.to_bytes(8, "little") * bool(horizons)) for at in horizons or (0,)}
        self.digests = {at: [] for at in states}

        def follow(token: int) -> None:
            for at in states:
                states[at] = self.after(states[at], len(self.digests[at]), token)
                self.digests[at].append(states[at])

        for token in self.tokens:
            follow(token)
        while len(self.tokens) < self.sequence.prompt + self.sequence.max_tokens:
            at = next((at for at in states if at >= len(self.tokens)), max(states))
            self.tokens.append(choose(states[at], self.seed))
            follow(self.tokens[-1])
            if self.tokens[-1] == END:
                break

    def after(self, state: int, position: int, token: int) -> int:
        """The digest at a position: of few keys, where this is a row of an output past the scheduler's `whole`, or one
        in the middle of a prompt."""
        prompt = self.sequence.prompt
        if self.whole is not None and position >= max(prompt, self.whole):
            state = digest(state, FEW)
        if self.prefill is not None and self.prefill.whole <= position < self.prefill.until(prompt):
            state = digest(state, FEW_OF_PROMPT)
        eviction = self.sequence.eviction
        if eviction is not None and position >= eviction.plain(prompt):
            state = digest(state, FEW)
        return digest(state, token)


class Group(NamedTuple):
    """A group of layers in a step: its memory, the first token that a chunk reads, the slots written so far, the
    sequence's table, and the blocks of branches."""

    memory: list[list[int | None]]
    oldest: int
    written: set[tuple[int, int]]
    blocks: list[int]
    others: tuple[tuple[int, ...], ...] | None
    dropped: int = 0  # tokens of the sequence that have no slot


@dataclass(eq=False)
class Launched:
    """A step on the device, which knows the blocks of its rows as they were when it was told."""

    plan: StepPlan
    tables: list[list[int]]
    sliding: list[list[int]]
    dropped: list[int]
    outcomes: dict[str, object] | None = None
    """None until it has been run."""


@dataclass(eq=False)
class Filling:
    """A thread that fills the blocks of a fetch: those before `count` are whole. It may die, and it may go on although
    nobody waits."""

    fetch: attar.scheduling.fetching.Fetch
    states: list[int]  # of each token
    count: int = 0


class Simulation:
    """One life of an engine. The modules can be others, with bugs in them."""

    def __init__(
        self,
        seed: int,
        events: int = EVENTS,
        block_pool: ModuleType = attar.scheduling.block_pool,
        prefix_cache: ModuleType = attar.scheduling.prefix_cache,
        scheduler: ModuleType = attar.scheduling.scheduler,
        sliding: ModuleType = attar.scheduling.sliding,
        fetching: ModuleType = attar.scheduling.fetching,
        admission: ModuleType = attar.scheduling.admission,
        block_tables: ModuleType = attar.scheduling.block_tables,
        deadlines: ModuleType = attar.scheduling.deadlines,
    ) -> None:
        self.rng = rng = random.Random(seed)
        self.events = events
        self.module = scheduler
        self.refusals = attar.scheduling.admission.Refused, admission.Refused
        size = rng.choice([1, 2, 3, 4, 4, 8])
        running = rng.choice([1, 3, 6, 8, 8])
        self.limits = SchedulerConfig(
            policy=rng.choice(["none", "static", "dynamic", *["continuous"] * 7]),
            max_running=running,
            max_step_tokens=running + rng.choice([0, 1, 3, 10, 30]),
            max_waiting=rng.choice([4, 8, 30]),
            max_delay=rng.choice([0.0, 1.0, 4.0]),
            max_passed=rng.choice([0, 1, 3]),
            max_preemptions=rng.choice([0, 1, 2, 4, 4]),
            headroom=rng.choice([0.0, 0.0, 0.0, 0.2]),
            max_drafts=random.Random(-(2**35) - seed).choice([0, 1, 4, 30]),
        )
        self.pool = block_pool.BlockPool(max(2, rng.choice([24, 48, 48, 96]) // size), size)
        self.cache = prefix_cache.PrefixCache(self.pool, rng.choice([n for n in range(1, size + 1) if size % n == 0]))
        self.whole = random.Random(-(2**37) - seed).choice([None, None, 0, 0, 9])
        last = random.Random(-(2**39) - seed).choice([None, None, 1, 4, 9])
        self.prefill = None if last is None else SparsePrefill(window=16, last=last)
        self.lag = random.Random(-(2**32) - seed)
        self.overlaps = self.lag.random() < 1 / 2
        self.groups = random.Random(-(2**38) - seed)
        self.window = self.groups.choice([None, None, None, None, None, 1, 2, 3, 5, 9])
        self.sliding = None
        if self.window is not None:
            rows = (1 + self.overlaps) * self.limits.max_step_tokens
            least = SlidingLimits(self.window, size, rows)
            spare = self.groups.choice([0, 0, 1, 5, 30])
            pool = block_pool.BlockPool(least.held + least.of_steps + spare, size)
            self.sliding = sliding.SlidingBlocks(pool, self.window, rows)
            self.cache.beside = self.sliding
            self.slides: list[list[int | None]] = [[None] * size for _ in range(pool.total)]
        parts = {"BlockTables": block_tables, "WaitingQueue": admission, "Deadlines": deadlines}
        with patch.multiple(scheduler, **{name: getattr(module, name) for name, module in parts.items()}):
            settings = self.limits, self.whole, self.sliding, self.prefill
            self.scheduler = scheduler.Scheduler(self.pool, self.cache, *settings)
        self.cache.evict = self.evict  # type: ignore[method-assign]
        self.memory: list[list[int | None]] = [[None] * size for _ in range(self.pool.total)]
        self.asked: dict[str, Asked] = {}
        self.requests = 0
        self.steps: list[Launched] = []
        self.now = 0.0
        self.drafts = random.Random(-(2**34) - seed)
        self.trees = random.Random(-(2**36) - seed)
        self.accepted = 0  # drafts that were right
        self.branched = 0  # times that a step's tokens were not those of the first branch
        self.dice = random.Random(-1 - seed)  # of faults alone: lives without them are as they would be
        self.faulty = self.dice.random() < 1 / 3
        ends: tuple[tuple[int, ...], ...] = ((), (), (), (7, 1 << 20), (4, 8, 16, 32, 1 << 20))
        self.horizons = random.Random(-(2**33) - seed).choice(ends)
        self.droppers = random.Random(-(2**39) - seed)
        plain = self.window is None and self.whole is None and self.prefill is None and not self.horizons
        self.evicts = plain and self.droppers.random() < 0.8
        self.threads = random.Random(-(2**40) - seed)
        self.moves = self.window is None and self.threads.random() < 0.5
        self.fillings: list[Filling] = []
        self.readings: list[tuple[attar.scheduling.fetching.Loan, list[list[int | None]]]] = []
        self.fetched = 0  # blocks that went into the tree
        self.scheduler.fetching = fetching.Fetching(self.pool, self.cache, self.scheduler._queue_again)
        if self.moves:
            self.scheduler.tables.kept = deque()
        self.viewer = random.Random(-(2**41) - seed)
        self.ids = None
        if self.viewer.random() < 1 / 4:
            self.ids = self.cache.images = ImageIds()
        self.mutual = self.viewer.random() < 0.5  # whether rows of an image see each other
        self.image_keys: dict[int, bytes] = {}  # of all numbers that were ever held
        self.fired = self.suffered = 0  # faults, and what failed for no other reason
        self.spoiled: set[str] = set()
        """Sequences for which a step failed: the device has nothing more of theirs."""
        self.failing: set[str] = set()
        """Those of them that were told so."""

    def life(self) -> None:
        """All events, then the end. Raises AssertionError where an invariant does not hold."""
        kinds = [self.arrive, self.cancel, self.wait, self.advance]
        for kind in self.rng.choices(kinds, weights=[4, 1, 1, 12], k=self.events):
            kind()
            self.check()
            self.move()
        self.drain()

    def arrive(self) -> None:
        """A request, of one to three choices, whose prompt may begin as something seen before."""
        rng = self.rng
        prompt: list[int] = []
        most = self.pool.total * self.pool.size
        if self.asked and rng.random() < 0.7:
            other = rng.choice(list(self.asked.values())[-8:]).tokens
            prompt = other[: rng.randint(1, min(len(other), most // 2))]
        prompt = prompt + [rng.randrange(VOCABULARY) for _ in range(rng.randint(0 if prompt else 1, 8))]
        taken = self.show(prompt) if self.ids is not None else []
        deadline = self.now + rng.uniform(0, 8) if rng.random() < 0.15 else None
        cache_salt, priority = rng.choice([b"", b"", b"", b"a", b"b"]), rng.choice([0, 0, 0, 1, -1])
        bypass, longest = rng.random() < 0.1, rng.choice([0, 1, 6, 15, 25, 40])
        eviction, images = self.eviction(), self.spans(prompt)
        eviction = None if images else eviction  # the engine refuses both in one request
        choices = []
        for i in range(rng.choice([1, 1, 1, 2, 3])):
            sequence = Sequence(
                id=f"{self.requests}.{i}", prompt_ids=prompt, max_tokens=longest, priority=priority,
                deadline=deadline, cache_salt=cache_salt, bypass=bypass and i == 0, horizons=self.horizons,
                eviction=eviction, images=images if i == 0 else self.spans(prompt),
            )  # fmt: skip
            choices.append(Asked(sequence, rng.getrandbits(32), list(prompt), self.whole, self.prefill))
        self.requests += 1
        tokens = len(prompt) + max(longest - 1, 0)
        blocks = -(-tokens // self.pool.size)
        if eviction is not None and eviction.once and len(prompt) > eviction.budget and longest > 1:
            kept = eviction.budget + tokens - len(prompt)
            blocks = -(-len(prompt) // self.pool.size) + -(-kept // self.pool.size)
        elif eviction is not None and not eviction.once and tokens > eviction.budget:
            blocks = 2 * -(-eviction.budget // self.pool.size)
        queued = (Status.QUEUED, Status.FETCHING)
        waiting = sum(a.sequence.status in queued for a in self.asked.values())
        fired = self.fired
        answer = self._add(choices)
        if answer is None:
            for span in (span for choice in choices for span in choice.sequence.images):
                self.ids.hold_again(span.number)
        for number in taken:
            self.ids.drop(number)
        if self.fired > fired:
            self.suffered += 1
            assert answer == "fault"
            assert not any(choice.sequence.id in self.scheduler.sequences for choice in choices), "half a request"
            return
        verdict = "too_long" if blocks > self.pool.total else None
        if verdict is None and waiting + len(choices) > self.limits.max_waiting:
            verdict = "full"
        assert answer == verdict, "refused or taken wrongly"
        if verdict is None:
            self.asked.update((choice.sequence.id, choice) for choice in choices)
            self.fetch([choice.sequence for choice in choices if not choice.sequence.bypass])

    def fetch(self, sequences: list[Sequence]) -> None:
        """Perhaps blocks of the prompt are elsewhere."""
        if not self.moves or not sequences or sequences[0].images or self.threads.random() < 0.4:
            return
        first, size = sequences[0], self.pool.size
        most = self.scheduler.tables.reusable(first) // size
        count = self.threads.randint(0, most)
        fired = self.fired
        with contextlib.suppress(faults.InjectedFault), self.mishap():
            match = self.cache.match(first.salt, first.tokens[: count * size])
            until = self.now + self.threads.uniform(0, 3)
            fetch = self.scheduler.fetch(sequences, match, count, until, self.now)
            if fetch is not None:
                assert fetch.known < count == len(fetch.blocks), "fetched, although it is there"
                self.fillings.append(Filling(fetch, self.states(fetch.salt, fetch.tokens)))
        self.suffered += self.fired - fired

    def move(self) -> None:
        """Threads do some of their work, and new blocks are lent to them."""
        if not self.moves:
            return
        if self.scheduler.tables.kept:
            for kept in self.scheduler.tables.kept:
                assert len(kept.tokens) % self.pool.size == 0, "part of a block is offered"
            self.scheduler.tables.kept.clear()
        while self.threads.random() < 0.5:
            self.let_go() if self.threads.random() < 0.3 else self.fill()
        nodes = list(self.cache.nodes())
        if nodes and self.threads.random() < 0.1:
            salt, before, node = self.threads.choice(nodes)
            blocks = self.cache.match(salt, before + node.tokens).blocks
            loan = self.scheduler.fetching.lend(blocks[: self.threads.randint(0, len(blocks))])
            self.readings.append((loan, [list(self.memory[block]) for block in loan.blocks]))
        self.check()

    def fill(self) -> None:
        """One of the threads fills a block of a fetch, dies of it, or lets go."""
        if not self.fillings:
            return
        filling = self.threads.choice(self.fillings)
        fetch, size = filling.fetch, self.pool.size
        left = fetch.filled[filling.count :]
        dies = self.threads.random() < 0.1 or (not fetch.wanted and self.threads.random() < 0.5)
        if left:
            at = (fetch.known + filling.count) * size
            written = self.threads.randrange(size) if dies else size
            self.memory[left[0]][:written] = filling.states[at : at + written]
            filling.count += not dies
        if dies or len(left) <= 1:
            self.fillings.remove(filling)
            self.fetched += filling.count
            fired = self.fired
            with self.mishap():
                self.scheduler.received(fetch, filling.count, self.now)
            self.suffered += self.fired - fired

    def let_go(self) -> None:
        """One of the threads has read the blocks that it was lent."""
        if self.readings:
            loan, before = self.readings.pop(self.threads.randrange(len(self.readings)))
            assert before == [self.memory[block] for block in loan.blocks], "a block changed while it was read"
            self.scheduler.fetching.give_back(loan)

    def states(self, salt: bytes, tokens: Iterable[int]) -> list[int]:
        """What the tree's slots hold for these tokens."""
        state, found = begin(salt), list[int]()
        for position, token in enumerate(tokens):
            if self.prefill is not None and position >= self.prefill.whole:
                state = digest(state, FEW_OF_PROMPT)
            state = digest(state, token)
            found.append(state)
        return found

    def show(self, prompt: list[int]) -> list[int]:
        """Perhaps put an image behind the prompt; give its images the numbers that they have now, and return these,
        which are held."""
        numbers: dict[int, int] = {}

        def hold(key: bytes) -> int:
            number = self.ids.hold(key)
            self.image_keys[number] = key
            taken.append(number)
            return number

        taken: list[int] = []
        for at, token in enumerate(prompt):
            if token < 0:
                old = number_of(token)
                if old not in numbers:
                    numbers[old] = hold(self.image_keys[old])
                prompt[at] = token + (old - numbers[old] << 15)
        if self.viewer.random() < 0.5:
            number = hold(bytes([self.viewer.randrange(4)]))
            prompt += [*row_ids(number, self.viewer.randint(1, 5)), *[1] * self.viewer.randrange(3)]
        return taken

    def spans(self, prompt: list[int]) -> tuple[ImageSpan, ...]:
        """The images of a prompt; whole ones where a step has room for them."""
        found, limits = spans(prompt), self.limits
        for span in found:
            room = limits.max_step_tokens - limits.together - limits.max_drafts
            span.whole = self.mutual and span.end - span.start <= room
        return found

    def encode(self) -> None:
        """Features come for those that run, and go from those that do not."""
        for sequence in self.scheduler.sequences.values():
            for span in sequence.images:
                if sequence not in self.scheduler.running:
                    span.ready = False
                elif not span.ready and self.viewer.random() < 0.5:
                    span.ready = True
                    break

    def eviction(self) -> Eviction | None:
        """The policy of a request, if it has one."""
        if not self.evicts or self.droppers.random() < 0.3:
            return None
        size = self.pool.size
        if self.droppers.random() < 0.5:
            return Eviction("snapkv", self.droppers.choice([1, 2, 5, 9]))
        budget = 2 * size + self.droppers.choice([0, 1, size, 3 * size, 20])
        return Eviction("sink", budget, self.droppers.randrange(min(size, 3)))

    def _add(self, choices: list[Asked]) -> str | None:
        try:
            with self.mishap():
                self.scheduler.add([choice.sequence for choice in choices], self.now)
        except self.refusals as refused:
            return refused.code
        except faults.InjectedFault:
            return "fault"
        return None

    @contextlib.contextmanager
    def mishap(self) -> Iterator[None]:
        """Perhaps something within raises."""
        if not self.faulty or self.dice.random() < 0.8:
            yield
            return
        fault = faults.Fault(self.dice.choice(POINTS), after=self.dice.choice([0, 0, 1, 3]))
        faults.arm(fault)
        try:
            yield
        finally:
            faults.arm()
            self.fired += fault.fired

    def cancel(self) -> None:
        """Any request, whatever it is doing or whether it has ended."""
        if self.asked:
            asked = self.rng.choice(list(self.asked.values())[-12:])
            if asked.gained is None:
                asked.gained = asked.sequence.output
            with self.mishap():
                self.scheduler.cancel(asked.sequence.id, self.now)

    def wait(self) -> None:
        self.now += self.rng.uniform(0, 2)
        with self.mishap():
            self.scheduler.expire(self.now)
        self.deadlines()

    def advance(self) -> None:
        """Plan a step, or another ahead of it, or run the first and commit it."""
        self.now += self.rng.uniform(0, 0.2)
        ahead = self.overlaps and len(self.steps) == 1 and not self.steps[0].plan.drafts
        if not self.steps or (ahead and self.lag.random() < 0.8):
            self.launch()
            return
        self.catch_up()
        step = self.steps.pop(0)
        told = {id for id, outcome in step.outcomes.items() if outcome.failure is not None}
        self.failing |= told & self.scheduler.sequences.keys()
        with self.mishap():
            self.scheduler.commit(step.plan, step.outcomes, self.now)
        self.emitted()

    def evict(self, n: int) -> None:
        """The cache's own, whoever calls it and whatever becomes of it: what is in use stays."""
        pool = self.pool
        used = [block for block in range(pool.total) if pool.kept(block) and pool.holders(block)]
        try:
            type(self.cache).evict(self.cache, n)
        finally:
            assert all(map(pool.kept, used)), "a block in use was evicted"

    def launch(self) -> None:
        ahead = bool(self.steps)
        # Whoever ends within the planning leaves its tokens to the tree, where one that has more of a block's takes the
        # place of one in use that has fewer: that is no eviction.
        ends = any(map(self.late, self.scheduler.running))
        used = [block for sequence in self.scheduler.running for block in sequence.blocks if self.pool.kept(block)]
        decoding = [each for each in self.scheduler.running if each.status is Status.DECODE and each.pending == 1]
        if not ahead:
            self.draft(decoding)
            self.encode()
        fired = self.fired
        with self.mishap():
            step = self.scheduler.ahead(self.now) if ahead else self.scheduler.plan(self.now)
        self.deadlines()
        if step is None:
            return
        gave_way = ends or bool(step.preempted or step.started_over) or self.fired > fired
        evicted = not gave_way and not all(map(self.pool.kept, used))
        assert not evicted, "a block in use was evicted"
        rows = {chunk.sequence for chunk in step.chunks}
        assert all(each in rows for each in decoding if each.status is Status.DECODE), "a decoder has to wait"
        self.planned(step, ahead)
        if step.chunks or not ahead:
            tables, sliding = (
                [list(getattr(chunk.sequence, name)) for chunk in step.chunks] for name in ("blocks", "sliding")
            )
            dropped = [chunk.sequence.dropped for chunk in step.chunks]
            self.steps.append(Launched(step, tables, sliding, dropped))
        if self.overlaps and self.lag.random() < 0.5:  # a device that is quick: what comes between finds all of it done
            self.catch_up(len(self.steps))

    def draft(self, decoding: list[Sequence]) -> None:
        """Guesses for some, right for a while, also past all limits."""
        for sequence in decoding:
            if self.drafts.random() < 0.5:
                known = len(sequence.tokens)
                right = self.asked[sequence.id].tokens[known : known + self.drafts.choice([0, 1, 2, 4, 9])]
                wrong = [self.drafts.randrange(VOCABULARY) for _ in range(self.drafts.choice([0, 0, 1, 3]))]
                sequence.drafts = (*right, *wrong)
                if self.trees.random() < 0.5 and sequence.eviction is None:
                    self.branch(sequence)

    def branch(self, sequence: Sequence) -> None:
        """Make a tree of its drafts, with wrong ones anywhere."""
        drafts, parents = list(sequence.drafts), list(range(len(sequence.drafts)))
        for _ in range(self.trees.choice([1, 2, 5])):
            at = self.trees.randrange(len(drafts) + 1)  # before the drafts of these rows
            parents = [parent + (parent > at) for parent in parents]
            drafts.insert(at, self.trees.randrange(VOCABULARY))
            parents.insert(at, self.trees.randrange(at + 1))
        sequence.drafts, sequence.parents = draft_tree.in_preorder(drafts, parents)

    def catch_up(self, count: int = 1) -> None:
        """The device does the first steps, in their order."""
        for step in self.steps[:count]:
            if step.outcomes is None:
                step.outcomes = self.run(step)

    def planned(self, step: StepPlan, ahead: bool) -> None:
        assert step.tokens <= self.limits.max_step_tokens, "over the token budget"
        assert len(self.scheduler.running) <= self.limits.together, "too many run"
        assert not (ahead and (step.preempted or step.started_over)), "somebody gives way to a step ahead"
        if self.limits.policy == "continuous":
            late = {each for each in step.admitted if each.gated or any(span.whole for span in each.images)}
            fed = {chunk.sequence for chunk in step.chunks} | late
            assert set(step.admitted) <= fed, "let in, and nothing left for it"
        for chunk in step.chunks:
            for span in chunk.sequence.images:
                apart = chunk.start + chunk.rows <= span.start or chunk.start >= span.end
                assert span.ready or apart, "a row of an image without features"
                inside = any(span.start < at < span.end for at in (chunk.start, chunk.start + chunk.rows))
                assert not (span.whole and inside), "an image is cut whose rows see each other"
        for sequence in step.admitted:
            assert not sequence.bypass or sequence.reused == 0, "reused in spite of bypass"
            assert sequence.reused % self.cache.round_to == 0, "part of a group was reused"
            assert sequence.reuse_ended in REUSE_ENDS, "a reason that nobody is told of"
            assert sequence.reused < sequence.prompt, "nothing left to compute"
            for other in self.scheduler.waiting:
                self.asked[other.id].passed += other.order < sequence.order
        for sequence in step.preempted:
            asked = self.asked[sequence.id]
            asked.preempted += 1
            assert asked.preempted <= self.limits.max_preemptions, "preempted too often"
        assert all(asked.passed <= self.limits.max_passed for asked in self.asked.values()), "passed too often"
        waits = any(each.gated for each in self.scheduler.running)
        if not step.chunks and self.scheduler.sequences and not ahead and not waits:
            wake = self.scheduler.wake()
            assert not self.scheduler.running, "running, and nothing to run"
            if self.fillings or self.readings:
                return  # there may be no room, or nobody but those that wait for blocks
            assert self.limits.policy == "dynamic", "an empty step, and sequences that wait"
            assert wake is not None and wake > self.now, "nobody will wake the scheduler"  # noqa: PT018

    def run(self, step: Launched) -> dict[str, object]:
        """The fake model: copies, then chunks, each of which reads all before it."""
        rng, size, memory = self.rng, self.pool.size, self.memory
        outcomes: dict[str, object] = {}
        written: set[tuple[int, int]] = set()
        slid: set[tuple[int, int]] = set()
        for source, target, slots, _ in step.plan.sliding_copies:
            self.slides[target][:slots] = self.slides[source][:slots]
        for source, target, slots, sequence in step.plan.copies:
            memory[target][:slots] = memory[source][:slots]
            if self.faulty and self.dice.random() < 0.1:
                memory[target] = [None] * size
                outcomes[sequence.id] = self.module.Outcome(failure="internal")
        for evicted in step.plan.evictions:
            self._evict(evicted)
        everything_fails = rng.random() < 0.01
        parts = zip(step.plan.chunks, step.tables, step.sliding, step.dropped, strict=True)
        for chunk, blocks, sliding, dropped in parts:
            sequence, start, rows, samples, drafts, tree = chunk
            asked = self.asked[sequence.id]
            if sequence.id in outcomes or sequence.id in self.spoiled:
                continue
            fails = everything_fails or rng.random() < 0.005
            digests = asked.digests[sequence.horizon]
            if drafts:
                assert start + rows - len(drafts) == len(sequence.tokens), "drafts in the middle of a sequence"
            known = len(sequence.tokens) if drafts else start + rows
            state = digests[known - 1]
            of = [state]  # of each row from that of the last token on
            depths = draft_tree.depths(chunk.parents or range(len(drafts)))
            for row, (draft, parent) in enumerate(zip(drafts, chunk.parents or range(len(drafts)), strict=True), 1):
                of.append(asked.after(of[parent], known - 1 + depths[row], draft))
            rows_of = [*digests[start:known], *of[1:]]
            if fails:
                rows_of = [None] * len(rows_of)
            own = Group(memory, 0, written, blocks, tree and tree.blocks, dropped)
            self._fill(own, chunk, digests, rows_of)
            if self.sliding is not None:
                oldest = max(0, start - self.window + 1)
                self._fill(Group(self.slides, oldest, slid, sliding, tree and tree.sliding), chunk, digests, rows_of)
            if fails:
                outcomes[sequence.id] = self.module.Outcome(failure="internal")
            elif samples:
                outcomes[sequence.id] = self._sample(asked, known, drafts, chunk.parents, state)
        self.spoiled |= {id for id, outcome in outcomes.items() if outcome.failure is not None}
        return outcomes

    def _evict(self, evicted: Evicted) -> None:
        """What an eviction does: sinks are turned, or a prompt's last tokens gathered."""
        memory, size, eviction = self.memory, self.pool.size, evicted.sequence.eviction
        if eviction.once:
            for slot in range(eviction.budget):
                at = slot + evicted.dropped
                kept = memory[evicted.sources[at // size]][at % size]
                memory[evicted.targets[slot // size]][slot % size] = kept
            return
        (source,), (target,) = evicted.sources, evicted.targets
        for slot in range(eviction.sinks):
            memory[target][slot] = turned(memory[source][slot], evicted.dropped)

    def _fill(self, group: Group, chunk: ScheduledTokens, digests: list[int], states: list[int | None]) -> None:
        """What one group of layers does for a chunk: read all that it sees, then write every row."""
        size, (sequence, start, rows, _, drafts, tree) = self.pool.size, chunk
        memory, oldest, _, blocks, others, dropped = group
        found = [memory[blocks[at // size]][at % size] for at in range(oldest, start - dropped)]
        sinks = sequence.eviction.sinks if dropped else 0
        expected = [turned(state, dropped) for state in digests[:sinks]] + digests[oldest + sinks + dropped : start]
        assert found == expected, f"{sequence.id} reads what is not its own"
        before = rows - len(drafts)
        known = start + before
        for row in range(before):
            self._write(group, blocks, start + row, states[row])
        depths = draft_tree.depths(chunk.parents or range(len(drafts)))
        for branch in range(1 + len(others) if tree else 1):
            last = draft_tree.branches(chunk.parents)[branch][-1] if tree else len(drafts)
            path = [last, *draft_tree.ancestors(chunk.parents, last)] if tree else range(1, 1 + last)
            table = blocks
            if tree and branch:
                table = [*blocks[: tree.first], *others[branch - 1]]
                assert known + depths[last] <= len(table) * size, "a branch without blocks"
                for at in range(tree.first * size, known):  # the rows before the drafts
                    self._write(group, table, at, memory[blocks[tree.first]][at % size])
            for row in path:
                if row:
                    self._write(group, table, known - 1 + depths[row], states[before - 1 + row])

    def _write(self, group: Group, table: list[int], at: int, state: int | None) -> None:
        at -= group.dropped
        slot = table[at // self.pool.size], at % self.pool.size
        assert slot not in group.written, "a slot is written twice in a step"
        group.written.add(slot)
        group.memory[slot[0]][slot[1]] = state

    def _sample(
        self, asked: Asked, known: int, drafts: tuple[int, ...], parents: tuple[int, ...], state: int
    ) -> object:
        """The token behind the `known` ones, whose state this is, and those behind drafts that are right."""
        if not asked.sequence.max_tokens:
            return self.module.Outcome()
        tokens: list[int] = []
        row: int | None = 0
        while row is not None:
            tokens.append(choose(state, asked.seed))
            state = asked.after(state, known + len(tokens) - 1, tokens[-1])
            last, row = row, None if tokens[-1] == END else draft_tree.child(drafts, parents, row, tokens[-1])
        self.branched += bool(parents) and last not in draft_tree.branches(parents)[0]
        self.accepted += len(tokens) - 1
        return self.module.Outcome(tuple(tokens), END in tokens)

    def emitted(self) -> None:
        for asked in self.asked.values():
            sequence = asked.sequence
            assert list(sequence.tokens) == asked.tokens[: len(sequence.tokens)], f"{sequence.id} differs from alone"
            if asked.gained is not None:
                assert sequence.output == asked.gained, f"{sequence.id} gained tokens after its end"

    def check(self) -> None:
        """Every invariant of the moment."""
        for sequence in self.scheduler.collect():
            asked = self.asked[sequence.id]
            for span in sequence.images:
                self.ids.drop(span.number)
            asked.endings.append(sequence.ending)
            asked.gained = sequence.output
            self.suffered += sequence.ending == "internal" and sequence.id not in self.failing
        assert self.scheduler.sequences or self.scheduler.wake() is None, "somebody is to be woken, and nobody is there"
        assert self.suffered == self.fired, "something failed of itself, or a fault had no victim, or several"
        pools = [(self.pool, self.memory)] + ([] if self.sliding is None else [(self.sliding.pool, self.slides)])
        for pool, memory in pools:
            for block, state in enumerate(pool.states()):
                if state == attar.scheduling.block_pool.FREE:
                    memory[block] = [None] * pool.size
        self.pool.check()
        self.cache.check()
        self.scheduler.check()
        self.owners()
        self.tags()
        if self.ids is not None:
            within = [token for _, _, node in self.cache.nodes() for token in node.tokens if token < 0]
            holders = Counter(map(number_of, within))
            holders.update(span.number for each in self.scheduler.sequences.values() for span in each.images)
            self.ids.check(holders)

    def owners(self) -> None:
        pool = self.pool
        tables = [asked.sequence.blocks for asked in self.asked.values()]
        assert all(len(table) == len(set(table)) for table in tables), "a block stands twice in a table"
        holders = Counter(block for table in tables for block in table)
        for asked in self.asked.values():
            holders.update([*asked.sequence.pristine, *asked.sequence.spare])
        for step in self.steps:
            holders.update(copy.source for copy in step.plan.copies)
            holders.update(step.plan.held)
        for moved in (*self.scheduler.fetching.fetches, *self.scheduler.fetching.loans):
            holders.update(moved.blocks)
        keepers = Counter(block for _, _, node in self.cache.nodes() for block in node.blocks)
        assert not keepers or max(keepers.values()) == 1, "a block is in two nodes"
        for block, state in enumerate(pool.states()):
            assert pool.holders(block) == holders[block], f"block {block} has not as many holders as it counts"
            owned = attar.scheduling.block_pool.CACHED if keepers[block] else attar.scheduling.block_pool.FREE
            assert state == (attar.scheduling.block_pool.ACTIVE if holders[block] else owned), f"block {block} leaked"
        assert pool.free + pool.active + pool.cached == pool.total
        if self.sliding is None:
            return
        tables = [asked.sequence.sliding[asked.sequence.slid :] for asked in self.asked.values()]
        tables += [step.plan.sliding_held for step in self.steps]
        held = Counter(block for table in tables for block in table)
        for block in range(self.sliding.pool.total):
            assert self.sliding.pool.holders(block) == held[block], f"sliding block {block} has other holders"

    def tags(self) -> None:
        for cache_salt, before, node in self.cache.nodes():
            # Those of rows in the middle of a prompt: the tree has no others where these differ.
            for at, state in enumerate(self.states(cache_salt, before + node.tokens)[len(before) :]):
                block = node.blocks[at // self.pool.size]
                assert self.memory[block][at % self.pool.size] == state, f"block {block} is not what the tree says"
                if self.sliding is not None and (own := self.sliding.beside(block)) is not None:
                    assert self.slides[own][at % self.pool.size] == state, f"sliding block {own} is not the tree's"

    def deadlines(self) -> None:
        assert not any(map(self.late, self.scheduler.sequences.values())), "a deadline passed unnoticed"
        fetches = self.scheduler.fetching.fetches
        assert not any(each.wanted and each.until <= self.now for each in fetches), "a fetch is waited for too long"

    def late(self, sequence: Sequence) -> bool:
        return sequence.deadline is not None and sequence.deadline <= self.now

    def drain(self) -> None:
        """Let everything end."""
        alive = [asked for asked in self.asked.values() if asked.sequence.id in self.scheduler.sequences]
        steps = sum(len(asked.tokens) for asked in alive) * (self.limits.max_preemptions + 2 + len(self.horizons)) + 10
        steps *= 1 if self.ids is None else 10
        while self.scheduler.sequences or self.steps:
            steps -= not self.steps
            assert steps > 0, "it goes on for ever"
            self.advance()
            self.check()
            self.fill()
            self.let_go()
            if self.steps and not self.steps[0].plan.chunks:
                self.now = max(self.now, self.scheduler.wake() or 0.0)
        while self.fillings or self.readings:
            self.fill()
            self.let_go()
        self.check()
        for asked in self.asked.values():
            sequence = asked.sequence
            assert len(asked.endings) == 1, f"{sequence.id} ended {len(asked.endings)} times"
            finished = asked.endings == ["finished"]
            assert not finished or list(sequence.tokens) == asked.tokens, f"{sequence.id} ended before its end"
        assert 0 <= self.cache.reused <= self.cache.asked
        assert self.pool.active == 0, "blocks that nobody uses are active"
        self.cache.flush()
        self.check()
        assert self.pool.free == self.pool.total, "blocks that a flush does not free"
        assert self.ids is None or not len(self.ids), "images that nobody has"
        if self.sliding is not None:
            assert self.sliding.pool.free == self.sliding.pool.total, "sliding blocks that a flush does not free"
            assert self.sliding.lent == 0, "blocks lent to no step"


def spans(prompt: list[int]) -> tuple[ImageSpan, ...]:
    """The images of a prompt: runs of rows of one."""
    found: list[ImageSpan] = []
    for at, token in enumerate(prompt):
        if token < 0:
            if found and found[-1].end == at and found[-1].number == number_of(token):
                found[-1].end = at + 1
            else:
                found.append(ImageSpan(number_of(token), at, at + 1))
    return tuple(found)


def failing(
    seeds: Iterable[int], events: int = EVENTS, report: Callable[[int], None] = lambda seed: None, **modules: ModuleType
) -> tuple[int, Exception] | None:
    """The first seed that breaks an invariant, or anything else, and how."""
    for seed in seeds:
        try:
            Simulation(seed, events, **modules).life()
        except Exception as error:  # a planted bug may raise anything
            return seed, error
        report(seed)
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description="Random lives of the scheduler, checked after every event.")
    parser.add_argument("--seeds", type=int, default=500, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first")
    parser.add_argument("--events", type=int, default=EVENTS, help="of each, before all that runs is let end")
    options = parser.parse_args()
    logging.disable()  # faults are logged
    start = time.perf_counter()

    def report(seed: int) -> None:
        if (seed + 1) % 1000 == 0:
            print(f"up to seed {seed}: {time.perf_counter() - start:.0f} s", flush=True)

    seeds = range(options.first, options.first + options.seeds)
    if (failure := failing(seeds, options.events, report)) is not None:
        seed, error = failure
        command = f"python -m tests.scheduling.simulation --first {seed} --seeds 1 --events {options.events}"
        print(f"seed {seed} fails: {command}", file=sys.stderr)
        raise error
    print(f"{options.seeds} seeds of {options.events} events: {time.perf_counter() - start:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
