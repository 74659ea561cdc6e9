"""Groups of linears of a block, of two kinds that differ only in mixtures of experts.

* `input_groups`: linears that read the very same rows. They share a Hessian and an activation scale.
* `folds`: a producer (norm or linear) and all readers of its output. A scale divided out of the producer must be
  multiplied into all of them: with experts, that is every expert, the shared one, and both gates.

A third kind is in `sensitivity.Group`: linears that an engine fuses into one product, and so wants in one scheme.
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
    """A producer, all its readers, and the part of the block whose output shows the cost of rounding the readers."""

    before: Norm | Linear
    linears: tuple[Linear, ...]
    run: Callable[[Tensor, ForwardBatch], Tensor]
    mixes: bool = False  # whether a row of `run` depends on other rows of its sequence


def input_groups(block: Block) -> Iterator[tuple[Linear, ...]]:
    """Yield the linears that a recipe may compress, grouped by the rows they read, in order of execution."""
    yield block.attention.qkv
    yield (block.attention.output,)
    for each in block.feed_forwards():
        yield each.up
        yield (each.down,)


def folds(block: Block) -> list[Fold]:
    """Return every point of the block where a per-channel scale can move without changing the block's function."""
    attention, mlp = block.attention, block.feed_forward
    found = [Fold(block.attention_norm, attention.qkv, attention.forward, mixes=True)]
    if len(attention.qkv) == 3 and not attention.output.hadamard and awq.foldable(attention.qkv[2], attention.output):
        found.append(_through(attention.qkv[2], attention.output))
    readers = [linear for each in block.feed_forwards() for linear in each.up]
    if isinstance(mlp, MixtureOfExperts):
        readers += [mlp.router] + ([mlp.shared_gate] if mlp.shared_gate is not None else [])
    found.append(Fold(block.feed_forward_norm, tuple(readers), lambda x, step: mlp.forward(x)))
    # The gate's product passes the scale of `up`; an activation or a rotation would not.
    gated = [each for each in block.feed_forwards() if each.gated and len(each.up) == 2 and not each.down.hadamard]
    return found + [_through(each.up[1], each.down) for each in gated]


def _through(before: Linear, after: Linear) -> Fold:
    return Fold(before, (after,), lambda x, step: ops.linear(x, (after,)))
