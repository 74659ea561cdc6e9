"""One sequence of tokens on its way through the engine: a few integers, and what follows from them.

`tokens` is the prompt and then the output. The keys and values of its first `computed` tokens are in `blocks`; what is
`pending` has to be run through the model. That one number tells prefill from decode: a sequence decodes while exactly
its last token is pending, and one that lost its blocks starts over with everything pending, output included. While a
step is under way, `planned` and `coming` are what its end will make of that: a plan made meanwhile goes on from there.

Who fills what: the engine makes the sequence; the scheduler alone changes it. The engine reads it, above all `blocks`,
which is its row of the block table while a step runs. Until it decodes, a commit may put other blocks of the same
contents in the place of its own, those of the prefix tree; from then on it only gains blocks.
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Iterable
from dataclasses import InitVar, dataclass, field


class Status(enum.Enum):
    """What a sequence is doing. The first four are where its time goes."""

    QUEUED = "queued"  # never run yet
    PREFILL = "prefill"  # running, no token of its own yet; also when it starts over
    DECODE = "decode"
    PREEMPTED = "preempted"  # waiting again: others needed its blocks
    ENDED = "ended"


@dataclass(eq=False, slots=True)
class Kin:
    """What the choices of one request have in common."""

    counted: bool = False
    """One of them has run, and the prefix cache has counted their prompt."""


@dataclass(eq=False, slots=True, kw_only=True)
class Sequence:
    """A prompt to be continued by at most `max_tokens` tokens (0: only to be run through the model).

    `priority`: lower goes first. `deadline` is on the clock that the scheduler is given. Sequences of different `salt`
    share no block. With `bypass` nothing of the prompt is taken from the cache, because what is asked for must be
    computed at every position. `adapter` is the number of the one that it takes, 0 for none; whoever makes it sees that
    its salt tells it from others.
    """

    id: str
    prompt_ids: InitVar[Iterable[int]]
    max_tokens: int
    priority: int = 0
    deadline: float | None = None
    salt: bytes = b""
    bypass: bool = False
    adapter: int = 0

    tokens: array[int] = field(init=False)
    prompt: int = field(init=False)
    """Tokens of the prompt."""
    longest: int = field(init=False)
    """Tokens that may ever be run through the model: not the last one generated, which nothing follows."""
    computed: int = 0
    """Tokens whose keys and values are in the blocks."""
    planned: int = 0
    """The same once the steps under way are over."""
    coming: int = 0
    """Tokens that those steps choose."""
    blocks: list[int] = field(default_factory=list)

    status: Status = Status.QUEUED
    ending: str | None = None
    """`finished`, or one of `messages.FAILURES`."""
    order: int = 0
    """Number in order of arrival."""
    kin: Kin = field(default_factory=Kin)
    arrival: float = 0.0
    passed: int = 0
    """How often a later one of better priority went first."""
    overdue: bool = False
    """Was passed as often as the limit allows: goes before all others."""
    preemptions: int = 0
    under_way: int = 0
    """Steps under way that have it: the runner may be reading or writing its blocks."""

    reused: int = 0
    """Tokens of the prompt that were not computed, when it was first admitted."""
    reuse_ended: str = ""
    differs_at: int | None = None
    spans: dict[Status, float] = field(default_factory=lambda: dict.fromkeys(Status, 0.0))
    """Seconds in each status."""
    since: float = 0.0
    """When it entered its status."""

    def __post_init__(self, prompt_ids: Iterable[int]) -> None:
        self.tokens = array("i", prompt_ids)
        self.prompt = len(self.tokens)
        assert self.prompt > 0
        assert self.max_tokens >= 0
        self.longest = self.prompt + max(self.max_tokens - 1, 0)

    @property
    def output(self) -> int:
        """Tokens generated."""
        return len(self.tokens) - self.prompt

    @property
    def expected(self) -> int:
        """Tokens to be run through the model, as far as they are known or will be when the steps under way are over."""
        tokens = len(self.tokens) + self.coming
        return tokens if tokens < self.longest else self.longest

    @property
    def pending(self) -> int:
        """Of those, tokens that no step has yet. None where all that is left is to see the last one chosen."""
        return self.expected - self.planned

    @property
    def rank(self) -> tuple[bool, int, int]:
        """The smallest goes first."""
        return not self.overdue, 0 if self.overdue else self.priority, self.order

    def enter(self, status: Status, now: float) -> None:
        """Change status; the time since the last change belongs to the old one."""
        self.spans[self.status] += now - self.since
        self.status, self.since = status, now

    def spent(self, status: Status, now: float) -> float:
        """Seconds in a status, the present one up to `now`."""
        return self.spans[status] + (now - self.since if status is self.status else 0.0)

    def check(self, size: int) -> None:
        """Assert that the integers agree, for blocks of `size` tokens."""
        running = self.status in (Status.PREFILL, Status.DECODE)
        assert 0 <= self.computed <= len(self.tokens) <= self.prompt + self.max_tokens
        assert self.computed <= self.planned <= self.expected
        assert self.under_way or (self.planned, self.coming) == (self.computed, 0), "more to come, of no step"
        assert self.planned <= len(self.blocks) * size, "tokens without a block"
        assert len(self.blocks) <= -(-self.longest // size), "more blocks than it can ever need"
        assert running or not self.blocks, "blocks held by a sequence that does not run"
        assert not running or self.pending > 0 or self.under_way, "running, with nothing to run"
        assert running or not self.under_way, "in a step without running"
