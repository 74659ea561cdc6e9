"""The passes of a recipe that move scale between a block's linears and their producers, before anything is rounded.

Each leaves the block's function unchanged, within the rounding of norms to their dtype (`fold`). Clipping is the
exception: it narrows the range of weights. The hints of the loss follow a linear's rows (`Hints.divided`, `turned`),
and the importances of columns follow its inputs (`_scaled`, `_turned_columns`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing

import torch
from torch import Tensor

from attar.compression.block.work import BlockWork
from attar.compression.calibration.hidden_states import Rows
from attar.compression.groups import Fold, folds
from attar.compression.memory import give_back
from attar.compression.recipe.methods import Awq, Clip, Pass, SmoothAttention, SmoothQuant
from attar.compression.recipe.recipe import naming
from attar.compression.solvers.pruning import zeros
from attar.compression.solvers.rounding import awq
from attar.compression.solvers.rounding.means import ColumnMean
from attar.compression.solvers.transforms import fold, smooth_attention, smoothquant
from attar.formats.scheme import Grid, Scheme
from attar.formats.weight_formats import Progressive
from attar.kernels import ops
from attar.kernels.operands import Linear, Norm
from attar.kv import schemes as kv
from attar.model.cache import ForwardBatch

SEARCH_ROWS = 4096  # rows on which AWQ compares block outputs


def run(work: BlockWork, options: Pass) -> None:
    """Apply one transform. Raises ValueError, naming the linear, where an input or a scale is not finite."""
    match options:
        case SmoothQuant():
            _smooth(work, options)
        case SmoothAttention():
            _smooth_attention(work, options)
        case Clip():
            _clip(work)
        case _:
            assert isinstance(options, Awq), "all others come last"
            _awq(work, options)


# SmoothQuant and SmoothAttention


def _smooth(work: BlockWork, options: SmoothQuant) -> None:
    places = [
        each for each in folds(work.block) if (options.norms if isinstance(each.before, Norm) else options.through)
    ]
    largest = {each.linears[-1].name: smoothquant.AbsMax(each.linears[-1].shape[1]) for each in places}
    work.watch({name: statistic.add for name, statistic in largest.items()})
    rows = work.inputs(list(largest), smoothquant.SEARCH_ROWS) if options.alpha == "search" else {}
    for each in places:
        name = each.linears[-1].name  # sees every row: in a mixture of experts it is a gate
        peaks, alpha = largest[name].value, smoothquant.alpha_for(work.architecture)
        if name in rows and any(schemes := _schemes(work, each)):
            weights = [fold.dense_weight(linear) for linear in each.linears]
            alpha, _ = smoothquant.search(rows[name], peaks, weights, schemes)
        elif options.alpha is not None and options.alpha != "search":
            alpha = options.alpha
        if isinstance(each.before, Norm):
            _scaled(work, each.linears, smoothquant.smooth(each.before, each.linears, peaks, alpha))
        else:
            _fold(work, each, smoothquant.scales(peaks, [fold.dense_weight(linear) for linear in each.linears], alpha))


def _schemes(work: BlockWork, place: Fold) -> list[Scheme | None]:
    """Return the schemes of an input group's linears that a search rounds to; weights to be pruned are not rounded
    yet."""
    return [zeros.solved_as(work.scheme(linear)) for linear in place.linears]


def _smooth_attention(work: BlockWork, options: SmoothAttention) -> None:
    attention = work.block.attention
    form, turning = attention.form, 0 if attention.rope is None else attention.rope.dims
    seen = smooth_attention.Channels(form.kv_heads, form.head_dim)
    for batch in work.hidden.batches():
        step = work.hidden.step(batch)
        x = ops.norm(work.hidden.read(batch), None, work.block.attention_norm)[1]
        heads = attention.heads(x, None if attention.rope is None else step.rotation(attention.rope))
        with naming(attention.qkv[0].name, "what comes of "):
            seen.add(*heads)
    if options.values:
        _turn_values(work, seen.values)
    if options.key_alpha is None:
        found = smooth_attention.search(seen, turning, kv.scheme("int4"))
    else:
        found = smooth_attention.scales(seen.key_max, turning, options.key_alpha)
    if attention.q_norm is not None and attention.k_norm is not None:  # a norm undoes any scale before it
        fold.into_norm(attention.q_norm, 1 / fold.into_norm(attention.k_norm, found.amax(0)))
        return
    queries = 1 / found.repeat_interleave(form.heads // form.kv_heads, 0)
    divided = [queries.flatten(), found.flatten()]
    if len(attention.qkv) == 1:
        rest = attention.qkv[0].shape[0] - sum(map(len, divided))
        divided = [torch.cat((*divided, torch.ones(rest)))]
    for linear, scales in zip(attention.qkv, divided, strict=False):
        fold.into_rows(linear, scales)
        if linear.name in work.guide:
            work.guide[linear.name] = work.guide[linear.name].divided(scales)


def _turn_values(work: BlockWork, seen: Tensor) -> None:
    """Fold a matrix between values and the output projection, given the sum of v v^T [G, D, D]."""
    attention = work.block.attention
    source, reader = attention.qkv[-1], attention.output
    turn, back = smooth_attention.between(seen, fold.dense_weight(reader))
    if reader.name in work.importances:
        work.importances[reader.name] = _turned_columns(work, reader, turn.float())
    fold.between(source, reader, turn, back)
    if source.name in work.guide:
        first = source.shape[0] - len(turn) * turn.shape[1]
        whole = torch.block_diag(torch.eye(first, dtype=back.dtype), *back).float()
        work.guide[source.name] = work.guide[source.name].turned(whole)


def _turned_columns(work: BlockWork, reader: Linear, turn: Tensor) -> Tensor:
    """Return a linear's importances once the heads x [D] of its inputs become x T, given T [G, D, D] of each group of
    heads. They are the diagonal of T^T E[x x^T] T: the diagonal of E[x x^T] was known, and its correlations are
    measured on the calibration text."""
    groups, size, _ = turn.shape
    known = work.importances[reader.name].to(turn.device)
    moments = torch.zeros(len(known) // size, size, size, dtype=torch.float64)  # a sum for each query head

    def add(x: Tensor) -> None:
        heads = x.float().unflatten(1, (-1, size)).movedim(1, 0)
        moments.add_((heads.transpose(1, 2) @ heads).double().to(moments.device))

    work.watch({reader.name: add})
    seen = moments.diagonal(dim1=1, dim2=2)  # [H, D]
    wanted = known.double().view_as(seen)
    ratio = torch.where(seen > 0, (wanted / seen).sqrt(), 0.0)
    moments = ratio[:, :, None] * moments * ratio[:, None]
    moments.diagonal(dim1=1, dim2=2).copy_(wanted)
    each = turn.double().repeat_interleave(len(moments) // groups, 0)
    return torch.einsum("hde,hdf,hfe->he", each, moments, each).clamp_min(0).flatten().float()


# AWQ


def _awq(work: BlockWork, options: Awq) -> None:
    places = folds(work.block)
    # The last reader sees every row: in a mixture of experts it is a gate.
    means = {each.linears[-1].name: ColumnMean(each.linears[-1].shape[1], power=1) for each in places}
    work.watch({name: statistic.add for name, statistic in means.items()})
    length = work.hidden.shape[1]
    rows = length * max(1, min(work.hidden.shape[0], SEARCH_ROWS // length))
    with ExitStack() as stack:
        inputs = {
            linear.name: stack.enter_context(closing(Rows(work.hidden.path.parent, rows, linear.shape[1])))
            for linear in (each.linears[-1] for each in places)
        }
        work.watch({name: store.append for name, store in inputs.items()}, rows)
        for each in places:
            name = each.linears[-1].name
            if len(inputs[name]) and any(work.scheme(linear) for linear in each.linears):
                _search(work, each, inputs[name], means[name].value, options.points)
    if options.clip:
        _clip(work)


def _search(work: BlockWork, place: Fold, inputs: Rows, mean: Tensor, points: int) -> None:
    """Find the scales of one input group of the block, given its inputs, and fold them in."""
    hidden, linears, length = work.hidden, place.linears, work.hidden.shape[1]
    size = hidden.rows_at_once
    if place.mixes:
        size = length * max(1, size // length)

    def outputs() -> Iterator[Tensor]:
        for some in inputs.batches(size):
            if place.mixes:  # rows of whole sequences, from the first on
                step = hidden.step(range(some.start // length, some.stop // length))
            else:
                step = ForwardBatch((len(some),), len(some), device=hidden.device)
            yield place.run(inputs.read(some), step)

    # The outputs of every input group are added to the residual stream.
    with closing(Rows(hidden.path.parent, len(inputs), hidden.shape[2])) as reference:
        for out in outputs():
            reference.append(out)

        def loss(weights: list[Tensor]) -> float:
            kept = [fold.dense_weight(linear) for linear in linears]
            for linear, weight in zip(linears, weights, strict=True):
                linear.weight = weight
            give_back()  # memory of making the candidates
            total = 0.0
            for some, out in zip(inputs.batches(size), outputs(), strict=True):
                total += float((out - reference.read(some)).double().square().sum())
            for linear, weight in zip(linears, kept, strict=True):
                linear.weight = weight
            return total / (len(inputs) * reference.columns)

        weights = [fold.dense_weight(linear) for linear in linears]
        found = awq.search_scales(weights, _schemes(work, place), mean, loss, points=points)
    del weights
    if found.alpha > 0:
        _fold(work, place, found.scales)
    give_back()


def _clip(work: BlockWork) -> None:
    queries_and_keys = {each.name for each in work.block.attention.qkv[:2]}
    groups = list(work.groups())
    inputs = work.inputs([name for name, _ in groups], awq.CLIP_TOKENS)
    for name, members in groups:
        for linear, scheme in members if name in inputs else ():
            if linear.name not in queries_and_keys and isinstance(scheme.weight, Grid | Progressive):
                linear.weight = awq.clip(fold.dense_weight(linear), inputs[name], scheme)


def _fold(work: BlockWork, place: Fold, scales: Tensor) -> None:
    """Divide the outputs of the group's producer by the scales and multiply its linears' columns."""
    taken = awq.apply(place.before, place.linears, scales)
    _scaled(work, place.linears, taken)
    if place.before.name in work.guide:  # the producer is a linear; its outputs are divided
        work.guide[place.before.name] = work.guide[place.before.name].divided(taken)


def _scaled(work: BlockWork, linears: Sequence[Linear], scales: Tensor) -> None:
    """Update the importances of linears' columns once their inputs are divided by scales [I]."""
    for linear in linears:
        if linear.name in work.importances:
            known = work.importances[linear.name]
            work.importances[linear.name] = known / scales.to(known.device).square()
