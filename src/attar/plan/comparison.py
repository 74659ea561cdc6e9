"""Comparison of precisions: the answer of `attar plan`, a row for each storage of the weights with each KV scheme.

Each row divides the memory as a server's start would (`fit.py`), and bounds the speed of decoding. A decode step of
`users` sequences reads every weight once (of experts, the chosen ones) and every user's keys and values, so it takes at
least

    seconds = (weight bytes + users * KV bytes at that context) / bandwidth
    tokens/s = users / seconds

A given rate of int8 operations adds a second bound: users * operations / rate, with the operations of one token in the
linears that multiply in int8. The larger of the two is named. Both are limits of the machine and no promise; `attar
bench` measures what kernels reach of them. Torch-free.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from attar.errors import UserError
from attar.formats.scheme import Scheme
from attar.images.settings import ImageSettings
from attar.kv.eviction import Eviction
from attar.kv.schemes import KvScheme
from attar.kv.sparse import SparseAttention
from attar.model import shapes
from attar.model.config import ModelConfig
from attar.model.split import Share
from attar.plan import costs, gpus, steps
from attar.plan.costs import Storage
from attar.plan.fit import NO_LIMITS, WHOLE, CacheLimits, Demand, Deployment, Fit, longest, shared, start
from attar.plan.gpus import GpuSpec
from attar.plan.roofline import Roofline
from attar.plan.steps import StepLimits
from attar.plan.vision import ImageLoad, TowerWeights

SPLITS = tuple(Share(0, tp, pp) for tp, pp in ((2, 1), (4, 1), (8, 1), (1, 2), (1, 4), (1, 8)))
"""Numbers of GPUs that a plan for one compares besides."""

USUAL = ("dense", "w8a8", "w4g128", "w3g128")


@dataclass(frozen=True)
class Subject:
    """The model that is planned for: its name, its configuration, how its weights are stored, and its vision tower.

    images: how it wants images, or a sentence that says why it takes none, such as a tower that cannot be read; None
    without a tower, and for a config.json with no settings of images beside it.
    """

    name: str
    config: ModelConfig
    storage: Storage
    tower: TowerWeights | None = None
    images: ImageSettings | str | None = None

    @classmethod
    def shape(cls, name: str, head: str | None) -> Subject:
        """Take a published shape, with an LM head of the scheme `head`. Raises ValueError for unknown ones."""
        scheme = None if head is None else Scheme.parse(head).with_scale_dtype("bfloat16")
        return cls(name, shapes.shape(name), Storage(None, scheme))


@dataclass(frozen=True)
class Hardware:
    """The machine or GPU that is planned for. Memory is in bytes; rates are bytes or int8 operations a second.

    source: where the memory's size comes from, for messages. Speeds on a `gpu` are by its own rates.
    """

    memory: int
    source: str
    bandwidth: float | None = None
    int8_rate: float | None = None
    gpu: GpuSpec | None = None

    @classmethod
    def of_gpu(cls, gpu: GpuSpec, bandwidth: int | None) -> Hardware:
        """Take a GPU by its data sheet, or as it was measured."""
        if bandwidth is not None:
            gpu = replace(gpu, bandwidth=float(bandwidth))
        return cls(gpu.memory, gpu.name, bandwidth, None, gpu)


@dataclass(frozen=True)
class Precisions:
    """Precisions that a plan compares: storages of the weights, the stored one first, and KV schemes.

    sparse: how many keys rows of outputs read, None for all; its one-bit keys lie beside each cache. eviction: which
    keys are dropped, None for none.
    """

    storages: Sequence[Storage]
    kv: Sequence[KvScheme]
    sparse: SparseAttention | None = None
    eviction: Eviction | None = None

    @classmethod
    def usual(cls, subject: Subject, gpu: bool = False) -> Precisions:
        """Take the precisions worth comparing for a model, on a GPU or a CPU."""
        kv = [each for each in costs.usual_kv(subject.config) if not gpu or each in gpus.USUAL_KV]
        return cls(usual_storages(subject.config, subject.storage), kv)


def usual_storages(config: ModelConfig, first: Storage) -> list[Storage]:
    """Return the storages worth comparing: `first`, and others of `USUAL` whose groups divide every linear's columns.

    The LM head stays as in `first`, because compression leaves it alone.
    """
    chosen = [first]
    for name in USUAL:
        storage = Storage.named(name, first.head, first.dtype)
        try:
            costs.weight_bytes(config, storage)
        except ValueError:
            continue
        if storage.label != first.label:
            chosen.append(storage)
    return chosen


@dataclass(frozen=True, slots=True)
class Speed:
    """Bounds of one decode step of all users at their context."""

    read: int  # bytes
    tokens_per_second: float
    limited_by: str  # bandwidth or compute

    def to_dict(self) -> dict[str, Any]:
        return {"read_bytes": self.read, "tokens_per_second": self.tokens_per_second, "limited_by": self.limited_by}


def speed(deployment: Deployment, demand: Demand, bandwidth: float, int8_rate: float | None = None) -> Speed:
    """Bound the speed at which all users together can decode on CPUs. `bandwidth` is in bytes a second, `int8_rate` in
    operations a second, of each process.

    Raises ValueError where a rate is not positive.
    """
    for name, rate in (("bandwidth", bandwidth), ("rate of operations", int8_rate)):
        if rate is not None and not rate > 0:
            raise UserError("option_out_of_range", f"the {name} must be above 0, not {rate:g}")
    config, storage = stages(deployment), deployment.storage
    context = longest(config, demand.context)
    context = context if deployment.eviction is None else deployment.eviction.slots_read(context)
    read = costs.step_bytes(config, storage, demand.users)
    read += demand.users * costs.kv_read_bytes(config, deployment.kv, context)
    reading = read / bandwidth
    computing = 0.0 if int8_rate is None else demand.users * costs.int8_flops(config, storage) / int8_rate
    return Speed(read, demand.users / max(reading, computing), "compute" if computing > reading else "bandwidth")


def gpu_speed(deployment: Deployment, gpu: GpuSpec, demand: Demand) -> Speed:
    """Bound the decode speed of all users on a GPU, with attention's operations."""
    config = stages(deployment)
    roof = Roofline(config, deployment.storage, deployment.kv, gpu.rates)
    reading, computing = roof.least([(longest(config, demand.context) - 1, 1, True)] * demand.users)
    limited_by = "compute" if computing > reading else "bandwidth"
    return Speed(round(reading * gpu.bandwidth), demand.users / max(reading, computing), limited_by)


def stages(deployment: Deployment) -> ModelConfig:
    """Return what one process computes of all layers, because pipeline stages run one after another."""
    return shared(deployment.config, deployment.storage, Share(0, deployment.share.tp))[1]


@dataclass(frozen=True, slots=True)
class Row:
    """One choice of precisions in a plan."""

    weights: str
    kv: KvScheme
    fit: Fit
    weight_bytes: costs.WeightBytes
    fits: bool  # all users
    short: int  # bytes missing for them; 0 where they fit, or would in a larger cache than the one asked for
    speed: Speed | None  # of all users; None where they do not fit, or without a bandwidth
    references: int  # linears that no kernel multiplies by


@dataclass(frozen=True, slots=True)
class Plan:
    """The answer of `attar plan`: every choice of precisions, the stored one first."""

    model: str
    memory: int
    source: str
    context: int  # of a request, as far as it fits
    users: int
    limits: StepLimits
    bandwidth: float | None  # bytes a second
    int8_rate: float | None  # operations a second
    rows: tuple[Row, ...]
    gpu: GpuSpec | None = None
    eviction: Eviction | None = None
    images: int = 0  # bytes of a vision tower and of features of images, which the memory is without
    tower: Mapping[str, int] = field(default_factory=dict)  # bytes of the weights: `stored`, and by `compress --vision`
    image_load: ImageLoad | None = None  # whose rows are part of the context
    splits: tuple[tuple[Share, Row | None], ...] = ()
    """The most precise choice that fits on each process of several GPUs; None where none does."""


def plan(
    subject: Subject, demand: Demand, hardware: Hardware, precisions: Precisions | None = None,
    limits: StepLimits | None = None, cache: CacheLimits = NO_LIMITS, adapters: int = 0, share: Share = WHOLE,
) -> Plan:  # fmt: skip
    """Divide the memory for every storage with every KV scheme (default: the usual ones), each as by `start`.

    `adapters` and `share` are as in `fit`: memory, bandwidth and rate then apply to each process. Pipeline stages run
    one after another, and communication between processes is not counted. Storages that cannot be split so, or that no
    GPU kernel supports, are left out, except the first. A plan for one whole GPU has `splits` over several as well.

    Raises ValueError for an impossible setting, for a context longer than the model's, and where `limits` let fewer
    sequences run together than there are users.
    """
    limits, config, gpu = limits or StepLimits(), subject.config, hardware.gpu
    precisions = precisions or Precisions.usual(subject, gpu is not None)
    if demand.users > limits.sequences:
        message = f"{demand.users} users at once, but only {limits.sequences} requests run together"
        raise UserError("option_conflict", message)
    most = longest(config, demand.context)
    context = demand.context if demand.users == 1 else most

    def rows(share: Share) -> Iterator[Row]:
        first = precisions.storages[0]
        for storage in precisions.storages:
            if gpu is not None and storage is not first and gpus.without_kernel(config, storage, gpu.float8):
                continue  # at least as large there as dense
            for kv in precisions.kv:
                deployment = Deployment(config, storage, kv, share, gpu, precisions.sparse, precisions.eviction)
                try:
                    stages(deployment)
                except ValueError:
                    if storage is first:
                        raise
                    break
                found = start(deployment, hardware.memory, limits, context, cache, adapters)
                if found.context < demand.least:
                    found = start(deployment, hardware.memory, limits, demand.least, cache, adapters)
                yield _row(deployment, found, demand.users, hardware)

    splits = []
    alone = share.count == 1 and not adapters and precisions.sparse is None and precisions.eviction is None
    for split in SPLITS if gpu is not None and alone else ():
        with suppress(ValueError):  # a model that cannot be split so
            splits.append((split, next((row for row in rows(split) if row.fits), None)))
    bandwidth, int8_rate = hardware.bandwidth, hardware.int8_rate
    if gpu is not None:
        bandwidth, int8_rate = gpu.bandwidth, gpu.operations["int8"]
    return Plan(
        subject.name, hardware.memory, hardware.source, most, demand.users, limits, bandwidth, int8_rate,
        tuple(rows(share)), gpu, precisions.eviction, splits=tuple(splits),
    )  # fmt: skip


def _row(deployment: Deployment, found: Fit, users: int, hardware: Hardware) -> Row:
    """Make the row of a choice of precisions, whose memory was divided so."""
    config, storage, gpu = deployment.config, deployment.storage, deployment.gpu
    short, fast = found.short(users), None
    fits = found.requests >= users and not short
    demand, held = Demand(found.context, users), shared(config, storage, deployment.share)[1]
    if gpu is not None:
        fast = gpu_speed(deployment, gpu, demand) if fits else None
        weights = gpus.weight_bytes(held, storage, gpu.float8)
        references = gpus.without_kernel(config, storage, gpu.float8)
    else:
        if hardware.bandwidth is not None and fits:
            fast = speed(deployment, demand, hardware.bandwidth, hardware.int8_rate)
        weights, references = costs.weight_bytes(held, storage), len(steps.references(config, storage))
    return Row(storage.label, deployment.kv, found, weights, fits, short, fast, references)
