"""From settings to an engine: what fits is computed from the checkpoint's headers, before any weight is read.

The same arithmetic answers `attar plan`. Without a size given, the cache gets what memory leaves, up to what the
largest allowed number of requests could use at once; where that is less than one request of the model's whole context,
the context becomes what does fit, and the start-up table says so.

On a GPU nothing but the cache is computed: the model is loaded, its largest step and its largest graph are measured
(`footprint.py`), and the cache gets the rest. Decode steps are recorded before the first request comes.
"""

from __future__ import annotations

import logging
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from attar import machine
from attar.checkpoints import hub, lora
from attar.checkpoints.stored import stored
from attar.engine import kv as kv_schemes
from attar.engine.engine import Engine
from attar.engine.footprint import CardMemory, Footprint, Trial, measure
from attar.engine.limits import Limits
from attar.engine.messages import Ready
from attar.engine.sampler import AT_ONCE
from attar.engine.settings import Settings
from attar.formats import kv
from attar.kernels import ops
from attar.model.config import ModelConfig
from attar.model.split import Share
from attar.plan import fit as planning
from attar.plan import report
from attar.plan.costs import BLOCK, Storage
from attar.plan.fit import Fit
from attar.plan.steps import StepLimits

if TYPE_CHECKING:
    from attar.engine.llm import LLM

logger = logging.getLogger(__name__)


def engine(settings: Settings) -> tuple[Engine, Ready]:
    """Load the model of `settings`. Raises ValueError where it cannot be loaded, fails its probe, or does not fit."""
    limits = settings.limits()
    threads = settings.threads or machine.cores()
    path = hub.resolve(settings.model)
    config, storage = stored(path)
    if settings.adapters and settings.tp * settings.pp > 1:
        raise ValueError("adapters are not shared between processes yet: --tp and --pp go without --adapter")
    if settings.device != "cpu":
        return _on_card(settings, path, config, limits, threads)
    folders = [Path(folder) for _, folder in settings.adapters]
    adapters = lora.memory(folders, config, limits.max_step_tokens)
    found = fit(settings, config, storage, limits, threads, adapters)
    share = Share(0, settings.tp, settings.pp)
    if share.count > 1:
        print(f"the first of {share.count} processes, which holds the most:", file=sys.stderr)
    print(report.startup(found, kv_name(settings)), file=sys.stderr, flush=True)
    if (slow := ops.pages_against(kv.scheme(kv_name(settings)))) is not None:
        logger.warning(
            "%s: attention and every decode step run by the reference, several times slower, and a text's bits may "
            "depend on what runs beside it",
            slow,
        )
    from attar.engine.llm import LLM  # which uses engines itself

    llm = LLM(
        path, dtype=settings.computes_in, activations=settings.activations, verify=settings.verify, tp=settings.tp,
        pp=settings.pp,
    )  # fmt: skip
    names = _install(llm, settings)
    torch.set_num_threads(max(1, threads // share.count))  # a number that was asked for counts, whatever the machine
    made = Engine(
        llm.decoder,
        llm.tokenizer,
        blocks=found.blocks,
        context=found.context,
        limits=limits,
        eos_ids=llm.eos_ids,
        kv=kv_name(settings),
        adapters=names,
        runner=llm.runner,
    )
    ready = Ready(path.name, found.context, config.vocab_size, found.blocks, found.block, found.table(), names)
    return made, ready


def _install(llm: LLM, settings: Settings) -> tuple[str, ...]:
    """Give the model its adapters; returns their names, in the order of their numbers."""
    for number, (_, folder) in enumerate(settings.adapters, 1):
        if (sentence := lora.doubt(Path(folder), llm.path)) is not None:
            logger.warning("%s", sentence)
        lora.install(llm.decoder, number, Path(folder))
    return tuple(name for name, _ in settings.adapters)


def _on_card(settings: Settings, path: Path, config: ModelConfig, limits: Limits, threads: int) -> tuple[Engine, Ready]:
    """As `engine`, on a GPU."""
    from attar.engine.llm import LLM

    ops.require(settings.device)
    torch.set_num_threads(threads)
    memory = CardMemory(torch.device(settings.device))
    available, most = memory.free(), _longest(settings, config)
    try:
        llm = LLM(
            path, dtype=settings.computes_in, verify=settings.verify, device=settings.device, tp=settings.tp,
            pp=settings.pp,
        )  # fmt: skip
        names, scheme = _install(llm, settings), kv_schemes.of(llm.decoder, kv_name(settings))
        trial = Trial(llm.decoder, scheme, limits, most, runner=llm.runner)
        each = trial.pages // trial.runner.pages[0].blocks
        measured = measure(memory, available, trial)
        del trial
        memory.settle()
        found = on_card(settings, measured, each, most, limits)
        print(report.startup(found, scheme.name), file=sys.stderr, flush=True)
        made = Engine(
            llm.decoder,
            llm.tokenizer,
            blocks=found.blocks,
            context=found.context,
            limits=limits,
            eos_ids=llm.eos_ids,
            kv=scheme.name,
            adapters=names,
            runner=llm.runner,
        )
        made.runner.record_all()
    except torch.OutOfMemoryError as error:
        raise ValueError(
            f"{path.name} does not fit into the {planning.size(available)} that {settings.device} has free: {error}"
        ) from None
    return made, Ready(path.name, found.context, config.vocab_size, found.blocks, found.block, found.table(), names)


def on_card(settings: Settings, measured: Footprint, block_bytes: int, most: int, limits: Limits) -> Fit:
    """Where a card's memory will go, after what was measured, for requests of up to `most` tokens. Raises ValueError,
    saying by how much, where it is too little."""
    memory = settings.memory or int(measured.available * machine.SHARE)
    source = "--memory" if settings.memory else f"free on {settings.device}"
    taken = measured.weights + measured.step + measured.graphs + measured.driver + block_bytes  # and nobody's block
    room = max(0, (memory - taken) // block_bytes)
    blocks = min(room, limits.max_running * -(-most // BLOCK))
    if settings.max_cached_tokens is not None:
        blocks = -(-settings.max_cached_tokens // BLOCK)
    context = most
    if settings.context is None and 0 < blocks * BLOCK < most:
        context = blocks * BLOCK
        logger.info("the cache holds %d tokens, so requests may have no more, instead of %d", context, most)
    found = Fit(
        memory, measured.weights, measured.step, measured.driver, BLOCK, block_bytes, blocks, context,
        graphs=measured.graphs + block_bytes,
    )  # fmt: skip
    planning.require(found, source)
    return found


def fit(
    settings: Settings, config: ModelConfig, storage: Storage, limits: Limits, threads: int, adapters: int = 0
) -> Fit:
    """Where the memory will go. Raises ValueError, saying by how much, where the model does not fit."""
    chosen = kv_name(settings)
    here = machine.examine()
    share = Share(0, settings.tp, settings.pp)
    memory = (settings.memory or here.budget) // share.count
    source = "--memory" if settings.memory else here.limited_by
    source += f", of which each of {share.count} processes has its part" if share.count > 1 else ""
    most = _longest(settings, config)
    bounds = StepLimits(rows=limits.max_step_tokens, sequences=limits.max_running, sampled=AT_ONCE, threads=threads)
    divide = partial(planning.fit, config, storage, chosen, memory, limits=bounds, adapters=adapters, share=share)
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


def _longest(settings: Settings, config: ModelConfig) -> int:
    """Tokens of a request that are asked for. Raises ValueError where the model has fewer."""
    most = settings.context or config.context
    if most > config.context:
        raise ValueError(f"--context {most:,} is past the {config.context:,} positions of the model")
    return most


def kv_name(settings: Settings) -> str:
    """How keys and values are kept: by default as they are. Raises ValueError for an unknown name."""
    return kv.scheme(settings.kv or ("bfloat16" if settings.computes_in == "bfloat16" else "float32")).name
