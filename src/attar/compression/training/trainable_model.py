"""A whole model that can be differentiated: common to tuning scales and training adapters.

Weights stay as they are stored and become float32 a matrix at a time. Of the graph of a step, the inputs of each block
are kept and the rest is computed again on the way back, unless the whole graph fits (`recompute`). The LM head is
applied to a few rows at a time, forwards and backwards, so that no more logits than `LOGITS_AT_ONCE` exist.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint as recomputed

from attar import machine
from attar.checkpoints.gguf.checkpoint import GgufCheckpoint
from attar.checkpoints.sources.hf import Checkpoint
from attar.errors import UserError
from attar.model import assembly, decoder
from attar.model.cache import ForwardBatch

LOGITS_AT_ONCE = 1 << 22
WARM_UP = 0.05  # fraction of the steps


class WholeModel:
    """The model of a checkpoint, of any format, in memory. A subclass installs its learned numbers by `install`."""

    def __init__(self, checkpoint: Checkpoint | GgufCheckpoint) -> None:
        self.config = config = checkpoint.config
        self.recompute = True
        self.embedding, self.head = assembly.build_ends(config, checkpoint)
        self.final_norm = assembly.build_final_norm(config, checkpoint)
        self.blocks = [assembly.build_block(config, checkpoint, layer) for layer in range(config.layers)]
        for linear in (self.head, *(linear for block in self.blocks for linear in block.linears())):
            linear.keep_dense = False

    def install(self, layer: int) -> None:
        """Install the learned numbers of block `layer`, or, where that is the number of blocks, of the final norm. It
        runs before each forward pass of the block or norm, so that the graph has a path to them."""

    def states(self, ids: Tensor) -> Tensor:
        """Return the inputs of the final norm, [S * L, I], for token ids [S, L]."""
        step = ForwardBatch((ids.shape[1],) * len(ids), ids.shape[1])
        hidden = self.embedding.forward(ids.reshape(-1), step.positions).float()
        for layer in range(self.config.layers):
            if torch.is_grad_enabled() and self.recompute:
                hidden = recomputed(self._run, layer, hidden, step, use_reentrant=False, preserve_rng_state=False)
            else:
                hidden = self._run(layer, hidden, step)
        return hidden

    def _run(self, layer: int, hidden: Tensor, step: ForwardBatch) -> Tensor:
        self.install(layer)
        out = self.blocks[layer].run(hidden, step)
        for linear in self.blocks[layer].linears():
            linear.dense = None
        return out

    def losses(self, hidden: Tensor, loss: Callable[[Tensor, slice], Tensor]) -> list[Tensor]:
        """Return `loss` of the logits of some rows, and of the slice of these rows, for all rows [N, I] before the
        final norm."""
        return [loss(self._logits(hidden[rows]), rows) for rows in self._parts(len(hidden))]

    def learn(self, ids: Tensor, loss: Callable[[Tensor, slice], Tensor]) -> float:
        """Add the gradients of the sum of `loss` to those of the learned numbers; return the sum."""
        hidden = self.states(ids)
        leaf, total = hidden.detach().requires_grad_(), 0.0
        for rows in self._parts(len(leaf)):
            part = loss(self._logits(leaf[rows]), rows)
            part.backward()
            total += float(part.detach())
        hidden.backward(leaf.grad)
        return total

    def _logits(self, rows: Tensor) -> Tensor:
        self.install(self.config.layers)
        return decoder.logits(self.config, self.final_norm, self.head, rows)

    def _parts(self, rows: int) -> list[slice]:
        at_once = max(1, LOGITS_AT_ONCE // self.config.vocab_size)
        return [slice(at, min(at + at_once, rows)) for at in range(0, rows, at_once)]

    def fit(self, rows: int, learned: int, memory: int | None, what: str) -> None:
        """Decide whether blocks run twice, for steps of so many rows and learned numbers, in so many bytes of memory
        (by default all that this machine allows). Raises ValueError, beginning with `what`, where even that is too
        little."""
        limit = machine.examine().budget if memory is None else memory
        sizes = [sum(math.prod(linear.shape) for linear in block.linears()) for block in self.blocks]
        heads = (self.config.heads + self.config.kv_heads) * self.config.head_dim
        graph = 4 * rows * (8 * self.config.hidden + 5 * heads + 6 * self.config.intermediate)  # graph of a block
        least = 2 * sum(sizes) + 2 * 4 * math.prod(self.head.shape) + 6 * 4 * learned + 3 * 4 * max(sizes)
        least += 4 * math.prod(self.head.shape) if self.head.keep_dense else 0
        least += 4 * self.config.layers * rows * self.config.hidden + graph + 6 * 4 * LOGITS_AT_ONCE
        if least > limit:
            raise UserError(
                "memory_insufficient",
                f"{what} needs {least / 1e9:.3g} GB of memory and may use {limit / 1e9:.3g}: give it more",
            )
        self.recompute = limit - least < 4 * sum(sizes) + self.config.layers * graph


# Common parts of runs of Adam


def schedule(done: float) -> float:
    """Return the learning rate at a fraction of all steps: a linear rise, then a cosine."""
    if done < WARM_UP:
        return done / WARM_UP
    return (1 + math.cos(math.pi * (done - WARM_UP) / (1 - WARM_UP))) / 2


def shuffled(items: Sequence[int], seed: int, epoch: int) -> list[int]:
    """Return the items in an order drawn from a counter of (seed, epoch)."""
    stream = np.random.Philox(key=np.array([seed, epoch], dtype=np.uint64), counter=np.array([0, 0, 2, 0]))
    return [items[i] for i in np.argsort(np.asarray(stream.random_raw(len(items))), kind="stable").tolist()]
