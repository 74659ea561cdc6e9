"""Keys and values in coordinates of their own, a few bits each: the arithmetic of the schemes int4, klt4 and klt2.

A `Basis` turns a head's numbers x [D] into coordinates y = (x - mean) into, and back: x = y back + mean. Nothing but
the rounding is lost, for `into` and `back` are each other's inverse. Neither do scores want x itself:

    q . x = (q back^T) . y + q . mean

so queries are turned once and keys never back; and the last term is the same for all keys of a query, which a softmax
does not see. Values are mixed as coordinates, and the mixture is turned back: its weights add up to one.

A coordinate is a level times its token's scale. Levels are small integers (`formats/kv.py`), as many as the coordinate
has bits; a coordinate of no bits is zero. The scale is the candidate whose rounding leaves the least error, where
`weights` say what an error counts; it is rounded to bfloat16 before codes are chosen, so it is the one that is read.

Codes lie in planes: bit b of 8 coordinates of 16 slots is 16 bytes, in the order in which an int8 product wants them,
which makes a vector of codes out of one bit mask a plane:

    keys     bit 64 q + 4 slot + j    of coordinate 4 q + j of the bucket
    values   bit 32 q + 4 c + j       of coordinate c and slot 4 q + j

Legend: N rows, G key-value heads, D head size, U planes of a head's run (`KvScheme.units`).
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from attar.formats.kv import BUCKET, LEVELS, MOST_BITS, RUN, UNIT

STEPS = (0.75, 0.825, 0.9, 0.975, 1.05, 1.125, 1.2, 1.3)
"""Candidates for a scale, as shares of the root mean square."""
LAST = 127  # level


@dataclass(eq=False)
class Basis:
    """Coordinates of one layer's keys or values, of each of its heads.

    `bits` [G][D / 8] of each bucket's coordinates add up to the same for every head, and do not increase.
    """

    into: Tensor  # [G, D, D] float32
    back: Tensor  # [G, D, D]
    mean: Tensor  # [G, D]
    weights: Tensor  # [G, D]: what a squared error of a coordinate counts
    bits: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        each, device = torch.tensor(self.bits), self.into.device
        self.columns = each.repeat_interleave(BUCKET, 1).to(device)  # [G, D]
        """Bits of each coordinate."""
        held = (self.columns > 0).float()
        self.shares = held / (UNIT * held.sum(1, keepdim=True).sqrt())
        """[G, D]: the root mean square of coordinates in standard deviations is that of the sum of (share * y)^2."""
        planes = [[(bucket, b) for bucket, many in enumerate(head) for b in range(many)] for head in self.bits]
        self.planes = torch.tensor(planes, device=device).view(len(self.bits), -1, 2)
        """[G, U, 2]: the bucket and the bit of each plane."""
        self.buckets = torch.tensor(self.bits, dtype=torch.uint8)
        self.queries = self.back.transpose(1, 2).contiguous()
        """[G, D, D]: queries times this are what keys' coordinates are multiplied with."""

    def turn(self, x: Tensor) -> Tensor:
        """Numbers x [N, G, D] to coordinates."""
        return torch.einsum("ngd,gde->nge", x.float() - self.mean, self.into)

    def turn_queries(self, q: Tensor) -> Tensor:
        """Queries [N, H, D] to what keys' coordinates are multiplied with."""
        heads = q.float().unflatten(1, (self.back.shape[0], -1))
        turned: Tensor = torch.einsum("ngrd,gde->ngre", heads, self.queries)
        return turned.flatten(1, 2).to(q.dtype).contiguous()

    def turn_back(self, mixed: Tensor) -> Tensor:
        """Mixtures [N, H, D] of coordinates to mixtures of numbers."""
        heads = mixed.unflatten(1, (self.back.shape[0], -1))
        turned: Tensor = torch.einsum("ngre,ged->ngrd", heads, self.back.to(mixed.dtype))
        return (turned + self.mean[:, None].to(mixed.dtype)).flatten(1, 2)


@functools.lru_cache(maxsize=8)
def rotation(kv_heads: int, head_dim: int, units: int, device: str = "cpu") -> Basis:
    """The basis that needs no model: Hadamard's, in blocks of the largest power of two that divides the head. It makes
    of any numbers such as are near enough normal and vary alike, so all coordinates have equal bits."""
    size = head_dim & -head_dim
    turn = torch.block_diag(*[hadamard(size)] * (head_dim // size)).to(device).expand(kv_heads, -1, -1).contiguous()
    buckets = head_dim // BUCKET
    assert units % buckets == 0, "equal bits want whole ones"
    flat = torch.zeros((kv_heads, head_dim), device=device)
    return Basis(turn, turn.transpose(1, 2).contiguous(), flat, flat + 1, ((units // buckets,) * buckets,) * kv_heads)


def hadamard(size: int) -> Tensor:
    """Sylvester's orthogonal matrix [size, size], size a power of two."""
    out = torch.ones((1, 1))
    while len(out) < size:
        out = torch.cat((torch.cat((out, out), 1), torch.cat((out, -out), 1)))
    return out / math.sqrt(size)


@functools.lru_cache
def tables() -> tuple[Tensor, Tensor]:
    """Of b bits: the level of each code, int8 [b, 64]; and the code of the level nearest to each integer from -127 to
    127, uint8 [b, 255], of two the lower."""
    levels, codes = torch.zeros((MOST_BITS + 1, 1 << MOST_BITS), dtype=torch.int8), torch.zeros((MOST_BITS + 1, 255))
    for b, half in LEVELS.items():
        every = torch.tensor([*(-x for x in reversed(half)), *half])
        levels[b, : len(every)] = every
        codes[b] = torch.bucketize(2.0 * torch.arange(-LAST, LAST + 1), every[1:] + every[:-1])
    return levels, codes.to(torch.uint8)


def quantize(y: Tensor, basis: Basis) -> tuple[Tensor, Tensor]:
    """Coordinates [N, G, D] to codes uint8 [N, G, D] and scales bfloat16 [N, G].

    What is not finite makes its scale NaN.
    """
    levels, nearest = (table.to(y.device) for table in tables())
    finite = y.isfinite().all(-1)
    y = torch.where(finite[..., None], y, 0.0)
    size = (y * basis.shares).square().sum(-1).sqrt()
    best = torch.full_like(size, torch.inf)
    codes, scales = torch.zeros_like(y, dtype=torch.uint8), torch.zeros_like(size, dtype=torch.bfloat16)
    for step in STEPS:
        scale = (size * step).bfloat16()
        s = torch.where(scale == 0, 1.0, scale.float())[..., None]
        at = (y / s).clamp(-LAST, LAST).round().long() + LAST
        code = nearest[basis.columns, at]
        error = ((y - s * levels[basis.columns, code.long()]).square() * basis.weights).sum(-1)
        better = error < best
        best, scales = torch.where(better, error, best), torch.where(better, scale, scales)
        codes = torch.where(better[..., None], code, codes)
    return codes, torch.where(finite, scales, torch.nan)


def dequantize(codes: Tensor, scales: Tensor, basis: Basis) -> Tensor:
    """Codes [..., G, D] and scales [..., G] to coordinates, float32."""
    levels = tables()[0].to(codes.device)
    return levels[basis.columns, codes.long()].float() * scales.float()[..., None]


def pack(codes: Tensor, basis: Basis, values: bool) -> Tensor:
    """Codes of whole runs [M, G, 16, D] to planes uint8 [M, G, U, 16]."""
    heads = []
    for g, planes in enumerate(basis.planes):
        columns = planes[:, :1] * BUCKET + torch.arange(BUCKET, device=codes.device)  # [U, 8]
        bit = codes[:, g].int()[..., columns] >> planes[:, 1, None] & 1  # [M, 16, U, 8]
        bit = bit.movedim(2, 1)  # [M, U, 16, 8]
        # [M, U, four slots, column, slot] or [M, U, half, slot, column]
        bit = bit.unflatten(2, (4, 4)).transpose(3, 4) if values else bit.unflatten(3, (2, 4)).transpose(2, 3)
        heads.append(bit.flatten(2).unflatten(2, (2 * BUCKET, 8)))
    weights = 1 << torch.arange(8, device=codes.device)
    return (torch.stack(heads, 1) * weights).sum(-1).to(torch.uint8)


def unpack(planes: Tensor, basis: Basis, values: bool) -> Tensor:
    """Planes [M, G, U, 16] to codes uint8 [M, G, 16, D]."""
    bits = (planes[..., None].int() >> torch.arange(8, device=planes.device) & 1).flatten(-2)  # [M, G, U, 128]
    out = torch.zeros((*planes.shape[:2], RUN, basis.columns.shape[1]), dtype=torch.int32, device=planes.device)
    for g, named in enumerate(basis.planes):
        one = bits[:, g]
        if values:
            one = one.unflatten(2, (4, BUCKET, 4)).transpose(3, 4).flatten(2, 3)  # [M, U, 16, 8]
        else:
            one = one.unflatten(2, (2, RUN, 4)).transpose(2, 3).flatten(3)
        for u, (bucket, b) in enumerate(named.tolist()):
            out[:, g, :, bucket * BUCKET : (bucket + 1) * BUCKET] += one[:, u] << b
    return out.to(torch.uint8)
