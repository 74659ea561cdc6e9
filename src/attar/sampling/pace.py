"""How many drafts a step verifies: as many as pay, by what steps and drafts were measured to cost and to bring.

A step of r rows takes c(r) seconds. A draft brings a token if it and all before it are right: the product of their
chances, its survival. Of all drafts of all sequences the n with the best survival are taken, for the n that maximizes

    (sequences + sum of the n survivals) / c(sequences + n),

none included. c is neither linear nor monotone, so all n are tried. A sequence's survivals fall with depth, so the n
best are the first few of each. A step of one sequence has one of a few numbers of rows (`SIZES`): each is recorded
before it is replayed (`execution/recorded_step.py`), and the last few recordings are kept.

*Costs* are medians of the last steps by number of rows, measured as they run. The first step of a size is not counted:
it may record the step, or compile kernels for it. Between measured numbers of rows the cost
is interpolated. Beyond them a row is taken to cost `ROW` of the first, which is little: so a size is tried, and then
known. A step without drafts is repeated now and then, because the costs of all sizes grow with the context. A drafter
that takes time adds the median of its seconds a draft.

*Chances* are shares of right drafts by the drafter's evidence, of recent drafts of the same sequence, which begin as
those of all sequences. A kind of evidence of which nothing is known begins as the kind below it: else a second draft
that was wrong once would never be made again. Drafts that are not verified are compared with the next token too, where
they cost nothing. Where drafts cost time and none pay, some are made all the same, to learn (`Trials`).

Texts do not depend on any of this (`sampling/verify.py`), so it may depend on time and load.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Sequence
from statistics import median

from attar.protocol.speculation import MAX_DRAFT_TOKENS, MAX_STEP_DRAFTS

SIZES = (1, 2, 3, 4, 5, 6, 8, 12, 16)  # rows of a step of one sequence
SAMPLES = 9  # steps of one size whose median counts
ROW = 0.1  # cost of a further row as a share of the first, where none is measured
REMEASURED = 64  # steps with drafts between two without any
MEMORY = 32.0  # drafts that count in a sequence's shares: older ones fade
GLOBAL_MEMORY = 1024.0
PRIOR = 4.0  # drafts for which the shares of all sequences count in those of one
START = 0.5  # share of right drafts, and its weight of one draft, before any is known
SOURCE = 1 << 10  # evidences of one source of drafts; those of another are a multiple of it more
KINDS = 8  # of evidence, of one source
TRIED = 0.01  # share of time that drafts take which are made to learn
LEAST = 0.02  # survival of a draft below which none is looked at
SAVED = 3.0  # seconds that may be left for such drafts, at most, and to begin with: to read a prompt takes some


class Costs:
    """Seconds of decode steps by number of rows."""

    def __init__(self) -> None:
        self._steps: dict[int, deque[float]] = {}
        self._rows: list[int] = []
        self._medians: dict[int, float] = {}
        self._begun: set[int] = set()
        self._found: dict[int, float] = {}  # by rows, since the last step

    def record(self, rows: int, seconds: float) -> None:
        """Count a step of so many rows, unless it is the first."""
        if rows not in self._begun:
            self._begun.add(rows)
            return
        if rows not in self._steps:
            self._steps[rows] = deque(maxlen=SAMPLES)
            self._rows.insert(bisect_left(self._rows, rows), rows)
        self._found.clear()
        self._steps[rows].append(seconds)
        self._medians[rows] = median(self._steps[rows])

    @property
    def known(self) -> bool:
        """True once a step was counted."""
        return bool(self._rows)

    def of(self, rows: int) -> float:
        """Return the seconds of a step of `rows` rows; 1 where nothing is known yet.

        They are no more than those of a larger step. Else a size that was slow once, beside other work, would look dear
        and not be tried again.
        """
        if (found := self._found.get(rows)) is None:
            at = bisect_left(self._rows, rows)
            found = min([self._between(rows, at), *(self._medians[more] for more in self._rows[at:])])
            self._found[rows] = found
        return found

    def _between(self, rows: int, at: int) -> float:
        """Return the seconds of a step by the nearest sizes that were measured, where `at` of them are smaller."""
        if (known := self._medians.get(rows)) is not None:
            return known
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
        kind = kind_of(evidence)
        keep = 1 - 1 / self._memory
        self._right[kind] = self._right.get(kind, 0.0) * keep + right
        self._all[kind] = self._all.get(kind, 0.0) * keep + 1
        if self._prior is not None:
            self._prior.record(evidence, right)

    def of(self, evidence: int) -> float:
        """Return the chance that a draft of this evidence is right if all before it are."""
        return self._share(kind_of(evidence))

    def _share(self, kind: int) -> float:
        share, weight = self._start, 1.0
        if self._prior is not None:
            share, weight = self._prior._share(kind), PRIOR
        elif kind % KINDS and self._all.get(kind - 1) and (below := self._share(kind - 1)) > share:
            share, weight = below, PRIOR
        return (self._right.get(kind, 0.0) + share * weight) / (self._all.get(kind, 0.0) + weight)

    def survivals(self, evidence: int, count: int) -> Iterator[float]:
        """Yield the survival of each of `count` drafts, the first with this evidence."""
        survival = 1.0
        for depth in range(count):
            survival *= self.of(evidence + depth)
            yield survival


def kind_of(evidence: int) -> int:
    """Return the class of an evidence: its source, and in that 1, 2, 3 to 4, 5 to 8, and so on to 65 and more."""
    source, own = divmod(max(evidence, 0), SOURCE)
    return KINDS * source + max(0, min(own - 1, 64)).bit_length()


class Trials:
    """Seconds that may be spent on drafts which are made only to learn what drafts are worth: a share of all."""

    def __init__(self) -> None:
        self._left = SAVED

    def passed(self, seconds: float) -> None:
        """Count the seconds of a step."""
        self._left = min(SAVED, self._left + TRIED * seconds)

    def may(self, seconds: float) -> bool:
        """Return whether so many seconds can be spent, and spend them if so."""
        if self._left < seconds:
            return False
        self._left -= seconds
        return True


class Pace:
    """Decides how many drafts of each sequence to verify: at most `most` of one, always so many where `fixed`, and at
    most `together` of all."""

    def __init__(self, most: int = MAX_DRAFT_TOKENS, fixed: bool = False, together: int = MAX_STEP_DRAFTS) -> None:
        self.most, self.fixed, self.together = most, fixed, together
        self.costs = Costs()
        self.chances = Chances(GLOBAL_MEMORY)
        self.trials = Trials()
        self.gained = 0.0
        """Seconds of a token without drafts, less those with the last counts."""
        self._speed = 0.0  # tokens a second by the last counts
        self._since = 0  # steps with drafts since the last without

    def counts(self, survivals: Sequence[Sequence[float]], drafting: float = 0.0) -> list[int]:
        """Return how many of the drafts of each sequence to verify, given the survival of each, where making one takes
        `drafting` seconds."""
        counts = [0] * len(survivals)
        drafts = sorted((-value, number) for number, each in enumerate(survivals) for value in each)[: self.together]
        if not drafts:
            return counts
        taken = len(drafts) if self.fixed else self._paying([-value for value, _ in drafts], len(survivals), drafting)
        for _, number in drafts[:taken]:
            counts[number] += 1
        return counts

    def planned(self, drafts: bool) -> None:
        """Count a step, with drafts or without."""
        self._since = self._since + 1 if drafts else 0

    @property
    def rests(self) -> bool:
        """Whether the next step is to have no drafts, because it is long since one had none."""
        return self._since >= REMEASURED and not self.fixed

    def continues(self, survival: float, made: int, sequences: int, drafting: float) -> bool:
        """Return whether one draft more pays, where each of the sequences has `made` drafts and the next of each has
        that survival: whether it brings more tokens a second than the rest."""
        if self.fixed:
            return True
        rows = sequences * (1 + made)
        cost = sequences * drafting + self.costs.of(rows + sequences) - self.costs.of(rows)
        return sequences * survival > self._speed * cost

    def best(self, survivals: Sequence[float], sequences: int, drafting: float = 0.0) -> tuple[float, int]:
        """Return the most tokens a second that the first of the drafts bring, and their number; the best come first."""
        tokens = float(sequences)
        best, taken = tokens / self.costs.of(sequences), 0
        for n, survival in enumerate(survivals, 1):
            tokens += survival
            if sequences == 1 and 1 + n not in SIZES:
                continue
            if (speed := tokens / (self.costs.of(sequences + n) + n * drafting)) > best:
                best, taken = speed, n
        return best, taken

    def _paying(self, survivals: Sequence[float], sequences: int, drafting: float) -> int:
        """Return how many of the drafts, the best first, bring the most tokens a second."""
        self._speed, taken = self.best(survivals, sequences, drafting)
        self.gained = self.costs.of(sequences) / sequences - 1 / self._speed
        return taken
