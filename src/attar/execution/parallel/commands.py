"""Commands of the leading process to the workers (`executor.py`), and their replies: plain values, encoded as msgpack.

A frame (`protocol/framing.py`) holds one value. Frames go through pipes between a process and those that it started, so
both sides trust what they read.
"""

from __future__ import annotations

import msgspec

from attar.errors import Code
from attar.model.split import Share
from attar.protocol.framing import frame

MAX_FRAME = 1 << 30


class Job(msgspec.Struct, frozen=True):
    """The task that a worker is started for."""

    model: str
    rank: int
    tp: int
    pp: int
    device: str  # its own
    dtype: str | None
    activations: str
    native: bool  # laid out for the kernels of the device, rather than computed by the reference
    threads: int
    folder: str  # the folder of the rendezvous

    @property
    def share(self) -> Share:
        return Share(self.rank, self.tp, self.pp)


class Pool(msgspec.Struct, frozen=True, tag="pool"):
    """Make a runner; the previous one is dropped."""

    blocks: int
    context: int
    kv: str
    sequences: int
    sliding: int = 0  # blocks of layers with a sliding window


class Adapt(msgspec.Struct, frozen=True, tag="adapt"):
    """Read an adapter, for rows that ask for its number; number 0 is for all rows."""

    number: int
    folder: str


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """A chunk of a step: its tokens from `start` on, and the sequence's blocks from the `kept`-th on."""

    sequence: int  # its number, given by the leader
    start: int
    samples: int
    tokens: list[int]
    kept: int
    blocks: list[int]
    prompt: int
    horizon: int
    adapter: int
    wants_logits: bool
    wants_hidden: bool
    slid: int = 0
    sliding: list[int] = []  # blocks of layers with a sliding window, from the `slid`-th on


class Run(msgspec.Struct, frozen=True, tag="run"):
    """Run a step of the runner."""

    pieces: list[Piece]
    copies: list[tuple[int, int, int]]  # source, target, slots
    gone: list[int]  # sequences that hold nothing any more
    sliding_copies: list[tuple[int, int, int]] = []


class Rendezvous(msgspec.Struct, frozen=True, tag="meet"):
    """Leave the exchanges of an incomplete step, release memory, and meet again; `time` counts the rendezvous."""

    time: int


class Room(msgspec.Struct, frozen=True, tag="room"):
    """Make a cache outside of any runner."""

    number: int
    capacity: int
    batch: int
    kv: str
    block: int


class Shutdown(msgspec.Struct, frozen=True, tag="leave"):
    """Drop a cache made by `Room`."""

    number: int


class Call(msgspec.Struct, frozen=True, tag="call"):
    """Run `Decoder.run` on the cache of number `room`, filled to `filled`; without cache where it is None."""

    room: int | None
    filled: list[int]
    lengths: tuple[int, ...]
    horizon: int | tuple[int, ...]
    ids: list[int]
    rows: list[int] | None
    adapters: tuple[int, ...] = ()


class Logits(msgspec.Struct, frozen=True, tag="logits"):
    """Compute logits of hidden states received by broadcast; `adapters` has each row's adapter where any takes one."""

    rows: int
    adapters: list[int] = []


class End(msgspec.Struct, frozen=True, tag="end"):
    """End the worker."""


Command = Pool | Adapt | Run | Rendezvous | Room | Shutdown | Call | Logits | End


class Reply(msgspec.Struct, frozen=True):
    """A worker's reply: `started`, `loaded`, or `failed` with its reason and code; then one for each `Run` and
    `Rendezvous`.

    A `Run` is answered by `ran`, `short` (of memory) or `broken` (off), a `Rendezvous` by `met`.
    """

    what: str
    text: str = ""
    free: int | None = None  # bytes of its GPU, before it has taken any
    code: Code = "worker_failed"


def encode(value: msgspec.Struct) -> bytes:
    """Return the frame of a value, which is far shorter than MAX_FRAME."""
    return frame(msgspec.msgpack.encode(value), MAX_FRAME)
