"""What a recipe does to one block: capture inputs, transform, round. The solvers know tensors; this file knows blocks.

Two ways to group a block's linears matter, and they differ only in mixtures of experts:

* `input_groups`: linears that read the very same rows. They share a Hessian and an activation scale.
* `folds`: a producer (norm or linear) and everything that reads its output. A scale divided out of the producer must be
  multiplied into all of them: with experts, that is every expert, the shared one, and both gates.

Every linear ends with a `Record` of what rounding did to it: the relative squared error of its output on calibration
rows (of its weight, where the recipe reads no calibration data), beside what plain rounding would have done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from attar.compression import fold, hessians, learning, structured
from attar.compression.calibrate import HiddenStates, Rows
from attar.compression.guide import Hints
from attar.compression.hessians import naming
from attar.compression.memory import give_back
from attar.compression.methods import (
    AutoRound,
    Awq,
    Clip,
    Gptq,
    Hqq,
    Magnitude,
    Prune,
    Rtn,
    SmoothAttention,
    SmoothQuant,
    SparseGpt,
    SqueezeLlm,
    Structured,
    Wanda,
)
from attar.compression.recipe import Recipe
from attar.compression.solvers import awq, hqq, rtn, smooth_attention, smoothquant, squeezellm, zeros
from attar.compression.solvers.form_levels import shared_largest
from attar.compression.solvers.means import ColumnMean
from attar.compression.structured import Sizes
from attar.formats import kv, observers
from attar.formats.forms import Progressive
from attar.formats.observers import Observer
from attar.formats.packed import PackedTensor, codec
from attar.formats.packing import row_slices
from attar.formats.scheme import Grid, Scheme
from attar.kernels import ops
from attar.kernels.operands import Linear, Norm
from attar.model.cache import Step
from attar.model.layers import Block, FeedForward, MixtureOfExperts

SEARCH_ROWS = 4096  # rows on which AWQ compares block outputs
ERROR_ROWS = 512  # rows on which a linear's error is reported where no Hessian is at hand


@dataclass(frozen=True)
class Record:
    """The relative squared error of one linear: as stored, and had it been rounded to nearest."""

    name: str
    scheme: str
    measure: str  # "output" on calibration rows, "weight", or "sensitivity": each weight as the loss minds it
    error: float
    rtn_error: float


@dataclass(frozen=True)
class Fold:
    """A producer, all its readers, and the part of the block whose output shows what rounding the readers costs."""

    before: Norm | Linear
    linears: tuple[Linear, ...]
    run: Callable[[Tensor, Step], Tensor]
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
    if len(attention.qkv) == 3 and awq.foldable(attention.qkv[2], attention.output):
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


class BlockWork:
    """One block on its way through a recipe. `run` leaves its linears packed and its norms folded."""

    def __init__(
        self,
        block: Block,
        hidden: HiddenStates | None,
        recipe: Recipe,
        schemes: Mapping[str, Scheme | None],
        architecture: str,
        importances: Mapping[str, Tensor] | None = None,
        guide: Mapping[str, Hints] | None = None,
        original: HiddenStates | None = None,
        sizes: Sizes | None = None,
    ) -> None:
        self.block, self.recipe, self.architecture = block, recipe, architecture
        self._importances = importances or {}
        self._guide, self._original = dict(guide or {}), original
        self._sizes = sizes
        self._hidden, self._schemes = hidden, schemes
        self._rtn_errors: dict[str, float] = {}

    def run(self) -> list[Record]:
        """Run the recipe. Raises ValueError naming the linear where a value is not finite or a solver gives up."""
        compressed = [pair for _, members in self._groups() for pair in members]
        pruned = [linear for _, members in self._pruned() for linear, _ in members]
        for linear in pruned or [linear for linear, _ in compressed]:
            weight = fold.dense_weight(linear)
            if not all(weight[rows].isfinite().all() for rows in row_slices(*linear.shape)):
                raise ValueError(f"{linear.name}.weight holds a NaN or an infinity")
        transforms = self.recipe.passes[:-1]
        if transforms:
            self._remember_rtn()
        for each in transforms:
            if isinstance(each, SmoothQuant):
                self._smooth(each)
            elif isinstance(each, SmoothAttention):
                self._smooth_attention(each)
            elif isinstance(each, Clip):
                self._clip()
            elif isinstance(each, Awq):
                self._awq(each)
        if any(scheme.static for _, scheme in compressed):
            self._fix_activation_scales()
        rounding = self.recipe.rounding
        if isinstance(rounding, Structured):
            return self._shrink(rounding)
        if isinstance(rounding, Magnitude | Wanda):
            return self._prune(rounding)
        if isinstance(rounding, AutoRound):
            return self._autoround(rounding)
        if isinstance(rounding, Gptq | SparseGpt | Prune):
            return self._gptq(rounding)
        if isinstance(rounding, SqueezeLlm):
            return self._squeeze()
        return self._rtn(rounding)

    # --- inputs -------------------------------------------------------------------------------------------------------

    def _scheme(self, linear: Linear) -> Scheme | None:
        return self._schemes.get(linear.name)

    def _groups(self) -> Iterator[tuple[str, list[tuple[Linear, Scheme]]]]:
        """The linears to compress with their schemes, by input group, under the name of the group's first linear."""
        for group in input_groups(self.block):
            members = [(each, scheme) for each in group if (scheme := self._scheme(each)) is not None]
            if members:
                yield group[0].name, members

    def _pruned(self) -> Iterator[tuple[str, list[tuple[Linear, Scheme | None]]]]:
        """As `_groups`, the linears to prune; those without a scheme stay dense."""
        for group in input_groups(self.block):
            members = [(each, self._scheme(each)) for each in group if self.recipe.pattern_for(each.name) is not None]
            if members:
                yield group[0].name, members

    def _watch(self, watchers: Mapping[str, Callable[[Tensor], None]], rows: int | None = None) -> None:
        """Run the block over the calibration states, or their first `rows`; each watcher sees its linear's inputs."""
        assert self._hidden is not None, "recipes that read inputs are given calibration data"

        def tap(linear: Linear, x: Tensor) -> None:
            if linear.name in watchers:
                try:
                    watchers[linear.name](x)
                except ValueError as error:
                    raise ValueError(f"the input of {linear.name}: {error}") from None

        seen = 0
        for batch in self._hidden.batches():
            self.block.run(self._hidden.read(batch), self._hidden.step(batch), tap)
            seen += len(batch) * self._hidden.shape[1]
            if rows is not None and seen >= rows:
                return

    def _inputs(self, names: Sequence[str], rows: int) -> dict[str, Tensor]:
        """The first `rows` input rows of each named linear, [<= rows, I]; of an expert that no token was sent to, none:
        it is left out here, and counted in `coverage`."""
        kept: dict[str, list[Tensor]] = {name: [] for name in names}

        def keep(pieces: list[Tensor]) -> Callable[[Tensor], None]:
            return lambda x: pieces.append(x[: rows - sum(map(len, pieces))].clone())

        self._watch({name: keep(pieces) for name, pieces in kept.items()}, rows)
        return {name: torch.cat(pieces) for name, pieces in kept.items() if pieces}

    # --- transforms ---------------------------------------------------------------------------------------------------

    def _smooth(self, options: SmoothQuant) -> None:
        alpha = smoothquant.alpha_for(self.architecture) if options.alpha is None else options.alpha
        places = [
            each for each in folds(self.block) if (options.norms if isinstance(each.before, Norm) else options.through)
        ]
        largest = {each.linears[-1].name: smoothquant.AbsMax(each.linears[-1].shape[1]) for each in places}
        self._watch({name: statistic.add for name, statistic in largest.items()})
        for each in places:
            peaks = largest[each.linears[-1].name].value
            if isinstance(each.before, Norm):
                smoothquant.smooth(each.before, each.linears, peaks, alpha)
            else:
                found = smoothquant.scales(peaks, [fold.dense_weight(linear) for linear in each.linears], alpha)
                self._fold(each, found)

    def _smooth_attention(self, options: SmoothAttention) -> None:
        assert self._hidden is not None
        attention = self.block.attention
        form, turning = attention.form, 0 if attention.rope is None else attention.rope.dims
        seen = smooth_attention.Channels(form.kv_heads, form.head_dim)
        for batch in self._hidden.batches():
            step = self._hidden.step(batch)
            x = ops.norm(self._hidden.read(batch), None, self.block.attention_norm)[1]
            heads = attention.heads(x, None if attention.rope is None else step.rotation(attention.rope))
            with naming(attention.qkv[0], "what comes of "):
                seen.add(*heads)
        if options.values:
            self._turn_values(seen.values)
        if options.key_alpha is None:
            found = smooth_attention.search(seen, turning, kv.scheme("int4"))
        else:
            found = smooth_attention.scales(seen.key_max, turning, options.key_alpha)
        if attention.q_norm is not None and attention.k_norm is not None:  # which undo what comes before
            taken = fold.into_norm(attention.k_norm, found.amax(0))
            fold.into_norm(attention.q_norm, 1 / taken)
            return
        queries = 1 / found.repeat_interleave(form.heads // form.kv_heads, 0)
        divided = [queries.flatten(), found.flatten()]
        if len(attention.qkv) == 1:
            rest = attention.qkv[0].shape[0] - sum(map(len, divided))
            divided = [torch.cat((*divided, torch.ones(rest)))]
        for linear, scales in zip(attention.qkv, divided, strict=False):
            fold.into_rows(linear, scales)
            if linear.name in self._guide:
                self._guide[linear.name] = self._guide[linear.name].divided(scales)

    def _turn_values(self, seen: Tensor) -> None:
        """Put a matrix between values and the output matrix, given the sum of v v^T [G, D, D]."""
        attention = self.block.attention
        source, reader = attention.qkv[-1], attention.output
        turn, back = smooth_attention.between(seen, fold.dense_weight(reader))
        fold.between(source, reader, turn, back)
        if source.name in self._guide:
            first = source.shape[0] - len(turn) * turn.shape[1]
            whole = torch.block_diag(torch.eye(first, dtype=back.dtype), *back).float()
            self._guide[source.name] = self._guide[source.name].turned(whole)

    def _awq(self, options: Awq) -> None:
        assert self._hidden is not None
        places = folds(self.block)
        # The last reader sees every row: in a mixture of experts it is a gate.
        means = {each.linears[-1].name: ColumnMean(each.linears[-1].shape[1], power=1) for each in places}
        self._watch({name: statistic.add for name, statistic in means.items()})
        length = self._hidden.shape[1]
        rows = length * max(1, min(self._hidden.shape[0], SEARCH_ROWS // length))
        with ExitStack() as stack:
            inputs = {
                linear.name: stack.enter_context(closing(Rows(self._hidden.path.parent, rows, linear.shape[1])))
                for linear in (each.linears[-1] for each in places)
            }
            self._watch({name: store.append for name, store in inputs.items()}, rows)
            for each in places:
                name = each.linears[-1].name
                if len(inputs[name]) and any(self._scheme(linear) for linear in each.linears):
                    self._search(each, inputs[name], means[name].value, options.points)
        if options.clip:
            self._clip()

    def _search(self, place: Fold, inputs: Rows, mean: Tensor, points: int) -> None:
        """Find the scales of one place of the block, given its inputs, and fold them in."""
        assert self._hidden is not None
        linears, length = place.linears, self._hidden.shape[1]
        size, device = self._hidden.rows_at_once, self._hidden.device
        if place.mixes:
            size = length * max(1, size // length)

        def outputs() -> Iterator[Tensor]:
            for some in inputs.batches(size):
                lengths = (length,) * (len(some) // length) if place.mixes else (len(some),)
                step = Step(lengths, max(lengths), device=device)
                yield place.run(inputs.read(some), step)

        # Whatever the place is, its outputs are added to the residual stream.
        with closing(Rows(self._hidden.path.parent, len(inputs), self._hidden.shape[2])) as reference:
            for out in outputs():
                reference.append(out)

            def loss(weights: list[Tensor]) -> float:
                kept = [fold.dense_weight(linear) for linear in linears]
                for linear, weight in zip(linears, weights, strict=True):
                    linear.weight = weight
                give_back()  # what making the candidates took
                total = 0.0
                for some, out in zip(inputs.batches(size), outputs(), strict=True):
                    total += float((out - reference.read(some)).double().square().sum())
                for linear, weight in zip(linears, kept, strict=True):
                    linear.weight = weight
                return total / (len(inputs) * reference.columns)

            weights = [fold.dense_weight(linear) for linear in linears]
            found = awq.search_scales(weights, [self._scheme(each) for each in linears], mean, loss, points=points)
        del weights
        if found.alpha > 0:
            self._fold(place, found.scales)
        give_back()

    def _fold(self, place: Fold, scales: Tensor) -> None:
        """Divide what feeds the place by the scales and multiply its linears' columns."""
        taken = awq.apply(place.before, place.linears, scales)
        if place.before.name in self._guide:  # a linear, whose outputs are divided
            self._guide[place.before.name] = self._guide[place.before.name].divided(taken)

    def _clip(self) -> None:
        queries_and_keys = {each.name for each in self.block.attention.qkv[:2]}
        groups = list(self._groups())
        inputs = self._inputs([name for name, _ in groups], awq.CLIP_TOKENS)
        for name, members in groups:
            for linear, scheme in members if name in inputs else ():
                if linear.name not in queries_and_keys and isinstance(scheme.weight, Grid | Progressive):
                    linear.weight = awq.clip(fold.dense_weight(linear), inputs[name], scheme)

    def _fix_activation_scales(self) -> None:
        """Static schemes: one scale for all tokens, from the range of |x| that calibration saw. An expert that no token
        was sent to takes the largest that any other has there."""
        seen: dict[str, Observer] = {}  # of the groups that tokens reached
        groups = ((name, [pair for pair in members if pair[1].static]) for name, members in self._groups())
        fixed = {name: members for name, members in groups if members}

        def watcher(name: str) -> Callable[[Tensor], None]:
            form = fixed[name][0][1].activation
            grid = form if isinstance(form, Grid) else Grid()  # of others no grid decides about the range
            new = partial(observers.of_activations, self.recipe.activation_range, grid)
            return lambda x: (seen.get(name) or seen.setdefault(name, new())).observe(x)

        self._watch({name: watcher(name) for name in fixed})
        peaks = {name: torch.stack([end.abs() for end in each.range()]).amax(0) for name, each in seen.items()}
        for name, members in fixed.items():
            alike = [peak for other, peak in peaks.items() if _role(other) == _role(name)]
            peak = peaks[name] if name in peaks else torch.stack(alike).amax(0)
            assert self._hidden is not None, "it was watched"
            peak = peak.to(self._hidden.device)  # histograms answer in ordinary memory
            for linear, scheme in members:
                assert scheme.activation is not None
                linear.activation_scale = codec(scheme.activation.kind).fixed_scale(peak, scheme.activation)

    # --- rounding -----------------------------------------------------------------------------------------------------

    def _remember_rtn(self) -> None:
        groups = list(self._groups())
        inputs = self._inputs([name for name, _ in groups], ERROR_ROWS)
        for name, members in groups:
            for linear, scheme in members:
                with naming(linear):
                    weight = fold.dense_weight(linear)
                    self._rtn_errors[linear.name] = _error(inputs.get(name), weight, rtn.solve(weight, scheme))

    def _rtn(self, options: Rtn | Hqq) -> list[Record]:
        groups, records = list(self._groups()), []
        inputs = self._inputs([name for name, _ in groups], ERROR_ROWS) if self._rtn_errors else {}
        largest = shared_largest(members for _, members in groups)
        for name, members in groups:
            for linear, scheme in members:
                weight = fold.dense_weight(linear)
                with naming(linear):
                    if isinstance(options, Hqq):
                        packed = hqq.solve(weight, scheme, steps=options.steps)
                    else:
                        importance = self._importances.get(linear.name)
                        packed = rtn.solve(
                            weight,
                            scheme,
                            scale_search=options.scale_search,
                            importance=importance,
                            largest=largest.get(linear.name),
                        )
                error = plain = _error(inputs.get(name), weight, packed)
                if linear.name in self._rtn_errors:
                    plain = self._rtn_errors[linear.name]
                elif isinstance(options, Hqq):
                    plain = weight_error(weight, rtn.solve(weight, scheme))
                records.append(Record(linear.name, scheme.name, _measure(inputs.get(name)), error, plain))
                linear.weight = packed
            give_back()
        return records

    def _autoround(self, options: AutoRound) -> list[Record]:
        """All linears of the block together, on the block's output for the inputs that it will really see."""
        assert self._hidden is not None
        if not self._rtn_errors:
            self._remember_rtn()
        groups, records = list(self._groups()), []
        inputs = self._inputs([name for name, _ in groups], ERROR_ROWS)
        weights = {linear.name: fold.dense_weight(linear) for _, members in groups for linear, _ in members}
        pairs = [pair for _, members in groups for pair in members]
        learning.solve(self.block, pairs, self._hidden, options, self._original)
        for name, members in groups:
            for linear, scheme in members:
                assert isinstance(linear.weight, PackedTensor)
                rows, plain = inputs.get(name), self._rtn_errors[linear.name]
                error = _error(rows, weights[linear.name], linear.weight)
                records.append(Record(linear.name, scheme.name, _measure(rows), error, plain))
        give_back()
        return records

    def _squeeze(self) -> list[Record]:
        """Tables in the metric of the original model's loss."""
        records = []
        for _, members in self._groups():
            for linear, scheme in members:
                weight, minded = fold.dense_weight(linear), self._guide[linear.name].weighed
                assert minded is not None
                with naming(linear):
                    packed = squeezellm.solve(weight, scheme, minded)
                    errors = [squeezellm.damage(weight, each, minded) for each in (packed, rtn.solve(weight, scheme))]
                records.append(Record(linear.name, scheme.name, "sensitivity", *errors))
                linear.weight = packed
            give_back()
        return records

    def _gptq(self, options: Gptq | SparseGpt | Prune) -> list[Record]:
        assert self._hidden is not None
        records = []
        groups: list[hessians.Group] = list(self._groups() if isinstance(options, Gptq) else self._pruned())
        for each in hessians.solve(self.block, groups, self._hidden, options, self._guide, self._original):
            rtn_error = self._rtn_errors.get(each.linear.name, each.result.rtn_error)
            stored = self._stored_as(each.scheme)
            records.append(Record(each.linear.name, stored, each.measure, each.result.error, rtn_error))
        return records

    def _prune(self, options: Magnitude | Wanda) -> list[Record]:
        """Zeros by a score of each weight, what is kept being as it was."""
        groups, records = list(self._pruned()), []
        squares = {name: ColumnMean(members[0][0].shape[1], power=2) for name, members in groups}
        if isinstance(options, Wanda):
            self._watch({name: statistic.add for name, statistic in squares.items()})
        for name, members in groups:
            for linear, scheme in members:
                weight, pattern, search = fold.dense_weight(linear), options.pattern, options.scale_search
                plain = zeros.solved_as(scheme)
                by_inputs = squares[name].tokens > 0  # an expert that no token was sent to has its weights alone
                with naming(linear):
                    if by_inputs:
                        found = zeros.by_wanda(weight, squares[name].value, pattern, plain, search)
                    else:
                        found = zeros.by_magnitude(weight, pattern, plain, search)
                measure = "output" if by_inputs else "weight"
                records.append(Record(linear.name, self._stored_as(scheme), measure, found.error, found.rtn_error))
                linear.weight = zeros.stored_as(found.packed, scheme)
            give_back()
        return records

    def _stored_as(self, scheme: Scheme | None) -> str:
        """What a record calls it."""
        sparsity = [] if self.recipe.pruning is None else [self.recipe.pruning.sparsity]
        return "-".join([*sparsity, *([] if scheme is None else [scheme.name])])

    def _shrink(self, options: Structured) -> list[Record]:
        """Fewer heads, then a narrower feed-forward, chosen and repaired on what a block with fewer heads shows it."""
        assert self._sizes is not None
        attention, mlp = self.block.attention, self.block.feed_forward
        assert isinstance(mlp, FeedForward), "sizes are known for dense models only"
        assert len(attention.qkv) == 3, "and for those that store q, k and v apart"
        form, new = attention.form, self._sizes
        records: list[Record] = []
        twin = hessians.twin_of(self.block) if options.correct else None
        if new.kv_heads < form.kv_heads:
            wide = form.heads // form.kv_heads * form.head_dim  # columns of o that one key-value head feeds
            runs = self._shrink_one(attention.output, wide, new.kv_heads, options, twin, records)
            _keep_rows(attention.qkv[0], structured.columns_of(runs, wide))
            for linear in attention.qkv[1:]:
                _keep_rows(linear, structured.columns_of(runs, form.head_dim))
            attention.form = replace(form, heads=new.heads, kv_heads=new.kv_heads)
        if new.intermediate < mlp.down.shape[1]:
            runs = self._shrink_one(mlp.down, 1, new.intermediate, options, twin, records)
            for linear in mlp.up:
                _keep_rows(linear, runs)
        return records

    def _shrink_one(
        self, linear: Linear, width: int, keep: int, options: Structured, twin: Block | None, records: list[Record]
    ) -> Tensor:
        """Leave the linear `keep` runs of `width` of its columns; returns which."""
        assert self._hidden is not None
        hessian, drift = hessians.of_inputs(self.block, linear, self._hidden, twin, self._original)
        with naming(linear):
            found = structured.shrink(fold.dense_weight(linear), hessian, width, keep, options.damping, drift)
        measure = "output" if twin is None else "corrected output"
        records.append(Record(linear.name, f"p{options.percent}", measure, found.error, found.plain_error))
        linear.weight = found.weight
        give_back()
        return found.runs


def _keep_rows(linear: Linear, rows: Tensor) -> None:
    linear.weight = fold.dense_weight(linear)[rows]
    if linear.bias is not None:
        linear.bias = linear.bias[rows]


def _role(name: str) -> str:
    """What a linear is called whichever expert it belongs to."""
    return name.rpartition(".")[2]


def _measure(x: Tensor | None) -> str:
    """What `_error` measures."""
    return "weight" if x is None else "output"


def _error(x: Tensor | None, weight: Tensor, packed: PackedTensor) -> float:
    """Of the output on rows x [N, I], or, where there are none, of the weight."""
    return weight_error(weight, packed) if x is None else output_error(x, weight, packed)


def output_error(x: Tensor, weight: Tensor, packed: PackedTensor) -> float:
    """|x (W' - W)^T|^2 / |x W^T|^2 of rows x [N, I]."""
    return _relative(lambda part: x @ part.T, weight, packed)


def weight_error(weight: Tensor, packed: PackedTensor) -> float:
    """|W' - W|^2 / |W|^2."""
    return _relative(lambda part: part, weight, packed)


def _relative(see: Callable[[Tensor], Tensor], weight: Tensor, packed: PackedTensor) -> float:
    wrong = whole = 0.0
    for rows in row_slices(*weight.shape):
        part = weight[rows].float()
        whole += float(see(part).double().square().sum())
        wrong += float(see(packed.dequantize(rows=rows) - part).double().square().sum())
    return wrong / whole if whole else 0.0
