"""Outlier profiler: the input channels of a model's linears that are far larger than the rest, and by how much.

From some billions of parameters on, a few fixed channels of the activations are 50 to 100 times the others (Dettmers et
al. 2022, arXiv:2208.07339; Xiao et al. 2022, arXiv:2211.10438). They decide how well activations round, and what
smoothing or scaling gains. Profiles before and after compression show what a transform moved where.

A place is a group of linears that read the same rows. Each of its channels has the largest |x| over all tokens, and the
largest |w| over all rows of the readers' weights. Each place has the kurtosis of x and of w (3 for a Gaussian, larger
for heavier tails). A channel is an outlier where its largest |x| is more than `FACTOR` times the median channel's. The
limit is relative, because the scale of activations differs from model to model, which a fixed threshold such as 6.0
ignores.

Legend: N rows, I channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attar.compression.groups import input_groups
from attar.errors import UserError
from attar.formats.packed import PackedTensor
from attar.formats.packing import row_slices
from attar.kernels.operands import Linear
from attar.model.cache import ForwardBatch
from attar.model.decoder import Decoder
from attar.progress import StageProgress

FACTOR = 10.0  # times the median channel's maximum
TOP = 5  # channels that a table names


@dataclass(frozen=True, eq=False)
class Profile:
    """Profile of one place: `linears` of block `layer` that read the same rows, observed over `tokens` of them."""

    layer: int
    linears: tuple[str, ...]
    inputs: Tensor  # max|x| of each channel, float32 [I]
    weights: Tensor  # max|w| of each channel, float32 [I]
    input_kurtosis: float
    weight_kurtosis: float
    tokens: int

    @property
    def kind(self) -> str:
        """Return the last names of the linears: `q_proj, k_proj, v_proj`."""
        return ", ".join(name.rpartition(".")[2] for name in self.linears)

    @property
    def peak(self) -> float:
        """Return the largest channel's maximum over the median channel's: 1 where all channels are alike, 0 without
        input."""
        median = float(self.inputs.median())
        return float(self.inputs.max()) / median if median else 0.0

    def outliers(self, factor: float = FACTOR) -> list[int]:
        """Return the channels whose largest |x| is more than `factor` times the median channel's, the largest first."""
        limit = factor * float(self.inputs.median())
        return [channel for channel, value in self.top(len(self.inputs)) if value > limit]

    def top(self, count: int = TOP) -> list[tuple[int, float]]:
        """Return the `count` largest channels with max|x|."""
        return [(int(c), float(self.inputs[c])) for c in self.inputs.argsort(descending=True, stable=True)[:count]]


class Spread:
    """Accumulator of per-channel maximum and kurtosis over rows that come in pieces."""

    def __init__(self, columns: int) -> None:
        self.largest = torch.zeros(columns)
        self.count = 0
        self.rows = 0
        self._sums = torch.zeros(4, dtype=torch.float64)

    def add(self, x: Tensor) -> None:
        """Add rows x [N, I]."""
        x = x.float()
        self.largest = torch.maximum(self.largest, x.abs().amax(0)) if len(x) else self.largest
        wide = x.double()
        square = wide * wide
        self._sums += torch.stack([wide.sum(), square.sum(), (square * wide).sum(), (square * square).sum()])
        self.count += x.numel()
        self.rows += len(x)

    @property
    def kurtosis(self) -> float:
        """Return the fourth central moment over the squared variance, of all numbers; 0 where they are all equal."""
        if not self.count:
            return 0.0
        m1, m2, m3, m4 = (self._sums / self.count).tolist()
        variance = m2 - m1 * m1
        fourth = m4 - 4 * m1 * m3 + 6 * m1 * m1 * m2 - 3 * m1**4
        return fourth / variance**2 if variance > 0 else 0.0


@torch.inference_mode()
def profile(
    decoder: Decoder, sequences: Sequence[Sequence[int]], progress: StageProgress | None = None
) -> list[Profile]:
    """Profile every place of a decoder that computes by the reference, over token sequences, in order of execution.
    Raises ValueError where the sequences are empty or an activation is not finite."""
    if not any(sequences):
        raise UserError("text_empty", "there is nothing to profile on: the text is empty")
    batches = [(torch.tensor(list(s)), ForwardBatch((len(s),), len(s))) for s in sequences if s]
    hidden: list[tuple[Tensor, Tensor | None]]
    hidden = [(decoder.embedding.forward(ids, step.positions), None) for ids, step in batches]
    found = []
    for layer, block in enumerate(decoder.blocks):
        groups = list(input_groups(block))
        seen = {group[0].name: Spread(group[0].shape[1]) for group in groups}

        def hook(linear: Linear, x: Tensor, seen: dict[str, Spread] = seen) -> None:
            if linear.name in seen:
                seen[linear.name].add(x)

        hidden = [block.forward(*states, step, hook) for states, (_, step) in zip(hidden, batches, strict=True)]
        for group in groups:
            inputs = seen[group[0].name]
            if not inputs.largest.isfinite().all():
                raise UserError("not_finite", f"the input of {group[0].name} holds a NaN or an infinity")
            weights = Spread(group[0].shape[1])
            for linear in group:
                _weights(linear, weights)
            names = tuple(linear.name for linear in group)
            found.append(
                Profile(layer, names, inputs.largest, weights.largest, inputs.kurtosis, weights.kurtosis, inputs.rows)
            )
        if progress is not None:
            progress(layer + 1, len(decoder.blocks))
    return found


def _weights(linear: Linear, into: Spread) -> None:
    """Add the weight's rows to `into`, columns in the order of the input's channels."""
    weight = linear.weight
    assert isinstance(weight, Tensor | PackedTensor), "a native model's weights are laid out for its kernels"
    back = None if linear.permutation is None else linear.permutation.argsort()
    for rows in row_slices(*linear.shape):
        part = weight[rows] if isinstance(weight, Tensor) else weight.dequantize(rows=rows)
        into.add(part if back is None else part[:, back])
