"""Keys and values of the sequences in flight, and the `Step` that says which rows of a call belong to whom.

The cache is contiguous per sequence and layer, in the compute dtype, sized once. Keys are stored rotated, with their
positions beside them as data: a paged or an evicting cache changes what is stored here and nothing in the decoder.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from attar.model.config import ModelConfig, Rope
from attar.model.rope import rotation


class KVCache:
    """Room for `batch` sequences of up to `capacity` positions each."""

    def __init__(
        self,
        config: ModelConfig,
        capacity: int,
        batch: int = 1,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
    ) -> None:
        shape = (batch, capacity, config.kv_heads, config.head_dim)
        self.capacity = capacity
        self.keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.layers)]
        self.values = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.layers)]
        self.positions = torch.arange(capacity, device=device)
        self.filled = [0] * batch

    def advance(self, lengths: tuple[int, ...]) -> None:
        """Count the rows of a finished step as part of their sequences."""
        self.filled = [filled + n for filled, n in zip(self.filled, lengths, strict=True)]

    def truncate(self, sequence: int, length: int) -> None:
        """Forget everything of `sequence` past `length` positions."""
        assert 0 <= length <= self.filled[sequence]
        self.filled[sequence] = length


@dataclass(frozen=True)
class Step:
    """The rows of one call: `lengths[s]` rows of sequence s, one sequence after another, in order of position.

    Without a cache every sequence starts at position 0 and its keys are its own rows; with one, each continues where
    the cache is filled to, and a sequence that sits this step out has length 0. `horizon` is the longest length that
    each sequence will reach, or one number that holds for all; it fixes the rotary angles (`rope.py`).

    Raises ValueError where the cache is too small.
    """

    lengths: tuple[int, ...]
    horizon: int | tuple[int, ...]
    cache: KVCache | None = None
    starts: tuple[int, ...] = field(init=False)
    positions: Tensor = field(init=False)  # [N]
    _rotations: dict[Rope, tuple[Tensor, Tensor]] = field(init=False, default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        starts = (0,) * len(self.lengths) if self.cache is None else tuple(self.cache.filled)
        ends = [first + n for first, n in zip(starts, self.lengths, strict=True)]
        if self.cache is not None and max(ends) > self.cache.capacity:
            over = max(ends) - self.cache.capacity
            raise ValueError(f"the KV cache holds {self.cache.capacity} positions: {over} too few for this step")
        past = (end > horizon for end, horizon in zip(ends, self.horizons, strict=True))
        assert not any(past), "a sequence runs past the horizon that fixed its rotary angles"
        object.__setattr__(self, "starts", starts)
        pieces = [torch.arange(first, end) for first, end in zip(starts, ends, strict=True)]
        object.__setattr__(self, "positions", torch.cat(pieces))

    @property
    def horizons(self) -> tuple[int, ...]:
        return self.horizon if isinstance(self.horizon, tuple) else (self.horizon,) * len(self.lengths)

    def rotation(self, rope: Rope) -> tuple[Tensor, Tensor]:
        """cos and sin of this step's rows, each [N, dims / 2]; layers that share a rope share them."""
        if rope not in self._rotations:
            if rope.grows and len(set(self.horizons)) > 1:
                pieces = zip(self.split(self.positions), self.horizons, strict=True)
                cos, sin = zip(*(rotation(rope, at, horizon) for at, horizon in pieces), strict=True)
                self._rotations[rope] = torch.cat(cos), torch.cat(sin)
            else:
                self._rotations[rope] = rotation(rope, self.positions, max(self.horizons))
        return self._rotations[rope]

    def split(self, rows: Tensor) -> list[Tensor]:
        """Rows [N, ...] as one tensor per sequence."""
        return list(rows.split(self.lengths))

    @property
    def alike(self) -> bool:
        """Whether all sequences have the same positions, so that they can be computed as one batch."""
        return len(set(self.starts)) == len(set(self.lengths)) == 1

    def keep(
        self, layer: int, k: Tensor, v: Tensor
    ) -> tuple[list[Tensor] | Tensor, list[Tensor] | Tensor, list[Tensor]]:
        """Write rows k, v [N, G, D] to the cache; return each sequence's keys, values and key positions so far.

        Keys and values of sequences that are `alike` come as one tensor [B, S, G, D].
        """
        if self.cache is None:
            positions = self.split(self.positions)
            if self.alike:
                batch = (len(self.lengths), -1)
                return k.unflatten(0, batch), v.unflatten(0, batch), positions
            return self.split(k), self.split(v), positions
        ends = [first + n for first, n in zip(self.starts, self.lengths, strict=True)]
        all_keys, all_values = self.cache.keys[layer], self.cache.values[layer]
        for s, (k_new, v_new) in enumerate(zip(self.split(k), self.split(v), strict=True)):
            all_keys[s, self.starts[s] : ends[s]] = k_new
            all_values[s, self.starts[s] : ends[s]] = v_new
        positions = [self.cache.positions[:end] for end in ends]
        if self.alike:
            return all_keys[:, : ends[0]], all_values[:, : ends[0]], positions
        keys, values = ([t[s, :end] for s, end in enumerate(ends)] for t in (all_keys, all_values))
        return keys, values, positions
