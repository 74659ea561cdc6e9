"""One step of the engine, as data: the scheduler's plan, which the runner runs, and each sequence's outcome."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from attar.scheduling.sequence import Sequence


class ScheduledTokens(NamedTuple):
    """Run `rows` tokens of the sequence from position `start`, reading the keys and values before them."""

    sequence: Sequence
    start: int
    rows: int
    samples: bool  # its last token is the sequence's last: sample the next


class Copy(NamedTuple):
    """An instruction to copy the first `slots` slots of one block to another, in every layer, before anything runs."""

    source: int
    target: int
    slots: int
    sequence: Sequence


@dataclass(slots=True)
class StepPlan:
    """The work of a step. Blocks are those of each sequence at this moment; they stay until the commit.

    A chunk of one row may be for a token that its sequence does not have yet: the step before samples it.
    """

    chunks: list[ScheduledTokens] = field(default_factory=list)
    copies: list[Copy] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)
    started_over: list[Sequence] = field(default_factory=list)  # they outgrew their horizon
    held: list[int] = field(default_factory=list)
    """Blocks to release with the commit: their sequences gave them up while the step was under way."""

    @property
    def tokens(self) -> int:
        return sum(chunk.rows for chunk in self.chunks)

    @property
    def sequences(self) -> list[Sequence]:
        """All sequences of the step, including those that the budget left no chunk."""
        return list(dict.fromkeys([*(chunk.sequence for chunk in self.chunks), *self.admitted]))

    def pieces(self, rows: int) -> list[StepPlan]:
        """Cut the step into steps of at most `rows` tokens, which compute the same when they are run in their order."""
        made, room = [StepPlan(copies=self.copies)], rows
        for sequence, start, pending, samples in self.chunks:
            end = start + pending
            while start < end:
                if not room:
                    made.append(StepPlan())
                    room = rows
                taken = min(end - start, room)
                made[-1].chunks.append(ScheduledTokens(sequence, start, taken, samples and start + taken == end))
                start, room = start + taken, room - taken
        return made


class Outcome(NamedTuple):
    """The result of a step for one sequence: the tokens it gained and whether it has ended, or why it failed."""

    tokens: tuple[int, ...] = ()
    finished: bool = False
    failure: str | None = None  # one of messages.FAILURES
