"""What the first process of several tells the others (`team.py`), and what they say: plain values, encoded as msgpack.

Frames are a length of four bytes, little-endian, then one value. They go through pipes between a process and those that
it started, so both sides trust what they read.
"""

from __future__ import annotations

import msgspec

from attar.model.split import Share

MAX_FRAME = 1 << 30


class Job(msgspec.Struct, frozen=True):
    """What a worker is started for."""

    model: str
    rank: int
    tp: int
    pp: int
    device: str  # its own
    dtype: str | None
    activations: str
    native: bool  # laid out for the kernels of the device, rather than computed by the reference
    threads: int
    folder: str  # where the processes find each other

    @property
    def share(self) -> Share:
        return Share(self.rank, self.tp, self.pp)


class Pool(msgspec.Struct, frozen=True, tag="pool"):
    """Make a runner; the one before goes."""

    blocks: int
    context: int
    kv: str
    sequences: int


class Adapt(msgspec.Struct, frozen=True, tag="adapt"):
    """Read an adapter, for rows that ask for its number; of number 0, for all rows."""

    number: int
    folder: str


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """A chunk of a step: its tokens from `start` on, and the sequence's blocks from the `kept`-th on."""

    sequence: int  # its number, of the leader's
    start: int
    samples: bool
    tokens: list[int]
    kept: int
    blocks: list[int]
    prompt: int
    max_tokens: int
    adapter: int
    wants_logits: bool
    wants_hidden: bool


class Run(msgspec.Struct, frozen=True, tag="run"):
    """A step of the runner."""

    pieces: list[Piece]
    copies: list[tuple[int, int, int]]  # source, target, slots
    gone: list[int]  # sequences that hold nothing any more


class Meet(msgspec.Struct, frozen=True, tag="meet"):
    """Leave the exchanges of a step that not all have made, give memory back, and meet anew: for this many-th time."""

    time: int


class Room(msgspec.Struct, frozen=True, tag="room"):
    """Make a cache outside of any runner."""

    number: int
    capacity: int
    batch: int
    kv: str
    block: int


class Leave(msgspec.Struct, frozen=True, tag="leave"):
    """Such a cache is no longer wanted."""

    number: int


class Call(msgspec.Struct, frozen=True, tag="call"):
    """`Decoder.run` on a cache of that number, filled to there; without cache where it is None."""

    room: int | None
    filled: list[int]
    lengths: tuple[int, ...]
    horizon: int | tuple[int, ...]
    ids: list[int]
    rows: list[int] | None
    adapters: tuple[int, ...] = ()


class Logits(msgspec.Struct, frozen=True, tag="logits"):
    """Logits of hidden states that come by broadcast, and the adapter of each row where any takes one."""

    rows: int
    adapters: list[int] = []


class End(msgspec.Struct, frozen=True, tag="end"):
    """Nothing more."""


Command = Pool | Adapt | Run | Meet | Room | Leave | Call | Logits | End


class Said(msgspec.Struct, frozen=True):
    """What a worker says: that it has started, that it has loaded its part, or why it will not; then of each `Run` that
    it `ran`, that it was `short` of memory, or that it was `broken` off, and of each `Meet` that it has `met` all."""

    what: str
    text: str = ""
    free: int | None = None  # bytes of its GPU, before it has taken any


def frame(value: msgspec.Struct) -> bytes:
    body = msgspec.msgpack.encode(value)
    assert len(body) <= MAX_FRAME, "a step is far shorter"
    return len(body).to_bytes(4, "little") + body
