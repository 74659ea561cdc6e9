"""Messages between the server's process and the engine's: plain values, encoded as msgpack.

The server holds connections, texts of requests and templates; the engine holds the model. All that passes between them
is one of these messages. Every request ends in exactly one `Failed`, or in one `Finished` for each of its choices.
Times are spans in seconds, never clock readings: the two processes need not share a clock.

A frame (`framing.py`) holds an array of messages, at most `MAX_FRAME` bytes. A longer frame, or one that does not
decode, ends the connection, and with it the engine: neither side trusts input that it cannot read.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from attar.protocol.framing import frame
from attar.protocol.grammar import Grammar
from attar.protocol.images import ImageInput
from attar.protocol.model_shape import MachineRates, ModelShape
from attar.protocol.reasoning import ReasoningSection
from attar.protocol.request import FinishReason, SamplingParams, TokenLogprob

MAX_FRAME = 64 << 20
BEAT_SECONDS = 0.5  # between two of the engine's beats


class Submit(msgspec.Struct, frozen=True, tag="submit"):
    """A prompt to be continued by `n` choices, each with randomness of its own: `noise.seed_of_choice` gives the
    seeds."""

    id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    n: int = 1
    cache_salt: bytes = b""  # requests with different salts share no cached block
    priority: int = 0  # lower goes first
    deadline: float | None = None  # seconds from now; then the request fails with `deadline`
    adapter: str = ""  # one of `Ready.adapters`; empty: the base model
    grammar: Grammar | None = None  # proven (`text/grammar_proof.py`); every choice satisfies it
    reasoning: ReasoningSection | None = None  # before which the grammar does not hold; None where there is none
    generated: tuple[tuple[int, ...] | None, ...] = ()
    """Tokens that another engine has generated for each choice, to be continued; None for a choice that has ended. They
    are not sent again, nor are the prompt's log probabilities where there are any. (): nothing was generated."""
    images: tuple[ImageInput, ...] = ()
    """Images in the order of the prompt, which has the model's image token once for each of their feature rows. Only
    an engine with `Ready.images` takes them."""


class Embed(msgspec.Struct, frozen=True, tag="embed"):
    """A prompt whose final hidden states are wanted as one vector: the last position's, or the mean of all."""

    id: str
    prompt: tuple[int, ...]
    pooling: str = "mean"  # or "last"
    deadline: float | None = None
    adapter: str = ""
    cache_salt: bytes = b""


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """Cancel a request whose answer has no reader left. Unknown ids are ignored: the answer may just have ended."""

    id: str


class Drain(msgspec.Struct, frozen=True, tag="drain"):
    """Stop when all requests have ended."""


class QueryStatus(msgspec.Struct, frozen=True, tag="ask"):
    """Send a `RequestStatus` for each of these requests that has not ended."""

    ids: tuple[str, ...]


class TakeOver(msgspec.Struct, frozen=True, tag="take_over"):
    """Take over the blocks of prompts that were used last from the engine whose `Ready.blocks_at` this is."""

    blocks_at: str


Command = Submit | Embed | Cancel | Drain | QueryStatus | TakeOver


class Report(msgspec.Struct, frozen=True):
    """Timing of one request in seconds, and reuse of its prompt in tokens."""

    queued: float = 0.0
    prefill: float = 0.0
    decode: float = 0.0
    preempted: float = 0.0
    preemptions: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    reuse_ended: str = ""  # why the rest was not reused: one of `REUSE_ENDS`; "": never ran
    differs_at: int | None = None  # index of the first token that no cached prompt has
    limited_by: dict[str, int] = {}  # the request's steps by what limited them: bandwidth, compute, overhead
    roof_fraction: float | None = None  # roofline time of these steps over their measured time
    step_seconds: float = 0.0  # of these steps, as measured
    expected_seconds: dict[
        str, float
    ] = {}  # of these steps by the model of `attar plan`: products, attention, overhead
    drafted_tokens: int = 0  # drafts of speculative decoding that were verified
    accepted_tokens: int = 0  # of these, the right ones, each of which saved a step
    forced_tokens: int = 0  # of these, the ones that the constraint forced
    overruled_tokens: int = 0  # forced tokens that were trusted in place of another that the model drew
    draft_steps: int = 0  # steps behind the prompt with speculation: each made a token, and one for each right draft
    draft_seconds: float = 0.0  # making drafts, in these steps, for all of their requests
    saved_seconds: float = 0.0  # by speculation, as steps were measured to cost; negative where it did not pay
    kv_eviction: str = ""  # which keys are dropped, such as sink:4+2044; "": none
    evicted_tokens: int = 0  # whose keys were dropped, of all choices
    sparse_attention: str = ""  # how many keys rows of outputs read, such as topk:1/16; "": all
    dense_layers: tuple[int, ...] = ()  # layers that read all keys in spite of it
    keys_seen: int = 0  # by rows of outputs, with sparse attention: the sum of their lengths
    keys_read: int = 0  # of these, in each layer that is not dense
    sparse_prefill: str = ""  # how rows of prompts read few keys, such as skip:0.01; "": they read all
    prompt_keys_seen: int = 0  # by rows of the prompt, with sparse prefill: the sum of their lengths
    prompt_keys_read: int = 0  # of these, in each layer without a sliding window
    fetching: float = 0.0  # seconds of waiting for blocks of the prompt from a disk or a prefill peer
    fetched_tokens: int = 0  # whose keys and values came from there; reused where still there on admission


REUSE_ENDS = ("complete", "differs", "evicted", "rounded", "no_room", "bypassed")
"""Reasons why no more of a prompt was reused.

complete: all of it was. differs: no cached prompt continues like it. evicted: the matching blocks were. rounded: the
cache shares only whole groups of tokens. no_room: the rest lay in a block for whose copy there was no room. bypassed:
the request's outputs must be computed.
"""


class Delta(msgspec.Struct, frozen=True, tag="delta"):
    """New tokens and text of one choice. `text` never ends inside a character, and may be empty while one is
    incomplete."""

    id: str
    choice: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprob, ...] | None = None


class PromptLogprobs(msgspec.Struct, frozen=True, tag="prompt_logprobs"):
    """Log probabilities of the prompt's tokens after its first, sent before anything is generated."""

    id: str
    logprobs: tuple[TokenLogprob, ...]


class Finished(msgspec.Struct, frozen=True, tag="finished"):
    """The end of one choice. `stop` is the stop string that ended it, if one did. The last choice to end has the
    report."""

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
    """The end of a request without an answer. `code` is one of FAILURES; `message` is fit for the user to read.

    The report covers the work done until then. It is None where the request was refused before it began, or its answer
    could not be sent.
    """

    id: str
    code: str
    message: str
    report: Report | None = None


FAILURES = (
    "full", "too_long", "invalid", "deadline", "bad_logits", "grammar_limit", "internal", "cancelled", "shutdown",
)  # fmt: skip
"""Codes of failed requests.

full: the queue is. too_long: more than the cache can ever hold. invalid: refused parameters. deadline: out of time.
bad_logits: logits of NaN. grammar_limit: a constraint grew past its limits. internal: an exception in the request's own
path. cancelled. shutdown: the engine is going down.
"""


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The engine's first message: the model is loaded."""

    model: str
    context: int
    vocab_size: int
    blocks: int
    block_size: int
    max_waiting: int  # most choices that may wait
    table: tuple[tuple[str, int], ...]  # memory by use: (use, bytes)
    adapters: tuple[str, ...] = ()  # names that a request may ask for
    max_running: int = 1  # most choices that may run at a time
    dimensions: int = 0  # numbers of an embedding
    bits: str = ""
    """Everything that the bits of an answer depend on, but the request: engines of one value continue each other's
    answers. Empty where the bits depend on what else runs."""
    shape: ModelShape | None = None  # of a model in one process on CPUs
    machine: MachineRates | None = None  # as measured before the model was loaded, where there are kernels
    horizons: tuple[int, ...] = ()  # lengths past each of which all keys of a sequence are others, ascending
    kv_evictions: tuple[tuple[str, int], ...] = ()
    """Policies of KV eviction that a request may name, the default first, and the most tokens of a request with each.
    """
    images: bool = False  # whether requests may have images
    no_images: str = ""  # why they may not, where the model has a vision tower: a setting, such as --tp
    blocks_at: str = ""  # path of the socket at which other replicas take over cached blocks; empty: they cannot

    def room(self, kv_eviction: str | None) -> int | None:
        """Return the tokens that prompt and output of a request may have together; None for a policy that is not
        offered. A request that names none has the first."""
        if kv_eviction is None:
            return self.kv_evictions[0][1] if self.kv_evictions else self.context
        return self.context if kv_eviction == "none" else dict(self.kv_evictions).get(kv_eviction)


class Stats(msgspec.Struct, frozen=True, tag="stats"):
    """State of the engine after a step, sent at most ten times a second, and once when it falls idle.

    Counters grow from the start of the engine; the other fields are of this moment.
    """

    running: int
    waiting: int
    blocks_free: int
    blocks_active: int
    blocks_cached: int
    steps: int  # counter
    prompt_tokens: int  # counter: asked to be prefilled
    reused_tokens: int  # counter: prompt tokens taken from the cache
    generated_tokens: int  # counter
    preemptions: int  # counter
    step_seconds: float  # counter
    blocks: bytes = b""  # one byte a block: 0 free, 1 active, 2 cached
    evicted_tokens: int = 0  # counter: tokens whose keys running sequences dropped
    steps_ahead: int = 0  # counter: steps launched before the previous step's tokens were known
    drafted_tokens: int = 0  # counter: drafts of speculative decoding that were verified
    accepted_tokens: int = 0  # counter: of these, the right ones
    forced_tokens: int = 0  # counter: of these, the ones that a constraint forced
    overruled_tokens: int = 0  # counter: forced tokens that were trusted in place of another that the model drew
    draft_errors: int = 0  # counter: exceptions of the drafter, and drafts that are no tokens
    drafted_by_position: tuple[int, ...] = ()  # counters: drafts that were verified, the first of a step first
    accepted_by_position: tuple[int, ...] = ()  # counters: of these, the right ones
    draft_steps: int = 0  # counter: steps of decoding choices, where there is a drafter
    draft_seconds: float = 0.0  # counter: making drafts
    keys_seen: int = 0  # counter: by rows of outputs, with sparse attention
    keys_read: int = 0  # counter: of these, in each layer that is not dense
    prompt_keys_seen: int = 0  # counter: by rows of prompts, with sparse prefill
    prompt_keys_read: int = 0  # counter: of these, in each layer without a sliding window
    sliding_blocks: tuple[int, int, int] | None = None
    """Free, active and cached blocks of layers with a sliding window, where those have blocks of their own."""
    disk_cache: tuple[int, ...] | None = None  # what was moved, in the order of DISK_CACHE; None without one
    prefill_peer: tuple[int, ...] | None = None  # what was passed on, in the order of PREFILL_PEER; None without a peer


DISK_CACHE = (
    "loaded_blocks", "loaded_bytes", "saved_blocks", "saved_bytes", "refused", "failed", "dropped", "skipped", "late",
    "blocks", "bytes",
)  # fmt: skip
"""Fields of `Stats.disk_cache`: counters, but for the last two.

loaded, saved: blocks read and written, with their bytes. refused: files that were not what they had to be, and were
deleted. failed: reads and writes that failed. dropped: files deleted to make room. skipped: prompts' beginnings that
were not saved, since too many waited, or the disk had failed. late: fetches for which no request waited any more.
blocks, bytes: those in the cache now.
"""
PREFILL_PEER = ("pulled_blocks", "pulled_bytes", "sent_blocks", "sent_bytes", "refused", "failed", "busy")
"""Fields of `Stats.prefill_peer`, which are counters.

pulled: by a decode engine, and by a replica that has just started. sent: by a prefill engine, and by another replica.
refused: answers, or connections, of another kind than was asked for. failed: answers that broke off or never came.
busy: questions that the peer had no blocks for.
"""


class StepTimes(msgspec.Struct, frozen=True, tag="steps"):
    """Steps since the last such message, sent with `Stats`: for each its rows, its sequences, the cached tokens that
    these had, and its seconds."""

    steps: tuple[tuple[int, int, int, float], ...]


class CachedBlocks(msgspec.Struct, frozen=True, tag="cached"):
    """Change of the whole blocks in the prefix cache, by their digests (`block_digests.py`); told before the events of
    the same step. With `whole`, `stored` are all there are."""

    stored: bytes
    evicted: bytes = b""
    whole: bool = False


class Beat(msgspec.Struct, frozen=True, tag="beat"):
    """Heartbeat of the engine's process, sent twice a second by a thread that no step blocks.

    `busy`: seconds since the engine's loop last looked for commands, that is the age of the present step; 0 while it
    waits for commands.
    """

    busy: float = 0.0


class RequestStatus(msgspec.Struct, frozen=True, tag="told"):
    """Present state of a request."""

    id: str
    report: Report


Event = (
    Delta | PromptLogprobs | Finished | Embedding | Failed | Ready | Stats | CachedBlocks | StepTimes | Beat
    | RequestStatus
)  # fmt: skip


def encode(messages: Sequence[Command] | Sequence[Event]) -> bytes:
    """Encode messages as one frame. Raises FrameTooLong where it would be longer than MAX_FRAME bytes."""
    return frame(msgspec.msgpack.encode(messages), MAX_FRAME)
