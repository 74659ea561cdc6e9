"""Unfinished blocks of the KV cache, where a scheme stores them apart from whole ones."""

from __future__ import annotations

from collections.abc import Sequence as List

from attar.model.cache import Tails
from attar.scheduling.sequence import Sequence, Status
from attar.scheduling.step_plan import ScheduledTokens


class Unfinished:
    """The assignment of unfinished blocks to sequences, where a scheme stores those apart: three for each sequence.

    A step that is run again finds the block that it began in unchanged; the blocks that it runs through after that go
    elsewhere. So a sequence has up to two at a time: that of its next token as far as is committed, and the last of a
    step. Blocks between those, which a step begins and finishes one after another, take the third, which belongs to the
    sequence's place in the step: those of different sequences are filled side by side.
    """

    def __init__(self, sequences: int) -> None:
        self.lasting, self.count = 2 * sequences, 3 * sequences
        self._free = list(range(self.lasting))
        self._held: dict[Sequence, dict[int, int]] = {}

    def tails(self, chunks: List[ScheduledTokens], size: int) -> Tails:
        """Return the unfinished blocks of a step of `chunks`, in blocks of `size` tokens."""
        for sequence in [s for s in self._held if s.status in (Status.PREEMPTED, Status.ENDED)]:
            self._free += self._held.pop(sequence).values()
        for chunk in chunks:
            held = self._held.setdefault(chunk.sequence, {})
            first, last = chunk.start // size, (chunk.start + chunk.rows - 1) // size
            for done in [i for i in held if i not in (first, last)]:
                self._free.append(held.pop(done))
            for i in {first, last} - held.keys():
                held[i] = self._free.pop()
        return lambda row, i: self._held[chunks[row].sequence].get(i, self.lasting + row)
