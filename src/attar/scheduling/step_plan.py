"""One step of the engine, as data: what the scheduler plans, the runner runs, and the engine says came of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from attar.scheduling.sequence import Sequence


class Chunk(NamedTuple):
    """Run `rows` tokens of the sequence from position `start`, reading the keys and values before them."""

    sequence: Sequence
    start: int
    rows: int
    samples: bool  # its last token is the sequence's last: choose the next


class Copy(NamedTuple):
    """Before anything runs, copy the first `slots` slots of one block to another, in every layer, for `sequence`."""

    source: int
    target: int
    slots: int
    sequence: Sequence


@dataclass(slots=True)
class StepPlan:
    """What to run. Blocks are those of each sequence at this moment; they stay until the commit.

    The one row of a chunk may be of a token that its sequence does not have yet: the step before chooses it.
    """

    chunks: list[Chunk] = field(default_factory=list)
    copies: list[Copy] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)
    held: list[int] = field(default_factory=list)
    """Blocks to be let go with the commit: whose they were gave them up while the step was under way."""

    @property
    def tokens(self) -> int:
        return sum(chunk.rows for chunk in self.chunks)

    @property
    def sequences(self) -> list[Sequence]:
        """All that have a part in it, also those that the budget left no chunk."""
        return list(dict.fromkeys([*(chunk.sequence for chunk in self.chunks), *self.admitted]))

    def pieces(self, rows: int) -> list[StepPlan]:
        """The step in steps of at most so many tokens, which compute the same where they are run in their order."""
        made, room = [StepPlan(copies=self.copies)], rows
        for sequence, start, pending, samples in self.chunks:
            end = start + pending
            while start < end:
                if not room:
                    made.append(StepPlan())
                    room = rows
                taken = min(end - start, room)
                made[-1].chunks.append(Chunk(sequence, start, taken, samples and start + taken == end))
                start, room = start + taken, room - taken
        return made


class Outcome(NamedTuple):
    """What a step gave one sequence: the tokens it gained and whether it has ended, or why it failed."""

    tokens: tuple[int, ...] = ()
    finished: bool = False
    failure: str | None = None  # one of messages.FAILURES
