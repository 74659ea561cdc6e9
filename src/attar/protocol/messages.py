"""What the server's process and the engine's tell each other: plain values, encoded as msgpack.

The server holds connections, texts of requests and templates; the engine holds the model. Everything between them is
one of these messages. Every request ends in exactly one `Failed`, or in one `Finished` for each of its choices. Times
are seconds as spans, never clock readings: the two processes need not share a clock.

Frames are a length of four bytes, little-endian, then an array of messages, at most `MAX_FRAME` bytes. A longer one, or
one that does not decode, ends the connection, and with it the engine: neither side trusts what it cannot read.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from attar.protocol.request import FinishReason, SamplingParams, TokenLogprob

MAX_FRAME = 64 << 20
BEAT_SECONDS = 0.5  # between two of the engine's beats


class Submit(msgspec.Struct, frozen=True, tag="submit"):
    """A prompt to be continued by `n` choices of their own randomness: their seeds are `sampler.seed_of_choice`."""

    id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    n: int = 1
    salt: bytes = b""  # requests of different salts share no cached block
    priority: int = 0  # lower goes first
    deadline: float | None = None  # seconds from now; then it fails with `deadline`
    adapter: str = ""  # one of `Ready.adapters`; empty: the model as it is


class Embed(msgspec.Struct, frozen=True, tag="embed"):
    """A prompt whose final hidden states are wanted as one vector: of the last position, or their mean."""

    id: str
    prompt: tuple[int, ...]
    pooling: str = "mean"  # or "last"
    deadline: float | None = None
    adapter: str = ""
    salt: bytes = b""


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """Nobody reads the request's answer any more. Unknown ids are ignored: the answer may just have ended."""

    id: str


class Drain(msgspec.Struct, frozen=True, tag="drain"):
    """Stop when all requests have ended."""


class Ask(msgspec.Struct, frozen=True, tag="ask"):
    """Say a `Told` of each of these requests that has not ended."""

    ids: tuple[str, ...]


Command = Submit | Embed | Cancel | Drain | Ask


class Report(msgspec.Struct, frozen=True):
    """Where one request's time went, and what of its prompt was reused. Seconds, and tokens."""

    queued: float = 0.0
    prefill: float = 0.0
    decode: float = 0.0
    preempted: float = 0.0
    preemptions: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    reuse_ended: str = ""  # why the rest was not reused: one of `REUSE_ENDS`; "": never ran
    differs_at: int | None = None  # index of the first token that no cached prompt has
    limited_by: dict[str, int] = {}  # steps that it had a part in, by what limited them: bandwidth, compute, overhead
    roof_fraction: float | None = (
        None  # in what part of their time bandwidth and compute would have allowed these steps
    )


REUSE_ENDS = ("complete", "differs", "evicted", "rounded", "no_room", "bypassed")
"""Why no more of a prompt was reused: there was no more of it; no cached prompt goes on like it; what did was evicted;
the cache shares whole groups of tokens only; the rest lay in a block for whose copy there was no room; what was asked
for has to be computed."""


class Delta(msgspec.Struct, frozen=True, tag="delta"):
    """What one choice gained. `text` never ends inside a character, and may be empty while one is incomplete."""

    id: str
    choice: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprob, ...] | None = None


class PromptLogprobs(msgspec.Struct, frozen=True, tag="prompt_logprobs"):
    """Log probabilities of the prompt's tokens after its first, before anything is generated."""

    id: str
    logprobs: tuple[TokenLogprob, ...]


class Finished(msgspec.Struct, frozen=True, tag="finished"):
    """One choice has ended. `stop` is the stop string that ended it, if one did. The last to end carries the report."""

    id: str
    choice: int
    reason: FinishReason
    completion_tokens: int
    stop: str | None = None
    report: Report | None = None


class Embedding(msgspec.Struct, frozen=True, tag="embedding"):
    """The vector of an `Embed`, float32, little-endian."""

    id: str
    vector: bytes
    report: Report | None = None


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The request has ended without an answer. `code` is one of FAILURES; `message` is fit for the user to read.

    The report is of what was done for it until then; None where it was refused before it began, or its answer could not
    be sent.
    """

    id: str
    code: str
    message: str
    report: Report | None = None


FAILURES = ("full", "too_long", "invalid", "deadline", "bad_logits", "internal", "cancelled", "shutdown")
"""Why requests fail: queue full, more than the cache can ever hold, refused parameters, out of time, logits of NaN, an
exception in its own path, cancelled, and the engine going down."""


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The engine's first message: the model is loaded."""

    model: str
    context: int
    vocab_size: int
    blocks: int
    block_size: int
    max_waiting: int  # choices that may wait at a time
    table: tuple[tuple[str, int], ...]  # where the memory goes: (what, bytes)
    adapters: tuple[str, ...] = ()  # names that a request may ask for
    max_running: int = 1  # choices that may run at a time


class Stats(msgspec.Struct, frozen=True, tag="stats"):
    """State of the engine after a step, at most ten times a second, and once when it falls idle.

    Counters grow from the start of the engine; the others are of this moment.
    """

    running: int
    waiting: int
    blocks_free: int
    blocks_active: int
    blocks_cached: int
    steps: int  # counter
    prompt_tokens: int  # counter: asked to be prefilled
    reused_tokens: int  # counter: of those, taken from the cache
    generated_tokens: int  # counter
    preemptions: int  # counter
    step_seconds: float  # counter
    blocks: bytes = b""  # one byte a block: 0 free, 1 active, 2 cached
    steps_ahead: int = 0  # counter: of the steps, launched before the tokens of the one before were known


class Beat(msgspec.Struct, frozen=True, tag="beat"):
    """The engine's process runs: said twice a second, by a thread that no step holds up.

    `busy`: seconds since its loop last looked for commands, which is how long the present step has taken; 0 while it
    waits for some.
    """

    busy: float = 0.0


class Told(msgspec.Struct, frozen=True, tag="told"):
    """A request as it is now."""

    id: str
    report: Report


Event = Delta | PromptLogprobs | Finished | Embedding | Failed | Ready | Stats | Beat | Told


def encode(messages: Sequence[Command] | Sequence[Event]) -> bytes:
    """One frame. Raises ValueError where it would be longer than MAX_FRAME."""
    body = msgspec.msgpack.encode(messages)
    if len(body) > MAX_FRAME:
        raise ValueError(f"a frame of {len(body)} bytes is longer than {MAX_FRAME}")
    return len(body).to_bytes(4, "little") + body
