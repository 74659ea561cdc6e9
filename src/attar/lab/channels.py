"""Samples of a model's linear layers for the lab's page: each channel's maxima, and real rows to round there.

The closed form of rounding's error is far off where tails are heavy, so the page rounds real rows. A group of linear
layers that read the same rows has `ROWS` rows of inputs, `ROWS` of weights, and at most `CHANNELS` channels: the
largest, and others evenly spaced. Maxima are over all tokens and all rows of the weights.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attar.compression.groups import input_groups
from attar.errors import UserError
from attar.formats.packed import PackedTensor
from attar.kernels.operands import Linear
from attar.model.cache import ForwardBatch
from attar.model.decoder import Decoder
from attar.progress import StageProgress

ROWS, CHANNELS, LARGEST = 16, 256, 64
BLOCKS = 3  # that are sampled: the first, a middle one, the last


class _Rows:
    """Rows of one group: maxima over all, and some of them as they are."""

    def __init__(self, columns: int) -> None:
        self.largest, self.count = torch.zeros(columns), 0
        self.kept: list[Tensor] = []

    def add(self, x: Tensor) -> None:
        x = x.float()
        self.largest = torch.maximum(self.largest, x.abs().amax(0))
        self.kept.append(x[:: max(1, len(x) // ROWS)].clone())
        self.count += len(x)

    @property
    def rows(self) -> Tensor:
        """Return `ROWS` rows, evenly spaced over all."""
        return _spread(torch.cat(self.kept))


@torch.inference_mode()
def sampled(decoder: Decoder, sequences: Sequence[Sequence[int]], progress: StageProgress) -> list[dict[str, Any]]:
    """Sample the groups of some blocks of a decoder that computes by the reference, over token sequences.

    Raises ValueError where the sequences are empty or an activation is not finite.
    """
    if not any(sequences):
        raise UserError("text_empty", "there is nothing to sample on: the text is empty")
    batches = [(torch.tensor(list(s)), ForwardBatch((len(s),), len(s))) for s in sequences if s]
    hidden: list[tuple[Tensor, Tensor | None]]
    hidden = [(decoder.embedding.forward(ids, step.positions), None) for ids, step in batches]
    last, found = len(decoder.blocks) - 1, []
    chosen = {round(last * at / (BLOCKS - 1)) for at in range(BLOCKS)}
    for layer, block in enumerate(decoder.blocks):
        groups = list(input_groups(block)) if layer in chosen else []
        seen = {group[0].name: _Rows(group[0].shape[1]) for group in groups}

        def hook(linear: Linear, x: Tensor, seen: dict[str, _Rows] = seen) -> None:
            if linear.name in seen:
                seen[linear.name].add(x)

        hidden = [block.forward(*states, step, hook) for states, (_, step) in zip(hidden, batches, strict=True)]
        found += [_entry(layer, group, seen[group[0].name]) for group in groups if seen[group[0].name].count]
        progress(layer + 1, last + 1)
    return found


def _entry(layer: int, group: Sequence[Linear], rows: _Rows) -> dict[str, Any]:
    if not rows.largest.isfinite().all():
        raise UserError("not_finite", f"the input of {group[0].name} holds a NaN or an infinity")
    weights = torch.cat([_weight(each) for each in group])
    chosen = _channels(rows.largest)
    kind = ", ".join(each.name.rpartition(".")[2] for each in group)
    return {
        "name": f"block {layer}: {kind}", "tokens": rows.count, "of": len(rows.largest), "index": chosen.tolist(),
        "inputs": _listed(rows.largest[chosen]), "weights": _listed(weights.abs().amax(0)[chosen]),
        "rows": _packed(rows.rows[:, chosen]), "outs": _packed(_spread(weights)[:, chosen]),
    }  # fmt: skip


def _weight(linear: Linear) -> Tensor:
    """Return a weight in float32, columns in the order of the input's channels."""
    weight = linear.weight
    assert isinstance(weight, Tensor | PackedTensor), "a native model's weights are laid out for its kernels"
    dense = (weight if isinstance(weight, Tensor) else weight.dequantize()).float()
    return dense if linear.permutation is None else dense[:, linear.permutation.argsort()]


def _channels(largest: Tensor) -> Tensor:
    """Return the indices of the channels to show, rising: all, or the largest and others evenly spaced."""
    if len(largest) <= CHANNELS:
        return torch.arange(len(largest))
    first = largest.argsort(descending=True, stable=True)
    others = first[LARGEST:].sort().values
    spaced = torch.linspace(0, len(others) - 1, CHANNELS - LARGEST).round().long()
    return torch.cat([first[:LARGEST], others[spaced]]).sort().values


def _spread(rows: Tensor) -> Tensor:
    """Return at most `ROWS` rows, evenly spaced."""
    return rows[torch.linspace(0, len(rows) - 1, min(ROWS, len(rows))).round().long()]


def _listed(values: Tensor) -> list[float]:
    return [float(f"{value:.6g}") for value in values.tolist()]


def _packed(values: Tensor) -> str:
    """Return numbers as base64 of little-endian float32."""
    return base64.b64encode(values.contiguous().numpy().astype("<f4").tobytes()).decode()
