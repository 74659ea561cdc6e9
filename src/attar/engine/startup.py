"""Start of an engine from settings: what fits is computed from the checkpoint's headers, before any weight is read.

`attar plan` uses the same arithmetic. Without a given size, the KV cache gets the remaining memory, up to what the
largest allowed number of requests need to run at once. Where that is less than one request of the model's whole
context, the context becomes what does fit, and the start-up table reports it.

On a GPU, weights that do not fit are reported before any is read. Of the rest only the cache is computed: the model is
loaded, its largest step and its largest graph are measured (`memory_profile.py`), and the cache gets what remains.
Decode steps are recorded before the first request comes. Of several GPUs the first is measured, whose process holds the
most, and the least free memory of any counts.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from msgspec.structs import replace as replace_settings

from attar import logs, machine
from attar.checkpoints.adapters import lora
from attar.checkpoints.fingerprints import require_unchanged
from attar.checkpoints.sources import hub
from attar.checkpoints.sources.opening import stored
from attar.engine import bottleneck
from attar.engine.blocks import opening
from attar.engine.blocks.moves import PeerBlocks, SavedBlocks
from attar.engine.bottleneck import Bottlenecks, KernelMeter, StreamMeter
from attar.engine.config import EngineConfig
from attar.engine.engine import Engine
from attar.engine.fitting import cost_of, deployment, evictions, fit, on_gpu, prefill, room_for_weights, sparse
from attar.engine.identity import bits_of
from attar.engine.images.limits import NO_TENSORS, no_images, tower_of, tower_weights
from attar.engine.loader import BY_REFERENCE, LoadedModel, Parallel, load_model, without_kernels
from attar.engine.memory_profile import GpuMemory, ProfileRun, measure
from attar.engine.speculation import drafter
from attar.errors import UserError
from attar.execution import kv_cache
from attar.formats.scheme import Scheme
from attar.kernels import dispatch
from attar.kernels.tiles import faster
from attar.kernels.triton.weights import knows_float8
from attar.kv.schemes import KvScheme
from attar.model.config import ModelConfig
from attar.plan import fit as planning
from attar.plan import report
from attar.plan.comparison import stages
from attar.plan.costs import Storage
from attar.plan.described import described
from attar.plan.fit import Deployment, Fit
from attar.plan.roofline import Rates, Roofline
from attar.plan.sliding import window_of
from attar.plan.steps import StepLimits
from attar.protocol.messages import Ready
from attar.protocol.model_shape import MachineRates
from attar.protocol.scheduler_config import SchedulerConfig
from attar.protocol.settings import Settings

logger = logging.getLogger(__name__)
NOT_CONTINUED = (
    "no other engine continues answers of this one: on GPUs, in several processes and by the reference, the bits of an "
    "answer may depend on other requests"
)


@dataclass(frozen=True, slots=True)
class _Checked:
    """What a start on a CPU reads before any weight: the checkpoint's headers, and what fits."""

    path: Path
    config: ModelConfig
    storage: Storage
    held: Deployment
    seeing: bool  # whether the vision tower is loaded
    no_images: str  # why images are refused; empty where they are not, or where the model takes none


@dataclass(frozen=True, slots=True)
class Shared:
    """What engines that are forked from one process have in common: a loaded model, and what was found before."""

    checked: _Checked
    model: LoadedModel
    rates: Rates | None  # of this machine, with the threads of one engine


def start_engine(settings: Settings, shared: Shared | None = None) -> tuple[Engine, Ready]:
    """Start an engine by `settings`, with what is loaded already where engines share it. Raises ValueError where the
    model cannot be loaded, fails its probe, or does not fit."""
    limits, threads = settings.limits(), settings.threads or machine.cores()
    checked = _check(settings) if shared is None else shared.checked
    peer, saved = opening.peer_of(settings), opening.open_saved(settings)
    held, against = checked.held, checked.no_images
    if against:
        logs.say(f"images are refused: {against}")
    if settings.device != "cpu":
        made, ready = _on_gpu(settings, checked.path, held, limits, threads)
        return made, replace_settings(ready, no_images=against)
    found = _fit(settings, checked)
    if held.share.count > 1:
        logs.say(f"the first of {held.share.count} processes, which holds the most:")
    _tell(settings, limits, found, held.kv)
    each = max(1, threads // held.share.count)  # a number that was asked for counts, whatever the machine
    torch.set_num_threads(each)
    if shared is None:
        rates = bottleneck.cpu_rates(found.weights, settings.activations)
        model = _load(settings, checked, threads)
    else:
        model, rates = shared.model, shared.rates
    for sentence in without_kernels(model.decoder):
        logger.warning("%s", sentence)
    torch.set_num_threads(each)  # which loading may have changed
    # The time of one stage of several says nothing of the step (`bottleneck.py`).
    model_of = bottleneck.step_model(settings, held, threads)
    judge = Bottlenecks(_roof(held, rates), KernelMeter(), model_of) if settings.pp == 1 else None
    made, ready = _made(settings, held, limits, model, found, judge, (saved, peer))
    ready = replace_settings(ready, no_images=NO_TENSORS if checked.seeing and made.images is None else against)
    if held.share.count > 1:
        return made, ready  # sizes and rates of one process say nothing of the step
    limits_of_step = StepLimits.of(limits, threads)
    shape = described(settings.served_as, checked.config, checked.storage, held.kv.name, limits_of_step)
    return made, replace_settings(ready, shape=shape, machine=_machine(rates, found, threads))


def load_shared(settings: Settings) -> Shared:
    """Load the model of `settings` on a CPU, for engines that are forked from this process and start with it.

    It takes the threads of all of them. Torch's threads belong to the calling thread, and end with it. Raises
    ValueError as `start_engine`.
    """
    checked = _check(settings)
    found, each = _fit(settings, checked), settings.threads or machine.cores()
    torch.set_num_threads(each)
    rates = bottleneck.cpu_rates(found.weights, settings.activations)
    torch.set_num_threads(settings.sharers * each)
    model = _load(settings, checked, settings.sharers * each)
    _ = model.eos_ids  # which reads the tokenizer, here and not in each engine
    return Shared(checked, model, rates)


def _check(settings: Settings) -> _Checked:
    """Read the headers of the model of `settings`. Raises ValueError for settings that do not go with each other or
    with the model, and for files that have changed."""
    sparse(settings)  # before anything is read
    evictions(settings)
    path = hub.resolve(settings.model)
    require_unchanged(settings.files, settings.folders)
    config, storage = stored(path)
    held = deployment(settings, config, storage)
    for policy in evictions(settings):
        context = settings.context or config.context
        policy.check_model(config.windows, config.learned_positions, config.angles_grow, context)
    vision, against = tower_of(path)
    if vision is not None:
        against = no_images(settings, vision) or ""
    return _Checked(path, config, storage, held, vision is not None and not against, against)


def _fit(settings: Settings, checked: _Checked) -> Fit:
    """Divide the memory of a start on CPUs. Raises ValueError where the model does not fit."""
    limits = settings.limits()
    folders = [Path(folder) for _, folder in settings.adapters]
    beside = lora.memory(folders, checked.config, limits.max_step_tokens, checked.held.share)
    images = 0
    tower, _ = tower_weights(checked.path, checked.storage.dtype) if checked.seeing else (None, "")
    if tower is not None:
        images = tower.bytes(faster()) + settings.image_cache
    return fit(settings, checked.held, limits, settings.threads or machine.cores(), beside, images)


def _load(settings: Settings, checked: _Checked, threads: int) -> LoadedModel:
    """Load weights and adapters on CPUs."""
    model = load_model(
        checked.path, dtype=settings.computes_in, activations=settings.activations, verify=settings.verify,
        parallel=Parallel(settings.tp, settings.pp, threads), images=checked.seeing,
    )  # fmt: skip
    _install(model, settings)
    return model


def _machine(rates: Rates | None, found: Fit, threads: int) -> MachineRates | None:
    """Return the measured rates as messages have them; None where none were measured."""
    if rates is None:
        return None
    read, int8, other = rates.bandwidth, rates.operations(Scheme.parse("w8a8")), rates.operations(None)
    source = f"This machine, {threads} threads: reads {read / 1e9:.1f} GB/s, int8 {int8 / 1e9:,.0f} GOP/s"
    source += "; the best of some runs before the model was loaded"
    return MachineRates(read, int8, other, found.memory, "the memory that this server planned with", source)


def _made(
    settings: Settings,
    held: Deployment,
    limits: SchedulerConfig,
    model: LoadedModel,
    found: Fit,
    judge: Bottlenecks | None,
    moved: tuple[SavedBlocks | None, PeerBlocks | None] = (None, None),
) -> tuple[Engine, Ready]:  # fmt: skip
    """Make an engine over a loaded model, and its first message."""
    (saved, peer), bits = moved, bits_of(settings, model)
    if peer is not None and peer.replicas:
        if why := opening.keeps_to_itself(bits, window_of(held.config) is not None, model.tower is not None):
            logs.say(f"replicas take over no cached blocks from each other: {why}")
            peer = None
    elif any(moved) and not bits:
        message = f"--cache-dir and --role: a linear of this model is computed {BY_REFERENCE}"
        raise UserError("feature_unsupported", message)
    names = tuple(name for name, _ in settings.adapters)
    drafts = drafter(
        settings.draft, model, found.context, limits.together, activations=settings.activations,
        verify=settings.verify, trees=settings.draft_tree is not None,
    )  # fmt: skip
    layers = None
    if held.sparse is not None:
        logs.say(f"sparse attention {held.sparse}: finding key statistics on a sample that the model writes")
        layers = kv_cache.sparse_layers_of(model.decoder, held.sparse)
        logs.say(f"{layers}; what it costs on a text: {cost_of(settings)}")
    few = prefill(settings)
    if few is not None:
        logs.say(f"sparse prefill {few}: {few.bound()}; what it costs on a text: {cost_of(settings)}")
    dropping = evictions(settings)
    for each in dropping:
        logs.say(f"KV eviction {each}; what it costs on a text: {cost_of(settings, each)}")
    if dropping and model.tower is not None:
        logs.say('images: requests with some need "kv_eviction": "none"; --kv-eviction is for those of text alone')
    config = EngineConfig(
        found.blocks, found.context, limits, model.eos_ids, held.kv, names, drafter=drafts,
        draft_tokens=settings.draft_tokens, draft_tree=settings.draft_tree, sparse=layers, prefill=few,
        sliding_blocks=found.sliding_blocks, tells_cache=settings.tells_cache, evictions=dropping, tower=model.tower,
        image_cache=settings.image_cache,
        saved=saved, peer=peer,
    )  # fmt: skip
    made = Engine(model.decoder, model.tokenizer, config, bounds=judge, runner=model.runner)
    require_unchanged(settings.files, settings.folders)  # nor while it was read
    if not bits and settings.tells_cache:  # other engines may be at hand
        logs.say(NOT_CONTINUED)
    ready = Ready(
        settings.served_as, found.context, held.config.vocab_size, found.blocks, found.block, limits.max_waiting,
        found.table(), names, limits.together, held.config.hidden, bits,
        kv_evictions=tuple((str(each), each.longest(found.context)) for each in dropping),
        horizons=made.runner.horizons, images=made.images is not None,
        blocks_at="" if peer is None or not peer.replicas else str(peer.address.path),
    )  # fmt: skip
    return made, ready


def _tell(settings: Settings, limits: SchedulerConfig, found: Fit, kv: KvScheme) -> None:
    """Print the scheduler's settings, by preset and options, and the use of memory."""
    logs.say(limits.told(settings.preset))
    logs.say(report.startup(found, kv))


def _install(model: LoadedModel, settings: Settings) -> None:
    """Give the model its adapters, in the order of their numbers."""
    for number, (_, folder) in enumerate(settings.adapters, 1):
        if (sentence := lora.doubt(Path(folder), model.path)) is not None:
            logger.warning("%s", sentence)
        lora.install(model.decoder, number, Path(folder), model.path)


def _roof(held: Deployment, rates: Rates | None) -> Roofline | None:
    """Return the roofline of what one process computes, None without rates."""
    return None if rates is None else Roofline(stages(held), held.storage, held.kv, rates)


def _on_gpu(
    settings: Settings, path: Path, held: Deployment, limits: SchedulerConfig, threads: int
) -> tuple[Engine, Ready]:
    """Start an engine on a GPU."""
    dispatch.require(settings.device)
    torch.set_num_threads(threads)
    memory = GpuMemory(torch.device(settings.device))
    available, most = memory.free(), planning.longest(held.config, settings.context)
    room_for_weights(settings, held, available, knows_float8(memory.device))
    try:
        rates = _measured(memory.device)
        memory.settle()
        model = load_model(
            path, dtype=settings.computes_in, verify=settings.verify, device=settings.device,
            parallel=Parallel(settings.tp, settings.pp, threads),
        )  # fmt: skip
        _install(model, settings)
        kv_cache.check(model.decoder, held.kv)
        trial = ProfileRun(model.decoder, held.kv, limits, most, runner=model.runner, adapters=len(settings.adapters))
        each = trial.pages // trial.runner.pages[0].blocks
        measured = measure(memory, available, trial)
        del trial
        # The first holds the most, and may not have the most memory.
        if model.executor is not None and model.executor.workers.free is not None:
            measured = replace(measured, available=min(available, model.executor.workers.free))
        memory.settle()
        found = on_gpu(settings, measured, each, most, limits, held.config if settings.pp == 1 else None)
        _tell(settings, limits, found, held.kv)
        roof = _roof(held, rates)
        judge = None if roof is None else Bottlenecks(roof, StreamMeter(memory.device))
        made, ready = _made(settings, held, limits, model, found, judge)
        made.runner.record_all()
    except torch.OutOfMemoryError as error:
        raise UserError(
            "memory_insufficient",
            f"{path.name} does not fit into the {planning.size(available)} that {settings.device} has free: {error}",
        ) from None
    return made, ready


def _measured(device: torch.device) -> Rates | None:
    """Measure the rates of a GPU; None where that fails, for lack of memory, say: a model may be served all the
    same."""
    try:
        return bottleneck.card_rates(device)
    except torch.AcceleratorError:  # the device is beyond use
        raise
    except RuntimeError as error:
        logger.warning("the rates of %s could not be measured, so nothing says what limits steps: %s", device, error)
        return None
