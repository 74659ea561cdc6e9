"""Deployment plans: memory and speed of an engine with given settings and hardware, before anything is loaded.

The arithmetic is that of a start (`fitting.py`), so a plan and a start of the same settings print the same table. Only
what measures or reads a checkpoint imports torch: a plan of a published shape on a GPU's data sheet needs none.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
from msgspec.structs import replace as with_fields

from attar import machine
from attar.errors import UserError, code_of
from attar.images.settings import ImageSettings
from attar.kv.eviction import moves, parse_all
from attar.kv.schemes import scheme
from attar.kv.sparse import LAYOUTS, SparseAttention
from attar.model.split import Share
from attar.plan import comparison, vision
from attar.plan.comparison import Hardware, Plan, Precisions, Subject
from attar.plan.fit import CacheLimits, Demand
from attar.plan.fit import size as size_of
from attar.plan.gpus import GpuSpec
from attar.plan.sharing import Sharing
from attar.plan.steps import StepLimits
from attar.plan.vision import ImageLoad
from attar.protocol.image_limits import MAX_ROWS
from attar.protocol.images import check_sizes
from attar.protocol.settings import Settings


def checkpoint(name: str) -> Subject:
    """Read a checkpoint's headers. Raises ValueError as loading it would."""
    from attar.checkpoints.sources import hub

    return subject_at(name, hub.resolve(name))


def subject_at(name: str, path: Path, whole: bool = True) -> Subject:
    """Read the headers of a folder or a GGUF file; without `whole`, a GGUF file needs nothing else. Raises ValueError
    as loading it would."""
    from attar.checkpoints import image_settings
    from attar.checkpoints.sources.opening import stored
    from attar.engine.images.limits import tower_weights

    config, storage = stored(path, whole)
    tower, why = tower_weights(path, storage.dtype, whole)
    if tower is None:
        return Subject(name, config, storage, images=why or None)
    images: ImageSettings | str | None
    try:
        images = image_settings.read(path, whole) or f"{name} takes no images: it has no preprocessor_config.json"
    except UserError as error:
        images = str(error)
    return Subject(name, config, storage, tower, images)


def machine_at_hand(bandwidth: int | None) -> Hardware:
    """Take this machine's CPU. Its rates are measured where no bandwidth is given; they are None without kernels."""
    here, rate = machine.examine(), None
    if bandwidth is None:
        from attar.kernels.native import extension, limits

        if extension.loaded():
            found = limits.measure()
            bandwidth, rate = int(found.read_gb_s * 1e9), 1e9 * (found.tile_gops or found.int8_gops)
    return Hardware(here.memory, here.limited_by, bandwidth, rate)


def gpu_at_hand(device: str) -> GpuSpec:
    """Measure a GPU of this machine. Raises ValueError where too little of its memory is free for that."""
    import torch

    from attar.engine import bottleneck
    from attar.engine.memory_profile import GpuMemory
    from attar.kernels.triton.weights import knows_float8

    place = torch.device(device)
    free = GpuMemory(place).free()
    try:
        gb_s, gops = bottleneck.card_limits(place)
    except torch.OutOfMemoryError:
        raise UserError(
            "memory_insufficient", f"{device} has too little memory free to be measured: name its model with --gpu"
        ) from None
    rates, name = {kind: 1e9 * rate for kind, rate in gops.items()}, torch.cuda.get_device_name(place)
    return GpuSpec(f"free on {device}, {name}", free, 1e9 * gb_s, rates, knows_float8(place))


def for_users(settings: Settings, users: int) -> Settings:
    """Raise the number of sequences to `users`, and tokens a step with it, where settings leave it open. Raises
    ValueError where the tokens of a step were set, and are fewer."""
    limits = settings.limits()
    if settings.max_running is not None or users <= limits.max_running:
        return settings
    if settings.max_step_tokens is not None and users > settings.max_step_tokens:
        raise UserError("option_conflict", f"{users} users at once need as many tokens a step: raise max-step-tokens")
    tokens = settings.max_step_tokens if users <= limits.max_step_tokens else users
    return with_fields(settings, max_running=users, max_step_tokens=tokens)


def plan(
    settings: Settings, subject: Subject, demand: Demand, hardware: Hardware, load: ImageLoad | None = None
) -> Plan:
    """Plan `demand` for every usual precision of weights and KV cache, or the settings' own KV format. A `load` of
    images is part of the demand's context, and is shown.

    A memory that settings name is each process's. Otherwise CPU processes share what the machine has, and each GPU has
    its own. Raises ValueError as `comparison.plan`.
    """
    share, limits = Share(0, settings.tp, settings.pp), settings.limits()
    memory, source = settings.memory, "--memory"
    if memory is None:
        part = machine.SHARE if settings.kv_fraction is None else 1.0
        memory = int(hardware.memory * part) // (share.count if hardware.gpu is None else 1)
        source = hardware.source
    images = 0 if hardware.gpu is not None else image_bytes(settings, subject)
    if images:
        memory, source = without_images(memory, images, source)
    hardware = replace(
        hardware, memory=memory, source=source + (f", each of {share.count} processes" * (share.count > 1))
    )
    precisions = Precisions.usual(subject, hardware.gpu is not None)
    if settings.kv is not None:
        precisions = replace(precisions, kv=(scheme(settings.kv),))
    if settings.sparse_attention is not None:
        few = SparseAttention.parse(settings.sparse_attention)
        few.check(precisions.kv[0], "cpu" if hardware.gpu is None else "a GPU", share.count)
        kept = tuple(each for each in precisions.kv if each.layout in LAYOUTS)
        precisions = replace(precisions, kv=kept, sparse=few)
    if settings.kv_eviction:
        precisions = _evicting(settings, precisions, subject, demand, share if hardware.gpu is None else None)
    adapters = 0  # bytes, with those of their products in a step
    if settings.adapters:
        from attar.checkpoints.adapters import lora

        folders = [Path(folder) for _, folder in settings.adapters]
        adapters = lora.memory(folders, subject.config, limits.max_step_tokens, share)
    least = demand if load is None or demand.context is not None else replace(demand, least=load.least)
    made = comparison.plan(
        subject, least, hardware, precisions, StepLimits.of(limits, settings.threads or machine.cores()),
        CacheLimits(settings.max_cached_tokens, settings.kv_fraction), adapters, share,
    )  # fmt: skip
    tower = subject.tower.choices(has_amx()) if images and subject.tower is not None else {}
    return replace(made, images=images, tower=tower, image_load=load)


def image_bytes(settings: Settings, subject: Subject, amx: bool | None = None) -> int:
    """Return the bytes of a model's vision tower and projector, and of features of images, on a CPU with `amx` or
    without, by default this one; 0 where an engine of these settings takes no images."""
    if subject.tower is None:
        return 0
    from attar.engine.images.limits import no_images

    if no_images(settings, subject.tower.config) is not None:
        return 0
    return subject.tower.bytes(has_amx() if amx is None else amx) + settings.image_cache


def has_amx() -> bool:
    """Return whether this machine has AMX, on which towers stored in bfloat16 are computed in it."""
    from attar.kernels.tiles import faster

    return faster()


def image_load(settings: Settings, subject: Subject, count: int, size: tuple[int, int], gpu: bool = False) -> ImageLoad:
    """Return what `count` images of a height and width are in each request, to a server on a `gpu` or on CPUs.

    Raises UserError for a model without a vision tower, for settings that images do not go with, and for images that
    the model or a server does not take in one request: too large, of too many rows, of more rows than a step has where
    they are computed together, or of more than the model's context less a token of prompt and one of answer.
    """
    from attar.engine.images.limits import no_images

    if subject.tower is None:
        reason = subject.images if isinstance(subject.images, str) else f"{subject.name} has no vision tower"
        raise UserError("feature_unsupported", f"--images: {reason}")
    config = subject.tower.config
    if (why := no_images(with_fields(settings, device="cuda") if gpu else settings, config)) is not None:
        raise UserError("option_conflict", f"--images does not go with {why}")
    if isinstance(subject.images, str):
        raise UserError("feature_unsupported", f"--images: {subject.images}")
    load = vision.images(config, subject.images, count, size)
    check_sizes([size] * count, [load.tiles.shape] * count)
    if load.rows > MAX_ROWS:
        raise UserError("image_too_large", f"an image has {load.rows:,} rows, and at most {MAX_ROWS:,} are taken")
    if config.bidirectional and load.rows > (rows := settings.limits().prompt_rows):
        message = f"the {load.rows:,} rows of an image are computed in one step, which has {rows:,} for them"
        raise UserError("option_conflict", f"{message}: raise max-step-tokens, or lower max-running")
    if load.least > (most := subject.config.context):
        message = f"{count} image{'s' * (count > 1)} of {load.rows:,} rows take {load.tokens:,} tokens"
        message += f": the model's context of {most:,} has no room for a prompt and an answer beside them"
        raise UserError("context_exceeded", message)
    if (needed := load.feature_bytes(config)) > settings.image_cache:
        message = f"features of {count} images take {size_of(needed)}: a server keeps {size_of(settings.image_cache)}"
        raise UserError("plan_does_not_fit", f"{message}, unless `attar serve --image-cache` says more")
    return load


def without_images(memory: int, images: int, source: str) -> tuple[int, str]:
    """Return what of a memory is left beside a vision tower and its images, and where it comes from. Raises UserError
    where nothing is."""
    if images > memory:
        raise UserError(
            "memory_insufficient",
            f"the vision tower needs {size_of(images)}, but there are {size_of(memory)} ({source}): "
            f"{size_of(images - memory)} too little",
        )
    return memory - images, f"{source}, less {size_of(images)} of the vision tower"


def _evicting(
    settings: Settings, precisions: Precisions, subject: Subject, demand: Demand, share: Share | None
) -> Precisions:
    """Return the precisions beside which the first policy of KV eviction works, that of requests which name none.

    `share` is None on a GPU. Raises ValueError for text of another form, and for what eviction does not go with.
    """
    eviction, config = parse_all(settings.kv_eviction)[0], subject.config
    kept = tuple(each for each in precisions.kv if moves(each))
    device, processes = ("a GPU", 1) if share is None else ("cpu", share.count)
    eviction.check((kept or precisions.kv)[0], device, processes, sparse=precisions.sparse is not None)
    context = demand.context or config.context
    eviction.check_model(config.windows, config.learned_positions, config.angles_grow, context)
    return replace(precisions, kv=kept, eviction=eviction)


def share(models: Sequence[Settings], memory: int) -> Sharing:
    """Divide memory among models that one server loads and unloads, on CPUs, from their headers. Raises ValueError for
    a model that cannot be read, and for one that does not fit alone."""
    from attar.checkpoints.sources.opening import stored
    from attar.engine.fitting import deployment
    from attar.plan import sharing

    first, limits = models[0], models[0].limits()
    held = {each.name: deployment(each, *stored(Path(each.model))) for each in models}
    steps = StepLimits.of(limits, first.threads or machine.cores())
    return sharing.share(held, memory, steps, first.context, CacheLimits(first.max_cached_tokens))


def main() -> int:
    """Read a memory and the settings of several models, as one JSON list, from standard input, and print their
    `Sharing`, or an `error` with its `code`. The server asks so, whose own process has no torch."""
    memory, *models = json.loads(sys.stdin.buffer.read())
    try:
        found = msgspec.to_builtins(share([msgspec.convert(each, Settings) for each in models], memory))
    except (ValueError, OSError) as error:
        found = {"error": str(error), "code": code_of(error)}
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
