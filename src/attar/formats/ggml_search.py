"""Encoding into GGML blocks by search: the scales and codes that lose least, by a weighted sum of squares.

Given weights x and importances w (the second moments of a linear's inputs, say), a block's bytes should minimise
sum w (x - value)^2, where value is what `ggml_blocks.decode` will say. That is a small mixed-integer least squares
problem, and the same three facts solve it for every type here:

* given the scales, the best code of each weight is the nearest one;
* given the codes, the best scales are a linear least squares fit, of one unknown or two;
* a block's fp16 scales tie its groups together only through rounding their own small integers.

So the encoder goes in two stages. First each group alone: from its extreme values a row of candidates for the scale is
laid out, slightly finer and coarser than the grid needs; each is rounded, fitted and judged, and the best is polished
by rounding and fitting in turn. Then the whole block: fp16 scales that make the largest group's integer the largest
there is; the integers of each group tried one step up and down, with codes rounded anew for each; the fp16 scales
fitted to all that was chosen. Rounds of this repeat, and a block keeps the best that it has met. Errors of blocks are
measured on the values that will be read, fp16 rounding included.

llama.cpp searches in the same spirit, but settles the integers of groups once, and makes weights of its own of the
importances and of the values' size. Here the importances count as they are, and without them all weights alike.

Not done: choices across blocks (GPTQ's compensation), which belong to whoever knows the Hessian.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from attar.formats.ggml import IQ4_VALUES, GgmlType
from attar.formats.ggml_blocks import Blocks, pack
from attar.formats.ggml_round import checked

CANDIDATES = 13  # scales tried for a group, for each end of its grid
POLISH = 2  # times that the best is rounded and fitted again
ROUNDS = 3  # times that a block's integers and fp16 scales are chosen
SLICE = 1 << 17  # weights at a time: what is needed beside them stays in cache


@dataclass(frozen=True)
class Form:
    """How a type's blocks are made: groups of `group` weights on a grid of values, under integer scales or none.

    `scales` is the range of a group's integer, None where a block is one group under its fp16 scale alone. An affine
    type subtracts a second integer, of the same range, times a second fp16 scale (adds an fp16 offset, where a block is
    one group); its codes are never negative.
    """

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
    """Rows of blocks, uint8 [..., bytes of a row], of values [..., I] of any float dtype.

    `importance` is what the squared error of each weight counts: not negative, of the values' shape, or [I] for all
    rows alike; None: all count the same. Where all of a group's are zero, they are taken as equal.

    Raises ValueError for a type that is not searched, for rows that are not whole blocks, for importances that are
    negative or not finite, and for a NaN, an infinity, or a weight beyond 65504, the largest of fp16, although a scale
    times its largest code would reach further.
    """
    if kind.name not in FORMS:
        raise ValueError(f"{kind.name} is not encoded by search: {', '.join(FORMS)} are")
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
        w = weights[part].reshape(x.shape)
        # Only ratios count. Scaled to one at the most, their sums neither overflow nor vanish.
        w = w / w.amax((1, 2), keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
        w = torch.where(w.amax(2, keepdim=True) > 0, w, 1.0)
        raw[part] = pack(kind, _affine_blocks(kind, form, x, w) if form.affine else _blocks(kind, form, x, w))
    return raw.view(*values.shape[:-1], row_bytes)


class _Grid:
    """Rounding to the values of a form."""

    def __init__(self, form: Form, device: torch.device) -> None:
        values = form.values
        self.low, self.high = values[0], values[-1]
        self.step = (self.high - self.low) / (len(values) - 1)
        self.even = self.step == 1.0
        # Between whole values the middles are halves of whole numbers, so the nearest is a function of ceil(2 y).
        halves = torch.arange(2 * self.low, 2 * self.high + 1)
        whole = torch.tensor(values)
        self.nearest_of = whole[torch.bucketize(halves, whole[1:] + whole[:-1])].float().to(device)

    def nearest(self, y: Tensor) -> Tensor:
        """The value nearest to each of y, which is overwritten; of two as near, the even or the lower one."""
        if self.even:
            return y.round_().clamp_(self.low, self.high)
        cells = y.mul_(2).ceil_().clamp_(2 * self.low, 2 * self.high).sub_(2 * self.low).to(torch.int32)
        return self.nearest_of.index_select(0, cells.flatten()).view(y.shape)

    def ends(self) -> Iterator[float]:
        """What a group's extreme value may be divided by: about the least and about the largest value."""
        for end in (self.low, self.high):
            for i in range(CANDIDATES):
                yield end + self.step * (2.4 * i / (CANDIDATES - 1) - 1.2)


def _over(x: Tensor, scale: Tensor) -> Tensor:
    """x / scale, and zero where the scale is zero."""
    inverse = 1 / scale
    return x * inverse.where(inverse.isfinite(), 0.0)


def _half(d: Tensor, kind: GgmlType) -> Tensor:
    """A scale as it will be read, float32."""
    return checked(d, kind).float()


def _keep(better: Tensor, new: tuple[Tensor, ...], old: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(torch.where(better.view(-1, *([1] * (n.ndim - 1))), n, o) for n, o in zip(new, old, strict=True))


# One scale a group


def _fit(x: Tensor, w: Tensor, codes: Tensor) -> tuple[Tensor, Tensor]:
    """The scale [..., 1] of codes that fits x best, and how much of sum w x^2 it explains [...]."""
    weighted = w * codes
    top, bottom = (weighted * x).sum(-1), (weighted * codes).sum(-1)
    scale = _over(top, bottom)
    return scale[..., None], scale * top


def _group_scales(grid: _Grid, x: Tensor, w: Tensor) -> Tensor:
    """The best scale of each group alone: [N, G, 1]."""
    extreme = x.gather(2, x.abs().argmax(2, keepdim=True))
    best = torch.zeros_like(extreme)
    gained = torch.full_like(extreme[..., 0], -1.0)
    for end in grid.ends():
        scale, gain = _fit(x, w, grid.nearest(_over(x, extreme / end)))
        better = gain > gained
        best, gained = torch.where(better[..., None], scale, best), torch.where(better, gain, gained)
    for _ in range(POLISH):
        scale, gain = _fit(x, w, grid.nearest(_over(x, best)))
        better = gain > gained
        best, gained = torch.where(better[..., None], scale, best), torch.where(better, gain, gained)
    return best


def _blocks(kind: GgmlType, form: Form, x: Tensor, w: Tensor) -> Blocks:
    grid = _Grid(form, x.device)
    scale = _group_scales(grid, x, w)
    if form.scales is None:
        d = checked(scale, kind)
        codes = grid.nearest(_over(x, d.float()))
        return Blocks(codes.flatten(1).to(torch.int16), d[:, 0])
    low, high = form.scales
    extreme = scale.gather(1, scale.abs().argmax(1, keepdim=True))  # [N, 1, 1]
    best: tuple[Tensor, ...] | None = None
    for end in (low, low + 1, high):  # which integer the largest scale becomes
        d = _half(extreme / end, kind)
        integers = _over(scale, d).round_().clamp_(low, high)
        for _ in range(ROUNDS):
            integers, codes, error = _best_integers(grid, x, w, d, integers, (low, high))
            found = (error.sum(1), d, integers, codes)
            best = found if best is None else _keep(found[0] < best[0], found, best)
            fitted, _ = _fit(x.flatten(1), w.flatten(1), (integers * codes).flatten(1))
            d = _half(fitted[..., None], kind)
    assert best is not None
    _, d, integers, codes = best
    return Blocks(codes.flatten(1).to(torch.int16), d[:, 0].half(), None, integers[..., 0].to(torch.int16))


def _best_integers(
    grid: _Grid, x: Tensor, w: Tensor, d: Tensor, integers: Tensor, bounds: tuple[int, int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Each group's integer, one step up or down included, its codes, and its error [N, G]."""
    best: tuple[Tensor, ...] | None = None
    for step in (0, 1, -1):
        tried = (integers + step).clamp(*bounds)
        scale = d * tried
        codes = grid.nearest(_over(x, scale))
        error = (w * (x - scale * codes).square_()).sum(2)
        if best is None:
            best = (tried, codes, error)
        else:
            better = error < best[2]
            best = (
                torch.where(better[..., None], tried, best[0]),
                torch.where(better[..., None], codes, best[1]),
                torch.where(better, error, best[2]),
            )
    assert best is not None
    return best[0], best[1], best[2]


# A scale and a minimum a group


def _affine_fit(x: Tensor, w: Tensor, by_scale: Tensor, by_min: Tensor | float) -> tuple[Tensor, Tensor]:
    """a and b, neither negative, [..., 1], for which a * by_scale - b * by_min fits x best."""
    ws, wm = w * by_scale, w * by_min
    ss, sm, mm = (ws * by_scale).sum(-1), (ws * by_min).sum(-1), (wm * by_min).sum(-1)
    sx, mx = (ws * x).sum(-1), (wm * x).sum(-1)
    determinant = ss * mm - sm * sm
    a, b = _over(sx * mm - sm * mx, determinant), _over(sx * sm - ss * mx, determinant)
    # Where the fit of both is not one, that of either alone which explains more of x.
    scale, least = _over(sx, ss).clamp(min=0), _over(-mx, mm).clamp(min=0)
    one, other = scale * sx >= -least * mx, (determinant <= 0) | (a < 0) | (b < 0)
    a = torch.where(other, torch.where(one, scale, 0.0), a)
    b = torch.where(other, torch.where(one, 0.0, least), b)
    return a[..., None], b[..., None]


def _group_scales_and_mins(top: int, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """The best scale and minimum of each group alone, neither negative: [N, G, 1]."""
    low, high = x.amin(2, keepdim=True).clamp(max=0), x.amax(2, keepdim=True)
    best: tuple[Tensor, Tensor, Tensor] | None = None
    steps = [top + 2.4 * i / (CANDIDATES - 1) - 1.2 for i in range(CANDIDATES)]
    for step in [*steps, *[0.0] * POLISH]:
        if step or best is None:
            codes = _over(x - low, (high - low).clamp(min=0) / step)
        else:
            codes = _over(x + best[1], best[0])
        codes = codes.round_().clamp_(0, top)
        a, b = _affine_fit(x, w, codes, 1.0)
        error = (w * (x - a * codes + b).square_()).sum(2, keepdim=True)
        if best is None:
            best = (a, b, error)
        else:
            better = error < best[2]
            best = (
                torch.where(better, a, best[0]),
                torch.where(better, b, best[1]),
                torch.where(better, error, best[2]),
            )
    assert best is not None
    return best[0], best[1]


def _offset_blocks(kind: GgmlType, form: Form, x: Tensor, w: Tensor) -> Blocks:
    """Offsets are never above zero: all of a group's weights seldom are."""
    scale, least = _group_scales_and_mins(form.values[-1], x, w)
    d, m = checked(scale, kind), checked(-least, kind)
    codes = _over(x - m.float(), d.float()).round_().clamp_(0, form.values[-1])
    return Blocks(codes.flatten(1).to(torch.int16), d[:, 0], m[:, 0])


def _affine_blocks(kind: GgmlType, form: Form, x: Tensor, w: Tensor) -> Blocks:
    if form.scales is None:
        return _offset_blocks(kind, form, x, w)
    limit, top = form.scales[1], form.values[-1]
    scale, least = _group_scales_and_mins(top, x, w)
    d = _half(scale.amax(1, keepdim=True) / limit, kind)
    m = _half(least.amax(1, keepdim=True) / limit, kind)
    scales, mins = (_over(a, b).round_().clamp_(0, limit) for a, b in ((scale, d), (least, m)))
    best: tuple[Tensor, ...] | None = None
    for _ in range(ROUNDS):
        scales, mins, codes, error = _best_pairs(top, limit, x, w, d, m, scales, mins)
        found = (error.sum(1), d, m, scales, mins, codes)
        best = found if best is None else _keep(found[0] < best[0], found, best)
        by_min = mins.expand(x.shape).flatten(1)
        a, b = _affine_fit(x.flatten(1), w.flatten(1), (scales * codes).flatten(1), by_min)
        d, m = _half(a[..., None], kind), _half(b[..., None], kind)
    assert best is not None
    _, d, m, scales, mins, codes = best
    integers = (each[..., 0].to(torch.int16) for each in (scales, mins))
    return Blocks(codes.flatten(1).to(torch.int16), d[:, 0].half(), m[:, 0].half(), *integers)


def _best_pairs(
    top: int, limit: int, x: Tensor, w: Tensor, d: Tensor, m: Tensor, scales: Tensor, mins: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Each group's two integers, one step up or down included, its codes, and its error [N, G]."""
    best: tuple[Tensor, ...] | None = None
    for up, along in product((0, 1, -1), repeat=2):
        tried, least = (scales + up).clamp(0, limit), (mins + along).clamp(0, limit)
        scale, shifted = d * tried, x + m * least
        codes = _over(shifted, scale).round_().clamp_(0, top)
        error = (w * (shifted - scale * codes).square_()).sum(2)
        if best is None:
            best = (tried, least, codes, error)
        else:
            better = error < best[3]
            wide = better[..., None]
            best = (
                torch.where(wide, tried, best[0]),
                torch.where(wide, least, best[1]),
                torch.where(wide, codes, best[2]),
                torch.where(better, error, best[3]),
            )
    assert best is not None
    return best[0], best[1], best[2], best[3]
