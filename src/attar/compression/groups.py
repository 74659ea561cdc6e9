"""How the linears of a block belong together. Two ways matter, and they differ only in mixtures of experts.

* `input_groups`: linears that read the very same rows. They share a Hessian and an activation scale.
* `folds`: a producer (norm or linear) and everything that reads its output. A scale divided out of the producer must be
  multiplied into all of them: with experts, that is every expert, the shared one, and both gates.

What an engine runs as one product, and so wants in one scheme, is a third (`sensitivity.Group`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor

from attar.compression.solvers.rounding import awq
from attar.kernels import ops
from attar.kernels.operands import Linear, Norm
from attar.model.cache import ForwardBatch
from attar.model.layers import Block, MixtureOfExperts


@dataclass(frozen=True)
class Fold:
    """A producer, all its readers, and the part of the block whose output shows what rounding the readers costs."""

    before: Norm | Linear
    linears: tuple[Linear, ...]
    run: Callable[[Tensor, ForwardBatch], Tensor]
    mixes: bool = False  # whether a row of `run` depends on the others of its sequence


def input_groups(block: Block) -> Iterator[tuple[Linear, ...]]:
    """The linears that a recipe may compress, grouped by the rows they read, in order of execution."""
    yield block.attention.qkv
    yield (block.attention.output,)
    for each in block.feed_forwards():
        yield each.up
        yield (each.down,)


def folds(block: Block) -> list[Fold]:
    """Every place of the block where a per-channel scale can move without changing what the block computes."""
    attention, mlp = block.attention, block.feed_forward
    found = [Fold(block.attention_norm, attention.qkv, attention.forward, mixes=True)]
    apart = len(attention.qkv) == 3 and not attention.output.hadamard
    if apart and awq.foldable(attention.qkv[2], attention.output):
        found.append(_through(attention.qkv[2], attention.output))
    readers = [linear for each in block.feed_forwards() for linear in each.up]
    if isinstance(mlp, MixtureOfExperts):
        readers += [mlp.router] + ([mlp.shared_gate] if mlp.shared_gate is not None else [])
    found.append(Fold(block.feed_forward_norm, tuple(readers), lambda x, step: mlp.forward(x)))
    # Through the gate's product the scale of `up` passes; through an activation, or a rotation, it would not.
    gated = [each for each in block.feed_forwards() if each.gated and len(each.up) == 2 and not each.down.hadamard]
    return found + [_through(each.up[1], each.down) for each in gated]


def _through(before: Linear, after: Linear) -> Fold:
    return Fold(before, (after,), lambda x, step: ops.linear(x, (after,)))
