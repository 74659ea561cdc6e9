"""Training data of a run: its sequences and the target's hidden states, kept on disk between epochs.

States are rounded to bfloat16, kept or not, so that the trained weights do not depend on what was kept. The file has no
name: it disappears with the process, and a resumed run computes the states anew.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from attar.drafting.target import States, Target

PREDICTIONS = 2
"""Numbers of four bytes beside a row's states: the best token and the logarithm of a sum."""


class Lessons:
    """Token ids [S, L] and the states of `layers`; with `predictions`, those over all tokens besides. States of as many
    sequences as fit in `most` bytes are kept in a file in `folder`."""

    def __init__(
        self, target: Target, ids: Tensor, layers: tuple[int, ...], predictions: bool, folder: Path, most: int
    ) -> None:
        self.ids, self._target, self._layers, self._predictions = ids, target, layers, predictions
        self._columns = len(layers) * target.config.hidden
        row = 2 * self._columns + 4 * PREDICTIONS
        kept = min(len(ids), most // (row * ids.shape[1]))
        self._known = torch.zeros(len(ids), dtype=torch.bool)
        self._kept = None
        if kept:
            with tempfile.TemporaryFile(dir=folder) as file:
                self._kept = np.memmap(file, np.uint8, "w+", shape=(kept, ids.shape[1], row))

    def of(self, which: Sequence[int]) -> tuple[Tensor, States]:
        """Return the token ids [s, L] of some sequences, and the states of their rows."""
        found = [self._one(number) for number in which]
        made = States(
            self._target.quick, {layer: torch.cat([one[0][i] for one in found]) for i, layer in enumerate(self._layers)}
        )
        if self._predictions:
            made.predictions = (torch.cat([one[1] for one in found]), torch.cat([one[2] for one in found]))
        return self.ids[list(which)], made

    def _one(self, number: int) -> tuple[Sequence[Tensor], Tensor, Tensor]:
        """Return the states of a sequence's rows, float32 [L, I] for each layer, its best tokens, int64 [L], and the
        logarithms of sums, [L]."""
        if self._kept is not None and self._known[number]:
            return self._unpacked(torch.from_numpy(self._kept[number]))
        states = self._target.quick_states(self.ids[number][None], self._layers)
        parts = torch.cat([states.of(layer) for layer in self._layers], 1).bfloat16()
        best, sums = (
            states.predictions
            if self._predictions
            else (torch.zeros(len(parts), dtype=torch.int64), torch.zeros(len(parts)))
        )
        packed = torch.cat(
            (parts.view(torch.uint8), best.int()[:, None].view(torch.uint8), sums[:, None].view(torch.uint8)), 1
        )
        if self._kept is not None and number < len(self._kept):
            self._kept[number], self._known[number] = packed.numpy(), True
        return self._unpacked(packed)

    def _unpacked(self, packed: Tensor) -> tuple[Sequence[Tensor], Tensor, Tensor]:
        states, best, sums = packed.split((2 * self._columns, 4, 4), 1)
        rows = states.contiguous().view(torch.bfloat16).float().chunk(len(self._layers), 1)
        return rows, best.contiguous().view(torch.int32)[:, 0].long(), sums.contiguous().view(torch.float32)[:, 0]
