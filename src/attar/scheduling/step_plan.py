"""One step of the engine, as data: the scheduler's plan, which the runner runs, and each sequence's outcome."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from attar.scheduling import draft_tree
from attar.scheduling.draft_tree import DraftTree
from attar.scheduling.sequence import Sequence


class ScheduledTokens(NamedTuple):
    """Run `rows` tokens of the sequence from position `start`, reading the keys and values before them.

    Drafts are guesses of the tokens that come next. They are run behind the sequence's last token, in the same call,
    and each is kept if the token sampled in its place is the same. Those of a `tree` follow the rows that it names, a
    chain's each the one before.
    """

    sequence: Sequence
    start: int
    rows: int  # drafts included
    samples: int  # last rows behind each of which a token is sampled: the sequence's last token and the drafts; or 0
    drafts: tuple[int, ...] = ()
    tree: DraftTree | None = None

    @property
    def slot(self) -> int:
        """Return the slot of its first row, counted from the sequence's first."""
        return self.start - self.sequence.dropped

    @property
    def parents(self) -> tuple[int, ...]:
        """Return the row that each draft follows; nothing for a chain."""
        return () if self.tree is None else self.tree.parents

    def kept(self, tokens: tuple[int, ...]) -> list[int]:
        """Return the rows, counted from the chunk's first, whose keys stay once these tokens were sampled."""
        before = self.rows - len(self.drafts)
        right = draft_tree.path(self.drafts, self.parents, tokens)[1:] if self.drafts else []
        return [*range(before), *(before - 1 + row for row in right)]

    @property
    def ids(self) -> list[int]:
        """Return the token ids of the rows. The last is missing where no one knows it yet."""
        known, end = len(self.sequence.tokens), self.start + self.rows
        return [*self.sequence.tokens[self.start : end], *self.drafts[max(0, self.start - known) : end - known]]


class Copy(NamedTuple):
    """An instruction to copy the first `slots` slots of one block to another, in every layer, before anything runs."""

    source: int
    target: int
    slots: int
    sequence: Sequence


class Evicted(NamedTuple):
    """An instruction to fill `targets` with the kept keys of `sources`, in every layer, behind all copies.

    `dropped` tokens of the sequence have no slot afterwards.
    """

    sequence: Sequence
    sources: tuple[int, ...]
    targets: tuple[int, ...]
    dropped: int


@dataclass(slots=True)
class StepPlan:
    """The work of a step. Blocks are those of each sequence at this moment; they stay until the commit.

    A chunk of one row may be for a token that its sequence does not have yet: the step before samples it. There are no
    drafts then.
    """

    chunks: list[ScheduledTokens] = field(default_factory=list)
    copies: list[Copy] = field(default_factory=list)
    evictions: list[Evicted] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)
    started_over: list[Sequence] = field(default_factory=list)  # they outgrew their horizon
    held: list[int] = field(default_factory=list)
    """Blocks to release with the commit: their sequences gave them up while the step was under way, or branches of
    drafts have them."""
    sliding_copies: list[Copy] = field(default_factory=list)  # of blocks of layers with a sliding window
    sliding_held: list[int] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return sum(chunk.rows for chunk in self.chunks)

    @property
    def drafts(self) -> int:
        return sum(len(chunk.drafts) for chunk in self.chunks)

    @property
    def sequences(self) -> list[Sequence]:
        """All sequences of the step, including those that the budget left no chunk."""
        evicted = (each.sequence for each in self.evictions)
        return list(dict.fromkeys([*(chunk.sequence for chunk in self.chunks), *self.admitted, *evicted]))

    def pieces(self, rows: int) -> list[StepPlan]:
        """Cut the step into steps of at most `rows` tokens, which compute the same when they are run in their order."""
        first = StepPlan(copies=self.copies, evictions=self.evictions, sliding_copies=self.sliding_copies)
        made, room = [first], rows
        for chunk in self.chunks:
            start, end = chunk.start, chunk.start + chunk.rows
            while start < end:
                if not room:
                    made.append(StepPlan())
                    room = rows
                taken = min(end - start, room)
                sampled = min(taken, max(0, start + taken - (end - chunk.samples)))
                made[-1].chunks.append(ScheduledTokens(chunk.sequence, start, taken, sampled, chunk.drafts, chunk.tree))
                start, room = start + taken, room - taken
        return made


class Outcome(NamedTuple):
    """The result of a step for one sequence: the tokens it gained and whether it has ended, or why it failed."""

    tokens: tuple[int, ...] = ()
    finished: bool = False
    failure: str | None = None  # one of messages.FAILURES
