"""Memory planning: one arithmetic for the server's start-up table and for `attar plan`.

    memory = weights + adapters + largest step + processes + KV cache

All but the last are bounds that are known before anything is loaded (`costs.py`, `steps.py`). The rest is cut into
blocks of the KV cache. A request of a full context takes ceil(context / block) of them. A request is admitted beside
others only where a fraction of all blocks (`headroom`) stays free for sequences that decode. So `requests` is how many
such requests the cache holds without a preemption, if no two share a prefix; the number that run together has a bound
of its own. `fit` is that division. `start` adds two decisions of a server. The cache is at most `ROOM` times what its
sequences can use together, so that a small model does not fill a large memory with old prompts. Requests become shorter
where not one of the model's whole context fits.

A fraction limits the KV cache to that part of the memory left. A number of tokens, which sets the cache's size
otherwise, is then an upper bound: the smaller of both holds, as in TensorRT-LLM. Torch-free.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from attar.errors import UserError
from attar.kv.eviction import Eviction
from attar.kv.schemes import KvScheme
from attar.kv.sparse import SparseAttention
from attar.model.config import ModelConfig
from attar.model.split import Share, split
from attar.plan import costs, gpus, steps
from attar.plan.costs import BLOCK, Storage
from attar.plan.gpus import GpuSpec
from attar.plan.sliding import CacheShape, SlidingLimits, window_of
from attar.plan.steps import StepLimits

ENGINE = 300 << 20  # bytes of the engine's process with torch and no model: 255 MB measured
SERVER = 80 << 20  # of the process that speaks HTTP: 50 MB measured
ROOM = 4  # times what sequences that run together can use: the rest keeps old prompts and answers for reuse
TOKENIZER = 600  # bytes a token of the vocabulary, in each of the two: 510 measured

WHOLE = Share()  # of a model in one process


@dataclass(frozen=True, slots=True)
class Deployment:
    """A model as it is stored, and what holds it.

    share: of several processes, how they divide the model. gpu: where it lies, None for CPUs. sparse: how many keys
    rows of outputs read, None for all. eviction: which keys are dropped, None for none.
    """

    config: ModelConfig
    storage: Storage
    kv: KvScheme
    share: Share = WHOLE
    gpu: GpuSpec | None = None
    sparse: SparseAttention | None = None
    eviction: Eviction | None = None


@dataclass(frozen=True, slots=True)
class CacheLimits:
    """Bounds of the KV cache.

    max_tokens: positions that set its size, by default what the memory leaves. fraction: part of the memory left, in
    (0, 1]; with it `max_tokens` is an upper bound.
    """

    max_tokens: int | None = None
    fraction: float | None = None

    def blocks(self, left: int, of: int | CacheShape, block: int) -> int:
        """Return the blocks of `block` positions for the `left` bytes of memory: all that fit, or enough for
        `max_tokens`, whether they fit or not. `of` is the bytes of a block, or the shape of the cache.

        With a `fraction` of `left`, the smaller of what fits in that and of those for `max_tokens`. Raises ValueError
        for a fraction outside (0, 1].
        """
        check_fraction(self.fraction)
        shape = of if isinstance(of, CacheShape) else CacheShape(of)
        room = shape.most(int(max(0, left) * (1.0 if self.fraction is None else self.fraction)))
        if self.max_tokens is None:
            return room
        asked = -(-self.max_tokens // block)
        return asked if self.fraction is None else min(asked, room)

    def option(self, tokens: int) -> str:
        """Return the command line's option that limits a cache of `tokens` tokens."""
        by_fraction = self.fraction is not None and (self.max_tokens is None or tokens < self.max_tokens)
        return "--kv-fraction" if by_fraction else "--max-tokens-in-cache"


NO_LIMITS = CacheLimits()


@dataclass(frozen=True, slots=True)
class Demand:
    """A demand: the number of concurrent users, each with `context` positions of prompt and answer.

    None is the model's whole context; a single user then gets as much of it as fits, as by `start`, and at least
    `least` positions. Raises ValueError for numbers below 1.
    """

    context: int | None = None
    users: int = 1
    least: int = 1

    def __post_init__(self) -> None:
        if self.context is not None and self.context < 1:
            raise UserError("option_out_of_range", f"a context has at least one position, not {self.context}")
        if self.users < 1:
            raise UserError("option_out_of_range", f"a plan is for at least one user, not {self.users}")


@dataclass(frozen=True, slots=True)
class Fit:
    """Division of the memory, in bytes, and the number of cache blocks that remain."""

    memory: int
    weights: int
    step: int
    processes: int
    block: int  # slots
    block_bytes: int  # in all layers
    blocks: int
    context: int  # of a full request
    adapters: int = 0  # including the step memory of their products
    graphs: int = 0  # on a GPU: memory of recorded steps
    kept_by: str = "--max-tokens-in-cache"  # the option that limits the cache in this memory
    headroom: float = 0.0  # fraction of all blocks that an admission leaves to the running sequences
    windows: CacheShape | None = None  # the shape of a cache of a model with sliding windows
    held: int | None = None  # most positions that a full request holds at a time, where keys are dropped; None: all

    @property
    def shape(self) -> CacheShape:
        """Return the shape of the cache."""
        return CacheShape(self.block_bytes) if self.windows is None else self.windows

    @property
    def cache(self) -> int:
        return self.shape.bytes(self.blocks)

    @property
    def sliding_blocks(self) -> int:
        """Return the blocks of layers with a sliding window; 0 where all layers have `blocks`."""
        return self.shape.sliding_blocks(self.blocks)

    @property
    def tokens(self) -> int:
        """Return the number of positions that the cache holds."""
        return self.blocks * self.block

    @property
    def blocks_each(self) -> int:
        """Return the number of blocks of a request of the full context."""
        return -(-(self.context if self.held is None else self.held) // self.block)

    @property
    def requests(self) -> int:
        """Return how many requests of the full context the cache holds, each but the first beside the blocks that
        `headroom` keeps free. A single one may take all blocks."""
        beside_others = (self.blocks - kept_free(self.blocks, self.headroom)) // self.blocks_each
        return max(beside_others, min(1, self.blocks // self.blocks_each))

    @property
    def unused(self) -> int:
        """Return the bytes left over; negative where some are missing."""
        taken = self.weights + self.adapters + self.step + self.graphs + self.processes
        return self.memory - taken - self.cache

    def short(self, users: int = 1) -> int:
        """Return the bytes that are missing for `users` full requests at once; 0 where they fit."""
        lacking = max(0, blocks_for(users, self.blocks_each, self.headroom) - self.blocks)
        return max(0, self.shape.bytes(self.blocks + lacking) - self.cache - self.unused)

    def table(self) -> tuple[tuple[str, int], ...]:
        """Return (use, bytes) of everything that takes memory, and of the unused rest."""
        found = (
            ("weights", self.weights), ("adapters", self.adapters), ("largest step", self.step),
            ("graphs", self.graphs), ("processes", self.processes), ("KV cache", self.cache), ("unused", self.unused),
        )  # fmt: skip
        return tuple((use, taken) for use, taken in found if taken or use not in ("adapters", "graphs"))


def fit(
    deployment: Deployment, memory: int, context: int | None = None, cache: CacheLimits = NO_LIMITS,
    limits: StepLimits | None = None, adapters: int = 0,
) -> Fit:  # fmt: skip
    """Divide `memory`, of the machine or of the deployment's GPU.

    `context` is that of a full request, by default the model's. `adapters` are the bytes that those take, with their
    steps. Where several processes share the model, `memory` is each one's, and all sizes are of the first, which holds
    most.

    A plan that does not fit is no error here: see `Fit.short` and `require`. Raises ValueError for an impossible
    setting.
    """
    if memory < 0:
        raise UserError("option_out_of_range", f"a memory of {memory} bytes is below zero")
    if cache.max_tokens is not None and cache.max_tokens < 1:
        raise UserError("option_out_of_range", f"the cache holds at least one token, not {cache.max_tokens}")
    config, storage, kv, gpu = deployment.config, deployment.storage, deployment.kv, deployment.gpu
    context = config.context if context is None else context
    Demand(context)  # checks it
    own, held = shared(config, storage, deployment.share)
    limits = limits or StepLimits()
    if gpu is not None:
        weights = gpus.weight_bytes(held, storage, gpu.float8).total
        each = keys = gpus.block_bytes(own, kv, gpu.float8)
        step, processes = gpus.step_bytes(own, storage, limits, context), 0
    else:
        weights, keys = costs.weight_bytes(held, storage).total, costs.block_bytes(own, kv)
        each = keys + (0 if deployment.sparse is None else costs.sign_bytes(own))
        step = steps.largest_step(own, storage, limits, context).total
        step += costs.beside_bytes(own, kv, limits.sequences)
        processes = ENGINE + SERVER + 2 * TOKENIZER * config.vocab_size
    rows = limits.rows * (1 if gpu is None else 2)  # a GPU's next step is planned while one is under way
    shape = cache_shape(own, keys, context, limits.sequences, rows) if deployment.share.pp == 1 else None
    shape = None if shape is None else replace(shape, block_bytes=each)
    blocks = cache.blocks(memory - weights - adapters - step - processes, shape or each, BLOCK)
    return Fit(
        memory, weights, step, processes, BLOCK, each, blocks, context, adapters,
        kept_by=cache.option(blocks * BLOCK), headroom=limits.headroom, windows=shape,
        held=None if deployment.eviction is None else deployment.eviction.most_slots(context),
    )  # fmt: skip


def with_kv(found: Fit, deployment: Deployment, kv: KvScheme, limits: StepLimits) -> Fit:
    """Return the division `found` of a deployment with another KV format, and as many cache blocks.

    It equals `fit` for that format, without another sum over the weights.
    """
    config, gpu = shared(deployment.config, deployment.storage, deployment.share)[0], deployment.gpu
    if gpu is not None:
        each, beside = gpus.block_bytes(config, kv, gpu.float8), 0
    else:
        each = costs.block_bytes(config, kv) + (0 if deployment.sparse is None else costs.sign_bytes(config))
        beside = costs.beside_bytes(config, kv, limits.sequences)
        beside -= costs.beside_bytes(config, deployment.kv, limits.sequences)
    rows = limits.rows * (1 if gpu is None else 2)
    whole = deployment.share.pp == 1
    shape = cache_shape(config, each, found.context, limits.sequences, rows) if whole else None
    return replace(found, step=found.step + beside, block_bytes=each, windows=shape)


def cache_shape(config: ModelConfig, block_bytes: int, context: int, sequences: int, rows: int) -> CacheShape | None:
    """Return the shape of a cache of a model with sliding windows; None where no layer has one.

    A block has `block_bytes` in all layers. `rows` are those of all steps under way together.
    """
    if (window := window_of(config)) is None:
        return None
    part = block_bytes // config.layers * sum(each is not None for each in config.windows)
    return CacheShape(block_bytes, -(-context // BLOCK), sequences, part, SlidingLimits(window, BLOCK, rows))


def kept_free(blocks: int, headroom: float) -> int:
    """Return how many of `blocks` blocks the scheduler leaves to running sequences when it admits another."""
    return math.ceil(headroom * blocks)


def blocks_for(requests: int, each: int, headroom: float) -> int:
    """Return the fewest blocks in which `requests` requests of `each` blocks run at once."""
    used = blocks = requests * each
    while requests > 1 and (more := used + kept_free(blocks, headroom)) > blocks:
        blocks = more
    return blocks


def check_fraction(fraction: float | None) -> None:
    """Raise ValueError for a fraction of the memory outside (0, 1]."""
    if fraction is not None and not 0 < fraction <= 1:
        message = f"the fraction of the memory for the KV cache is above 0 and at most 1, not {fraction:g}"
        raise UserError("option_out_of_range", message)


def start(
    deployment: Deployment, memory: int, limits: StepLimits, context: int | None = None, cache: CacheLimits = NO_LIMITS,
    adapters: int = 0,
) -> Fit:  # fmt: skip
    """Divide a server's memory as `fit`. By default the cache gets what the memory leaves, or a fraction of that, up to
    `ROOM` times what `limits.sequences` full requests need to run together.

    Where no `context` is given and the cache holds less than one request of the model's, the context becomes what the
    cache holds, less what a policy keeps of a prompt beside it. Raises ValueError as `fit` and `longest`; `require`
    reports what does not fit.
    """
    most = longest(deployment.config, context)
    found = fit(deployment, memory, most, cache, limits, adapters=adapters)
    kept_by = found.kept_by
    most_blocks = useful(limits.sequences, found.blocks_each, limits.headroom)
    if cache.max_tokens is None and found.blocks > most_blocks:
        found = fit(deployment, memory, most, replace(cache, max_tokens=most_blocks * BLOCK), limits, adapters=adapters)
    if context is None and 0 < found.blocks < found.blocks_each:
        kept, dropping = replace(cache, max_tokens=found.tokens), deployment.eviction
        length = found.tokens if dropping is None else dropping.longest_in(found.tokens) or found.tokens
        found = fit(deployment, memory, min(length, most), kept, limits, adapters=adapters)
    return replace(found, kept_by=kept_by)


def useful(sequences: int, each: int, headroom: float) -> int:
    """Return the most blocks that a cache gets by default, where `sequences` sequences of `each` blocks may run
    together."""
    return ROOM * blocks_for(sequences, each, headroom)


def longest(config: ModelConfig, context: int | None) -> int:
    """Return the tokens of the longest request, by default the model's context. Raises ValueError where the model has
    fewer positions."""
    if context is not None and context > config.context:
        message = f"a context of {context:,} is past the {config.context:,} positions of the model"
        raise UserError("context_exceeded", message)
    return context or config.context


def shared(config: ModelConfig, storage: Storage, share: Share) -> tuple[ModelConfig, ModelConfig]:
    """Return the part of a model that the first of several processes computes, with the logits of all, and the part
    whose weights it holds. Raises ValueError where the model cannot be split so."""
    if share.count == 1:
        return config, config
    part = split(config, Share(0, share.tp, share.pp), {each.name: storage.of(each) for each in costs.matrices(config)})
    assert part.vocabulary is not None
    return part.own, replace(part.own, vocab_size=part.vocabulary[1])


def require(found: Fit, source: str) -> None:
    """Raise ValueError, with the missing bytes, unless the plan fits and the cache holds one full request.

    `source` names the origin of the memory limit, such as "--memory" or "available memory".
    """
    if found.unused < 0:
        needed = found.memory - found.unused
        what = "the model" if found.blocks == 0 else f"the model with a cache of {found.tokens:,} tokens"
        raise UserError(
            "memory_insufficient",
            f"{what} needs {size(needed)}, but there are {size(found.memory)} ({source}): {size(-found.unused)} too "
            f"little; {_parts(found)}",
        )
    if found.requests < 1:
        held = f"the cache would hold {found.tokens:,} tokens, less than one request of {found.context:,}"
        if not (short := found.short()):  # the memory would allow more than was asked for
            raise UserError("plan_does_not_fit", f"{held}: a smaller --context or a larger {found.kept_by} would do")
        message = f"{held}: {size(short)} too little; a smaller --context, a smaller --kv or more memory would do"
        raise UserError("plan_does_not_fit", message)


def _parts(found: Fit) -> str:
    return ", ".join(f"{what} {size(count)}" for what, count in found.table() if what != "unused" and count)


def size(count: float) -> str:
    """Return bytes as text in powers of ten: 763 MB, 1.24 GB."""
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if abs(count) >= unit:
            return f"{count / unit:.3g} {name}" if abs(count) < 1000 * unit else f"{count / unit:,.0f} {name}"
    return f"{count:.0f} bytes"
