"""AutoRound on one block: the block runs on calibration states with learned weights in place.

The inputs are those that the compressed blocks before hand on. The targets are the outputs of the block's own weights
on the states of the original model, so that it compensates for the blocks before. Without those states the targets use
the same inputs. Targets are kept in a file. One step runs a few sequences, in turn. Memory is three float32 copies of
the block's weights (the original, V, and the best V), those of one product and its gradient, and one step's graph.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import closing

import torch
from torch import Tensor

from attar.compression.block.work import BlockWork
from attar.compression.calibration.hidden_states import HiddenStates, Rows
from attar.compression.recipe.methods import AutoRound
from attar.compression.recipe.recipe import naming
from attar.compression.solvers.rounding import autoround
from attar.compression.solvers.transforms import fold
from attar.formats.scheme import Scheme
from attar.kernels.operands import Linear
from attar.model.layers import Block

CHECK_RUNS = 4  # runs of sequences on which iterates are compared


def solve(work: BlockWork, members: Sequence[tuple[Linear, Scheme]], options: AutoRound) -> None:
    """Learn the roundings, and pack the linears in place. Raises ValueError, naming the linear, as `autoround.Rounding`
    does, and where the block's error is not finite."""
    block, hidden, roundings = work.block, work.hidden, list[autoround.Rounding]()
    with torch.inference_mode(False), torch.enable_grad():
        for norm in block.norms():  # gradients cannot pass through inference-mode tensors
            norm.weight, norm.bias = norm.weight.clone(), None if norm.bias is None else norm.bias.clone()
        for linear, scheme in members:
            with naming(linear.name):
                roundings.append(autoround.Rounding(fold.dense_weight(linear), scheme, options.scale_search))
        with closing(Rows(hidden.path.parent, math.prod(hidden.shape[:2]), hidden.shape[2])) as wanted:
            with torch.no_grad():
                aim = work.original or hidden
                for batch in aim.batches():
                    wanted.append(block.run(aim.read(batch), aim.step(batch)))
            linears = [linear for linear, _ in members]
            for linear, each in zip(linears, roundings, strict=True):
                linear.weight = each.packed()  # its scheme says how rows are rounded
            learning = _Learning(block, linears, hidden, wanted, options.batch)
            autoround.search(roundings, learning.loss, learning.check, steps=options.steps)
    for linear, each in zip(linears, roundings, strict=True):
        linear.weight, linear.dense = each.packed(), None


class _Learning:
    """Error of a block's output with given weights in place, on runs of calibration sequences, in turn."""

    def __init__(
        self, block: Block, linears: Sequence[Linear], hidden: HiddenStates, wanted: Rows, tokens: int
    ) -> None:
        self._block, self._linears, self._hidden, self._wanted = block, linears, hidden, wanted
        sequences, length = hidden.shape[:2]
        size = max(1, tokens // length)
        self._runs = [range(at, min(at + size, sequences)) for at in range(0, sequences, size)]

    def loss(self, weights: list[Tensor], step: int) -> Tensor:
        return self._error(weights, self._runs[step % len(self._runs)])

    def check(self, weights: list[Tensor]) -> float:
        runs = self._runs[:: -(-len(self._runs) // CHECK_RUNS)]
        return sum(float(self._error(weights, run)) for run in runs) / len(runs)

    def _error(self, weights: list[Tensor], run: range) -> Tensor:
        for linear, weight in zip(self._linears, weights, strict=True):
            linear.dense = weight
        out = self._block.run(self._hidden.read(run), self._hidden.step(run))
        length = self._hidden.shape[1]
        return (out - self._wanted.read(range(run.start * length, run.stop * length))).square().mean()
