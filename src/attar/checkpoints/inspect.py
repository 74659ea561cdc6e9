"""Summary of a checkpoint from its headers alone: architecture, schemes, and the bytes of every tensor."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from attar.checkpoints.gguf.checkpoint import GgufCheckpoint
from attar.checkpoints.receipts import receipt
from attar.checkpoints.receipts.place import receipt_path
from attar.checkpoints.sources import hf, hub
from attar.checkpoints.vocabulary import is_gguf
from attar.formats.scheme import Part, Scheme
from attar.model.assembly import all_compressible


@dataclass(frozen=True)
class Stored:
    """A tensor of a GGUF file: like `Part`, with a type that torch does not have."""

    dtype: str
    shape: tuple[int, ...]
    bytes: int


@dataclass(frozen=True)
class Inspection:
    """Contents of a checkpoint according to its headers.

    `bits_per_weight` is over the linears that a recipe may compress; the LM head counts only where it is compressed.
    `bytes` are those of the weight files on disk, which besides the tensors hold a header each. Tensors are in the
    order of their layers.
    """

    path: Path
    architecture: str
    layers: int
    context: int
    parameters: int
    bits_per_weight: float
    bytes: int
    schemes: dict[str, int]
    tensors: Mapping[str, Part | Stored]
    receipt: bool
    recipe: str | None = None  # name in the receipt: sparsity, for one, is in no header

    def to_dict(self) -> dict[str, Any]:
        return {
            "path": str(self.path),
            "architecture": self.architecture,
            "layers": self.layers,
            "context": self.context,
            "parameters": self.parameters,
            "bits_per_weight": self.bits_per_weight,
            "bytes": self.bytes,
            "tensor_bytes": sum(part.bytes for part in self.tensors.values()),
            "schemes": self.schemes,
            "receipt": self.receipt,
            "recipe": self.recipe,
            "tensors": [
                {"name": name, "dtype": part.dtype, "shape": list(part.shape), "bytes": part.bytes}
                for name, part in self.tensors.items()
            ],
        }

    def table(self) -> str:
        at = f"{receipt_path(self.path).name}: `attar verify` checks it"
        schemes = ", ".join(f"{name} x {count}" for name, count in self.schemes.items())
        lines = [
            f"architecture     {self.architecture}, {self.layers} layers, context {self.context}",
            f"parameters       {self.parameters:,}",
            f"linears          {schemes}",
            f"bits per weight  {self.bits_per_weight:.4g} in the linears",
            f"bytes            {self.bytes:,}, in {len(self.tensors)} tensors",
            f"recipe           {self.recipe or 'not known'}",
            f"receipt          {at if self.receipt else 'none: ' + receipt.why_missing(self.path)}",
            "",
        ]
        width = max(map(len, self.tensors))
        lines += [
            f"{n:<{width}}  {p.dtype:<9} {'x'.join(map(str, p.shape)):<14} {p.bytes:>13,}"
            for n, p in self.tensors.items()
        ]
        return "\n".join(lines)


def inspect(model: str | Path) -> Inspection:
    """Read the headers of a model (folder, GGUF file, Hub id or `demo`). Raises CheckpointError as loading would."""
    path = hub.resolve(model)
    if is_gguf(path):
        return _inspect_gguf(path)
    checkpoint = hf.Checkpoint.open(path)
    config, folder = checkpoint.config, checkpoint.folder
    tensors = {name: folder.info(name) for name in sorted(folder.names(), key=_natural)}
    found: Counter[str] = Counter()
    bits = weights = 0
    belongs = set()
    modules = all_compressible(config)
    if checkpoint.scheme_of(config.names.head) is not None:
        modules.append(config.names.head)
    for module in modules:
        scheme: Scheme | None = checkpoint.scheme_of(module)
        rows, columns = checkpoint.linear_shape(module)
        at = checkpoint.stored_linear(module) + "."
        found[scheme.name if scheme else tensors[f"{at}weight"].dtype] += 1
        mine = [name for name in tensors if name.startswith(at) and not name.endswith(".bias")]
        belongs.update(mine)
        bits += 8 * sum(tensors[name].bytes for name in mine)
        weights += rows * columns
    rest = sum(math.prod(part.shape) for name, part in tensors.items() if name not in belongs)
    return Inspection(
        path, config.architecture, config.layers, config.context, weights + rest, bits / weights,
        sum(file.size for file in folder.files.values()), dict(found), tensors, *_receipt(path),
    )  # fmt: skip


def _inspect_gguf(path: Path) -> Inspection:
    checkpoint = GgufCheckpoint.open(path, torch.float32, as_stored=True, blocks=True)
    config, file = checkpoint.config, checkpoint.file
    tensors = {
        name: Stored(tensor.kind.name, tensor.shape, tensor.end - tensor.begin)
        for name in sorted(file.names(), key=_natural)
        for tensor in [file.info(name)]
    }
    modules = all_compressible(config)
    if checkpoint.kind_of(config.names.head).elements > 1:
        modules.append(config.names.head)
    found: Counter[str] = Counter()
    for module in modules:
        found[checkpoint.kind_of(module).name] += 1
    shapes = [checkpoint.linear_shape(module) for module in modules]
    bits = sum(8 * checkpoint.kind_of(m).bytes(shape) for m, shape in zip(modules, shapes, strict=True))
    return Inspection(
        path, config.architecture, config.layers, config.context, sum(math.prod(t.shape) for t in tensors.values()),
        bits / sum(math.prod(shape) for shape in shapes), file.size, dict(found), tensors,
        *_receipt(path),
    )  # fmt: skip


def _receipt(path: Path) -> tuple[bool, str | None]:
    """Return whether there is a receipt, and the recipe that it names."""
    found = receipt.read_receipt(path)
    recipe = None if found is None else found.value["recipe"]
    name = recipe.get("recipe") if isinstance(recipe, dict) else None
    return found is not None, name if isinstance(name, str) and name.isprintable() else None


def _natural(name: str) -> list[tuple[int, str]]:
    """Return a sort key that puts layer 10 after layer 9."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in name.split(".")]
