"""KV cache in rotated coordinates of a few bits each: the arithmetic of the schemes int4, klt4 and klt2.

A `Basis` turns a head's numbers x [D] into coordinates y = (x - mean) into, and back: x = y back + mean. Only the
rounding loses anything, because `into` and `back` are each other's inverse. Scores do not need x itself:

    q . x = (q back^T) . y + q . mean

so queries are turned once and keys never back. The last term is the same for all keys of a query, so a softmax is
invariant to it. Values are mixed as coordinates, and the mixture is turned back: its weights add up to one.

A coordinate is a level times its token's scale. Levels are small integers (`kv/schemes.py`), as many as the coordinate
has bits; a coordinate of no bits is zero. The scale is the candidate with the least rounding error, weighted by
`weights`. Candidates are numbers that can be stored, so the tested scale is the one that is read. A scale is a
bfloat16. In a calibrated basis it is a byte, the upper half of a float16 without its sign (five bits of exponent and
three of fraction): neighbours are 6 to 12 % apart, like the candidates, and the byte saved is better spent on bits of
codes. In such a basis one coordinate can have most of a token's size, as in keys of attention sinks. It would lie
beyond all levels of a scale near the root mean square, so candidates go on there.

Codes lie by buckets of 8 coordinates and runs of 16 slots, 128 codes in the order of an int8 product:

    keys     number 64 q + 4 slot + j    coordinate 4 q + j of the bucket
    values   number 32 q + 4 c + j       coordinate c and slot 4 q + j

Their bits are cut, from the lowest, into planes of 4, 2 and 1 bits, like those of weights, so that a shift and a mask
make a vector of one. A plane of w bits takes 16 w bytes, and byte i has the bits of codes i, i + 16 w, i + 32 w and so
on, from its lowest.

Legend: N rows, G key-value heads, D head size, U bits of a run's coordinates (`KvScheme.units`), 16 bytes each.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attar.kv.schemes import BUCKET, LEVELS, MOST_BITS, RUN, UNIT

STEPS = (0.75, 0.825, 0.9, 0.975, 1.05, 1.125, 1.2, 1.3)
"""Candidates for a scale in bfloat16, as shares of the root mean square."""
BYTES = range(-3, 5)
"""Candidates for a scale of a byte, as offsets to the root mean square, which is cut to a byte. Beyond the last, larger
ones follow as long as each is better than the one before."""
DROPPED = 7  # bits of a float16 that a byte's scale lacks
INFINITE = 0x7C00 >> DROPPED  # byte; those above are NaN
LAST = 127  # level
SMALLEST = 1e-30  # smallest divisor of numbers: anything over a smaller scale is zero
WIDTHS = ((), (1,), (2,), (2, 1), (4,), (4, 1), (4, 2))  # bits of each plane, by the number of bits of a coordinate


@dataclass(eq=False)
class Basis:
    """Coordinates of one layer's keys or values, of each of its heads.

    `bits` [G][D / 8] of each bucket's coordinates add up to the same for every head, and do not increase. `back` and
    `queries` are each other's transpose and may share their memory.
    """

    into: Tensor  # [G, D, D] float32
    back: Tensor  # [G, D, D]
    mean: Tensor  # [G, D]
    weights: Tensor  # [G, D]: weight of a coordinate's squared error
    bits: tuple[tuple[int, ...], ...]
    queries: Tensor = None  # type: ignore[assignment]  # [G, D, D]: turns queries for keys' coordinates

    def __post_init__(self) -> None:
        if self.queries is None:
            self.queries = self.back.transpose(1, 2)
        each, device = torch.tensor(self.bits), self.into.device
        self.columns = each.repeat_interleave(BUCKET, 1).to(device)  # bits of each coordinate [G, D]
        held = (self.columns > 0).float()
        self.shares = held / (UNIT * held.sum(1, keepdim=True).sqrt())
        """Shares [G, D] of coordinates: sqrt(sum of (share * y)^2) is the root mean square of y in standard
        deviations."""
        self.buckets = torch.tensor(self.bits, dtype=torch.uint8)

    def of_keys(self) -> Basis:
        """Return a basis for keys: `queries` is laid out in order, and not `back`, which values need."""
        if self.queries.is_contiguous():
            return self
        queries = self.queries.contiguous()
        return replace(self, queries=queries, back=queries.transpose(1, 2))

    def turn(self, x: Tensor) -> Tensor:
        """Turn numbers x [N, G, D] into coordinates."""
        return torch.einsum("ngd,gde->nge", x.float() - self.mean, self.into)

    def turn_queries(self, q: Tensor) -> Tensor:
        """Turn queries [N, H, D] for products with keys' coordinates."""
        turned: Tensor = torch.einsum("ngrd,gde->ngre", q.float().unflatten(1, (self.back.shape[0], -1)), self.queries)
        return turned.flatten(1, 2).to(q.dtype).contiguous()

    def turn_back(self, mixed: Tensor) -> Tensor:
        """Turn mixtures [N, H, D] of coordinates into mixtures of numbers."""
        heads = mixed.unflatten(1, (self.back.shape[0], -1))
        turned: Tensor = torch.einsum("ngre,ged->ngrd", heads, self.back.to(mixed.dtype))
        return (turned + self.mean[:, None].to(mixed.dtype)).flatten(1, 2)


@functools.lru_cache(maxsize=8)
def rotation(kv_heads: int, head_dim: int, units: int, device: str = "cpu") -> Basis:
    """Return the uncalibrated basis: Hadamard's, in blocks of the largest power of two that divides the head. It makes
    any numbers nearly normal and equally varied, so all coordinates have equal bits."""
    size = head_dim & -head_dim
    turn = torch.block_diag(*[hadamard(size)] * (head_dim // size)).to(device).expand(kv_heads, -1, -1).contiguous()
    buckets = head_dim // BUCKET
    assert units % buckets == 0, "equal bits want whole ones"
    flat = torch.zeros((kv_heads, head_dim), device=device)
    return Basis(turn, turn, flat, flat + 1, ((units // buckets,) * buckets,) * kv_heads, queries=turn)  # symmetric


def hadamard(size: int) -> Tensor:
    """Return Sylvester's orthogonal matrix [size, size], size a power of two."""
    out = torch.ones((1, 1))
    while len(out) < size:
        out = torch.cat((torch.cat((out, out), 1), torch.cat((out, -out), 1)))
    return out / math.sqrt(size)


@functools.lru_cache
def tables() -> tuple[Tensor, Tensor]:
    """Return the tables of levels and codes, by the bits b of a coordinate.

    They are the level of each code, int8 [b, 64]; and the code of the level nearest to each integer from -127 to 127,
    uint8 [b, 255], a tie going to the lower.
    """
    levels, codes = torch.zeros((MOST_BITS + 1, 1 << MOST_BITS), dtype=torch.int8), torch.zeros((MOST_BITS + 1, 255))
    for b, half in LEVELS.items():
        every = torch.tensor([*(-x for x in reversed(half)), *half])
        levels[b, : len(every)] = every
        codes[b] = torch.bucketize(2.0 * torch.arange(-LAST, LAST + 1), every[1:] + every[:-1])
    return levels, codes.to(torch.uint8)


def quantize(y: Tensor, basis: Basis, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    """Quantize coordinates [N, G, D] to codes uint8 [N, G, D] and scales [N, G], bfloat16 or uint8.

    A head that is not finite gets the scale NaN, and so do numbers too large for a scale or for their errors' sum: only
    readers of that row see it.
    """
    levels, nearest = (table.to(y.device) for table in tables())
    finite = y.isfinite().all(-1)
    y = torch.where(finite[..., None], y, 0.0)
    size = (y * basis.shares).square().sum(-1).sqrt()
    best = torch.full_like(size, torch.inf)
    codes, scales = torch.zeros_like(y, dtype=torch.uint8), torch.full_like(size, torch.nan)
    better = torch.zeros_like(size, dtype=torch.bool)
    for number, scale in enumerate(_candidates(size, dtype)):
        going = better if number >= len(BYTES) else True  # past the candidates of every head
        s = torch.where(scale < SMALLEST, 1.0, scale)
        at = (y * (1 / s)[..., None]).clamp(-LAST, LAST).round().long() + LAST
        code = nearest[basis.columns, at]
        error = ((y - scale[..., None] * levels[basis.columns, code.long()]).square() * basis.weights).sum(-1)
        better = (error < best) & going
        best, scales = torch.where(better, error, best), torch.where(better, scale, scales)
        codes = torch.where(better[..., None], code, codes)
        if number >= len(BYTES) - 1 and not better.any():
            break
    scales = torch.where(finite, scales, torch.nan)
    return codes, scales.bfloat16() if dtype == torch.bfloat16 else _upper_half(scales.half())


def _candidates(size: Tensor, dtype: torch.dtype) -> Iterator[Tensor]:
    """Yield scales for numbers of a root mean square [N, G], each of which the dtype holds: float32 [N, G]."""
    if dtype == torch.bfloat16:
        yield from ((size * step).bfloat16().float() for step in STEPS)
        return
    half = size.half()
    for more in range(BYTES.start, INFINITE):
        scale = widen((_upper_half(half).int() + more).clamp(0, INFINITE).to(torch.uint8))
        yield torch.where(half.isfinite(), scale, torch.inf)  # a byte cannot reach it: no error can be best


def _upper_half(scales: Tensor) -> Tensor:
    """Cut nonnegative numbers in float16 to the bytes that `widen` reads."""
    return (scales.view(torch.int16) >> DROPPED).to(torch.uint8)


def widen(scales: Tensor) -> Tensor:
    """Convert stored scales to float32."""
    if scales.dtype == torch.uint8:
        scales = (scales.to(torch.int16) << DROPPED).view(torch.float16)
    return scales.float()


def dequantize(codes: Tensor, scales: Tensor, basis: Basis) -> Tensor:
    """Convert codes [..., G, D] and scales [..., G], bfloat16 or uint8, to coordinates, float32."""
    return tables()[0].to(codes.device)[basis.columns, codes.long()].float() * widen(scales)[..., None]


def pack(codes: Tensor, basis: Basis, values: bool) -> Tensor:
    """Pack codes of whole runs [M, G, 16, D] into planes uint8 [M, G, U, 16]."""
    heads = []
    for g, bits in enumerate(basis.bits):
        planes = []
        for bucket, many in enumerate(bits):
            own = codes[:, g, :, bucket * BUCKET : (bucket + 1) * BUCKET].int()  # [M, 16, 8]
            # [M, four slots, slot, column] to [.., column, slot], or [M, slot, half, column] to [M, half, slot, column]
            own = own.unflatten(1, (4, 4)).transpose(2, 3) if values else own.unflatten(2, (2, 4)).transpose(1, 2)
            line = own.flatten(1)
            for width in WIDTHS[many]:
                part = (line & (1 << width) - 1).unflatten(1, (8 // width, -1))
                planes.append((part << torch.arange(0, 8, width, device=codes.device)[:, None]).sum(1))
                line = line >> width
        heads.append(torch.cat(planes, 1).unflatten(1, (-1, 2 * BUCKET)))
    return torch.stack(heads, 1).to(torch.uint8)


def unpack(planes: Tensor, basis: Basis, values: bool) -> Tensor:
    """Unpack planes [M, G, U, 16] to codes uint8 [M, G, 16, D]."""
    out = torch.zeros((*planes.shape[:2], RUN, basis.columns.shape[1]), dtype=torch.int32, device=planes.device)
    for g, bits in enumerate(basis.bits):
        every, at = planes[:, g].flatten(1).int(), 0
        for bucket, many in enumerate(bits):
            line, low = torch.zeros((len(every), RUN * BUCKET), dtype=torch.int32, device=planes.device), 0
            for width in WIDTHS[many]:
                part = every[:, None, at : at + 16 * width] >> torch.arange(0, 8, width, device=planes.device)[:, None]
                line += (part & (1 << width) - 1).flatten(1) << low
                at, low = at + 16 * width, low + width
            if values:
                own = line.unflatten(1, (4, BUCKET, 4)).transpose(2, 3).flatten(1, 2)
            else:
                own = line.unflatten(1, (2, RUN, 4)).transpose(1, 2).flatten(2)
            out[:, g, :, bucket * BUCKET : (bucket + 1) * BUCKET] = own
    return out.to(torch.uint8)
