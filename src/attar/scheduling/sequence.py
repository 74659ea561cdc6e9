"""One sequence of tokens on its way through the engine: a few integers, and values derived from them.

`tokens` is the prompt and then the output. The keys and values of its first `computed` tokens are in `blocks`; the
`pending` tokens have to be run through the model. That one number tells prefill from decode: a sequence decodes while
exactly its last token is pending, and one that lost its blocks starts over with everything pending, output included.
While a step is under way, `planned` and `inflight_tokens` are the values after its end: a plan made meanwhile starts
from them.

The engine makes the sequence; the scheduler alone changes it. The engine reads it, above all `blocks`, which is its row
of the block table while a step runs. Until it decodes, a commit may replace its blocks by the prefix tree's with the
same contents; from then on it only gains blocks, or takes those of a branch whose drafts were right.
"""

from __future__ import annotations

import enum
import itertools
from array import array
from collections.abc import Iterable
from dataclasses import InitVar, dataclass, field

from attar.kv.eviction import NEVER, Eviction
from attar.protocol.block_digests import horizon_of
from attar.scheduling.image_ids import ImageSpan


class Status(enum.Enum):
    """The status of a sequence. Its time is counted under all but the last."""

    FETCHING = "fetching"  # never run yet: blocks of its prompt come from elsewhere (`fetching.py`)
    QUEUED = "queued"  # never run yet
    PREFILL = "prefill"  # running, no token of its own yet; also when it starts over
    DECODE = "decode"
    PREEMPTED = "preempted"  # waiting again: others needed its blocks
    ENDED = "ended"


@dataclass(eq=False, slots=True)
class SequenceGroup:
    """State shared by the choices of one request."""

    counted: bool = False  # True once one of them has run, and the prefix cache has counted their prompt


@dataclass(eq=False, slots=True, kw_only=True)
class Sequence:
    """A prompt to be continued by at most `max_tokens` tokens (0: only to be run through the model).

    `priority`: lower goes first. `deadline` is on the scheduler's clock. Sequences of different `cache_salt` share no
    block. With `bypass` nothing of the prompt is taken from the cache, because the request needs every position
    computed. `adapter` is the number of its adapter, 0 for none; the caller makes the salt differ by adapter.
    `horizons` are the lengths, ascending, past each of which all of its keys are others, and last one that it never
    exceeds; () where its keys never change. `eviction` says which of its keys are dropped (`evicting.py`). `images` are
    those of its prompt, in order. Where they give tokens positions by time, height and width (M-RoPE), `positions` are
    the prompt's, and a later token has its index and `shift` in all three.
    """

    id: str
    prompt_ids: InitVar[Iterable[int]]
    max_tokens: int
    priority: int = 0
    deadline: float | None = None
    cache_salt: bytes = b""
    bypass: bool = False
    adapter: int = 0
    horizons: tuple[int, ...] = ()
    eviction: Eviction | None = None
    images: tuple[ImageSpan, ...] = ()
    positions: tuple[array[int], ...] = ()
    shift: int = 0

    horizon: int = field(init=False, default=0)  # that of the keys in the blocks; 0: they never change
    tokens: array[int] = field(init=False)
    prompt: int = field(init=False)  # number of tokens of the prompt
    longest: int = field(init=False)
    """Tokens that may ever be run through the model: all but the last one generated, which nothing follows."""
    computed: int = 0  # tokens whose keys and values are in the blocks
    planned: int = 0  # value of `computed` once the steps under way are over
    inflight_tokens: int = 0  # tokens that the steps under way will sample
    blocks: list[int] = field(default_factory=list)
    sliding: list[int] = field(default_factory=list)
    """Blocks of the layers with a sliding window, where those are a group of their own (`sliding.py`)."""
    slid: int = 0  # of these, the first ones, which were released: no row reads their tokens any more
    dropped: int = 0  # tokens among those planned that have no slot any more: slots are that much less than positions
    evicted: int = 0  # tokens that have ever been dropped, those of repeated runs among them
    pristine: list[int] = field(default_factory=list)  # the block of its first tokens as it was computed, once evicted
    spare: list[int] = field(default_factory=list)  # blocks for evictions, of a sequence that is not preempted any more
    drafts: tuple[int, ...] = ()
    """Guesses of its next tokens, which the engine sets before a plan and the plan uses up."""
    parents: tuple[int, ...] = ()
    """The row that each draft follows, where they are a tree in preorder (`draft_tree.py`); nothing for a chain."""

    status: Status = Status.QUEUED
    ending: str | None = None  # `finished`, or one of `messages.FAILURES`
    order: int = 0  # number in order of arrival
    group: SequenceGroup = field(default_factory=SequenceGroup)
    arrival: float = 0.0
    passed: int = 0  # times that a later arrival of better priority went first
    overdue: bool = False  # True once it was passed as often as the limit allows: it goes before all others
    preemptions: int = 0
    under_way: int = 0  # steps under way that contain it: the runner may be reading or writing its blocks

    fetched: int = 0  # tokens whose blocks came from elsewhere, before it was first admitted
    offered: int = 0  # tokens of whole blocks of which it has told (`Scheduler.kept`)
    reused: int = 0  # tokens of the prompt that were not computed, when it was first admitted
    reuse_ended: str = ""
    differs_at: int | None = None
    spans: dict[Status, float] = field(default_factory=lambda: dict.fromkeys(Status, 0.0))  # seconds in each status
    since: float = 0.0  # time when it entered its status

    def __post_init__(self, prompt_ids: Iterable[int]) -> None:
        self.tokens = array("i", prompt_ids)
        self.prompt = len(self.tokens)
        assert self.prompt > 0
        assert self.max_tokens >= 0
        self.longest = self.prompt + max(self.max_tokens - 1, 0)
        self.settle()

    def settle(self) -> None:
        """Take the horizon of the present length, before anything is computed."""
        assert not self.computed
        self.horizon = horizon_of(self.horizons, len(self.tokens))

    @property
    def outgrown(self) -> bool:
        """Return whether it is, or will be once the steps under way are over, longer than its horizon."""
        return 0 < self.horizon < self.expected

    @property
    def salt(self) -> bytes:
        """Return the salt of its blocks: `cache_salt`, and the horizon where there is one."""
        return self.cache_salt + self.horizon.to_bytes(8, "little") if self.horizon else self.cache_salt

    @property
    def output(self) -> int:
        """Tokens generated."""
        return len(self.tokens) - self.prompt

    @property
    def expected(self) -> int:
        """Tokens to be run through the model, known now or once the steps under way are over."""
        tokens = len(self.tokens) + self.inflight_tokens
        return tokens if tokens < self.longest else self.longest

    @property
    def pending(self) -> int:
        """Expected tokens that no step has yet; 0 where only the last sampled token is outstanding."""
        return self.expected - self.planned

    @property
    def cut(self) -> int:
        """Index of the token before which its keys are evicted next; no chunk crosses it."""
        return NEVER if self.eviction is None else self.eviction.cut(self.prompt, self.dropped)

    @property
    def gated(self) -> bool:
        """Return whether its next row waits for the features of an image."""
        return self.gate_from(self.planned) == self.planned

    def reach(self, at: int, budget: int) -> int:
        """Return the index before which a chunk of at most `budget` rows from index `at` ends."""
        end = min(self.expected, at + budget, self.gate_from(at))
        start = self.within(end)
        return end if start is None else max(start, at)

    def within(self, at: int) -> int | None:
        """Return the start of the image whose rows see each other and in which index `at` lies; None outside."""
        return next((image.start for image in self.images if image.whole and image.start < at < image.end), None)

    def axes(self, start: int, rows: int) -> tuple[Iterable[int], ...]:
        """Return the positions of `rows` tokens from index `start` on, by time, height and width."""
        later = range(max(start, self.prompt) + self.shift, start + rows + self.shift)
        if not self.positions:
            return (range(start + self.shift, start + rows + self.shift),) * 3
        return tuple(itertools.chain(axis[start : start + rows], later) for axis in self.positions)

    def gate_from(self, at: int) -> int:
        """Return the index of the first token from `at` on that waits for the features of an image."""
        for image in self.images:
            if not image.ready and image.end > at:
                return max(image.start, at)
        return NEVER

    @property
    def due(self) -> bool:
        """Return whether keys are evicted before its next row."""
        return self.eviction is not None and self.planned == self.cut and self.pending > 0

    def slots(self, tokens: int) -> int:
        """Return the slots that its first `tokens` tokens take, as far as the next eviction."""
        return tokens if self.eviction is None else min(tokens, self.cut) - self.dropped

    @property
    def rank(self) -> tuple[bool, int, int]:
        """Sort key of sequences: the smallest goes first."""
        return not self.overdue, 0 if self.overdue else self.priority, self.order

    def enter(self, status: Status, now: float) -> None:
        """Change status; the time since the last change belongs to the old one."""
        self.spans[self.status] += now - self.since
        self.status, self.since = status, now

    def spent(self, status: Status, now: float) -> float:
        """Return the seconds in a status, the present one up to `now`."""
        return self.spans[status] + (now - self.since if status is self.status else 0.0)

    def check(self, size: int) -> None:
        """Assert that the integers agree, for blocks of `size` tokens."""
        running = self.status in (Status.PREFILL, Status.DECODE)
        assert 0 <= self.computed <= len(self.tokens) <= self.prompt + self.max_tokens
        assert self.computed <= self.planned <= self.expected
        assert self.under_way or (self.planned, self.inflight_tokens) == (self.computed, 0), "more to come, of no step"
        assert self.planned <= self.cut, "an eviction was missed"
        assert self.planned - self.dropped <= len(self.blocks) * size, "tokens without a block"
        kept = self.eviction.budget if self.eviction is not None and self.dropped else 0
        assert len(self.blocks) <= -(-max(self.slots(self.longest), kept) // size), "more blocks than it can ever need"
        blocks = self.blocks or self.sliding or self.pristine or self.spare
        assert running or not (blocks or self.dropped), "blocks held by a sequence that does not run"
        assert not running or self.pending > 0 or self.under_way, "running, with nothing to run"
        assert running or not self.under_way, "in a step without running"
