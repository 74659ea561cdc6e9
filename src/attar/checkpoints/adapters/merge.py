"""Merging of a low-rank adapter into a checkpoint: W + B A in one matrix, for programs that read models and not
adapters.

The sum is computed in float32 and rounded to W's dtype. A compressed base becomes a dense folder. Each of its linears
is dequantized, rotations and permutations of its columns are undone in the weight, and the changed ones get their
product. So the result computes what the base computes with the adapter beside it, except that inputs are no longer
rounded where a scheme rounds them. The sum is not put back on the base's grid, because most of a small update would be
rounded away. Rounding a sample of rows to nearest shows how much (`Merged.requantized`); `attar compress`, which
calibrates, may do better. GGUF files are refused, because their source is the better base.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attar.checkpoints.adapters import lora
from attar.checkpoints.convert.source import packed_linears, values_of
from attar.checkpoints.folder import CONFIG, write_json
from attar.checkpoints.sources.hf import Checkpoint
from attar.checkpoints.strict_io import CheckpointError
from attar.checkpoints.vocabulary import is_gguf
from attar.checkpoints.writer import MAX_SHARD, ShardWriter, atomic_folder, plan_files, require_free
from attar.errors import UserError
from attar.formats.packed import codec
from attar.formats.scheme import Part, Scheme
from attar.formats.weight_formats import Sparse24
from attar.kernels import hadamard
from attar.kernels.operands import Adapter
from attar.model.assembly import all_compressible

SAMPLED = 32  # rows of a matrix that are rounded to find the error


@dataclass(frozen=True)
class Merged:
    """Result of `merge`. `dequantized` counts the base's compressed linears by scheme.

    `change` is the size of the adapter's product relative to the weights it changes. `requantized` is the relative
    error of rounding the sums to nearest on the base's schemes. Both are root mean squares over the changed linears
    that were compressed, the latter over some of their rows; None where there are none. Linears whose scheme cannot
    take the sums, because it needs pruned weights or has no number as large, are left out.
    """

    path: Path
    adapter: Path
    linears: tuple[str, ...]
    dequantized: Mapping[str, int]
    dtype: str
    change: float | None
    requantized: float | None

    def to_dict(self) -> dict[str, Any]:
        paths = {"path": str(self.path), "adapter": str(self.adapter)}
        return vars(self) | paths | {"linears": list(self.linears), "dequantized": dict(self.dequantized)}

    def sentences(self) -> list[str]:
        """Return sentences about the dequantization of a compressed base; none for a dense one."""
        if not self.dequantized:
            return []
        counted = ", ".join(f"{count} of {name}" for name, count in self.dequantized.items())
        said = [f"the base is compressed: its linears ({counted}) became dense, in {self.dtype}"]
        if self.requantized is not None:
            said.append(
                f"the adapter changes those it reaches by {self.change:.2%} of their size; rounded to nearest on the "
                f"base's grids again they would be off by {self.requantized:.2%}"
            )
        return said


class _Errors:
    """Sums of squares over the changed linears that were compressed: of their weights, of the added products, and of
    the rounding error in the sampled rows."""

    def __init__(self) -> None:
        self.weights = self.added = self.sampled = self.error = 0.0

    def add(self, weight: Tensor, delta: Tensor, scheme: Scheme) -> None:
        self.weights += float(weight.square().sum())
        self.added += float(delta.square().sum())
        if isinstance(scheme.weight, Sparse24):
            return
        rows = (weight + delta)[:: -(-len(weight) // SAMPLED)].contiguous()
        try:
            rounded = codec(scheme.weight.kind).quantize(rows, scheme).dequantize()
        except ValueError:  # the sums exceed the scheme's scales, which is no reason not to merge
            return
        self.sampled += float(rows.square().sum())
        self.error += float((rounded - rows).square().sum())

    @property
    def change(self) -> float | None:
        return math.sqrt(self.added / self.weights) if self.weights else None

    @property
    def requantized(self) -> float | None:
        return math.sqrt(self.error / self.sampled) if self.sampled else None


def merge(base: Path, adapter: Path, out: Path, *, overwrite: bool = False, max_shard_bytes: int = MAX_SHARD) -> Merged:
    """Write the checkpoint `base` with an adapter merged into it, dense, to `out`.

    Raises CheckpointError as `lora.read` does, where a tied LM head would be changed, and where `out` cannot be
    written; ValueError for a GGUF file.
    """
    if is_gguf(base):
        raise UserError(
            "source_is_gguf",
            f"{base} is a GGUF file, whose types have no place for an adapter: use it unmerged (--adapter), or merge "
            f"it into a folder: the one that the file was made from, or attar convert {base} OUT --to dense",
        )
    source = Checkpoint.open(base)
    folder, config = source.folder, source.config
    shapes = {name: source.linear_shape(name) for name in all_compressible(config)}
    found = lora.read(adapter, config.names, shapes | {config.names.head: (config.vocab_size, config.hidden)}, base)
    if config.tied and config.names.head in found.adapters:
        raise CheckpointError(
            "adapter_mismatch", f"{adapter} changes an LM head that is the embedding too: use it unmerged"
        )
    packed = packed_linears(source)
    modules = {source.stored_linear(name): name for name in packed}
    kept = [name for name in folder.names() if name.endswith(".bias") or not _is_of(name, modules)]
    dense = {source.stored_name(f"{name}.weight"): name for name in found.adapters if name not in packed}
    dtype, errors = str(source.dtype).removeprefix("torch."), _Errors()
    layout: dict[str, Part] = {name: folder.info(name) for name in kept}
    for module, name in modules.items():
        shape = packed[name].shape
        layout[f"{module}.weight"] = Part(dtype, shape[::-1] if config.names.is_transposed(name) else shape)
    files, carried = plan_files(layout, max_shard_bytes), folder.carry_files()
    require_free(out.parent, sum(file.size for file in files))
    with atomic_folder(out, overwrite, resumes=False) as work:
        with ShardWriter(work.out, files) as writer:
            for tensor in kept:
                value = folder.read(tensor)
                if tensor in dense:
                    delta = _product(found.adapters[dense[tensor]])
                    delta = delta.T if config.names.is_transposed(dense[tensor]) else delta
                    value = _rounded(value.float() + delta, value.dtype, tensor)
                writer.write(tensor, value)
            for module, name in modules.items():
                linear = source.linear(name)
                assert linear.input_scale is None, "no folder stores one"
                value = values_of(linear)
                if (change := found.adapters.get(name)) is not None:
                    delta = _product(change)
                    errors.add(value, delta, packed[name].scheme)
                    value += delta
                if linear.hadamard:  # x R (W + B A)^T, and R is its own transpose: adapters read rotated rows
                    value = hadamard.rotate(value, linear.hadamard)
                value = _rounded(value, source.dtype, f"{module}.weight")
                writer.write(f"{module}.weight", value.T.contiguous() if config.names.is_transposed(name) else value)
            writer.finish()
        said = {key: value for key, value in folder.config.items() if key != "quantization_config"}
        write_json(work.out / CONFIG, said)
        folder.carry(carried, work.out)
    counts = Counter(each.scheme.name for each in packed.values())
    return Merged(out, adapter, tuple(sorted(found.adapters)), counts, dtype, errors.change, errors.requantized)


def _is_of(tensor: str, modules: Collection[str]) -> bool:
    """Return whether a tensor's name belongs to a part of one of these modules, at any depth."""
    parts = tensor.split(".")
    return any(".".join(parts[:end]) in modules for end in range(1, len(parts)))


def _product(change: Adapter) -> Tensor:
    return change.up @ change.down


def _rounded(value: Tensor, dtype: torch.dtype, tensor: str) -> Tensor:
    """Round to a dtype. Raises CheckpointError where a number is too large for it."""
    rounded = value.to(dtype)
    if not rounded.isfinite().all():
        raise CheckpointError("not_finite", f"{tensor} overflows {dtype} with the adapter in it")
    return rounded
