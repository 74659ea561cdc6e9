"""From settings to an engine: what fits is computed from the checkpoint's headers, before any weight is read.

The same arithmetic answers `attar plan`. Without a size given, the cache gets what memory leaves, up to what the
largest allowed number of requests could use at once; where that is less than one request of the model's whole context,
the context becomes what does fit, and the start-up table says so.
"""

from __future__ import annotations

import logging
import sys
from functools import partial

import torch

from attar import machine
from attar.checkpoints import hub
from attar.checkpoints.stored import stored
from attar.engine.engine import Engine
from attar.engine.limits import Limits
from attar.engine.messages import Ready
from attar.engine.sampler import AT_ONCE
from attar.engine.settings import Settings
from attar.formats import kv
from attar.kernels import ops
from attar.model.config import ModelConfig
from attar.plan import fit as planning
from attar.plan import report
from attar.plan.costs import BLOCK, Storage
from attar.plan.fit import Fit
from attar.plan.steps import StepLimits

logger = logging.getLogger(__name__)


def engine(settings: Settings) -> tuple[Engine, Ready]:
    """Load the model of `settings`. Raises ValueError where it cannot be loaded, fails its probe, or does not fit."""
    limits = settings.limits()
    threads = settings.threads or machine.cores()
    path = hub.resolve(settings.model)
    config, storage = stored(path)
    found = fit(settings, config, storage, limits, threads)
    print(report.startup(found, kv_name(settings)), file=sys.stderr, flush=True)
    if (slow := ops.pages_against(kv.scheme(kv_name(settings)))) is not None:
        logger.warning("%s: attention and every decode step run by the reference, several times slower", slow)
    from attar.engine.llm import LLM  # which uses engines itself

    llm = LLM(path, dtype=settings.dtype, activations=settings.activations, verify=settings.verify)
    torch.set_num_threads(threads)  # a number that was asked for counts, whatever the machine
    made = Engine(
        llm.decoder,
        llm.tokenizer,
        blocks=found.blocks,
        context=found.context,
        limits=limits,
        eos_ids=llm.eos_ids,
        kv=kv_name(settings),
    )
    ready = Ready(path.name, found.context, config.vocab_size, found.blocks, found.block, found.table())
    return made, ready


def fit(settings: Settings, config: ModelConfig, storage: Storage, limits: Limits, threads: int) -> Fit:
    """Where the memory will go. Raises ValueError, saying by how much, where the model does not fit."""
    chosen = kv_name(settings)
    here = machine.examine()
    memory = settings.memory or here.budget
    source = "--memory" if settings.memory else here.limited_by
    most = settings.context or config.context
    if most > config.context:
        raise ValueError(f"--context {most:,} is past the {config.context:,} positions of the model")
    bounds = StepLimits(rows=limits.max_step_tokens, sequences=limits.max_running, sampled=AT_ONCE, threads=threads)
    divide = partial(planning.fit, config, storage, chosen, memory, limits=bounds)
    found = divide(context=most, max_tokens=settings.max_cached_tokens)
    if settings.max_cached_tokens is None:
        useful = limits.max_running * -(-most // BLOCK)
        if found.blocks > useful:
            found = divide(context=most, max_tokens=useful * BLOCK)
    if settings.context is None and 0 < found.tokens < most:
        logger.info("the cache holds %d tokens, so requests may have no more, instead of %d", found.tokens, most)
        found = divide(context=found.tokens, max_tokens=found.tokens)
    planning.require(found, source)
    return found


def kv_name(settings: Settings) -> str:
    """How keys and values are kept: by default as they are. Raises ValueError for an unknown name."""
    return kv.scheme(settings.kv or ("bfloat16" if settings.dtype == "bfloat16" else "float32")).name
