"""Low-rank adapters (LoRA, Hu et al. 2021) as PEFT stores them: read onto a model, or merged into a dense checkpoint.

A folder holds adapter_config.json and adapter_model.safetensors. Of each linear that it changes, the latter has
`base_model.model.<module>.lora_A.weight` [r, I] and `...lora_B.weight` [O, r], and the linear computes

    y = x' W^T + b + (alpha / r) (x A^T) B^T        (alpha / sqrt(r) for rank-stabilised LoRA, Kalajdzievski 2023).

x' may be rounded, permuted or divided, as the stored W wants it; the adapter reads x as it comes, which is what it was
trained on. So any base will do, compressed ones too, and W stays as it is (`attach`). Merging (`merge`) makes one
matrix of both, which only a dense base has the room for: on a grid most of a small update would be rounded away.

An adapter that is read in part is a model that runs and answers otherwise than trained. So every tensor must have its
place, every pair be whole, and every key of the config that changes what is computed be one that is known here: DoRA,
trained biases or embeddings, activated and quantization-aware adapters are refused by name.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from attar.checkpoints.folder import read_json
from attar.checkpoints.hf import Checkpoint
from attar.checkpoints.patterns import pattern
from attar.checkpoints.safetensors import CheckpointError, TensorFile, near
from attar.checkpoints.writer import MAX_SHARD, ShardWriter, atomic_folder, plan_files, require_free
from attar.kernels.operands import Adapter, Linear
from attar.model.config import Names
from attar.model.decoder import Decoder, compressible

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MAX_CONFIG = 1_000_000
PREFIX = "base_model.model."
DOWN, UP = ".lora_A.weight", ".lora_B.weight"

KNOWN = frozenset(
    (
        "alpha_pattern", "auto_mapping", "base_model_name_or_path", "bias", "corda_config", "eva_config",
        "ensure_weight_tying", "exclude_modules", "fan_in_fan_out", "inference_mode", "init_lora_weights",
        "layers_pattern", "layers_to_transform", "loftq_config", "lora_alpha", "lora_dropout", "megatron_config",
        "megatron_core", "peft_type", "peft_version", "qalora_group_size", "r", "rank_pattern", "revision",
        "runtime_config", "target_modules", "task_type", "use_rslora",
    )
)  # fmt: skip
"""Keys of adapter_config.json that are read here, or say nothing of what a trained adapter computes. Any other is
refused unless it is empty or false."""


@dataclass(frozen=True, eq=False)
class Lora:
    """An adapter's matrices by the name of the linear that each changes."""

    path: Path
    adapters: Mapping[str, Adapter]


def read(path: Path, names: Names, shapes: Mapping[str, tuple[int, int]]) -> Lora:
    """Read the adapter folder `path` for a model whose linears, by name, have `shapes` (O, I); in float32.

    Raises CheckpointError where it is no LoRA adapter, does what is not known here, has a tensor without a place, half
    a pair, or one of another shape, rank or kind, or a value that is not finite.
    """
    config = read_json(path / CONFIG, MAX_CONFIG)
    _check(config, path)
    file = TensorFile(path / WEIGHTS)
    modules = {spelling: name for name in shapes for spelling in names.spellings(name)}
    halves: dict[str, dict[str, Tensor]] = {}
    for tensor in file.names():
        half = next((end for end in (DOWN, UP) if tensor.endswith(end)), None)
        module = tensor.removeprefix(PREFIX)
        if half is None or not tensor.startswith(PREFIX):
            raise CheckpointError(f"{file.path}: tensor {tensor!r} is neither the A nor the B of a linear's LoRA")
        module = module.removesuffix(half)
        if module not in modules:
            raise CheckpointError(f"{file.path}: the model has no linear {module!r}{near(module, modules)}")
        value = file.read(tensor)
        if not value.is_floating_point() or value.ndim != 2:
            raise CheckpointError(f"{file.path}: tensor {tensor!r} is {value.dtype} {list(value.shape)}, not a matrix")
        value = value.float()
        if not value.isfinite().all():
            raise CheckpointError(f"{file.path}: tensor {tensor!r} holds a NaN or an infinity")
        pair = halves.setdefault(modules[module], {})
        if half in pair:
            raise CheckpointError(f"{file.path}: holds {half.removeprefix('.')} of {modules[module]} twice")
        pair[half] = value
    file.close()
    if not halves:
        raise CheckpointError(f"{file.path}: holds no adapter")
    alphas = _Patterned(config, "alpha_pattern", "lora_alpha", path)
    ranks = _Patterned(config, "rank_pattern", "r", path)
    adapters = {}
    for name, pair in halves.items():
        if len(pair) < 2:
            raise CheckpointError(f"{file.path}: {name} has only one of lora_A and lora_B")
        down, up, rank = pair[DOWN], pair[UP], ranks.of(name)
        if down.shape != (rank, shapes[name][1]) or up.shape != (shapes[name][0], rank):
            raise CheckpointError(
                f"{file.path}: {name} is {list(shapes[name])} and its rank {rank:g}, which A {list(down.shape)} and "
                f"B {list(up.shape)} do not fit"
            )
        scale = alphas.of(name) / (math.sqrt(rank) if config.get("use_rslora") else rank)
        adapters[name] = Adapter(down, up * scale)
    return Lora(path, adapters)


BEGINNINGS = (True, False, None, "gaussian", "eva", "orthogonal")
"""Of `init_lora_weights`: those of which the base stays as it was. Others take from it what the adapter begins with."""


def _check(config: Mapping[str, Any], path: Path) -> None:
    where = path / CONFIG
    if config.get("peft_type") != "LORA":
        raise CheckpointError(f"{where}: peft_type is {config.get('peft_type')!r}: only LORA is supported")
    if config.get("bias", "none") != "none":
        raise CheckpointError(f"{where}: bias is {config['bias']!r}: trained biases are not supported")
    if (beginning := config.get("init_lora_weights", True)) not in BEGINNINGS:
        raise CheckpointError(
            f"{where}: init_lora_weights is {beginning!r}, which changes the base: have PEFT convert the "
            "adapter when it saves it (path_initial_model_for_weight_conversion)"
        )
    for key, value in config.items():
        if key not in KNOWN and value:
            raise CheckpointError(f"{where}: {key} is set, which changes what is computed and is not supported")


class _Patterned:
    """A number of the config for each module: its pattern's, or else the general one."""

    def __init__(self, config: Mapping[str, Any], patterns: str, general: str, path: Path) -> None:
        where = f"{path / CONFIG}"
        found = config.get(patterns) or {}
        if not isinstance(found, dict):
            raise CheckpointError(f"{where}: {patterns} must be an object")
        self._general = _positive(config.get(general), f"{where}: {general}")
        self._patterns: list[tuple[re.Pattern[str], float]] = [
            (pattern(key, f"{where}: {patterns}"), _positive(value, f"{where}: {patterns}"))
            for key, value in found.items()
        ]

    def of(self, module: str) -> float:
        """The first pattern's that matches the module's name from some dot on, to its end."""
        ends = [module, *(module[m.end() :] for m in re.finditer(r"\.", module))]
        return next((value for key, value in self._patterns if any(map(key.fullmatch, ends))), self._general)


def _positive(value: object, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e6:
        raise CheckpointError(f"{where} must be a positive number, not {value!r}")
    return value


def linears_of(decoder: Decoder) -> Iterator[Linear]:
    """Every linear of a model, its output matrix last."""
    for block in decoder.blocks:
        yield from block.linears()
    yield decoder.head


def attach(decoder: Decoder, path: Path) -> Lora:
    """Read an adapter and have the model compute with it; its weights stay as they are. Another takes its place.

    Raises CheckpointError as `read` does.
    """
    linears = {linear.name: linear for linear in linears_of(decoder)}
    found = read(path, decoder.config.names, {name: linear.shape for name, linear in linears.items()})
    for name, linear in linears.items():
        change = found.adapters.get(name)
        linear.adapter = None if change is None else change.to(decoder.device)
    return found


def merge(base: Path, adapter: Path, out: Path, *, overwrite: bool = False, max_shard_bytes: int = MAX_SHARD) -> Lora:
    """Write the checkpoint `base` with an adapter merged into it, W + B A in float32, rounded to W's dtype, to `out`.

    Raises CheckpointError as `read` does, where the base is compressed, where an output matrix that is also the
    embedding would be changed, and for whatever keeps `out` from being written.
    """
    source = Checkpoint.open(base)
    folder, config = source.folder, source.config
    if "quantization_config" in folder.config:
        raise CheckpointError(
            f"{base} is compressed, and its grid has no place for an adapter: use it unmerged, or merge it into the "
            "original and compress that"
        )
    names = [name for layer in range(config.layers) for name in compressible(config, layer)] + [config.names.head]
    found = read(
        adapter, config.names, {name: source.linear_shape(name) for name in names if source.has(f"{name}.weight")}
    )
    if config.tied and config.names.head in found.adapters:
        raise CheckpointError(f"{adapter} changes an output matrix that is the embedding too: use it unmerged")
    changes = {source.stored_name(f"{name}.weight"): (name, each) for name, each in found.adapters.items()}
    files = plan_files({name: folder.info(name) for name in folder.names()}, max_shard_bytes)
    require_free(out.parent, sum(file.size for file in files))
    with atomic_folder(out, overwrite) as work:
        with ShardWriter(work.out, files) as writer:
            for tensor in folder.names():
                value = folder.read(tensor)
                if tensor in changes:
                    name, change = changes[tensor]
                    delta = change.up @ change.down
                    delta = delta.T if config.names.is_transposed(name) else delta
                    value = (value.float() + delta).to(value.dtype)
                    if not value.isfinite().all():
                        raise CheckpointError(f"{tensor} overflows {value.dtype} with the adapter in it")
                writer.write(tensor, value)
            writer.finish()
        (work.out / "config.json").write_text(json.dumps(folder.config, indent=2, ensure_ascii=False) + "\n")
        for name in folder.carry_files():
            (work.out / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(folder.path / name, work.out / name)
    return found
