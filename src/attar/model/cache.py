"""The KV cache of the sequences in flight, and the `ForwardBatch` that assigns the rows of a call to sequences.

A cache is pages (`kv.pages`): blocks of slots named by a sequence's row of the block table. Here each sequence has its
blocks from the start, side by side; an engine that allocates them as sequences grow brings tables of its own
(`KVCache.over`), and nothing else changes. Keys are stored rotated (`PagedKV.keys_rotated`).

Some schemes keep a sequence's unfinished block in 16 bits (`kv/schemes.py`). A call's rows of a sequence then lie in
one block; `KVCache.pieces` cuts longer ones, and `Decoder.states` runs the pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from attar.kernels import dispatch
from attar.kernels.operands import Routes
from attar.kv.pages import AttentionMetadata, Bases, PagedKV, PromptRows, Rotation
from attar.kv.schemes import SCHEMES, KvScheme
from attar.kv.sparse_prefill import SparsePrefill
from attar.model.config import ModelConfig, Rope
from attar.model.rope import far_rotation, rotation, sectioned, table

BLOCK = 64  # slots: a head's keys of a block are then 4 KiB or more, which memory delivers at full speed
ALIGNED = 16  # bytes: alignment of tensors that are copied together


Tails = Callable[[int, int], int]
"""A function tails(s, i) that returns the unfinished block of the i-th block of sequence s."""


class KVCache:
    """Memory for `batch` sequences of up to `capacity` positions each, stored in `scheme` (`kv/schemes.py`).

    `bases` are for calibrated schemes, one a layer. Raises ValueError where a block is no multiple of 16 slots, or the
    scheme does not support the model's heads.
    """

    def __init__(
        self,
        config: ModelConfig,
        capacity: int,
        batch: int = 1,
        scheme: KvScheme = SCHEMES["float32"],
        device: str = "cpu",
        block: int = BLOCK,
        bases: Sequence[Bases] | None = None,
    ) -> None:
        width = -(-capacity // block)
        self.layers = pool(config, batch * width, scheme, device, block, batch, bases)
        self.block_tables = torch.arange(batch * width, dtype=torch.int32).view(batch, width)  # on the host
        self.capacity = capacity
        self.filled = [0] * batch
        self.tails: Tails = _own
        self.sliding_tables: Tensor | None = None
        """Block tables of the layers with a sliding window, where those have blocks of their own."""
        self.dense_until: list[int] | None = None
        """Position of each sequence's first row that chooses what it reads, where layers have one-bit keys."""
        self.prefill: SparsePrefill | None = None
        self.prompts: list[int] = []
        self.skipped: Tensor | None = None
        self.offsets: list[int] | None = None
        """How much more each sequence's rotary angles are than its slots, where keys were evicted; None: nothing."""

    @classmethod
    def over(
        cls,
        layers: list[PagedKV],
        tables: Tensor,
        filled: list[int],
        tails: Tails | None = None,
        sliding: Tensor | None = None,
    ) -> KVCache:
        """Return a cache of sequences on blocks that the caller allocates.

        Their rows of `tables` [B, width] int32, on the host, name these blocks; `tails` names unfinished blocks, where
        the scheme keeps those apart. With `sliding`, of the same shape, layers with a sliding window have the blocks
        that those tables name; what they name behind a window is not read.
        """
        made = cls.__new__(cls)
        made.layers, made.block_tables, made.filled, made.tails = layers, tables, filled, tails or _own
        made.sliding_tables = sliding
        made.dense_until = made.offsets = None
        made.prefill, made.prompts, made.skipped = None, [], None
        made.capacity = tables.shape[1] * layers[0].block
        return made

    def read_few(self, settings: SparsePrefill, prompts: list[int]) -> None:
        """Have rows of prompts of these lengths read few keys, but for the last of each prompt.

        `skipped`, int64 [sequences], counts the keys whose values they skip.
        """
        self.prefill, self.prompts, self.skipped = settings, prompts, torch.zeros(len(prompts), dtype=torch.int64)

    def _few(self, ends: list[int]) -> PromptRows | None:
        """Return which rows of a call read few keys; None where none does."""
        if self.prefill is None or self.skipped is None:
            return None
        until, whole = [self.prefill.until(prompt) for prompt in self.prompts], self.prefill.whole
        if not any(max(first, whole) < min(end, own) for first, end, own in zip(self.filled, ends, until, strict=True)):
            return None
        return PromptRows(self.prefill, torch.tensor(until, dtype=torch.int32), self.skipped)

    @property
    def block(self) -> int:
        return self.layers[0].block

    @property
    def device(self) -> torch.device:
        return self.layers[0].keys.device

    def place(self, lengths: tuple[int, ...]) -> AttentionMetadata:
        """Return the placement of the next `lengths[s]` rows of each sequence s, without waiting for the device.

        Tables and lengths are known on the host, and go to the device in one copy.
        """
        ends = [first + n for first, n in zip(self.filled, lengths, strict=True)]
        pieces = [torch.arange(first, end) for first, end in zip(self.filled, ends, strict=True)]
        slots = self._slots(self.block_tables, pieces)
        starts = torch.tensor([0, *lengths]).cumsum(0)
        tails = None
        if self.recent:
            last = ((s, max(end - 1, 0) // self.block) for s, end in enumerate(ends))
            own = [self.tails(s, i) if n else None for (s, i), n in zip(last, lengths, strict=True)]
            taken = [tail for tail in own if tail is not None]
            assert len(set(taken)) == len(taken), "two sequences would fill one unfinished block"
            tails = torch.tensor([tail or 0 for tail in own])
        filled = torch.tensor(ends, dtype=torch.int32)
        row_starts, seen, tables, positions, where = sent(
            self.device, starts.int(), filled, self.block_tables, torch.cat(pieces).int(), slots
        )
        until = None if self.dense_until is None else torch.tensor(self.dense_until, dtype=torch.int32)
        return AttentionMetadata(
            row_starts, seen, tables, positions, where, tails=tails, dense_until=until, prompts=self._few(ends)
        )

    def place_sliding(self, place: AttentionMetadata, lengths: tuple[int, ...]) -> AttentionMetadata | None:
        """Return the placement of the same rows in layers with a sliding window; None where all layers have the same
        blocks."""
        if self.sliding_tables is None:
            return None
        pieces = [torch.arange(first, first + n) for first, n in zip(self.filled, lengths, strict=True)]
        tables, slots = sent(self.device, self.sliding_tables, self._slots(self.sliding_tables, pieces))
        return replace(place, block_tables=tables, slot_mapping=slots)

    def _slots(self, tables: Tensor, pieces: list[Tensor]) -> Tensor:
        """Return the slots of positions `pieces[s]` of each sequence s, int64 [N]."""
        size = self.block
        return torch.cat([t[at // size] * size + at % size for t, at in zip(tables.long(), pieces, strict=True)])

    @property
    def scheme(self) -> KvScheme:
        return self.layers[0].scheme

    @property
    def recent(self) -> bool:
        """Return whether unfinished blocks lie apart, so that a call's rows of a sequence are of one block."""
        return self.scheme.recent

    def pieces(self, lengths: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        """Yield the next `lengths` rows of each sequence in calls that this cache accepts, in order."""
        left, at = list(lengths), list(self.filled)
        while any(left):
            piece = [
                min(n, self.block - first % self.block) if self.recent else n for n, first in zip(left, at, strict=True)
            ]
            yield tuple(piece)
            left = [n - m for n, m in zip(left, piece, strict=True)]
            at = [first + m for first, m in zip(at, piece, strict=True)]

    def advance(self, lengths: tuple[int, ...]) -> None:
        """Count the rows of a finished step as part of their sequences."""
        self.filled = [filled + n for filled, n in zip(self.filled, lengths, strict=True)]

    def truncate(self, sequence: int, length: int) -> None:
        """Forget everything of `sequence` past `length` positions."""
        assert 0 <= length <= self.filled[sequence]
        within = (self.filled[sequence] - 1) // self.block * self.block <= length
        assert within or not self.recent or length % self.block == 0, "what was unfinished there is overwritten"
        self.filled[sequence] = length


def _own(sequence: int, block: int) -> int:
    return sequence


def sent(device: torch.device, *parts: Tensor) -> list[Tensor]:
    """Return tensors of the host on `device`: on a CPU themselves, elsewhere by one copy, without waiting."""
    if device.type == "cpu":
        return list(parts)
    sizes = [-(-part.nbytes // ALIGNED) * ALIGNED for part in parts]
    host = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=device.type == "cuda")
    for piece, part in zip(host.split(sizes), parts, strict=True):
        piece[: part.nbytes].view(part.dtype).view(part.shape).copy_(part)
    pieces = host.to(device, non_blocking=True).split(sizes)
    return [piece[: part.nbytes].view(part.dtype).view(part.shape) for piece, part in zip(pieces, parts, strict=True)]


def pool(
    config: ModelConfig,
    blocks: int,
    scheme: KvScheme,
    device: str = "cpu",
    block: int = BLOCK,
    tails: int = 0,
    bases: Sequence[Bases] | None = None,
    sliding: int = 0,
) -> list[PagedKV]:
    """Return `blocks` blocks of `block` slots in every layer, and `tails` unfinished ones where the scheme has such.

    With `sliding`, layers with a sliding window have so many blocks instead.
    """
    counts = [blocks if window is None or not sliding else sliding for window in config.windows]
    each = [None] * config.layers if bases is None else bases
    heads = config.kv_heads, config.head_dim
    return [
        dispatch.pages(count, block, *heads, scheme, device, tails, of_layer)
        for count, of_layer in zip(counts, each, strict=True)
    ]


@dataclass(frozen=True, eq=False)
class KeptStates:
    """Hidden states [N, I] of rows where they enter some layers, by layer, each still in two parts (stream, delta).

    The next step may overwrite the parts.
    """

    pairs: dict[int, tuple[Tensor, Tensor | None]]

    def __len__(self) -> int:
        """Return the number of rows."""
        return next((len(stream) for stream, _ in self.pairs.values()), 0)

    def rows(self, rows: slice | list[int]) -> KeptStates:
        """Return those of some rows."""
        return KeptStates({k: (s[rows], None if d is None else d[rows]) for k, (s, d) in self.pairs.items()})

    def of(self, layer: int) -> Tensor:
        """Return the hidden states that enter a layer, [N, I], in memory of their own."""
        stream, delta = self.pairs[layer]
        return stream.clone() if delta is None else stream + delta


class Repeated(NamedTuple):
    """Rows of a call whose keys and values are written to other slots as well: [M] int64 each, on the host."""

    rows: Tensor
    slots: Tensor
    sliding: Tensor | None = None  # the slots in layers with a sliding window, where those have blocks of their own


class Features(NamedTuple):
    """Rows of a call that do not come from the embedding: their indexes, int64 [M], and the rows themselves, [M, I]."""

    rows: Tensor
    values: Tensor

    def of(self, rows: Tensor) -> Features | None:
        """Return those of chosen rows of the call, counted among these; None where there is none."""
        at = (rows.to(self.rows.device)[:, None] == self.rows).nonzero()
        return Features(at[:, 0], self.values[at[:, 1]]) if len(at) else None


@dataclass(frozen=True)
class ForwardBatch:
    """The rows of one call: `lengths[s]` rows of sequence s, one sequence after another, in order of position.

    Without a cache every sequence starts at position 0 and its keys are its own rows. With one, each continues at the
    cache's filled length, and a sequence that skips this step has length 0. `horizon` is a length that each sequence
    does not exceed, or one number for all; it fixes the rotary angles (`rope.py`). `adapters` are the numbers of the
    sequences' adapters, 0 for none. Without a cache `device` is the device of the rows. Raises ValueError where the
    cache is too small. The hidden states that enter the layers `keep` are in `kept` once the call is made. Sequences
    may be branches of a tree of drafts, whose tables begin alike; `repeated` are rows that several of them read.
    """

    lengths: tuple[int, ...]
    horizon: int | tuple[int, ...]
    cache: KVCache | None = None
    adapters: tuple[int, ...] = ()
    device: torch.device | str = "cpu"
    keep: tuple[int, ...] = ()
    repeated: Repeated | None = None
    watched: Tensor | None = None  # rows [M] whose queries are kept
    features: Features | None = None  # of images; the ids of their rows are any of the vocabulary
    angles: Tensor | None = None  # [3, N] int64: time, height and width of each row (M-RoPE); None: its position
    spans: Tensor | None = None  # [N, 2] int32: positions that a row of an image sees besides
    queries: dict[int, Tensor] = field(init=False, default_factory=dict, repr=False, compare=False)
    """Queries of the watched rows, as they read keys, by layer: [M, H, D], once the call is made."""
    again: Tensor | None = field(init=False, default=None, repr=False)  # rows of `repeated`, on the device
    kept: KeptStates = field(init=False, repr=False, compare=False)
    positions: Tensor = field(init=False)  # [N] int64
    place: AttentionMetadata | None = field(init=False)  # with a cache
    sliding: AttentionMetadata | None = field(init=False)  # of layers with a window that have blocks of their own
    routes: Routes | None = field(init=False)  # of the rows, where any takes an adapter
    _rotations: dict[Rope, Rotation] = field(init=False, default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        starts = (0,) * len(self.lengths) if self.cache is None else tuple(self.cache.filled)
        ends = [first + n for first, n in zip(starts, self.lengths, strict=True)]
        if self.cache is not None and max(ends) > self.cache.capacity:
            over = max(ends) - self.cache.capacity
            raise ValueError(f"the KV cache holds {self.cache.capacity} positions: {over} too few for this step")
        past = (end > horizon for end, horizon in zip(ends, self.horizons, strict=True))
        assert not any(past), "a sequence runs past the horizon that fixed its rotary angles"
        place = None if self.cache is None else self.cache.place(self.lengths)
        sliding = None if self.cache is None or place is None else self.cache.place_sliding(place, self.lengths)
        routes = None
        if any(number for number, n in zip(self.adapters, self.lengths, strict=bool(self.adapters)) if n):
            device = torch.device(self.device) if self.cache is None else self.cache.device
            numbers = torch.tensor(self.adapters).repeat_interleave(torch.tensor(self.lengths))
            routes = Routes(numbers, partial(sent, device))
        if self.spans is not None and place is not None:
            for each in (place, sliding):
                if each is not None:
                    each.spans = self.spans
        if self.repeated is not None:
            assert place is not None, "rows are repeated in a cache"
            again, slots = sent(place.slot_mapping.device, self.repeated.rows, self.repeated.slots)
            place.slot_mapping = torch.cat((place.slot_mapping, slots))
            if sliding is not None:
                assert self.repeated.sliding is not None, "rows are repeated in both groups of layers"
                sliding.slot_mapping = torch.cat((sliding.slot_mapping, self.repeated.sliding))
            object.__setattr__(self, "again", again)
        object.__setattr__(self, "kept", KeptStates({}))
        object.__setattr__(self, "routes", routes)
        object.__setattr__(self, "place", place)
        object.__setattr__(self, "sliding", sliding)
        if place is None:
            (positions,) = sent(torch.device(self.device), torch.cat([torch.arange(n) for n in self.lengths]))
        else:
            positions = place.positions.long()
        object.__setattr__(self, "positions", positions)

    @property
    def horizons(self) -> tuple[int, ...]:
        return self.horizon if isinstance(self.horizon, tuple) else (self.horizon,) * len(self.lengths)

    def place_of(self, window: int | None) -> AttentionMetadata | None:
        """Return the placement of the rows in a layer with this sliding window."""
        return self.place if window is None or self.sliding is None else self.sliding

    def enter(self, layer: int, stream: Tensor, delta: Tensor | None) -> None:
        """Take note of the hidden states [N, I] that enter a layer; the number of layers is the final norm's."""
        if layer in self.keep:
            self.kept.pairs[layer] = stream, delta

    def rotation(self, rope: Rope) -> Rotation:
        """Return the angles of this step's rows; layers that share a rope share them."""
        if rope not in self._rotations:
            self._rotations[rope] = self._rotation(rope)
        return self._rotations[rope]

    def turn_again(self) -> None:
        """Write the angles of the cache's next rows, by its offsets, where those of this step's rows are."""
        assert self.cache is not None
        assert self.place is not None
        for rope, turned in self._rotations.items():
            for own, other in zip((turned.cos, turned.sin), self._moved(rope), strict=True):
                own.copy_(other)

    def _moved(self, rope: Rope) -> tuple[Tensor, Tensor]:
        """Return cos and sin of rows whose angles are other than their slots, float32 [N, R / 2] each."""
        assert self.cache is not None
        assert self.cache.offsets is not None
        offsets = torch.tensor(self.cache.offsets).repeat_interleave(torch.tensor(self.lengths))
        return far_rotation(rope, self.positions + offsets, max(self.horizons))

    def _rotation(self, rope: Rope) -> Rotation:
        if self.cache is not None and self.cache.offsets is not None:
            rows = torch.arange(len(self.positions), dtype=torch.int32, device=self.positions.device)
            return Rotation(*self._moved(rope), self._with_repeated(rows))
        if self.angles is not None:
            assert not rope.grows, "angles of three positions do not grow with the sequence"
            rows = torch.arange(len(self.positions), dtype=torch.int32, device=self.positions.device)
            return Rotation(*sectioned(rope, self.angles, max(self.horizons)), self._with_repeated(rows))
        if rope.grows and len(set(self.horizons)) > 1:  # sequences turn by angles of their own
            pieces = zip(self.split(self.positions), self.horizons, strict=True)
            cos, sin = zip(*(rotation(rope, at, horizon) for at, horizon in pieces), strict=True)
            rows = torch.arange(len(self.positions), dtype=torch.int32, device=self.positions.device)
            return Rotation(torch.cat(cos), torch.cat(sin), self._with_repeated(rows))
        rows = self.positions.int() if self.place is None else self.place.positions
        return Rotation(*table(rope, max(self.horizons), rows.device), self._with_repeated(rows))

    def _with_repeated(self, rows: Tensor) -> Tensor:
        return rows if self.again is None else torch.cat((rows, rows[self.again]))

    def split(self, rows: Tensor) -> list[Tensor]:
        """Split rows [N, ...] into one tensor per sequence."""
        return list(rows.split(self.lengths))

    def whole(self, k: Tensor, v: Tensor) -> tuple[list[Tensor] | Tensor, list[Tensor] | Tensor]:
        """Return each sequence's keys and values of k, v [N, G, D], for a step without a cache.

        Where all sequences are of one length, so that they can be computed as one batch, they are one tensor [B, S, G,
        D] each.
        """
        if len(set(self.lengths)) == 1:
            batch = (len(self.lengths), -1)
            return k.unflatten(0, batch), v.unflatten(0, batch)
        return self.split(k), self.split(v)
