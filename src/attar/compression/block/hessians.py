"""GPTQ or pruning on one block: which rows of which linears share a Hessian, and which Hessians are in memory together.

Every Hessian costs I x I numbers, and every pass that gathers some costs a run of the block over the calibration text.
By default the linears that read the same rows share one, and all of a dense block are gathered in one pass, on the
block as it was. An expert of a mixture that received no token is solved for from its weights alone, which `coverage`
reports. So is a linear whose inputs were all zero, as behind a `v` of zeros. Three options of the recipe change that;
hints of the loss are used as far as they carry information (`heeded`):

* `guide`: tokens are weighted by the loss, differently for each group of rows of each linear (`loss_weights`), so that
  each group has a Hessian of its own;
* `couple`: a second matrix for each linear, of its outputs (`two_sided`);
* `correct`: targets are corrected for what was compressed before (`qronos`). Then linears are replaced as soon as they
  are solved, so that later ones in the block see their real inputs. A twin of the unchanged block reads the hidden
  states of the original model, which take a second pair of files.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attar.compression.block.work import BlockWork, observe
from attar.compression.calibration.loss_weights import Hints, row_groups
from attar.compression.memory import give_back, large_blocks_kept
from attar.compression.recipe.methods import Gptq, Prune, SparseGpt
from attar.compression.recipe.recipe import naming
from attar.compression.solvers.pruning import prune, sparsegpt, zeros
from attar.compression.solvers.rounding import gptq, qronos, two_sided
from attar.compression.solvers.rounding.form_levels import shared_largest
from attar.compression.solvers.rounding.gptq import GptqResult, Hessian
from attar.compression.solvers.transforms import fold
from attar.formats.packed import PackedTensor
from attar.formats.scheme import Scheme
from attar.kernels.operands import Linear
from attar.model.layers import Block, FeedForward, MixtureOfExperts

HESSIANS = 2.5  # multiple of a block's widest Hessian, its factor included, that may be in memory at once

Options = Gptq | SparseGpt | Prune

Group = tuple[str, Sequence[tuple[Linear, Scheme | None]]]
"""Linears to compress that read the same rows, under the name of the first linear that reads them. Linears without a
scheme are pruned and stay dense."""


@dataclass(frozen=True)
class Solved:
    """A linear, the rounded weight that it is to get, and the relative error by the named measure."""

    linear: Linear
    scheme: Scheme | None
    result: GptqResult
    measure: str


@dataclass(frozen=True, eq=False)
class Share:
    """Rows of linears that share one Hessian, from the inputs of the linear `name` with tokens weighted by
    `weights`."""

    name: str
    users: tuple[tuple[Linear, Scheme | None, slice], ...]
    weights: Tensor | None = None  # [N], one weight a token

    @property
    def columns(self) -> int:
        return self.users[0][0].shape[1]


@dataclass(eq=False)
class _Statistics:
    """Statistics that one pass over the block gathers for one share."""

    share: Share
    hessian: Hessian
    drift: qronos.Drift | None
    seen: int = 0  # number of tokens

    @property
    def adds(self) -> bool:
        return self.drift is not None and self.drift.residual is not None

    def add(self, x: Tensor, original: Tensor | None, residual: Tensor | None = None) -> None:
        weights = self.share.weights
        if weights is not None:
            weights = weights[self.seen : self.seen + len(x)]
            self.seen += len(x)
        self.hessian.add(x, weights)
        if self.drift is not None:
            assert original is not None
            self.drift.add(original, x, weights, residual)


def heeded(guide: Mapping[str, Hints]) -> dict[str, Hints]:
    """Return the hints without those that carry no information because the gradients were zero. Such hints belong to a
    linear of zeros, as in an added block that computes the identity, or to a model that is certain of every token. Rows
    without token weights weigh all tokens alike, and rows without coupling are solved for by themselves."""
    return {name: _heeded(hints) for name, hints in guide.items()}


def _heeded(hints: Hints) -> Hints:
    weights, outputs = hints.weights, hints.outputs
    if weights is not None:
        # Smaller values have lost digits, and one over their sum is not finite.
        weights = weights.masked_fill(weights < torch.finfo(weights.dtype).tiny, 0)
        some = weights.any(0)
        weights = weights.masked_fill(~some, 1) if some.any() else None
    if outputs is not None and _coupling(outputs).silent:
        outputs = None
    return replace(hints, weights=weights, outputs=outputs)


def _coupling(outputs: Tensor) -> Hessian:
    found = Hessian(0)
    found.mean = outputs
    return found


def solve(work: BlockWork, groups: Sequence[Group], options: Options) -> Iterator[Solved]:
    """Solve for all linears of the groups of a block, in order. The hints of the loss are those after `heeded`. For
    linears that the importances do not name, the Hessian's diagonal weighs columns where scales of GGML blocks are
    searched. Weights are replaced here, each once no later solve needs the unchanged block. Raises ValueError, naming
    the linear, as the solvers do."""
    block, correct = work.block, not isinstance(options, SparseGpt) and options.correct
    weights = {name: hints.weights for name, hints in work.guide.items() if hints.weights is not None}
    twin = twin_of(block) if correct else None
    largest = shared_largest(members for _, members in groups)
    takes_on = options.residual if isinstance(options, Gptq) else 0.0
    # Numbers of rows that correct the error in the residual stream.
    adding = {each.name: each.shape[0] for each in _added(block)} if takes_on else {}
    solved: list[tuple[Linear, Tensor | PackedTensor]] = []
    pieces: dict[str, list[GptqResult]] = {}
    runs = list(waves([list(_shares(group, weights)) for group in groups], _room(block, groups), correct))
    for number, wave in enumerate(runs, 1):
        statistics = []
        for share in wave:
            drift = qronos.Drift(share.columns, adding.get(share.name, 0)) if correct else None
            statistics.append(_Statistics(share, Hessian(share.columns), drift))
        with work.stages.timed("inputs"), work.unpacked(), large_blocks_kept():
            _gather(work, twin, statistics)
        while statistics:
            found = statistics.pop(0)
            # All-zero inputs, and experts that received no token, tell nothing: only the weights are known.
            known = found.hessian.tokens > 0 or isinstance(block.feed_forward, MixtureOfExperts)
            blind = known and found.hessian.silent
            if blind:
                found.hessian.weigh_alike()
            with naming(found.share.users[0][0].name):
                prepared = _prepare(found.hessian, options)
            for linear, scheme, rows in found.share.users:
                with naming(linear.name):
                    weight = fold.dense_weight(linear)[rows]
                    if found.drift is not None:
                        weight = qronos.corrected(weight, found.drift, prepared, takes_on, rows)
                    hints = work.guide.get(linear.name)
                    outputs = None if blind or hints is None else hints.outputs
                    shared, counts = largest.get(linear.name), work.importances.get(linear.name)
                    result = _solve(weight, prepared, zeros.solved_as(scheme), options, outputs, shared, counts)
                pieces.setdefault(linear.name, []).append(result)
                if rows.stop == linear.shape[0]:
                    whole = gptq.stacked(pieces.pop(linear.name))
                    yield Solved(linear, scheme, whole, "weight" if blind else _measure(hints, correct))
                    solved.append((linear, zeros.stored_as(whole.packed, scheme)))
                if correct or number == len(runs):  # later linears must see it, or none will
                    _install(solved)
            del prepared, found  # before the next factor is made
            give_back()


def _measure(hints: Hints | None, corrected: bool) -> str:
    words = ["weighted"] * (hints is not None and hints.weights is not None)
    words += ["coupled"] * (hints is not None and hints.outputs is not None)
    return " ".join([*words, *["corrected"] * corrected, "output"])


def _prepare(hessian: Hessian, options: Options) -> gptq.Prepared:
    if isinstance(options, Prune):
        return prune.prepare(hessian, options.damping)
    return gptq.prepare(hessian, options.damping, options.order if isinstance(options, Gptq) else "natural")


def _solve(
    weight: Tensor,
    prepared: gptq.Prepared,
    scheme: Scheme | None,
    options: Options,
    outputs: Tensor | None,
    largest: Tensor | None,
    importance: Tensor | None,
) -> GptqResult:
    search = options.scale_search
    if isinstance(options, SparseGpt):
        return sparsegpt.solve(weight, prepared, options.pattern, scheme, block=options.block, scale_search=search)
    if isinstance(options, Prune):
        assert isinstance(prepared, prune.Prepared)
        return prune.solve(weight, prepared, options.pattern, scheme, steps=options.steps, scale_search=search)
    assert scheme is not None, "only what is pruned stays dense"
    if outputs is not None:
        coupling = gptq.prepare(_coupling(outputs.to(weight.device)), options.output_damping)
        return two_sided.solve(weight, prepared, coupling, scheme, options, importance=importance)
    return gptq.solve(weight, prepared, scheme, options, largest=largest, importance=importance)


def _install(solved: list[tuple[Linear, Tensor | PackedTensor]]) -> None:
    for linear, weight in solved:
        dtype = fold.dense_weight(linear).dtype  # corrected targets are float32
        linear.weight = weight.to(dtype) if isinstance(weight, Tensor) else weight
    solved.clear()


def _shares(group: Group, weights: Mapping[str, Tensor]) -> Iterator[Share]:
    name, members = group
    alike = [(linear, scheme, slice(0, linear.shape[0])) for linear, scheme in members if linear.name not in weights]
    if alike:
        yield Share(name, tuple(alike))
    for linear, scheme in members:
        if linear.name in weights:
            columns = weights[linear.name].unbind(1)
            for rows, column in zip(row_groups(linear.shape[0], len(columns)), columns, strict=True):
                yield Share(name, ((linear, scheme, rows),), column)


def of_inputs(work: BlockWork, linear: Linear, twin: Block | None) -> tuple[Hessian, qronos.Drift | None]:
    """Return the Hessian of one linear's inputs and, given a twin of the unchanged block, their drift from the
    original's."""
    columns = linear.shape[1]
    share = Share(linear.name, ((linear, None, slice(0, linear.shape[0])),))
    found = _Statistics(share, Hessian(columns), None if twin is None else qronos.Drift(columns))
    _gather(work, twin, [found])
    return found.hessian, found.drift


def _gather(work: BlockWork, twin: Block | None, statistics: Sequence[_Statistics]) -> None:
    """Run the block over all calibration states, and its twin over the original's, and update the statistics."""
    block, hidden, original = work.block, work.hidden, work.original
    takers: dict[str, list[_Statistics]] = {}
    for each in statistics:
        takers.setdefault(each.share.name, []).append(each)
    originals: dict[str, Tensor] = {}
    wrong: dict[str, Tensor] = {}  # the error in the residual stream, where a linear adds to it
    behind = next((each.name for each in _added(block) if each is not block.attention.output), "")

    def keep(linear: Linear, x: Tensor) -> None:
        if linear.name in takers:
            originals[linear.name] = x.clone()

    def hook(linear: Linear, x: Tensor) -> None:
        for each in takers.get(linear.name, ()):
            with naming(linear.name, "the input of "):
                each.add(x, originals.get(linear.name), wrong.get(linear.name))

    for batch in hidden.batches():
        rows, step = hidden.read(batch), hidden.step(batch)
        if twin is not None:
            assert original is not None
            true, there = original.read(batch), original.step(batch)
            wrong[block.attention.output.name] = true - rows
            if any(each.adds for each in takers.get(behind, ())):
                between, _ = twin.forward(true, None, there, keep)
                wrong[behind] = between - block.forward(rows, None, step)[0]
            else:
                observe(twin, true, there, keep, takers)
        observe(block, rows, step, hook, takers)


def _added(block: Block) -> list[Linear]:
    """Return the linears whose outputs are added to the residual stream unchanged."""
    found = [] if block.attention_post_norm is not None else [block.attention.output]
    if block.feed_forward_post_norm is None and isinstance(block.feed_forward, FeedForward):
        found.append(block.feed_forward.down)
    return found


def _room(block: Block, groups: Sequence[Group]) -> float:
    """Return how many float32 numbers Hessians may take together."""
    widest = max((members[0][0].shape[1] ** 2 for _, members in groups), default=0)
    return HESSIANS * widest + sum(math.prod(linear.shape) for linear in block.linears()) / 4


def waves(groups: Sequence[Sequence[Share]], room: float, apart: bool) -> Iterator[list[Share]]:
    """Yield the shares of all groups, in order, in runs whose statistics are in memory together. Each run costs a pass
    over the block. A run takes as much as `HESSIANS` of the widest and half the block in bf16. Dense families need one
    run where Hessians are shared. `apart`: no run reaches beyond a group, and every share has two matrices."""
    wave: list[Share] = []
    for group in groups:
        for share in group:
            if wave and most([(1 + apart) * each.columns**2 for each in (*wave, share)]) > room:
                yield wave
                wave = []
            wave.append(share)
        if apart and wave:
            yield wave
            wave = []
    if wave:
        yield wave


def most(sizes: Sequence[int]) -> int:
    """Return the peak of numbers in memory while the Hessians in turn are factored, solved with and dropped."""
    return max(sum(sizes[i:]) + size for i, size in enumerate(sizes))


def twin_of(block: Block) -> Block:
    """Return a copy of the block that shares its tensors, and whose linears can be replaced independently."""
    held = [each for linear in block.linears() for each in vars(linear).values() if isinstance(each, Tensor)]
    held += [each for norm in block.norms() for each in vars(norm).values() if isinstance(each, Tensor)]
    return copy.deepcopy(block, {id(each): each for each in held})
