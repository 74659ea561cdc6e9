"""The deadlines of sequences, the soonest first."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping

from attar.scheduling.sequence import Sequence

MANY_ENDED = 256  # deadlines of ended sequences that may be kept


class Deadlines:
    """A heap of the deadlines of `sequences`, a view by id of those that have not ended.

    A sequence that ends leaves its deadline behind, which is skipped later.
    """

    def __init__(self, sequences: Mapping[str, Sequence]) -> None:
        self._sequences = sequences
        self._heap: list[tuple[float, str]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, sequence: Sequence) -> None:
        """Note a sequence's deadline, where it has one."""
        if sequence.deadline is None:
            return
        heapq.heappush(self._heap, (sequence.deadline, sequence.id))
        if len(self._heap) > 2 * len(self._sequences) + MANY_ENDED:  # else each stays until its time
            self._heap = sorted(entry for entry in self._heap if entry[1] in self._sequences)

    def first(self) -> float | None:
        """Return the soonest deadline; None where no sequence has one."""
        while self._heap and self._heap[0][1] not in self._sequences:
            heapq.heappop(self._heap)  # it has ended: waking for its deadline would find nothing to do, for ever
        return self._heap[0][0] if self._heap else None

    def passed(self, now: float) -> Iterator[Sequence]:
        """Remove and yield each sequence whose deadline has come. The caller may end it meanwhile."""
        while self._heap and self._heap[0][0] <= now:
            deadline, id = heapq.heappop(self._heap)
            sequence = self._sequences.get(id)
            if sequence is not None and sequence.deadline == deadline:
                yield sequence
