"""What settings ask of an engine, and what of it fits into the memory, before anything is loaded.

Errors name the missing bytes, and options that do not go with each other.
"""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path

from attar import logs, machine
from attar.checkpoints.drafts.files import kind_of
from attar.checkpoints.sources import hub
from attar.engine.drafts.draft_head import memory_bytes as head_bytes
from attar.engine.drafts.draft_model import memory_bytes
from attar.engine.memory_profile import MemoryProfile
from attar.errors import UserError
from attar.kv import schemes
from attar.kv.eviction import Eviction, parse_all
from attar.kv.schemes import KvScheme
from attar.kv.sparse import SparseAttention
from attar.kv.sparse_prefill import SparsePrefill
from attar.model.config import ModelConfig
from attar.model.split import Share
from attar.plan import fit as planning
from attar.plan import gpus
from attar.plan.costs import BLOCK, Storage
from attar.plan.fit import CacheLimits, Deployment, Fit
from attar.plan.steps import StepLimits
from attar.protocol.scheduler_config import SchedulerConfig
from attar.protocol.settings import Settings

logger = logging.getLogger(__name__)


def deployment(settings: Settings, config: ModelConfig, storage: Storage) -> Deployment:
    """Return the deployment of a model by settings. Raises ValueError for an unknown KV scheme."""
    share, dropping = Share(0, settings.tp, settings.pp), next(iter(evictions(settings)), None)
    return Deployment(config, storage, kv_scheme(settings), share, sparse=sparse(settings), eviction=dropping)


def kv_scheme(settings: Settings) -> KvScheme:
    """Return the scheme of keys and values, by default the lossless one. Raises ValueError for an unknown name."""
    return schemes.scheme(settings.kv or ("bfloat16" if settings.computes_in == "bfloat16" else "float32"))


def sparse(settings: Settings) -> SparseAttention | None:
    """Return how many keys rows of outputs read, None where they read all.

    Raises ValueError for text of another form, and for settings that sparse attention does not go with.
    """
    if settings.sparse_attention is None:
        return None
    found = SparseAttention.parse(settings.sparse_attention)
    found.check(kv_scheme(settings), settings.device, settings.tp * settings.pp, settings.draft_tree is not None)
    return found


def prefill(settings: Settings) -> SparsePrefill | None:
    """Return how rows of prompts read few keys, None where they read all.

    Raises ValueError for text of another form, and for settings that sparse prefill does not go with.
    """
    if settings.sparse_prefill is None:
        return None
    found = SparsePrefill.parse(settings.sparse_prefill)
    found.check(settings.device, settings.tp * settings.pp, settings.draft_tree is not None)
    return found


def evictions(settings: Settings) -> tuple[Eviction, ...]:
    """Return the policies of KV eviction that requests may name.

    Raises ValueError for text of another form, and for settings that eviction does not go with.
    """
    found, scheme, count = parse_all(settings.kv_eviction), kv_scheme(settings), settings.tp * settings.pp
    trees, few = settings.draft_tree is not None, bool(settings.sparse_attention or settings.sparse_prefill)
    for each in found:
        each.check(scheme, settings.device, count, trees=trees, sparse=few)
    return found


def cost_of(settings: Settings, eviction: Eviction | None = None) -> str:
    """Return the command that measures what reading few keys, or dropping them by a policy, costs on a text."""
    given = (
        ("sparse-attention", settings.sparse_attention),
        ("sparse-prefill", settings.sparse_prefill),
        ("kv-eviction", eviction),
        ("kv", settings.kv),
    )
    options = "".join(f" --{name} {value}" for name, value in given if value is not None)
    return f"attar eval {settings.model}{options} --text FILE"


def fit(
    settings: Settings, held: Deployment, limits: SchedulerConfig, threads: int, adapters: int = 0, images: int = 0
) -> Fit:
    """Divide the memory before a start on CPUs; `images` are the bytes of a vision tower and its features. Raises
    ValueError, saying by how much, where the model does not fit."""
    here, share, most = machine.examine(), held.share, held.config.context
    memory, source = settings.memory, "--memory"
    if memory is None:
        memory, source = here.budget if settings.kv_fraction is None else here.memory, here.limited_by
    beside: list[tuple[str, int]] = [("vision tower", images)] if images else []
    if settings.draft_model is not None:
        beside.append(("draft model", draft_bytes(settings, limits, threads, settings.context or most)))
    for what, needed in beside:
        if needed > memory:
            raise UserError(
                "memory_insufficient",
                f"the {what} needs {planning.size(needed)}, but there are {planning.size(memory)} ({source}): "
                f"{planning.size(needed - memory)} too little",
            )
        logs.say(f"{what:<15} {planning.size(needed)}")
        memory -= needed
        source += f", less {planning.size(needed)} of the {what}"
    memory //= share.count
    source += f", of which each of {share.count} processes has its part" if share.count > 1 else ""
    cache = CacheLimits(settings.max_cached_tokens, settings.kv_fraction)
    start = partial(planning.start, held)
    given = StepLimits.of(limits, threads), settings.context, cache, adapters
    found = start(memory, *given)
    if settings.sharers > 1 and found.unused >= 0:
        memory = found.weights + (memory - found.weights) // settings.sharers
        source += f", of which {settings.sharers} engines share the weights and have equal parts of the rest"
        found = start(memory, *given)
    if found.context < (settings.context or most):
        logger.info("requests may have %d tokens, what the cache holds, instead of %d", found.context, most)
    planning.require(found, source)
    return found


def draft_bytes(settings: Settings, limits: SchedulerConfig, threads: int, context: int) -> int:
    """Return the bytes that the draft model or head of `settings` takes. Raises ValueError where it cannot be read."""
    assert settings.draft_model is not None
    path = Path(settings.draft_model)
    if kind_of(path) is None:
        return memory_bytes(path, context, limits.together, threads)
    return head_bytes(path, hub.resolve(settings.model), context, StepLimits.of(limits, threads))


def room_for_weights(settings: Settings, held: Deployment, available: int, float8: bool) -> None:
    """Raises ValueError, saying by how much, where a card has too little memory for its part of the weights alone."""
    part = planning.shared(held.config, held.storage, held.share)[1]
    weights = gpus.weight_bytes(part, held.storage, float8).total
    memory, source = settings.memory, "--memory"
    if memory is None:
        memory, source = available, f"free on {settings.device}"
    if weights > memory:
        raise UserError(
            "memory_insufficient",
            f"the weights need {planning.size(weights)}, but there are {planning.size(memory)} ({source}): "
            f"{planning.size(weights - memory)} too little",
        )


def on_gpu(
    settings: Settings,
    measured: MemoryProfile,
    block_bytes: int,
    most: int,
    limits: SchedulerConfig,
    windowed: ModelConfig | None = None,
) -> Fit:
    """Where a card's memory will go, after what was measured, for requests of up to `most` tokens. Layers of the model
    `windowed` with a sliding window have blocks of their own. Raises ValueError, saying by how much, where it is too
    little."""
    cache = CacheLimits(settings.max_cached_tokens, settings.kv_fraction)
    memory, source = settings.memory, "--memory"
    if memory is None:
        memory = int(measured.available * (machine.SHARE if cache.fraction is None else 1.0))
        source = f"free on {settings.device}"
    taken = measured.weights + measured.step + measured.graphs + measured.driver + block_bytes  # and nobody's block
    shape = None
    if windowed is not None:
        shape = planning.cache_shape(windowed, block_bytes, most, limits.together, 2 * limits.max_step_tokens)
    blocks = cache.blocks(memory - taken, shape or block_bytes, BLOCK)
    if cache.max_tokens is None:
        blocks = min(blocks, planning.useful(limits.together, -(-most // BLOCK), limits.headroom))
    context = most
    if settings.context is None and 0 < blocks * BLOCK < most:
        context = blocks * BLOCK
        logger.info("the cache holds %d tokens, so requests may have no more, instead of %d", context, most)
    found = Fit(
        memory, measured.weights, measured.step, measured.driver, BLOCK, block_bytes, blocks, context,
        graphs=measured.graphs + block_bytes,
        kept_by=cache.option(blocks * BLOCK), headroom=limits.headroom, windows=shape,
    )  # fmt: skip
    planning.require(found, source)
    return found
