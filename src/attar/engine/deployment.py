"""Deployment plans: memory and speed of an engine with given settings and hardware, before anything is loaded.

The arithmetic is that of a start (`startup.py`), so a plan and a start of the same settings print the same table. Only
what measures or reads a checkpoint imports torch: a plan of a published shape on a GPU's data sheet needs none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from msgspec.structs import replace as with_fields

from attar import machine
from attar.formats.scheme import Scheme
from attar.model import shapes
from attar.model.config import ModelConfig
from attar.model.split import Share
from attar.plan import fit
from attar.plan.costs import Storage
from attar.plan.fit import Demand, Plan
from attar.plan.gpus import GpuSpec
from attar.plan.steps import StepLimits
from attar.protocol.settings import Settings


@dataclass(frozen=True)
class Subject:
    """The model to plan for: its name, its configuration, and the storage of its weights."""

    name: str
    config: ModelConfig
    storage: Storage

    @classmethod
    def checkpoint(cls, name: str) -> Subject:
        """Read a checkpoint's headers. Raises ValueError as loading it would."""
        from attar.checkpoints.sources import hub
        from attar.checkpoints.sources.stored import stored

        return cls(name, *stored(hub.resolve(name)))

    @classmethod
    def shape(cls, name: str, head: str | None) -> Subject:
        """Take a published shape, with an LM head of the scheme `head`. Raises ValueError for unknown ones."""
        scheme = None if head is None else Scheme.parse(head).with_scale_dtype("bfloat16")
        return cls(name, shapes.shape(name), Storage(None, scheme))


@dataclass(frozen=True)
class Hardware:
    """The machine or GPU that is planned for. Memory is in bytes; rates are bytes or int8 operations a second.

    source: where the memory's size comes from, for messages.
    """

    memory: int
    source: str
    bandwidth: int | None = None
    int8_rate: float | None = None
    gpu: GpuSpec | None = None

    @classmethod
    def of_machine(cls, bandwidth: int | None) -> Hardware:
        """Describe this CPU. Its rates are measured where no bandwidth is given; they are None without kernels."""
        here, rate = machine.examine(), None
        if bandwidth is None:
            from attar.kernels.native import extension, limits

            if extension.loaded():
                found = limits.measure()
                bandwidth, rate = int(found.read_gb_s * 1e9), 1e9 * (found.tile_gops or found.int8_gops)
        return cls(here.memory, here.limited_by, bandwidth, rate)

    @classmethod
    def of_gpu(cls, gpu: GpuSpec, bandwidth: int | None) -> Hardware:
        """Describe a GPU by its data sheet, or as it was measured."""
        if bandwidth is not None:
            gpu = replace(gpu, bandwidth=float(bandwidth))
        return cls(gpu.memory, gpu.name, bandwidth, None, gpu)


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
        raise ValueError(f"{device} has too little memory free to be measured: name its model with --gpu") from None
    rates = {kind: 1e9 * rate for kind, rate in gops.items()}
    name = f"free on {device}, {torch.cuda.get_device_name(place)}"
    return GpuSpec(name, free, 1e9 * gb_s, rates, knows_float8(place))


def for_users(settings: Settings, users: int) -> Settings:
    """Raise the number of sequences to `users`, and tokens a step with it, where settings leave it open.

    Raises ValueError where the tokens of a step were set, and are fewer.
    """
    limits = settings.limits()
    if settings.max_running is not None or users <= limits.max_running:
        return settings
    if settings.max_step_tokens is not None and users > settings.max_step_tokens:
        raise ValueError(f"{users} users at once need as many tokens a step: raise max-step-tokens")
    if users <= limits.max_step_tokens:
        return with_fields(settings, max_running=users)
    return with_fields(settings, max_running=users, max_step_tokens=users)


def plan(settings: Settings, subject: Subject, demand: Demand, hardware: Hardware) -> Plan:
    """Plan `demand` for every usual precision of weights and KV cache, or the settings' own KV format.

    A memory size in the settings is each process's. Otherwise CPU processes share the machine's memory, and each GPU
    has its own. Raises ValueError as `fit.plan`.
    """
    share, limits = Share(0, settings.tp, settings.pp), settings.limits()
    memory, source = settings.memory, "--memory"
    if memory is None:
        part = machine.SHARE if settings.kv_fraction is None else 1.0
        memory = int(hardware.memory * part) // (share.count if hardware.gpu is None else 1)
        source = hardware.source
    return fit.plan(
        subject.name, subject.config, fit.usual(subject.config, subject.storage), demand, memory,
        source + (f", each of {share.count} processes" if share.count > 1 else ""),
        limits=StepLimits.of(limits, settings.threads or machine.cores()), max_tokens=settings.max_cached_tokens,
        kv_schemes=None if settings.kv is None else (settings.kv,), bandwidth=hardware.bandwidth,
        int8_rate=hardware.int8_rate, adapters=_adapters(settings, subject, limits.max_step_tokens, share),
        share=share, fraction=settings.kv_fraction, card=hardware.gpu,
    )  # fmt: skip


def _adapters(settings: Settings, subject: Subject, rows: int, share: Share) -> int:
    """Count the bytes of adapters and of their products in a step."""
    if not settings.adapters:
        return 0
    from attar.checkpoints.adapters import lora

    folders: Sequence[Path] = [Path(folder) for _, folder in settings.adapters]
    return lora.memory(folders, subject.config, rows, share)
