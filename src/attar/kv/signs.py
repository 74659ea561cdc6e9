"""One-bit keys: the signs of each key's columns after rotation, kept beside a layer's cache.

A key k at position p becomes the signs of c = k - m(p) and one scale s: c is about s * spread * sign. The mean m(p) is
that of the layer's keys before rotation, one a head and column, rotated to p. Spreads are constants of head and column.
The scale has the least squared error: sum(spread |c|) / sum(spread^2).

A ranking adds the query's product with m(p), which costs no memory. There, pairs of columns that turn by at most one
radian in 8 positions are turned to the middle of a run of 16 slots, and follow a straight line from there (`Turns`).
Models with large biases of keys need the mean before rotation: behind a constant mean after rotation the bias, which
turns with p, would take the signs. Heads of 64 columns take 10 bytes a token. Related work calls such reading
progressive quantization (SpAtten, Wang et al. 2021).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from attar.kv.schemes import RUN
from attar.kv.sparse import SparseAttention

SLOW = 1 / 8  # radians a position: pairs that turn no faster follow a straight line within a run
LANES = 32  # runs that a scan takes at once: tables have a multiple of them
WEIGHTS = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8)


@dataclass(eq=False)
class Turns:
    """Angles of rotary pairs by run of 16 slots: of F fast pairs, which come first, and of S slow ones."""

    slow_cos: Tensor  # float32 [S, runs], at slot 8 of each run
    slow_sin: Tensor
    speeds: Tensor  # float32 [S]: radians from slot to slot
    fast_cos: Tensor  # float32 [runs, F up to a multiple of 16], at slot 0
    fast_sin: Tensor
    lane_cos: Tensor  # float32 [F, 16]: from slot 0 on
    lane_sin: Tensor

    @classmethod
    def of(cls, cos: Tensor, sin: Tensor) -> Turns:
        """Return the angles of tables [positions, F + S], which have at least two positions."""
        speeds = torch.atan2(sin[1].double(), cos[1].double())
        fast = int((speeds.abs() > SLOW).nonzero().max()) + 1 if bool((speeds.abs() > SLOW).any()) else 0
        ends = -len(cos) % (RUN * LANES)
        cos, sin = (F.pad(each, (0, 0, 0, ends)).unflatten(0, (-1, RUN)) for each in (cos, sin))
        slow_cos, slow_sin = (each[:, RUN // 2, fast:].T.contiguous() for each in (cos, sin))
        fast_cos, fast_sin = (F.pad(each[:, 0, :fast], (0, -fast % RUN)).contiguous() for each in (cos, sin))
        lanes = speeds[:fast, None] * torch.arange(RUN)
        slow = speeds[fast:].float()
        return cls(slow_cos, slow_sin, slow, fast_cos, fast_sin, lanes.cos().float(), lanes.sin().float())

    @classmethod
    def none(cls, runs: int) -> Turns:
        """Return the angles of keys that do not turn, of sequences of so many runs or fewer."""
        slow, quick = torch.zeros((0, runs + -runs % LANES)), torch.zeros((runs + -runs % LANES, 0))
        return cls(slow, slow, torch.zeros(0), quick, quick, torch.zeros((0, RUN)), torch.zeros((0, RUN)))


@functools.lru_cache(maxsize=8)  # tables of a rope are the same tensors for every layer
def _turns(cos: Tensor, sin: Tensor) -> Turns:
    with torch.inference_mode(False):
        return Turns.of(cos, sin)


@dataclass(eq=False)
class Signs:
    """The one-bit keys of a layer's blocks, and the settings by which rows choose among them."""

    bits: Tensor  # uint8 [blocks, G, block / 16, ceil(D / 8), 16]: bit j of byte c is the sign of column 8 c + j
    scales: Tensor  # bfloat16 [blocks, G, block]
    means: Tensor  # float32 [G, D], of keys before rotation
    spreads: Tensor  # float32 [G, D], equal in both columns of a rotated pair
    settings: SparseAttention
    angles: tuple[Tensor, Tensor] | None = None  # cos and sin of every position, float32 [positions, R / 2] each

    @classmethod
    def zeros(
        cls,
        blocks: int,
        block: int,
        means: Tensor,
        spreads: Tensor,
        settings: SparseAttention,
        angles: tuple[Tensor, Tensor] | None = None,
    ) -> Signs:
        """Make one-bit keys of `blocks` blocks of `block` slots for heads with these means and spreads [G, D]."""
        heads, size = means.shape
        bits = torch.zeros((blocks, heads, block // RUN, -(-size // 8), RUN), dtype=torch.uint8)
        scales = torch.zeros((blocks, heads, block), dtype=torch.bfloat16)
        return cls(bits, scales, means.float().contiguous(), spreads.float().contiguous(), settings, angles)

    def means_at(self, positions: Tensor) -> Tensor:
        """Return the means rotated to positions [N]: float32 [N, G, D]."""
        if self.angles is None:
            return self.means.expand(len(positions), -1, -1)
        cos, sin = (table[positions.long()][:, None] for table in self.angles)
        half = cos.shape[-1]
        a, b, rest = self.means.split((half, half, self.means.shape[1] - 2 * half), 1)
        turned = a * cos - b * sin, b * cos + a * sin, rest.expand(len(positions), -1, -1)
        return torch.cat(turned, -1)

    @functools.cached_property
    def turns(self) -> Turns:
        """Angles of the means by run."""
        if self.angles is None:
            return Turns.none(self.scales.shape[0] * self.scales.shape[2] // RUN)
        return _turns(*self.angles)

    @functools.cached_property
    def squares(self) -> Tensor:
        """Sums of squared spreads, float64 [G]."""
        return self.spreads.double().square().sum(-1).clamp_min(1e-30)

    @functools.cached_property
    def numbers(self) -> Tensor:
        """Addresses of the arrays, and sizes, int64 [19], in the order of `Signs` in `csrc/attention.h`."""
        turns = self.turns
        arrays = (
            self.bits, self.scales, self.means, self.spreads, self.squares, turns.slow_cos, turns.slow_sin,
            turns.speeds, turns.fast_cos, turns.fast_sin, turns.lane_cos, turns.lane_sin,
        )  # fmt: skip
        assert all(each.is_contiguous() for each in arrays)
        sizes = (len(turns.speeds), len(turns.lane_cos), turns.fast_cos.shape[1], turns.slow_cos.shape[1])
        topk, share, whole = -(-self.settings.topk // RUN), self.settings.share, self.settings.whole
        return torch.tensor([*(each.data_ptr() for each in arrays), *sizes, topk, share, whole])

    def mean_products(self, q: Tensor, length: int) -> Tensor:
        """Return the products of queries [H, D] of one row with the means at positions 0 to `length`, [H, length]."""
        means, turns = self.means.repeat_interleave(len(q) // len(self.means), 0), self.turns
        fast, runs = len(turns.lane_cos), -(-length // RUN)
        pairs = fast + len(turns.speeds)
        (qa, qb, rest), (ma, mb, others) = (
            each.split((pairs, pairs, q.shape[1] - 2 * pairs), 1) for each in (q, means)
        )  # fmt: skip
        a, b = qa * ma + qb * mb, qb * ma - qa * mb
        found: Tensor = (rest * others).sum(1)[:, None, None].expand(-1, runs, RUN)
        cos, sin = turns.fast_cos[:runs, :fast], turns.fast_sin[:runs, :fast]
        here = a[:, None, :fast] * cos + b[:, None, :fast] * sin, b[:, None, :fast] * cos - a[:, None, :fast] * sin
        found = found + here[0] @ turns.lane_cos + here[1] @ turns.lane_sin
        a, b, cos, sin = a[:, fast:], b[:, fast:], turns.slow_cos[:, :runs], turns.slow_sin[:, :runs]
        slope = (b * turns.speeds) @ cos - (a * turns.speeds) @ sin
        found = found + (a @ cos + b @ sin)[..., None] + slope[..., None] * (torch.arange(RUN) - RUN // 2)
        return found.flatten(1)[:, :length]

    def write(self, k: Tensor, slots: Tensor, positions: Tensor) -> None:
        """Write the signs of rotated keys [N, G, D] at positions [N] to their slots [N].

        A key that is not finite gets a scale that is not.
        """
        block, place = slots // self.scales.shape[2], slots % self.scales.shape[2]
        centred = k.float() - self.means_at(positions)
        signs = F.pad(centred > 0, (0, -centred.shape[-1] % 8)).unflatten(-1, (-1, 8))
        packed = (signs * WEIGHTS.to(k.device)).sum(-1).to(torch.uint8)
        self.bits[block, :, place // RUN, :, place % RUN] = packed
        sums = (centred.abs().double() * self.spreads.double()).sum(-1)
        self.scales[block, :, place] = (sums / self.squares).float().bfloat16()

    def read(self, table: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Return signs, bool [S, G, D], and scales, float32 [S, G], of a sequence's first `length` slots."""
        blocks = table[: -(-length // self.scales.shape[2])].long()
        packed = self.bits[blocks].movedim((1, 4), (3, 2)).flatten(0, 2)[:length]  # [S, G, ceil(D / 8)]
        signs = (packed[..., None] & WEIGHTS.to(packed.device)) > 0
        scales = self.scales[blocks].transpose(1, 2).flatten(0, 1)[:length].float()
        return signs.flatten(-2)[..., : self.means.shape[1]], scales
