"""The last pass of a recipe on one block: codes, zeros or fewer columns for every linear, and a `Record` of each.

Each method's solver is applied to the block here: which rows it sees, which linears it takes together, and what it does
with an expert that received no token. Solvers that use Hessians, like GPTQ, are in `hessians`. Those that learn on the
block's output are in `learning`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from attar.compression.block import hessians, learning, structured
from attar.compression.block.record import Record, error_on, measure_on, minded_error
from attar.compression.block.work import BlockWork
from attar.compression.memory import give_back
from attar.compression.recipe.methods import (
    AutoRound,
    Gptq,
    Hqq,
    Magnitude,
    Prune,
    Rtn,
    SparseGpt,
    SqueezeLlm,
    Structured,
    Wanda,
)
from attar.compression.recipe.recipe import naming
from attar.compression.solvers.pruning import zeros
from attar.compression.solvers.rounding import hqq, rtn, squeezellm
from attar.compression.solvers.rounding.form_levels import shared_largest
from attar.compression.solvers.rounding.means import ColumnMean
from attar.compression.solvers.transforms import fold
from attar.formats import observers
from attar.formats.observers import Observer
from attar.formats.packed import PackedTensor, codec
from attar.formats.scheme import Grid, Scheme
from attar.kernels.operands import Linear
from attar.model.layers import Block, FeedForward

ERROR_ROWS = 512  # rows on which a linear's error is reported where no Hessian is at hand


def run(work: BlockWork) -> list[Record]:
    """Round, prune or shrink as the recipe says. Raises ValueError, naming the linear, where a solver gives up."""
    options = work.recipe.rounding
    match options:
        case Structured():
            return _shrink(work, options)
        case Magnitude() | Wanda():
            return _prune(work, options)
        case AutoRound():
            return _autoround(work, options)
        case Gptq() | SparseGpt() | Prune():
            return _gptq(work, options)
        case SqueezeLlm():
            return _squeeze(work)
        case Rtn() | Hqq():
            return _rtn(work, options)


def rtn_errors(work: BlockWork) -> dict[str, float]:
    """Return the error of each linear, as it is now, under rounding to nearest, by the measure of the recipe's
    rounding. Scales are searched as that rounding searches them: unsearched scales would make it look better than it
    is."""
    groups, found = list(work.groups()), {}
    inputs = _error_rows(work, [name for name, _ in groups])
    largest = shared_largest(members for _, members in groups)
    for name, members in groups:
        for linear, scheme in members:
            with naming(linear.name):
                weight, x, hints = fold.dense_weight(linear), inputs.get(name), work.guide.get(linear.name)
                packed = _to_nearest(work, linear, scheme, largest.get(linear.name))
                if x is None or hints is None:
                    found[linear.name] = error_on(x, weight, packed)
                else:
                    found[linear.name] = minded_error(x, weight, packed, hints)
    return found


def _to_nearest(work: BlockWork, linear: Linear, scheme: Scheme, largest: Tensor | None) -> PackedTensor:
    search, importance = work.recipe.rounding.scale_search, work.importances.get(linear.name)
    return rtn.solve(fold.dense_weight(linear), scheme, scale_search=search, importance=importance, largest=largest)


def _error_rows(work: BlockWork, names: Sequence[str]) -> dict[str, Tensor]:
    """Return the inputs on which errors of the named linears are reported. A linear that reads only zeros, or an expert
    that received no token, has none and is judged by its weight."""
    return {name: x for name, x in work.inputs(names, ERROR_ROWS).items() if x.any()}


def fix_activation_scales(work: BlockWork) -> None:
    """Set the activation scales of static schemes: one for all tokens, from the range of |x| on the calibration text.
    An expert that received no token takes the largest scale of the other experts there."""
    seen: dict[str, Observer] = {}  # only groups that tokens reached
    groups = ((name, [pair for pair in members if pair[1].static]) for name, members in work.groups())
    fixed = {name: members for name, members in groups if members}

    def watcher(name: str) -> Callable[[Tensor], None]:
        form = fixed[name][0][1].activation
        grid = form if isinstance(form, Grid) else Grid()  # other forms have no grid that determines the range
        new = partial(observers.of_activations, work.recipe.activation_range, grid)
        return lambda x: (seen.get(name) or seen.setdefault(name, new())).observe(x)

    work.watch({name: watcher(name) for name in fixed})
    peaks = {name: torch.stack([end.abs() for end in each.range()]).amax(0) for name, each in seen.items()}
    for name, members in fixed.items():
        role = name.rpartition(".")[2]  # the name without the expert's index
        alike = [peak for other, peak in peaks.items() if other.rpartition(".")[2] == role]
        peak = peaks[name] if name in peaks else torch.stack(alike).amax(0)
        peak = peak.to(work.hidden.device)  # histograms return CPU tensors
        for linear, scheme in members:
            assert scheme.activation is not None
            linear.activation_scale = codec(scheme.activation.kind).fixed_scale(peak, scheme.activation)


# Codes


def _rtn(work: BlockWork, options: Rtn | Hqq) -> list[Record]:
    groups, records = list(work.groups()), []
    inputs = _error_rows(work, [name for name, _ in groups]) if work.rtn_errors else {}
    largest = shared_largest(members for _, members in groups)
    for name, members in groups:
        for linear, scheme in members:
            weight = fold.dense_weight(linear)
            with naming(linear.name):
                if isinstance(options, Hqq):
                    packed = hqq.solve(weight, scheme, steps=options.steps)
                else:
                    packed = _to_nearest(work, linear, scheme, largest.get(linear.name))
            error = plain = error_on(inputs.get(name), weight, packed)
            if linear.name in work.rtn_errors:
                plain = work.rtn_errors[linear.name]
            elif isinstance(options, Hqq):
                plain = error_on(None, weight, rtn.solve(weight, scheme, scale_search=options.scale_search))
            records.append(Record(linear.name, scheme.name, measure_on(inputs.get(name)), error, plain))
            linear.weight = packed
        give_back()
    return records


def _autoround(work: BlockWork, options: AutoRound) -> list[Record]:
    """Round all linears of the block together, by the block's output for the inputs that it will really see."""
    plain = work.rtn_errors or rtn_errors(work)
    groups, records = list(work.groups()), []
    inputs = _error_rows(work, [name for name, _ in groups])
    weights = {linear.name: fold.dense_weight(linear) for _, members in groups for linear, _ in members}
    learning.solve(work, [pair for _, members in groups for pair in members], options)
    for name, members in groups:
        for linear, scheme in members:
            assert isinstance(linear.weight, PackedTensor)
            rows = inputs.get(name)
            error = error_on(rows, weights[linear.name], linear.weight)
            records.append(Record(linear.name, scheme.name, measure_on(rows), error, plain[linear.name]))
    give_back()
    return records


def _squeeze(work: BlockWork) -> list[Record]:
    """Fit lookup tables in the metric of the original model's loss."""
    records = []
    for _, members in work.groups():
        for linear, scheme in members:
            weight, minded = fold.dense_weight(linear), work.guide[linear.name].weighed
            assert minded is not None
            with naming(linear.name):
                packed = squeezellm.solve(weight, scheme, minded)
                errors = [squeezellm.damage(weight, each, minded) for each in (packed, rtn.solve(weight, scheme))]
            records.append(Record(linear.name, scheme.name, "sensitivity", *errors))
            linear.weight = packed
        give_back()
    return records


def _gptq(work: BlockWork, options: Gptq | SparseGpt | Prune) -> list[Record]:
    records = []
    groups: list[hessians.Group] = list(work.groups() if isinstance(options, Gptq) else work.pruned())
    for each in hessians.solve(work, groups, options):
        name, error = each.linear.name, each.result.error
        plain = work.rtn_errors.get(name, each.result.rtn_error)
        records.append(Record(name, _stored_as(work, each.scheme), each.measure, error, plain))
    return records


# Zeros


def _prune(work: BlockWork, options: Magnitude | Wanda) -> list[Record]:
    """Zero weights by a score of each; kept weights do not change."""
    groups, records = list(work.pruned()), []
    squares = {name: ColumnMean(members[0][0].shape[1], power=2) for name, members in groups}
    if isinstance(options, Wanda):
        work.watch({name: statistic.add for name, statistic in squares.items()})
    for name, members in groups:
        for linear, scheme in members:
            weight, pattern, search = fold.dense_weight(linear), options.pattern, options.scale_search
            plain = zeros.solved_as(scheme)
            # An expert that received no token, or a linear that reads only zeros, has its weights alone.
            by_inputs = squares[name].tokens > 0 and bool(squares[name].value.any())
            with naming(linear.name):
                if by_inputs:
                    found = zeros.by_wanda(weight, squares[name].value, pattern, plain, search)
                else:
                    found = zeros.by_magnitude(weight, pattern, plain, search)
            measure = "output" if by_inputs else "weight"
            records.append(Record(linear.name, _stored_as(work, scheme), measure, found.error, found.rtn_error))
            linear.weight = zeros.stored_as(found.packed, scheme)
        give_back()
    return records


def _stored_as(work: BlockWork, scheme: Scheme | None) -> str:
    """Return the name of a scheme in a record."""
    pruning = work.recipe.pruning
    return "-".join([*([] if pruning is None else [pruning.sparsity]), *([] if scheme is None else [scheme.name])])


# Fewer heads and columns


def _shrink(work: BlockWork, options: Structured) -> list[Record]:
    """Remove heads, then columns of the feed-forward, chosen and repaired on the outputs of a block with fewer
    heads."""
    assert work.sizes is not None
    attention, mlp = work.block.attention, work.block.feed_forward
    assert isinstance(mlp, FeedForward), "sizes are known for dense models only"
    assert len(attention.qkv) == 3, "and for those that store q, k and v apart"
    form, new = attention.form, work.sizes
    records: list[Record] = []
    twin = hessians.twin_of(work.block) if options.correct else None
    if new.kv_heads < form.kv_heads:
        wide = form.heads // form.kv_heads * form.head_dim  # columns of o that one key-value head feeds
        runs = _shrink_one(work, attention.output, wide, new.kv_heads, options, twin, records)
        _keep_rows(attention.qkv[0], structured.columns_of(runs, wide))
        for linear in attention.qkv[1:]:
            _keep_rows(linear, structured.columns_of(runs, form.head_dim))
        attention.form = replace(form, heads=new.heads, kv_heads=new.kv_heads)
    if new.intermediate < mlp.down.shape[1]:
        runs = _shrink_one(work, mlp.down, 1, new.intermediate, options, twin, records)
        for linear in mlp.up:
            _keep_rows(linear, runs)
    return records


def _shrink_one(
    work: BlockWork,
    linear: Linear,
    width: int,
    keep: int,
    options: Structured,
    twin: Block | None,
    records: list[Record],
) -> Tensor:
    """Keep `keep` runs of `width` columns of the linear; return the indices of those kept."""
    hessian, drift = hessians.of_inputs(work, linear, twin)
    measure = "weight" if hessian.silent else "output" if twin is None else "corrected output"
    with naming(linear.name):
        found = structured.shrink(fold.dense_weight(linear), hessian, width, keep, options.damping, drift)
    records.append(Record(linear.name, f"p{options.percent}", measure, found.error, found.plain_error))
    linear.weight = found.weight
    give_back()
    return found.runs


def _keep_rows(linear: Linear, rows: Tensor) -> None:
    linear.weight = fold.dense_weight(linear)[rows]
    if linear.bias is not None:
        linear.bias = linear.bias[rows]
