"""That a converted model is the same: digests of what tensors stand for, and what a conversion says of itself.

A tensor's digest is that of its values as float32, columns in their order. That is what a format decodes to, whichever
it is, so two models with the same digests compute the same, bit for bit, where one program computes both.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attar.checkpoints.convert_targets import Stored
from attar.checkpoints.hf import Checkpoint
from attar.checkpoints.writer import Workspace
from attar.formats.packed import PackedTensor
from attar.kernels.operands import Linear
from attar.model.decoder import compressible, packed_ends

Progress = Callable[[str, int, int], None]
"""progress(stage, done, total)"""


@dataclass(frozen=True)
class Converted:
    """What `convert` did. `sha256` is that of every tensor as float32, the source's and the output's alike."""

    path: Path
    format: str
    tensors: int
    packed: int  # linears among them
    bytes: int
    sha256: str
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        return {
            "path": str(self.path),
            "format": self.format,
            "tensors": self.tensors,
            "packed": self.packed,
            "bytes": self.bytes,
            "sha256": self.sha256,
            "notes": list(self.notes),
        }


def proof(done: Converted) -> Iterator[str]:
    """What was shown, in sentences."""
    yield (
        f"every one of {done.tensors} tensors, {done.packed} of them re-packed, decodes to the same bits: "
        f"sha256 {done.sha256} of the source and of what was read back"
    )


class Digest:
    """SHA-256 over tensors as float32, each with its name."""

    def __init__(self) -> None:
        self._sum = hashlib.sha256()
        self.of: dict[str, str] = {}  # of each tensor

    def add(self, name: str, values: Tensor) -> None:
        raw = values.float().contiguous().numpy().tobytes()
        self.of[name] = hashlib.sha256(raw).hexdigest()
        self._sum.update(f"{self.of[name]}  {name}\n".encode())

    @property
    def whole(self) -> str:
        return self._sum.hexdigest()


def values_of(linear: Linear) -> Tensor:
    """What the weight of a linear stands for, float32 [O, I], its columns in their order."""
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


def compare(ours: Digest, theirs: Digest) -> None:
    """Raises ValueError naming the first tensor that came out otherwise, before the output is put in place."""
    if different := [name for name in ours.of if ours.of[name] != theirs.of.get(name)]:
        raise ValueError(f"{different[0]} was read back otherwise than it was written: nothing is put in place")
    assert ours.whole == theirs.whole


def packed_linears(checkpoint: Checkpoint) -> dict[str, Stored]:
    """Every compressed linear of a folder, by our name."""
    config, found = checkpoint.config, {}
    for name in linear_names(checkpoint):
        if name == config.names.head and config.tied and not packed_ends(config, checkpoint):
            continue
        scheme = checkpoint.scheme_of(name)
        if scheme is not None:
            module = checkpoint.stored_linear(name)
            permuted = any(checkpoint.folder.has(f"{module}.{part}") for part in ("g_idx", "weight_g_idx"))
            # What is declared is not always used: whether columns are out of their order, only the reader knows.
            permuted = permuted and checkpoint.linear(name).permutation is not None
            found[name] = Stored(scheme, checkpoint.linear_shape(name), permuted)
    return found


def inexact(name: str, reason: object, where: Path) -> ValueError:
    return ValueError(f"{where}: {name} cannot be converted exactly: {reason}")


def linear_names(checkpoint: Checkpoint) -> list[str]:
    config = checkpoint.config
    names = [name for layer in range(config.layers) for name in compressible(config, layer)]
    return [*names, config.names.head]


def emptied(work: Workspace) -> Path:
    """The folder to write into, without what an interrupted run of something else left in it."""
    shutil.rmtree(work.out)
    work.out.mkdir()
    return work.out


def as_json(value: Mapping[str, Any]) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"
