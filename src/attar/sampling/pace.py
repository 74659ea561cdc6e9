"""How many drafts a step verifies: as many as pay, by what steps and drafts were measured to cost and to bring.

A step of r rows takes c(r) seconds. A draft brings a token if it and all before it are right: the product of their
chances, its survival. Of all drafts of all sequences the n with the best survival are taken, for the n that maximizes

    (sequences + sum of the n survivals) / c(sequences + n),

none included. c is neither linear nor monotone, so all n are tried. A sequence's survivals fall with depth, so the n
best are the first few of each.

*Costs* are medians of the last steps by number of rows, measured as they run. The first step of a size is not counted:
it may record the step, or compile kernels for it. Between measured numbers of rows the cost
is interpolated. Beyond them a row is taken to cost `ROW` of the first, which is little: so a size is tried, and then
known. A step without drafts is repeated now and then, because the costs of all sizes grow with the context. A drafter
that takes time adds the median of its seconds a draft.

*Chances* are shares of right drafts by the drafter's evidence, of recent drafts of the same sequence, which begin as
those of all sequences. Drafts that are not verified are compared with the next token too, where they cost nothing.
Where they cost time none are made while none pay, but for one after 1, 2, 4 to 64 steps.

Texts do not depend on any of this (`sampling/verify.py`), so it may depend on time and load.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Sequence
from statistics import median

from attar.protocol.speculation import MAX_DRAFT_TOKENS, MAX_STEP_DRAFTS

SAMPLES = 9  # steps of one size whose median counts
ROW = 0.1  # cost of a further row as a share of the first, where none is measured
REMEASURED = 64  # steps with drafts between two without any
MEMORY = 32.0  # drafts that count in a sequence's shares: older ones fade
GLOBAL_MEMORY = 1024.0
PRIOR = 4.0  # drafts for which the shares of all sequences count in those of one
START = 0.5  # share of right drafts, and its weight of one draft, before any is known


class Costs:
    """Seconds of decode steps by number of rows."""

    def __init__(self) -> None:
        self._steps: dict[int, deque[float]] = {}
        self._rows: list[int] = []
        self._medians: dict[int, float] = {}
        self._begun: set[int] = set()

    def record(self, rows: int, seconds: float) -> None:
        """Count a step of so many rows, unless it is the first."""
        if rows not in self._begun:
            self._begun.add(rows)
            return
        if rows not in self._steps:
            self._steps[rows] = deque(maxlen=SAMPLES)
            self._rows.insert(bisect_left(self._rows, rows), rows)
        self._steps[rows].append(seconds)
        self._medians[rows] = median(self._steps[rows])

    @property
    def known(self) -> bool:
        """True once a step was counted."""
        return bool(self._rows)

    def of(self, rows: int) -> float:
        """Return the seconds of a step of `rows` rows; 1 where nothing is known yet."""
        if (known := self._medians.get(rows)) is not None:
            return known
        at = bisect_left(self._rows, rows)
        if at == len(self._rows) or at == 0:
            if not self._rows:
                return 1.0
            near = self._rows[-1 if at else 0]
            return self._medians[near] * (1 + ROW * rows) / (1 + ROW * near)
        low, high = self._rows[at - 1], self._rows[at]
        part = (rows - low) / (high - low)
        return self._medians[low] * (1 - part) + self._medians[high] * part


class Chances:
    """Shares of right drafts by evidence, the younger ones counting more."""

    def __init__(self, memory: float, prior: Chances | None = None, start: float = START) -> None:
        self._memory, self._prior, self._start = memory, prior, start
        self._right: dict[int, float] = {}
        self._all: dict[int, float] = {}

    def record(self, evidence: int, right: bool) -> None:
        """Count a draft."""
        kind = _kind(evidence)
        keep = 1 - 1 / self._memory
        self._right[kind] = self._right.get(kind, 0.0) * keep + right
        self._all[kind] = self._all.get(kind, 0.0) * keep + 1
        if self._prior is not None:
            self._prior.record(evidence, right)

    def of(self, evidence: int) -> float:
        """Return the chance that a draft of this evidence is right if all before it are."""
        kind = _kind(evidence)
        share, weight = (self._start, 1.0) if self._prior is None else (self._prior.of(evidence), PRIOR)
        return (self._right.get(kind, 0.0) + share * weight) / (self._all.get(kind, 0.0) + weight)

    def survivals(self, evidence: int, count: int) -> Iterator[float]:
        """Yield the survival of each of `count` drafts, the first with this evidence."""
        survival = 1.0
        for depth in range(count):
            survival *= self.of(evidence + depth)
            yield survival


def _kind(evidence: int) -> int:
    """Return the class of an evidence: 1, 2, 3 to 4, 5 to 8, and so on to 32 and more."""
    return min(evidence - 1, 31).bit_length() if evidence > 0 else 0


class Pace:
    """Decides how many drafts of each sequence to verify: at most `most` of one, always so many where `fixed`, and at
    most `together` of all."""

    def __init__(self, most: int = MAX_DRAFT_TOKENS, fixed: bool = False, together: int = MAX_STEP_DRAFTS) -> None:
        self.most, self.fixed, self.together = most, fixed, together
        self.costs = Costs()
        self.chances = Chances(GLOBAL_MEMORY)
        self._since = 0  # steps with drafts since the last without

    def counts(self, survivals: Sequence[Sequence[float]], drafting: float = 0.0) -> list[int]:
        """Return how many of the drafts of each sequence to verify, given the survival of each, where making one takes
        `drafting` seconds."""
        counts = [0] * len(survivals)
        drafts = sorted((-value, number) for number, each in enumerate(survivals) for value in each)[: self.together]
        if not drafts:
            return counts
        if self._since >= REMEASURED and not self.fixed:
            self._since = 0
            return counts
        taken = len(drafts) if self.fixed else self._paying([-value for value, _ in drafts], len(survivals), drafting)
        for _, number in drafts[:taken]:
            counts[number] += 1
        self._since += taken > 0
        return counts

    def _paying(self, survivals: Sequence[float], sequences: int, drafting: float) -> int:
        """Return how many of the drafts, the best first, bring the most tokens a second."""
        tokens = float(sequences)
        best, taken = tokens / self.costs.of(sequences), 0
        for n, survival in enumerate(survivals, 1):
            tokens += survival
            if (speed := tokens / (self.costs.of(sequences + n) + n * drafting)) > best:
                best, taken = speed, n
        return taken
