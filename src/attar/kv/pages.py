"""KV cache blocks: the layout of a block, and the places of a call's rows.

A *slot* is one token's place, number `slot % block` of block `slot // block`. A sequence's slots are listed by its row
of a block table, so sequences grow without moving and may share common blocks.

The scheme defines the layout of a block (`KvScheme.parts` names every array). Floats and 8 bits lie as the arrays
below, which `csrc/attention.h` draws; a few bits a coordinate as in `bit_planes.py`; KIVI's and KVQuant's as in
`kivi.py` and `kvquant.py`. The reference and the CPU kernels read all of them. Kernels of a GPU have a layout of their
own (`kernels/triton/pages.py`): a cache belongs to the backend that it was made for.

Shapes: N rows, one sequence after another; B sequences; H query heads, G key-value heads, D head size. J neighbours
stand together, as many as a dot product of the type takes at once: 4 for int8, otherwise 1.
"""

from __future__ import annotations

import array
import functools
import math
import mmap
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from attar.errors import UserError
from attar.kv import schemes
from attar.kv.bit_planes import Basis, rotation
from attar.kv.kvquant import Channels
from attar.kv.kvquant_published import PublishedCode
from attar.kv.schemes import KvScheme, Layout
from attar.kv.signs import Signs
from attar.kv.sparse_prefill import SparsePrefill

RUN = schemes.RUN  # slots that stand side by side in the keys, and columns in the values
PARTS = ("keys", "values", "key_scales", "value_scales", "key_zeros", "value_zeros")  # of most schemes


@dataclass(eq=False)
class Bases:
    """The coordinates that one layer's keys and values are rounded in."""

    keys: Basis | Channels
    values: Basis | Channels

    def __post_init__(self) -> None:
        if isinstance(self.keys, Basis):
            self.keys = self.keys.of_keys()

    @functools.cached_property
    def addresses(self) -> Tensor:
        """Addresses of the arrays of two `Basis`, int64 [12], in the order of `Bases` in `csrc/attention.h`."""
        assert isinstance(self.keys, Basis)
        assert isinstance(self.values, Basis)
        sides = ((self.keys, self.keys.queries), (self.values, self.values.back))
        return _addresses(each for s, b in sides for each in (b, s.into, s.mean, s.weights, s.shares, s.buckets))


@dataclass(eq=False)
class Recent:
    """Unfinished blocks in 16 bits, in the coordinates of finished blocks: [tails, G, block, D] each.

    `AttentionMetadata.tails` gives the tail of each sequence.
    """

    keys: Tensor
    values: Tensor


@dataclass(eq=False)
class PagedKV:
    """The blocks of one layer, with the scheme's data of the layer as a whole.

    Keys and values of the float and 8-bit schemes have the shapes below; other schemes follow `KvScheme.parts` and
    their codec.
    """

    head_dim: int
    keys: Tensor  # [blocks, G, block / 16, ceil(D / J), 16, J]
    values: Tensor  # [blocks, G, block / J, D rounded up to 16, J]
    key_scales: Tensor | None = None  # [blocks, G, block]
    value_scales: Tensor | None = None
    key_zeros: Tensor | None = None
    value_zeros: Tensor | None = None
    scheme: KvScheme = schemes.SCHEMES["float32"]
    bases: Bases | None = None
    recent: Recent | None = None
    more: dict[str, Tensor] = field(default_factory=dict)  # arrays that only this scheme has, by the names of its parts
    signs: Signs | None = None  # one-bit keys, where rows choose what they read
    published: PublishedCode | None = None  # where float pages simulate a cache as published
    keys_rotated: bool = field(default=True, init=False)
    """True where keys are rotated when they are written.

    A cache that moves keys to other positions needs them rotated when they are read, which no kernel does yet: `ops`
    accepts rotated keys only.
    """

    @classmethod
    def zeros(
        cls,
        blocks: int,
        block: int,
        kv_heads: int,
        head_dim: int,
        scheme: KvScheme,
        device: str = "cpu",
        tails: int = 0,
        bases: Bases | None = None,
    ) -> PagedKV:
        """Make blocks of `block` slots, all zeros, and `tails` unfinished ones where the scheme has such.

        `bases` are for calibrated schemes, which have none by default. Raises ValueError where the scheme does not
        support such heads or blocks, or lacks its bases.
        """
        parts = scheme.parts(kv_heads, head_dim, block).items()
        made = {name: _zeros((blocks, *part.shape), getattr(torch, part.dtype), device) for name, part in parts}
        if scheme.calibrated and bases is None:
            raise UserError(
                "kv_unsupported",
                f"{scheme.name} needs bases that are calibrated on the model (model.kv_basis.calibrate)",
            )
        if scheme.layout == Layout.BIT_PLANES and bases is None:
            turn = rotation(kv_heads, head_dim, scheme.units(head_dim), device)
            bases = Bases(turn, turn)
        recent = None
        if scheme.recent:
            shape = (tails, kv_heads, block, head_dim)
            recent = Recent(*(torch.zeros(shape, dtype=torch.bfloat16, device=device) for _ in range(2)))
        more = {name: made.pop(name) for name in list(made) if name not in PARTS}
        return cls(head_dim, **made, scheme=scheme, bases=bases, recent=recent, more=more, signs=None, published=None)

    @functools.cached_property
    def channels(self) -> Tensor:
        """Addresses of the arrays of two `Channels` and of the parts stored apart, int64 [12]. Their order is that of
        `TwoChannels` in `csrc/attention.h`."""
        assert self.bases is not None
        arrays = list[Tensor]()
        for side, each in (("key", self.bases.keys), ("value", self.bases.values)):
            assert isinstance(each, Channels)
            apart = (self.more[f"{side}_{what}"] for what in ("outliers", "columns", "firsts"))
            arrays += [each.mean, each.spread, each.levels, *apart]
        return _addresses(arrays)

    def parts(self) -> list[Tensor]:
        """Return the arrays of blocks."""
        found = [part for name in PARTS if (part := getattr(self, name)) is not None] + list(self.more.values())
        return found if self.signs is None else [*found, self.signs.bits, self.signs.scales]

    @property
    def blocks(self) -> int:
        return self.keys.shape[0]

    @property
    def block(self) -> int:
        return self.keys.shape[2] * (1 if self.scheme.layout == Layout.KVQUANT else RUN)

    @property
    def dtype(self) -> torch.dtype:
        return self.keys.dtype

    @property
    def kv_heads(self) -> int:
        return self.keys.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks."""
        return sum(part.nbytes for part in self.parts())


@dataclass(eq=False)
class PromptRows:
    """Rows of prompts that read few keys: those of each sequence at positions before `until`."""

    settings: SparsePrefill
    until: Tensor  # [B] int32
    skipped: Tensor  # [B] int64: keys whose values were skipped are added, those of each row, head and layer


@dataclass(eq=False)
class AttentionMetadata:
    """The rows of each sequence in a call, the slots of their keys and values, and the slots filled already.

    Everything is a tensor, read when a kernel runs: a recorded step is replayed by writing new numbers into them. The
    position of a key is its slot's index in the sequence, unless `key_positions` gives another, as an evicting cache
    must: there, a negative number marks an empty slot. With `tree`, each sequence's own rows (its last slots) see of
    one another only what the mask allows, and their keys are at the rows' positions, which may branch. Where the pages
    keep unfinished blocks apart, a call's rows of a sequence are of one block, and `tails` names the unfinished block
    that is theirs. Where the pages have one-bit keys, rows at positions from `dense_until` on choose what they read.
    With `prompts`, rows in the middle of prompts read few keys in layers without a sliding window. With `spans`, a row
    sees the positions from its span's first to its end too, which are those of this call: the image that it is of.
    """

    row_starts: Tensor  # [B + 1] int32: the rows of sequence b are row_starts[b] .. row_starts[b + 1]
    lengths: Tensor  # [B] int32: slots filled, once this call's rows are written
    block_tables: Tensor  # [B, width] int32: block numbers; those past the length are not looked at
    positions: Tensor  # [N] int32
    slot_mapping: Tensor  # [N] int64: block number * block + place in the block
    key_positions: Tensor | None = None  # [blocks, block] int32
    tree: Tensor | None = None  # bool [sum of T * T]: each sequence's mask [queries, keys] of its T rows, one by one
    tails: Tensor | None = None  # [B] int64
    dense_until: Tensor | None = None  # [B] int32; None: every row reads every key
    prompts: PromptRows | None = None
    spans: Tensor | None = None  # [N, 2] int32, on the host: first and end; both 0 for none


@dataclass(eq=False)
class Rotation:
    """Rotary angles: row n turns by cos[rows[n]] and sin[rows[n]], each [R / 2] for the first R columns of a head."""

    cos: Tensor  # [angles, R / 2] float32
    sin: Tensor
    rows: Tensor  # [N] int32


def _addresses(tensors: Iterable[Tensor]) -> Tensor:
    """Return the addresses of tensors, int64 [N]. It uses no operation of torch, so it works while a step is
    recorded."""
    return torch.frombuffer(array.array("q", [each.data_ptr() for each in tensors]), dtype=torch.int64)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    """Return zeros whose memory, on a CPU, is committed on the first write. `torch.zeros` would write it all at once,
    which for a large cache takes as long as loading the model."""
    size = math.prod(shape) * dtype.itemsize
    if device != "cpu" or not size:
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # the tensor keeps it alive
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(shape)
