"""Contents of a folder for a writer of another format: its compressed linears, and tensors by our names."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from attar.checkpoints.sources.hf import Checkpoint
from attar.errors import UserError
from attar.formats.packed import PackedTensor
from attar.formats.scheme import Scheme
from attar.kernels.operands import Linear
from attar.model.assembly import all_compressible, packed_ends


@dataclass(frozen=True, slots=True)
class Stored:
    """One compressed linear, before it is read. `permuted`: its columns are sorted by group, out of their order."""

    scheme: Scheme
    shape: tuple[int, int]
    permuted: bool = False


def packed_schemes(checkpoint: Checkpoint) -> dict[str, Scheme]:
    """Return the scheme of every compressed linear of a folder, by our name, from headers alone."""
    config = checkpoint.config
    ends = [] if config.tied and not packed_ends(config, checkpoint) else [config.names.head]
    found = {name: checkpoint.scheme_of(name) for name in (*all_compressible(config), *ends)}
    return {name: scheme for name, scheme in found.items() if scheme is not None}


def packed_linears(checkpoint: Checkpoint) -> dict[str, Stored]:
    """Return every compressed linear of a folder, by our name."""
    found = {}
    for name, scheme in packed_schemes(checkpoint).items():
        module = checkpoint.stored_linear(name)
        permuted = any(checkpoint.folder.has(f"{module}.{part}") for part in ("g_idx", "weight_g_idx"))
        # A declared order is not always used: only the reader knows whether columns are out of order.
        permuted = permuted and checkpoint.linear(name).permutation is not None
        found[name] = Stored(scheme, checkpoint.linear_shape(name), permuted)
    return found


def dense_names(checkpoint: Checkpoint, linears: Iterable[str]) -> list[str]:
    """Return the folder's tensors that are no part of a compressed linear's weight: all dense ones, and biases."""
    modules = {checkpoint.stored_linear(name) for name in linears}

    def packed(tensor: str) -> bool:  # X.weight_packed, and X.weight.codes too
        words = tensor.split(".")
        return words[-1] != "bias" and any(".".join(words[:end]) in modules for end in range(1, len(words)))

    return [name for name in checkpoint.folder.names() if not packed(name)]


def stored_bits(checkpoint: Checkpoint, linears: Mapping[str, Stored]) -> float | None:
    """Return the stored bits per weight of a folder's compressed linears; None where there are none."""
    if not linears:
        return None
    names = set(checkpoint.folder.names()) - set(dense_names(checkpoint, linears))
    stored = sum(checkpoint.folder.info(name).bytes for name in names)
    return 8 * stored / sum(math.prod(each.shape) for each in linears.values())


def values_of(linear: Linear) -> Tensor:
    """Return the values of a linear's weight, float32 [O, I], with its columns in their order."""
    weight = linear.weight
    if isinstance(weight, Tensor):
        return weight.float()
    assert isinstance(weight, PackedTensor)
    values = weight.dequantize(torch.float32)
    if linear.permutation is None:
        return values
    found = torch.empty_like(values)
    found[:, linear.permutation] = values
    return found


def dense_values(checkpoint: Checkpoint, name: str) -> Tensor:
    return checkpoint.folder.read(stored_name(checkpoint, name))


def stored_name(checkpoint: Checkpoint, name: str) -> str:
    """Return a dense tensor's name in the folder: the one table of a tied model may be the LM head."""
    names, stored = checkpoint.config.names, checkpoint.stored_name(name)
    if name == f"{names.embed}.weight" and not checkpoint.folder.has(stored):
        return checkpoint.stored_name(f"{names.head}.weight")
    return stored


def inexact(name: str, reason: object, where: Path) -> UserError:
    return UserError("conversion_inexact", f"{where}: {name} cannot be converted exactly: {reason}")
