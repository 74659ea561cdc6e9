"""SmoothAttention (Lin et al. 2024, QServe): move outliers of keys into queries, which no KV cache holds.

q . k = (q L) . (k L^-1) for any diagonal L > 0, so the outlier channels that make a key cost more bits than its other
channels are divided down, and the queries that meet them multiplied; both are folded into the projections. A cache
rounds keys after rotary embedding, which turns channels i and i + R/2 (of R that turn) into one another: L commutes
with it only where both have one number. And all query heads that read a key-value head share its L.

Statistic: of each channel of keys and of queries, after the rotation, the largest magnitude and the mean square
(`Channels`). Solve, as published:

    L_i = max|k_i|^0.5, the larger of a pair's

`search` looks further: L = rms(k)^a / rms(q)^b over powers a and b, head by head, for the least squared error of the
scores, tr(M E), given M = E[q q^T] and keys rounded as a cache of 4 bits rounds them. It matters what that is: rounding
on a grid from least to greatest suffers from every outlier, and a Hadamard rotation before it spreads them by itself,
after which an error is alike in all channels and counts for what queries make of it.

A factor common to all channels of a head changes nothing but how large the numbers are: the geometric mean of L is one.

No rotary embedding turns values, so a whole matrix may follow them: v' = v T, and T^-1 goes into the columns of o, of
all query heads that mix these values. A cache that rotates before it rounds leaves an error alike in all directions, in
proportion to |v'|^2. With C = E[v v^T] and M what an error of v costs after o, that is

    tr(T^T C T) tr(T^-1 M T^-T)    least where T T^T = C^-1/2 (C^1/2 M C^1/2)^1/2 C^-1/2

(`between`; the geometric mean of C^-1 and M, by Cauchy and Schwarz), of which T is the symmetric root. What rounding
o's inputs and its columns costs are products of the same form.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attar.errors import UserError
from attar.kv import bit_planes
from attar.kv.schemes import KvScheme

SMALLEST = 1e-5  # smallest magnitude: smaller ones are replaced by it
POWERS = (0.0, 0.25, 0.5, 0.75, 1.0)
KEYS = 1024  # keys of a head on which powers are compared
RIDGE = 1e-4  # fraction of the mean diagonal that is added to the diagonal: no direction may be free


class Channels:
    """Statistics of one layer's keys, queries and values over all rows seen: G key-value heads of D channels."""

    def __init__(self, kv_heads: int, head_dim: int) -> None:
        self.key_max = torch.zeros(kv_heads, head_dim)
        self.key_square = torch.zeros(kv_heads, head_dim, dtype=torch.float64)  # a sum
        self.moment = torch.zeros(kv_heads, head_dim, head_dim, dtype=torch.float64)  # the sum of q q^T
        self.values = torch.zeros_like(self.moment)  # the sum of v v^T
        self.rows = 0
        self.kept: list[Tensor] = []  # the first `KEYS` keys [N, G, D]

    def add(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Add queries [N, H, D], keys and values [N, G, D], rotated. Raises ValueError on a NaN or an infinity."""
        if not all(each.isfinite().all() for each in (q, k, v)):
            raise UserError("not_finite", "queries, keys or values hold a NaN or an infinity")
        room = KEYS - sum(map(len, self.kept))
        if room > 0:
            self.kept.append(k[:room].float().clone())
        self.key_max = torch.maximum(self.key_max, k.abs().amax(0).float())
        self.key_square += k.double().square().sum(0)
        heads = q.float().unflatten(1, (len(self.moment), -1)).movedim(1, 0).flatten(1, 2)  # [G, N * H / G, D]
        self.moment += (heads.transpose(1, 2) @ heads).double()
        self.values += torch.einsum("ngd,nge->gde", v.float(), v.float()).double()
        self.rows += len(k)


def scales(largest: Tensor, turning: int, alpha: float) -> Tensor:
    """Return the published L [G, D] from max|k| [G, D], of which the first `turning` channels turn in pairs (i, i +
    half)."""
    return _centred(tied(largest.float(), turning).clamp(min=SMALLEST) ** alpha)


def search(seen: Channels, turning: int, scheme: KvScheme) -> Tensor:
    """Return the best L [G, D] found for keys in a KV cache of `scheme`, which has planes in a rotation."""
    heads, size = seen.key_max.shape
    basis = bit_planes.rotation(heads, size, scheme.units(size))
    keys = torch.cat(seen.kept)
    key_size = tied((seen.key_square / seen.rows).sqrt().float(), turning).clamp(min=SMALLEST)
    query_size = (seen.moment.diagonal(dim1=1, dim2=2) / seen.rows).sqrt().float()
    query_size = tied(query_size, turning).clamp(min=SMALLEST)
    best, least = torch.ones(heads, size), torch.full((heads,), torch.inf, dtype=torch.float64)
    for a in POWERS:
        for b in POWERS:
            found = _centred(key_size**a / query_size**b)
            y = basis.turn(keys / found)
            lost = bit_planes.dequantize(*bit_planes.quantize(y, basis), basis) - y
            wrong = (torch.einsum("nge,ged->ngd", lost, basis.back) * found).double()  # with the keys
            error = torch.einsum("ngd,gde,nge->g", wrong, seen.moment, wrong)
            better = error < least
            least, best = torch.where(better, error, least), torch.where(better[:, None], found, best)
    return best


def between(values: Tensor, output: Tensor) -> tuple[Tensor, Tensor]:
    """Return T and T^-1, both [G, D, D] float64, from the sum of v v^T [G, D, D] and the output projection [O, H *
    D]."""
    groups, size, _ = values.shape
    heads = output.double().view(len(output), groups, -1, size)  # [O, G, H / G, D]
    metric = torch.einsum("ogrd,ogre->gde", heads, heads)
    one = torch.eye(size, dtype=torch.float64)
    found = []
    for c, m in zip(values.double(), metric, strict=True):
        if not (c.trace() > 0 and m.trace() > 0):  # this head contributes nothing
            found.append(one)
            continue
        c, m = (each / each.trace() * size + RIDGE * one for each in (c, m))
        root = _power(c, 0.5)
        back = _power(c, -0.5)
        found.append(_power(back @ _power(root @ m @ root, 0.5) @ back, 0.5))
    turn = torch.stack(found)
    return turn, torch.linalg.inv(turn)


def _power(x: Tensor, power: float) -> Tensor:
    """Return a power of a symmetric matrix without negative eigenvalues."""
    values, axes = torch.linalg.eigh((x + x.T) / 2)
    found: Tensor = (axes * values.clamp(min=float(values[-1]) * 1e-12) ** power) @ axes.T
    return found


def tied(x: Tensor, turning: int) -> Tensor:
    """Return numbers of channels [G, D], with the larger one of each rotary pair for both."""
    pair = torch.maximum(*x[:, :turning].chunk(2, -1)) if turning else x[:, :0]
    return torch.cat((pair, pair, x[:, turning:]), -1)


def _centred(x: Tensor) -> Tensor:
    return x / x.log().mean(-1, keepdim=True).exp()
