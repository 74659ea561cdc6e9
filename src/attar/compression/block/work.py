"""One block in the course of a recipe: its state, and the inputs of its linears on the calibration text.

Transforms and roundings work on it in turn (`passes`); the solvers behind them see tensors only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress

import torch
from torch import Tensor

from attar.compression.block.structured import Sizes
from attar.compression.calibration.hidden_states import HiddenStates
from attar.compression.calibration.loss_weights import Hints
from attar.compression.groups import input_groups
from attar.compression.recipe.methods import Gptq, Prune, SparseGpt
from attar.compression.recipe.recipe import Recipe, naming
from attar.compression.stages import Stages
from attar.formats.packed import PackedTensor
from attar.formats.scheme import Scheme
from attar.kernels import tiles
from attar.kernels.operands import ActivationHook, Linear
from attar.kernels.ref import activation_grid
from attar.model.cache import ForwardBatch
from attar.model.layers import Block

FEW = 1 << 24  # weights whose float32 copies take no more than the activations of one call


class _Observed(Exception):
    """Ends a pass over a block that is run for its linears' inputs only."""


def observe(block: Block, rows: Tensor, step: ForwardBatch, hook: ActivationHook, names: Container[str]) -> None:
    """Run a block on rows [N, I] for the inputs of the named linears, which `hook` receives, and no further."""
    last = next((each for each in reversed(list(block.linears())) if each.name in names), None)

    def until_last(linear: Linear, x: Tensor) -> None:
        hook(linear, x)
        if linear is last:
            raise _Observed

    with suppress(_Observed):
        block.run(rows, step, until_last)


def on_tiles(recipe: Recipe, device: torch.device | str) -> bool:
    """Return whether a recipe's passes over the calibration text may multiply in bfloat16, as models in it are run:
    where that is much faster, and only Hessians and the next block's inputs come of them. What corrects for earlier
    rounding compares two passes, and keeps float32."""
    hessians = isinstance(recipe.rounding, Gptq | SparseGpt | Prune) and not recipe.corrects
    return hessians and tiles.faster(device)


def _suits_tiles(linear: Linear) -> bool:
    weight = linear.weight
    exact = weight.dtype == torch.bfloat16 if isinstance(weight, Tensor) else isinstance(weight, PackedTensor)
    return exact and activation_grid(linear) is None and math.prod(linear.shape) >= tiles.LEAST


class BlockWork:
    """A block, the recipe, and the scheme of each linear by name; linears without one stay dense. `states` are inputs
    of the block on the calibration text, where the recipe reads them, and those in the original model if it corrects
    targets. `importances` weigh columns, [I] by name, and `guide` holds the hints of the loss for a linear; both change
    as the linear does. `sizes` are those that structured pruning leaves. `rtn_errors` are the errors of rounding to
    nearest before any transform, where there is one. `stages` counts seconds."""

    def __init__(
        self,
        block: Block,
        states: tuple[HiddenStates, HiddenStates | None] | None,
        recipe: Recipe,
        schemes: Mapping[str, Scheme | None],
        architecture: str,
        importances: Mapping[str, Tensor] | None = None,
        guide: Mapping[str, Hints] | None = None,
        sizes: Sizes | None = None,
    ) -> None:
        self.stages = Stages()
        self.block, self.recipe, self.architecture = block, recipe, architecture
        self.importances, self.guide = dict(importances or {}), dict(guide or {})
        self._hidden = None if states is None else states[0]
        self.original = None if states is None else states[1]
        self.rtn_errors: dict[str, float] = {}
        self.sizes, self._schemes = sizes, schemes

    @property
    def hidden(self) -> HiddenStates:
        assert self._hidden is not None, "recipes that read inputs are given calibration data"
        return self._hidden

    def scheme(self, linear: Linear) -> Scheme | None:
        return self._schemes.get(linear.name)

    def groups(self) -> Iterator[tuple[str, list[tuple[Linear, Scheme]]]]:
        """Yield the linears to compress with their schemes, by input group, under the name of the group's first
        linear."""
        for group in input_groups(self.block):
            members = [(each, scheme) for each in group if (scheme := self.scheme(each)) is not None]
            if members:
                yield group[0].name, members

    def pruned(self) -> Iterator[tuple[str, list[tuple[Linear, Scheme | None]]]]:
        """Yield the linears to prune, by input group as `groups` does; linears without a scheme stay dense."""
        for group in input_groups(self.block):
            members = [(each, self.scheme(each)) for each in group if self.recipe.pattern_for(each.name) is not None]
            if members:
                yield group[0].name, members

    @property
    def on_tiles(self) -> bool:
        """Return whether passes over the calibration text multiply by large matrices in bfloat16."""
        return self._hidden is not None and on_tiles(self.recipe, self._hidden.device)

    @contextmanager
    def unpacked(self) -> Iterator[None]:
        """Hold the block's weights in the dtype of their products within the context, where memory allows. A pass of
        many calls would decode them in each. `FEW` are always allowed; a recipe with Hessians needs a factor of the
        widest later. Large matrices are multiplied in bfloat16, `on_tiles`, unless they were stored in more digits."""
        linears, hessians = list(self.block.linears()), isinstance(self.recipe.rounding, Gptq | SparseGpt | Prune)
        room = max(FEW, max(each.shape[1] for each in linears) ** 2 if hessians else 0)
        fits, on_tiles = sum(math.prod(each.shape) for each in linears) <= room, self.on_tiles
        stored = [each.weight for each in linears]
        try:
            for each in linears:
                if on_tiles and _suits_tiles(each):
                    each.product_dtype = torch.bfloat16
                if fits and isinstance(each.weight, PackedTensor):
                    each.dense = each.weight.dequantize(each.product_dtype or torch.float32)
                elif fits and isinstance(each.weight, Tensor) and each.product_dtype is None:
                    each.weight = each.weight.float()
            yield
        finally:
            for each, weight in zip(linears, stored, strict=True):
                each.weight, each.dense, each.product_dtype = weight, None, None

    def watch(self, watchers: Mapping[str, Callable[[Tensor], None]], rows: int | None = None) -> None:
        """Run the block over the calibration states, or their first `rows`; each watcher receives its linear's
        inputs."""

        def hook(linear: Linear, x: Tensor) -> None:
            if linear.name in watchers:
                with naming(linear.name, "the input of "):
                    watchers[linear.name](x)

        seen = 0
        with self.stages.timed("inputs"), self.unpacked() if rows is None else nullcontext():
            for batch in self.hidden.batches():
                observe(self.block, self.hidden.read(batch), self.hidden.step(batch), hook, watchers)
                seen += len(batch) * self.hidden.shape[1]
                if rows is not None and seen >= rows:
                    return

    def inputs(self, names: Sequence[str], rows: int) -> dict[str, Tensor]:
        """Return the first `rows` input rows of each named linear, [<= rows, I]. An expert that received no token has
        none: it is left out here, and counted in `coverage`."""
        kept: dict[str, list[Tensor]] = {name: [] for name in names}

        def keep(pieces: list[Tensor]) -> Callable[[Tensor], None]:
            return lambda x: pieces.append(x[: rows - sum(map(len, pieces))].clone())

        self.watch({name: keep(pieces) for name, pieces in kept.items()}, rows)
        return {name: torch.cat(pieces) for name, pieces in kept.items() if pieces}
