"""Configurations that a plan by goals compares: recipes of weights, KV formats, and rows of a step.

A dense model may be compressed by each recipe whose groups divide its columns and whose weights have a kernel. A model
that is compressed already stays as it is. Existing outputs come first: their receipts state what they cost. Torch-free.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from attar.errors import UserError
from attar.formats.scheme import ITEM_BITS
from attar.kv.schemes import SCHEMES, KvScheme
from attar.model.config import ModelConfig
from attar.model.split import Share
from attar.model.vision.against import Beside, against
from attar.model.vision.config import VisionConfig
from attar.plan import costs, gpus
from attar.plan.costs import Storage
from attar.plan.fit import WHOLE, shared
from attar.plan.goals import quality
from attar.plan.goals.quality import UNCHANGED, Quality
from attar.plan.gpus import GpuSpec

GROUPS = (128, 64, 32)
MOST_LINEARS = 10_000  # a plan of so many takes some seconds
CPU_KV = ("float32", "bfloat16", "int8", "kivi4", "klt4", "int4", "kivi2")
GPU_KV = ("bfloat16", "int8", "fp8", "int4")


@dataclass(frozen=True, slots=True)
class Weights:
    """Weights of a configuration. recipe: what makes them from the model, None where they are as stored. path: the
    existing output that has them."""

    label: str
    storage: Storage
    quality: Quality
    recipe: str | None = None
    path: str | None = None


@dataclass(frozen=True, slots=True)
class Rejected:
    """A technique that no configuration uses, and the reason, with the number that decides it."""

    technique: str
    reason: str


@dataclass(frozen=True)
class Recipe:
    """A recipe by the parts of its name; `{g}` in the scheme takes the largest group that divides the columns."""

    method: str
    scheme: str
    quality: Quality

    def name(self, group: int | None) -> str:
        return f"{self.method}-{self.scheme.format(g=group)}"


RECIPES: tuple[Recipe, ...] = (
    Recipe("smoothquant+gptq", "w8a8", quality.WEIGHTS["smoothquant+gptq-w8a8"]),
    Recipe("guided", "w4g{g}-asym", quality.WEIGHTS["guided-w4-asym"]),
    Recipe("gptq", "w4g{g}", quality.WEIGHTS["gptq-w4"]),
    Recipe("rtn", "w4g{g}", quality.WEIGHTS["rtn-w4"]),
    Recipe("guided", "w3g{g}-asym", quality.WEIGHTS["guided-w3-asym"]),
    Recipe("gptq", "w3g{g}", quality.WEIGHTS["gptq-w3"]),
    Recipe("prune-2:4", "sparse24", quality.WEIGHTS["prune-2:4"]),
)


def check_size(config: ModelConfig) -> None:
    """Raise UserError for a model of more linear layers than a plan counts."""
    each = 4 + 3 * (1 if config.experts is None else config.experts.count)
    if config.layers * each > MOST_LINEARS:
        message = f"the model would have {config.layers * each:,} linear layers; a plan counts {MOST_LINEARS:,} at most"
        raise UserError("config_invalid", message)


def compressed(config: ModelConfig, storage: Storage) -> bool:
    """Return whether a model's weights are quantized already."""
    return any(storage.of(each) is not None for each in costs.matrices(config) if each.compressible)


def weights(
    config: ModelConfig, storage: Storage, gpu: GpuSpec | None, outputs: Sequence[Weights] = (), share: Share = WHOLE
) -> tuple[list[Weights], list[Rejected]]:
    """Return the weights to compare, as stored first, and those that cannot be, also because the processes of `share`
    cannot share them. Raises UserError where these cannot share the stored ones."""
    stored = Weights(storage.label, storage, UNCHANGED)
    found, out = _divisible(config, [stored, *outputs], share)
    if compressed(config, storage):
        out.append(
            Rejected("other weights", f"{storage.label} weights are quantized already: a recipe needs dense ones")
        )
        return found, out
    for recipe in RECIPES:
        made = _made(recipe, config, storage, share)
        if isinstance(made, str):
            out.append(Rejected(recipe.name(GROUPS[0]), made))
        elif without := _without_kernel(config, made.storage, gpu):
            out.append(Rejected(made.label, f"{without} linear layers would have no kernel here"))
        elif all(each.label != made.label for each in found):
            found.append(made)
    return found, out


def _divisible(config: ModelConfig, found: Sequence[Weights], share: Share) -> tuple[list[Weights], list[Rejected]]:
    """Return the weights that several processes can share, and the others. The first must be among them."""
    kept, out = list[Weights](), list[Rejected]()
    for each in found:
        try:
            shared(config, each.storage, share)
        except UserError as error:
            if each is found[0]:
                raise
            out.append(Rejected(each.label, str(error)))
        else:
            kept.append(each)
    return kept, out


def _made(recipe: Recipe, config: ModelConfig, storage: Storage, share: Share) -> Weights | str:
    found = divided(recipe.scheme, config, storage, share)
    if isinstance(found, str):
        return found
    group, made = found
    name = recipe.name(group)
    return Weights(name, made, recipe.quality, recipe=name)


def divided(scheme: str, config: ModelConfig, storage: Storage, share: Share) -> tuple[int, Storage] | str:
    """Return the first group, `{g}` in the scheme, that divides all columns, also where the processes of `share` cut
    them, and the storage with it; or why there is none."""
    why = f"no group of {', '.join(map(str, GROUPS))} divides all columns"
    for group in GROUPS:
        found = Storage.named(scheme.format(g=group), storage.head, storage.dtype)
        try:
            costs.weight_bytes(config, found)
        except ValueError:
            continue
        try:
            shared(config, found, share)
        except UserError as error:
            why = str(error)
        else:
            return group, found
    return why


def _without_kernel(config: ModelConfig, storage: Storage, gpu: GpuSpec | None) -> int:
    if gpu is not None:
        return gpus.without_kernel(config, storage, gpu.float8)
    found = costs.counted(config, storage)
    return sum(count for each, count in found if costs.against(storage.of(each)) is not None)


def kv(
    config: ModelConfig, gpu: GpuSpec | None, only: str | None, vision: VisionConfig | None = None
) -> tuple[list[KvScheme], list[Rejected]]:
    """Return the KV formats to compare, and those that the model's heads, the device, or images of a `vision` tower do
    not take."""
    names = (only,) if only is not None else CPU_KV if gpu is None else GPU_KV
    found, out = [], []
    for name in names:
        try:
            costs.block_bytes(config, SCHEMES[name])
            if gpu is not None:
                gpus.block_bytes(config, SCHEMES[name], gpu.float8)
        except ValueError as error:
            out.append(Rejected(f"KV cache in {name}", str(error)))
        else:
            why = None if vision is None else against(vision, Beside(scheme=SCHEMES[name]))
            if why is not None:
                out.append(Rejected(f"KV cache in {name}", why))
            else:
                found.append(SCHEMES[name])
    if not found:
        raise UserError("kv_unsupported", out[0].reason)
    return found, out


def disk_bytes(config: ModelConfig, storage: Storage) -> int:
    """Return the bytes of a model's tensors on disk: codes and scales of each linear layer, the rest in 16 bits or as
    it is stored."""
    item = ITEM_BITS[storage.dtype] // 8
    total = costs.norm_weights(config) * item
    total += item * config.hidden * (config.learned_positions + config.position_offset if config.names.positions else 0)
    for each, count in costs.counted(config, storage):
        scheme = storage.of(each)
        weight = each.rows * each.columns * item if scheme is None else scheme.bytes((each.rows, each.columns))
        total += count * (weight + (each.rows * item if each.bias else 0))
    if not config.tied:
        table = config.vocab_size, config.hidden
        scheme = storage.embedding
        total += table[0] * table[1] * item if scheme is None else scheme.bytes(table)
    return total
