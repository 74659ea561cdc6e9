"""Hints of the loss about each linear: weights of each token's error, coupling of the rows, or a weight of each entry.

To second order an error E of a linear's weight [O, I] changes the loss by half of the mean over tokens of (g^T E x)^2,
with x the linear's input and g the gradient of the loss at its output. This is the quadratic form of the Fisher matrix,
which has (O I)^2 entries and is reduced in one of three ways:

* `weights` (GuidedQuant; Kim et al. 2025): products between rows are left out, so that each row j has a Hessian of its
  own, E[g_j^2 x x^T]; rows in groups share that of their mean. The statistic is one number a token and group, the mean
  of g_j^2. Any solver that takes a Hessian takes this one (`gptq.Hessian.add`).
* `outputs` (YAQA, sketch A; Tseng et al. 2025): the Kronecker product of E[|x|^2 g g^T], which is the statistic, and
  the Hessian of the inputs (`two_sided`).
* `weighed` (SqueezeLLM; Kim et al. 2023): its diagonal alone, one number a weight (`squeezellm`).

With labels sampled from the model itself this is the Fisher matrix, the Hessian of the KL divergence between the model
and the compressed one. With the text's own next tokens it would be something else (`gradients`). The gradients are
those of the original model: one pass over the text, before the first block is compressed. The block pass makes the
input Hessians later, from real outputs of the compressed blocks before. So only 4 bytes a token, linear and group go to
disk for weights, 4 O^2 bytes a linear for outputs, and 4 a weight that is weighed.

Weights and outputs are not for mixtures of experts: the rows that an expert sees are chosen token by token, and change
once the blocks before are compressed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attar.checkpoints.sources.hf import Checkpoint
from attar.compression.calibration import gradients
from attar.compression.calibration.image_rows import ImageRows
from attar.compression.solvers.rounding.gptq import Hessian
from attar.compression.solvers.rounding.squeezellm import Sensitivity
from attar.errors import UserError
from attar.model.layers import Block
from attar.progress import Progress


def row_groups(rows: int, groups: int) -> list[slice]:
    """Split rows 0 .. `rows` into at most `groups` runs of about the same length."""
    size = -(-rows // groups)
    return [slice(at, min(at + size, rows)) for at in range(0, rows, size)]


def weights(g: Tensor, groups: int) -> Tensor:
    """Return the weights [N, G] of tokens in the Hessians of the groups of rows, from gradients g [N, O]."""
    return torch.stack([g[:, rows].square().mean(1) for rows in row_groups(g.shape[1], groups)], 1)


@dataclass(frozen=True, eq=False)
class Hints:
    """Hints of the loss about one linear, each where it was asked for: the weights [N, G] of tokens in the order of the
    calibration text, the matrix [O, O] of its outputs, and the weight of each entry [O, I]."""

    weights: Tensor | None
    outputs: Tensor | None
    weighed: Tensor | None = None

    def divided(self, scales: Tensor) -> Hints:
        """Return the hints once the outputs are divided by scales [O]: gradients are multiplied. Not defined for entry
        weights."""
        assert self.weights is None, "rows of a group do not scale alike"
        assert self.weighed is None
        return self if self.outputs is None else Hints(None, self.outputs * scales[:, None] * scales)

    def turned(self, inverse: Tensor) -> Hints:
        """Return the hints once the outputs y [O] are y T, given T^-1 [O, O]. Not defined for entry weights."""
        assert self.weights is None, "rows of a group are not turned alike"
        assert self.weighed is None
        return self if self.outputs is None else Hints(None, inverse @ self.outputs @ inverse.T)


class _Taker:
    """Accumulator of the hints of one linear."""

    def __init__(self, shape: tuple[int, int], groups: int, couple: bool, weigh: bool) -> None:
        self.groups, self.pieces = groups, list[Tensor]()
        self.outputs = Hessian(shape[0]) if couple else None
        self.weighed = Sensitivity(shape) if weigh else None

    def __call__(self, x: Tensor, g: Tensor) -> None:
        if self.groups:
            self.pieces.append(weights(g, self.groups))
        if self.outputs is not None:
            self.outputs.add(g, x.square().sum(1))
        if self.weighed is not None:
            self.weighed.add(x, g)

    def numbers(self) -> list[Tensor]:
        """Return the hints in the order of `Guide._shapes`."""
        found = [torch.cat(self.pieces)] if self.pieces else []
        found += [] if self.outputs is None else [self.outputs.mean]
        return found + ([] if self.weighed is None else [self.weighed.total])


@dataclass(frozen=True)
class Guide:
    """Hints of all linears to compress, in a file a block."""

    folder: Path
    key: str  # identifies the run: another run's hints are not used
    linears: Mapping[int, Mapping[str, tuple[int, int]]]  # by block, linears with hints and their shapes (O, I)
    tokens: int
    groups: int  # groups of rows, at most; 0: no token weights
    couple: bool  # whether there are output matrices
    weigh: bool = False  # whether each entry has a weight

    @property
    def collected(self) -> bool:
        """Return whether the files are there."""
        return all(self._path(layer).is_file() for layer in self.linears)

    @property
    def bytes(self) -> int:
        """Return the size of all files in bytes."""
        each = (self._shapes(*shape) for linears in self.linears.values() for shape in linears.values())
        return sum(4 * shape[0] * shape[1] for shapes in each for shape in shapes if shape is not None)

    def collect(
        self, source: Checkpoint, ids: Tensor, memory: int, seed: int, progress: Progress | None = None,
        images: ImageRows | None = None,
    ) -> None:  # fmt: skip
        """Make the files, from token ids [S, L], unless an earlier run has done so. Raises ValueError as
        `gradients.walk`."""
        if self.collected:
            return
        takers: dict[str, _Taker] = {}

        def watch(layer: int, block: Block) -> gradients.Watchers:
            takers.clear()
            for name, shape in self.linears[layer].items():
                takers[name] = _Taker(shape, self.groups, self.couple, self.weigh)
            return takers

        def done(layer: int) -> None:
            temporary = self._path(layer).with_suffix(".tmp")
            with temporary.open("wb") as file:
                for taker in takers.values():
                    for part in taker.numbers():
                        file.write(part.numpy().astype("<f4").tobytes())
            temporary.replace(self._path(layer))

        gradients.walk(
            source, ids, self.folder, watch, done, memory=memory, seed=seed, progress=progress, images=images
        )

    def of(self, layer: int) -> dict[str, Hints]:
        """Return the hints of a block's linears by name. Raises ValueError where the file has changed since it was
        written."""
        numbers = torch.from_numpy(np.fromfile(self._path(layer), dtype="<f4").astype(np.float32, copy=False))
        found, at = {}, 0
        for name, (rows, columns) in self.linears[layer].items():
            parts: list[Tensor | None] = []
            for shape in self._shapes(rows, columns):
                if shape is None:
                    parts.append(None)
                    continue
                stop = at + shape[0] * shape[1]
                if stop > len(numbers):
                    raise UserError(
                        "state_damaged",
                        f"{self._path(layer)} is shorter than it was written: the disk was tampered with",
                    )
                parts.append(numbers[at:stop].view(shape))
                at = stop
            found[name] = Hints(*parts)
        return found

    def _shapes(self, rows: int, columns: int) -> list[tuple[int, int] | None]:
        """Return the shapes of the fields of `Hints`, in file order."""
        return [
            (self.tokens, len(row_groups(rows, self.groups))) if self.groups else None,
            (rows, rows) if self.couple else None,
            (rows, columns) if self.weigh else None,
        ]

    def _path(self, layer: int) -> Path:
        return self.folder / f"guide-{self.key}-{layer}.hints"


def key(about: Mapping[str, Any]) -> str:
    """Return a name for the run, from all that it depends on."""
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:16]
