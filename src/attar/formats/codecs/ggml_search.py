"""Encoding into GGML blocks by search: the scales and codes that lose least, by a weighted sum of squares.

Given weights x and importances w (the second moments of a linear's inputs, say), a block's bytes should minimise sum w
(x - value)^2, where value is the result of `ggml_blocks.decode`. That is a small mixed-integer least squares problem,
and three facts solve it for every type here:

* given the scales, the best code of each weight is the nearest one;
* given the codes, the best scales are a linear least squares fit, of one unknown or two;
* a block's fp16 scales tie its groups together only through rounding their own small integers.

The encoder has two stages. The first treats each group alone. Its extreme values give a row of candidate scales,
slightly finer and coarser than the grid needs. Each is rounded, fitted and judged, and the best is polished by rounding
and fitting in turn. The second treats the whole block. The fp16 scales first make the largest group's integer the
largest possible. The integers of each group are then tried one step up and down, with codes rounded again for each, and
the fp16 scales are fitted to the choice. This repeats, and a block keeps the best result. Errors of blocks are measured
on decoded values, fp16 rounding included.

Last, each block is compared with its plain rounding from its extreme values, without a search, and the better of the
two is kept. A block that defeats the search (importances far apart, values that fp16 hardly holds) is thus never worse
than its plain rounding.

A scale and an offset are fitted to deviations from the weighted means: where all codes of a group are equal, the usual
determinant is a difference of two like numbers: rounding noise.

llama.cpp's search is similar, but fixes the integers of groups once, and derives weights of its own from the
importances and the values' size. Here the importances are used unchanged; without them all weights count alike.

Not done: choices across blocks (GPTQ's compensation), which need the Hessian.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from attar.errors import UserError
from attar.formats.codecs.ggml import IQ4_VALUES, GgmlType
from attar.formats.codecs.ggml_blocks import Blocks, pack, to_values
from attar.formats.codecs.ggml_round import CODED, checked, coded, inverse

CANDIDATES = 13  # scales tried for a group, for each end of its grid
POLISH = 2  # rounds of rounding and fitting the best again
ROUNDS = 3  # rounds of choosing a block's integers and fp16 scales
SLICE = 1 << 17  # weights at a time, so that temporaries stay in cache
LEAST = 1e-9  # least count of a group beside its block's others, to be searched like them
NOISE = 1e-5  # share of a sum of squares that rounding may leave where nothing should be
NEIGHBOURS = (1.0, 1 + 0.505 * 2**-10, 1 - 0.505 * 2**-10)  # factors of an fp16 number: itself, next, previous
MOST = torch.finfo(torch.float16).max


@dataclass(frozen=True)
class Form:
    """A type's blocks: groups of `group` weights on a grid of values, under integer scales or none. `scales` is the
    range of a group's integer, None where a block is one group under its fp16 scale alone. An affine type subtracts a
    second integer, of the same range, times a second fp16 scale (adds an fp16 offset of either sign, where a block is
    one group); its codes are never negative."""

    group: int
    values: tuple[int, ...]
    scales: tuple[int, int] | None
    affine: bool = False


def _whole(low: int, high: int) -> tuple[int, ...]:
    return tuple(range(low, high + 1))


FORMS: Mapping[str, Form] = {
    "Q4_0": Form(32, _whole(-8, 7), None),
    "Q5_0": Form(32, _whole(-16, 15), None),
    "Q4_1": Form(32, _whole(0, 15), None, affine=True),
    "Q5_1": Form(32, _whole(0, 31), None, affine=True),
    "Q8_0": Form(32, _whole(-128, 127), None),
    "IQ4_NL": Form(32, IQ4_VALUES, None),
    "IQ4_XS": Form(32, IQ4_VALUES, (-32, 31)),
    "Q3_K": Form(16, _whole(-4, 3), (-32, 31)),
    "Q6_K": Form(16, _whole(-32, 31), (-128, 127)),
    "Q2_K": Form(16, _whole(0, 3), (0, 15), affine=True),
    "Q4_K": Form(32, _whole(0, 15), (0, 63), affine=True),
    "Q5_K": Form(32, _whole(0, 31), (0, 63), affine=True),
}


def encode(kind: GgmlType, values: Tensor, importance: Tensor | None = None) -> Tensor:
    """Encode values [..., I] of any float dtype as rows of blocks, uint8 [..., bytes of a row].

    `importance` weights the squared error of each weight: not negative, of the values' shape, or [I] for all rows
    alike; None weights all alike. A group whose importances are all zero counts its weights alike. No block loses more,
    by importance, than its plain rounding would.

    Raises ValueError for a type that is not searched, for rows that are not whole blocks, for importances that are
    negative or not finite, and for a NaN, an infinity, or a weight beyond 65504, the largest of fp16, although a scale
    times its largest code would reach further.
    """
    if kind.name not in FORMS:
        raise UserError("scheme_unsupported", f"{kind.name} is not encoded by search: {', '.join(FORMS)} are")
    form, row_bytes = FORMS[kind.name], kind.row_bytes(values.shape[-1])
    weights = torch.ones((), device=values.device) if importance is None else importance.float()
    if not (weights.isfinite() & (weights >= 0)).all():
        raise ValueError("importances must be finite and not negative")
    weights = weights.expand(values.shape).reshape(-1, kind.elements)
    blocks = values.reshape(-1, kind.elements)
    raw = torch.empty((len(blocks), kind.block_bytes), dtype=torch.uint8, device=values.device)
    step = SLICE // kind.elements
    for start in range(0, len(blocks), step):
        part = slice(start, start + step)
        x = blocks[part].float().view(-1, kind.elements // form.group, form.group)
        checked(x.abs().amax((1, 2)), kind)
        w, alone, counts = _ratios(weights[part].reshape(x.shape))
        found = (_affine_blocks if form.affine else _blocks)(kind, form, x, alone, counts)
        raw[part] = pack(kind, _better(found, _plain(kind, form, x), x.flatten(1), w.flatten(1)))
    return raw.view(*values.shape[:-1], row_bytes)


def _ratios(w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return importances [N, G, group] scaled to a largest of one a block, then a group, and the counts of groups [N,
    G, 1]. Only ratios count; after scaling, sums neither overflow nor vanish. A group that counts for nothing is fitted
    nevertheless, at nearly no cost to the others."""
    tiny = torch.finfo(torch.float32).tiny
    counts = w.amax(2, keepdim=True)
    most = counts.amax(1, keepdim=True)
    w, counts = w / most.clamp(min=tiny), counts / most.clamp(min=tiny)
    if not (most > 0).all():
        w, counts = w.where(most > 0, 1.0), counts.where(most > 0, 1.0)
    alone = w
    if counts.shape[1] > 1:
        alone = w / counts.clamp(min=tiny)
        if not (counts > 0).all():
            alone = alone.where(counts > 0, 1.0)
    return w, alone, counts.clamp(min=LEAST)


class _Grid:
    """Rounding to the values of a format."""

    def __init__(self, form: Form, device: torch.device) -> None:
        values = form.values
        self.low, self.high = values[0], values[-1]
        self.step = (self.high - self.low) / (len(values) - 1)
        self.even = self.step == 1.0
        # Between whole values the midpoints are halves of whole numbers, so the nearest is a function of ceil(2 y).
        halves = torch.arange(2 * self.low, 2 * self.high + 1)
        whole = torch.tensor(values)
        self.nearest_of = whole[torch.bucketize(halves, whole[1:] + whole[:-1])].float().to(device)

    def nearest(self, y: Tensor) -> Tensor:
        """Return the value nearest to each of y, which is overwritten; a tie goes to the even or the lower value."""
        if self.even:
            return y.round_().clamp_(self.low, self.high)
        cells = y.mul_(2).ceil_().clamp_(2 * self.low, 2 * self.high).sub_(2 * self.low).to(torch.int32)
        return self.nearest_of.index_select(0, cells.flatten()).view(y.shape)


def _over(x: Tensor, scale: Tensor) -> Tensor:
    """Return x / scale, and zero where the scale is zero."""
    return x * inverse(scale)


def _half(d: Tensor, kind: GgmlType) -> Tensor:
    """Return a scale or an offset as decoded, float32. A fit beyond fp16 gets fp16's largest number."""
    return checked(d.clamp(-MOST, MOST), kind).float()


def _least(found: tuple[Tensor, ...], best: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return `found` where its error, the first of its tensors, is less than that of `best`, if there is one yet."""
    if not best:
        return found
    better = found[0] < best[0]
    places = [better[(..., *[None] * (each.ndim - better.ndim))] for each in found]
    return tuple(torch.where(*each) for each in zip(places, found, best, strict=True))


# The plain rounding of a block


def _plain(kind: GgmlType, form: Form, x: Tensor) -> Blocks:
    """Return blocks x [N, G, group] without a search. Types that `ggml_round` knows get its rounding. For the others,
    groups' scales and minimums follow from their extreme values and are rounded to integers of the largest, and codes
    are the nearest."""
    if kind.name in CODED:
        return coded(kind, x.flatten(1))
    grid = _Grid(form, x.device)
    if not form.affine:
        scale = x.gather(2, x.abs().argmax(2, keepdim=True)) / grid.low
        if form.scales is None:
            d = _half(scale, kind)
            return Blocks(_int16(grid.nearest(_over(x, d)), x), d[:, 0].half())
        bottom, limit = form.scales
        d = _half(scale.gather(1, scale.abs().argmax(1, keepdim=True)) / bottom, kind)
        integers = _over(scale, d).round_().clamp_(bottom, limit)
        codes = grid.nearest(_over(x, d * integers))
        return Blocks(_int16(codes, x), d[:, 0].half(), None, _int16(integers, integers))
    assert form.scales is not None
    limit = form.scales[1]
    low = x.amin(2, keepdim=True).clamp(max=0)
    scale = (x.amax(2, keepdim=True) - low) / grid.high
    least = low.abs()
    d, m = (_half(each.amax(1, keepdim=True) / limit, kind) for each in (scale, least))
    scales, mins = (_over(a, b).round_().clamp_(0, limit) for a, b in ((scale, d), (least, m)))
    codes = _over(x + m * mins, d * scales).round_().clamp_(0, grid.high)
    return Blocks(_int16(codes, x), d[:, 0].half(), m[:, 0].half(), _int16(scales, scales), _int16(mins, mins))


def _int16(values: Tensor, like: Tensor) -> Tensor:
    return values.expand(like.shape).flatten(1).to(torch.int16)


def _better(found: Blocks, plain: Blocks, x: Tensor, w: Tensor) -> Blocks:
    """Return the one of each two blocks that loses less, the first where they are equal."""
    missed = [to_values(each).sub_(x) for each in (found, plain)]
    ours, theirs = (each.square().mul_(w).sum(1) for each in missed)
    close = (theirs <= ours * 1.001).nonzero()[:, 0]
    if not len(close):
        return found
    # Where the sums are nearly equal, rounding could decide.
    exact = w[close].double()
    ours, theirs = (each[close].double().square_().mul_(exact).sum(1) for each in missed)
    worse = torch.zeros((len(x), 1), dtype=torch.bool, device=x.device)
    worse[close[theirs < ours]] = True

    def chosen(ours: Tensor | None, theirs: Tensor | None) -> Tensor | None:
        return None if ours is None or theirs is None else torch.where(worse, theirs, ours)

    codes, d = torch.where(worse, plain.codes, found.codes), torch.where(worse, plain.d, found.d)
    rest = ((found.m, plain.m), (found.scales, plain.scales), (found.mins, plain.mins))
    return Blocks(codes, d, *(chosen(*each) for each in rest))


# One scale a group


def _fit(x: Tensor, w: Tensor, codes: Tensor, spare: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the scale [..., 1] of codes that fits x best, and how much of sum w x^2 it explains [...]. Overwrites
    `codes`, and `spare` where it is given: allocating memory each time takes longer than the sums."""
    weighted = torch.mul(w, codes, out=spare)
    bottom = codes.mul_(weighted).sum(-1)
    top = weighted.mul_(x).sum(-1)
    scale = _over(top, bottom)
    return scale[..., None], scale * top


def _group_scales(grid: _Grid, x: Tensor, w: Tensor) -> Tensor:
    """Return the best scale of each group alone: [N, G, 1]."""
    extreme = x.gather(2, x.abs().argmax(2, keepdim=True))
    best = torch.zeros_like(extreme)
    gained = torch.full_like(extreme[..., 0], -1.0)
    spare, other = torch.empty_like(x), torch.empty_like(x)
    # Divisors of the extreme value: near the least and near the largest value.
    tries = [2.4 * i / (CANDIDATES - 1) - 1.2 for i in range(CANDIDATES)]
    ends = [end + grid.step * each for end in (grid.low, grid.high) for each in tries]
    for end in (*ends, *[None] * POLISH):
        by = inverse(best if end is None else extreme / end)
        scale, gain = _fit(x, w, grid.nearest(torch.mul(x, by, out=spare)), other)
        better = gain > gained
        best, gained = torch.where(better[..., None], scale, best), torch.where(better, gain, gained)
    return best


def _blocks(kind: GgmlType, form: Form, x: Tensor, w: Tensor, counts: Tensor) -> Blocks:
    grid = _Grid(form, x.device)
    scale = _group_scales(grid, x, w)
    if form.scales is None:
        d = checked(scale, kind)
        codes = grid.nearest(_over(x, d.float()))
        return Blocks(_int16(codes, x), d[:, 0])
    w = w * counts
    low, high = form.scales
    extreme = scale.gather(1, scale.abs().argmax(1, keepdim=True))  # [N, 1, 1]
    best: tuple[Tensor, ...] = ()
    for end in (low, low + 1, high):  # the integer of the largest scale
        d = _half(extreme / end, kind)
        integers = _over(scale, d).round_().clamp_(low, high)
        for _ in range(ROUNDS):
            integers, codes, error = _best_integers(grid, x, w, d, integers, (low, high))
            best = _least((error.sum(1), d, integers, codes), best)
            fitted, _ = _fit(x.flatten(1), w.flatten(1), (integers * codes).flatten(1))
            d = _half(fitted[..., None], kind)
    _, d, integers, codes = best
    return Blocks(_int16(codes, x), d[:, 0].half(), None, _int16(integers, integers))


def _best_integers(
    grid: _Grid, x: Tensor, w: Tensor, d: Tensor, integers: Tensor, bounds: tuple[int, int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return each group's integer, tried one step up and down, its codes, and its error [N, G]."""
    best: tuple[Tensor, ...] = ()
    for step in (0, 1, -1):
        tried = (integers + step).clamp(*bounds)
        scale = d * tried
        codes = grid.nearest(_over(x, scale))
        best = _least(((scale * codes).sub_(x).square_().mul_(w).sum(2), tried, codes), best)
    error, tried, codes = best
    return tried, codes, error


# A scale and a minimum a group


def _group_scales_and_offsets(top: int, x: Tensor, w: Tensor, signed: bool) -> tuple[Tensor, Tensor]:
    """Return the best scale and offset of each group alone: [N, G, 1]. Scales are not negative, and offsets not
    positive unless they are `signed`."""
    # All terms are in sqrt(w): a sum of squares is then a norm, and no product need be stored.
    root, total = w.sqrt(), w.sum(2, keepdim=True)
    mean = (w * x).sum(2, keepdim=True) / total
    centred = (x - mean).mul_(root)
    rest = (centred * root).sum(2, keepdim=True)  # of rounding the mean
    low, high = x.amin(2, keepdim=True), x.amax(2, keepdim=True)
    if not signed:
        low = low.clamp(max=0)
    span, above = (high - low).clamp(min=0), x - low
    # First the candidate without a fit: from the least to the largest value.
    scale, offset = span / top, low
    codes, spare = torch.empty_like(x), torch.empty_like(x)
    torch.mul(above, inverse(scale), out=codes).round_().clamp_(0, top)
    error = _square(codes.mul_(scale).sub_(above).mul_(root))
    steps = [top + 2.4 * i / (CANDIDATES - 1) - 1.2 for i in range(CANDIDATES)]
    for step in [*steps, *[0.0] * POLISH]:
        by, bottom = (inverse(span / step), low) if step else (inverse(scale), offset)
        shifted = above if step else torch.sub(x, offset, out=spare)
        # Codes less the mean's code: all are zero where all are equal, and no sum is a small difference.
        middle = ((mean - bottom) * by).round_().clamp_(0, top)
        torch.mul(shifted, by, out=codes).round_().clamp_(0, top).sub_(middle).mul_(root)
        second, first = _square(codes), torch.mul(codes, root, out=spare).sum(2, keepdim=True)
        across = torch.mul(codes, centred, out=spare).sum(2, keepdim=True)
        variance = second - first.square() / total
        variance = variance.where(variance > NOISE * second, 0.0)
        a = _over(across - first / total * rest, variance)
        b = mean - a * (middle + first / total)
        if not signed:  # where an offset would be positive: the scale that fits best without one
            products = across + middle * rest + mean * (first + middle * total)
            squares = second + middle * (2 * first + middle * total)
            a, b = torch.where(b > 0, _over(products, squares), a), b.clamp(max=0)
        left = mean - a * middle - b
        lost = _square(codes.mul_(a).sub_(centred)) + left * (2 * (rest - a * first) + left * total)
        better = lost < error
        scale, offset, error = (torch.where(better, new, old) for new, old in ((a, scale), (b, offset), (lost, error)))
    return scale, offset


def _square(y: Tensor) -> Tensor:
    """Return the sum of squares of each group [N, G, 1]."""
    norm: Tensor = torch.linalg.vector_norm(y, dim=2, keepdim=True)
    return norm.square_()


def _offset_blocks(kind: GgmlType, form: Form, x: Tensor, w: Tensor) -> Blocks:
    top = form.values[-1]
    scale, offset = _group_scales_and_offsets(top, x, w, signed=True)
    codes, spare = torch.empty_like(x), torch.empty_like(x)
    mean = (w * x).sum(2, keepdim=True) / w.sum(2, keepdim=True)
    best: tuple[Tensor, ...] = ()
    # fp16 may be coarse beside a scale. So the fp16 numbers around the offset are tried, each with its best scale, and
    # the mean too: where nearly all weight lies on one value, the sum of the two should not miss it.
    for tried in (*(offset * each for each in NEIGHBOURS), mean):
        m = _half(tried, kind)
        d, shifted = _half(scale, kind), x - m
        for last in (False, True):
            torch.mul(shifted, inverse(d), out=codes).round_().clamp_(0, top)
            error = torch.mul(codes, d, out=spare).sub_(shifted).square_().mul_(w).sum((1, 2))
            best = _least((error, d, m), best)
            if not last:
                d = _half(_fit(shifted, w, codes, spare)[0].clamp(min=0), kind)
    _, d, m = best
    codes = _over(x - m, d).round_().clamp_(0, top)
    return Blocks(_int16(codes, x), d[:, 0].half(), m[:, 0].half())


def _affine_blocks(kind: GgmlType, form: Form, x: Tensor, w: Tensor, counts: Tensor) -> Blocks:
    if form.scales is None:
        return _offset_blocks(kind, form, x, w)
    limit, top = form.scales[1], form.values[-1]
    scale, offset = _group_scales_and_offsets(top, x, w, signed=False)
    least, w = offset.abs(), w * counts
    best: tuple[Tensor, ...] = ()
    for largest, rounds in ((limit, ROUNDS), (limit - 1, 1)):  # the integer of the largest scale
        d = _half(scale.amax(1, keepdim=True) / largest, kind)
        m = _half(least.amax(1, keepdim=True) / limit, kind)
        scales, mins = (_over(a, b).round_().clamp_(0, limit) for a, b in ((scale, d), (least, m)))
        for i in range(rounds):
            scales, mins, codes, error = _best_pairs(top, limit, x, w, d, m, scales, mins)
            best = _least((error.sum(1), d, m, scales, mins, codes), best)
            if i < rounds - 1:
                by_min = mins.expand(x.shape).flatten(1)
                a, b = _block_fit(x.flatten(1), w.flatten(1), (scales * codes).flatten(1), by_min)
                d, m = _half(a[..., None], kind), _half(b[..., None], kind)
    _, d, m, scales, mins, codes = best
    integers = (_int16(each, each) for each in (scales, mins))
    return Blocks(_int16(codes, x), d[:, 0].half(), m[:, 0].half(), *integers)


def _block_fit(x: Tensor, w: Tensor, by_scale: Tensor, by_min: Tensor) -> tuple[Tensor, Tensor]:
    """Return a and b, neither negative, [N, 1], for which a * by_scale - b * by_min fits x [N, E] best."""
    ws, wm = w * by_scale, w * by_min
    ss, mm = (ws * by_scale).sum(1), (wm * by_min).sum(1)
    sx, mx = (ws * x).sum(1), (wm * x).sum(1)
    # The part of the codes that the minimums do not explain; with equal minimums, codes less their mean.
    shared, least = _over((ws * by_min).sum(1), mm), _over(mx, mm)
    own = by_scale - shared[:, None] * by_min
    weighted = w * own
    variance = (weighted * own).sum(1)
    a = _over((weighted * (x - least[:, None] * by_min)).sum(1), variance)
    b = a * shared - least
    # Where the fit of both fails: the fit of whichever alone explains more of x.
    scale, least = _over(sx, ss).clamp(min=0), (-least).clamp(min=0)
    one, other = scale * sx >= -least * mx, (variance <= NOISE * ss) | (a < 0) | (b < 0)
    a = torch.where(other, torch.where(one, scale, 0.0), a)
    b = torch.where(other, torch.where(one, 0.0, least), b)
    return a[:, None], b[:, None]


def _best_pairs(
    top: int, limit: int, x: Tensor, w: Tensor, d: Tensor, m: Tensor, scales: Tensor, mins: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return each group's two integers, tried one step up and down, its codes, and its error [N, G]."""
    best: tuple[Tensor, ...] = ()
    for along in (0, 1, -1):
        least = (mins + along).clamp(0, limit)
        shifted = x + m * least
        for up in (0, 1, -1):
            tried = (scales + up).clamp(0, limit)
            scale = d * tried
            codes = _over(shifted, scale).round_().clamp_(0, top)
            error = codes.mul_(scale).sub_(shifted).square_().mul_(w).sum(2, keepdim=True)
            best = _least((error, tried, least), best)
    error, scales, mins = best
    codes = _over(x + m * mins, d * scales).round_().clamp_(0, top)
    return scales, mins, codes, error[..., 0]
