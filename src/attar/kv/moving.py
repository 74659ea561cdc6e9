"""Moves of keys and values between slots of pages, in plain torch: what eviction keeps (`eviction.py`).

Keys lie rotated in their slots. One that only changes its slot keeps its codes and its scale, and so its bits. Sinks
move beside the tokens that they stand before: they are turned by the difference, from keys as they were first computed,
so that they are rounded once more however often they move.

Legend: G key-value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from attar.kv import bit_planes
from attar.kv.bit_planes import Basis
from attar.kv.eight_bits import dequantize_head, quantize_head
from attar.kv.pages import RUN, PagedKV
from attar.kv.schemes import Layout


class _Stored(NamedTuple):
    """Keys or values as they are stored, slot by slot: codes or floats [slots, G, D], and scales [slots, G] or None."""

    codes: Tensor
    scales: Tensor | None

    def gather(self, index: Tensor) -> _Stored:
        """Return the slots [N, G] of each head."""
        codes = self.codes.gather(0, index[..., None].expand(-1, -1, self.codes.shape[2]))
        return _Stored(codes, None if self.scales is None else self.scales.gather(0, index))


def read(pages: PagedKV, blocks: Sequence[int], slots: int) -> tuple[Tensor, Tensor]:
    """Return keys and values of a table's first slots, [slots, G, D] each, in the dtype of floats or in float32."""
    return read_keys(pages, blocks, slots), _decode(_take(pages, blocks, slots, values=True), _basis(pages, True))


def read_keys(pages: PagedKV, blocks: Sequence[int], slots: int) -> Tensor:
    """Return the keys of the first slots of a table, as `read`."""
    return _decode(_take(pages, blocks, slots), _basis(pages))


def plain_queries(pages: PagedKV, queries: Tensor) -> Tensor:
    """Return queries [w, H, D] for products with what `read` returns; they are given as they read the pages' keys."""
    basis = _basis(pages)
    if basis is None:
        return queries
    grouped = queries.float().unflatten(1, (pages.kv_heads, -1))
    return torch.einsum("wgre,gde->wgrd", grouped, basis.into).flatten(1, 2)


def keep(pages: PagedKV, sources: Sequence[int], targets: Sequence[int], kept: Tensor) -> None:
    """Gather the slots `kept` [G, N], ascending in each head, of table `sources` into the first of table `targets`."""
    for values in (False, True):
        every = _take(pages, sources, len(sources) * pages.block, values)
        _put(pages, targets, every.gather(kept.T), values)


def move_sinks(pages: PagedKV, source: int, target: int, sinks: int, turn: tuple[Tensor, Tensor] | None) -> None:
    """Write the first `sinks` slots of block `source` to those of `target`, with keys turned by `turn`.

    `turn` are cos and sin [R / 2] of the angles; None where the layer has none. Other slots stay.
    """
    if not sinks:
        return
    keys, basis = _take(pages, [source], sinks), _basis(pages)
    if turn is not None:
        cos, sin = turn
        turned, plain = 2 * len(cos), _decode(keys, basis)
        a, b = plain[..., :turned].float().chunk(2, -1)
        moved = torch.cat((a * cos - b * sin, b * cos + a * sin, plain[..., turned:].float()), -1)
        keys = _encode(moved, keys, basis)
    _put(pages, [target], keys)
    _put(pages, [target], _take(pages, [source], sinks, values=True), values=True)


def _basis(pages: PagedKV, values: bool = False) -> Basis | None:
    """Return the coordinates that keys or values are stored in; None for their own."""
    if pages.bases is None:
        return None
    basis = pages.bases.values if values else pages.bases.keys
    assert isinstance(basis, Basis), "keys that cannot be moved"
    return basis


def _decode(stored: _Stored, basis: Basis | None) -> Tensor:
    """Return numbers [slots, G, D]: floats as they are stored, others in float32."""
    if stored.scales is None:
        return stored.codes
    if basis is None:
        return dequantize_head(stored.codes, stored.scales)
    return basis.turn_back(bit_planes.dequantize(stored.codes, stored.scales, basis))


def _encode(x: Tensor, like: _Stored, basis: Basis | None) -> _Stored:
    """Return numbers float32 [slots, G, D] as such pages store them."""
    if like.scales is None:
        return _Stored(x.to(like.codes.dtype), None)
    if basis is None:
        return _Stored(*quantize_head(x, fp8=like.codes.dtype == torch.uint8))
    return _Stored(*bit_planes.quantize(basis.turn(x), basis, like.scales.dtype))


def _take(pages: PagedKV, blocks: Sequence[int], slots: int, values: bool = False) -> _Stored:
    """Return the first slots of a table as they are stored."""
    table = torch.tensor(blocks)
    part, scales = (pages.values, pages.value_scales) if values else (pages.keys, pages.key_scales)
    own = part[table]
    if pages.scheme.layout == Layout.BIT_PLANES:
        basis = _basis(pages, values)
        assert basis is not None
        codes = bit_planes.unpack(own.transpose(1, 2).flatten(0, 1), basis, values)  # [M * runs, G, 16, D]
        codes = codes.transpose(1, 2).flatten(0, 1)
    elif values:
        codes = own.permute(0, 2, 4, 1, 3)[..., : pages.head_dim].flatten(0, 2)  # of [M, block / J, J, G, P]
    else:  # of [M, runs, 16, G, D / J, J]
        codes = own.permute(0, 2, 4, 1, 3, 5).flatten(-2)[..., : pages.head_dim].flatten(0, 2)
    found = None if scales is None else scales[table].transpose(1, 2).flatten(0, 1)[:slots]
    return _Stored(codes[:slots], found)


def _put(pages: PagedKV, blocks: Sequence[int], stored: _Stored, values: bool = False) -> None:
    """Write the first slots of a table; others stay."""
    slots = torch.arange(len(stored.codes))
    block, place = torch.tensor(blocks)[slots // pages.block], slots % pages.block
    part, scales = (pages.values, pages.value_scales) if values else (pages.keys, pages.key_scales)
    if scales is not None and stored.scales is not None:
        scales[block, :, place] = stored.scales
    if pages.scheme.layout == Layout.BIT_PLANES:
        basis = _basis(pages, values)
        assert basis is not None
        block, run = block[::RUN], place[::RUN] // RUN
        codes = bit_planes.unpack(part[block, :, run], basis, values)  # a run's slots share bytes
        codes[slots // RUN, :, slots % RUN] = stored.codes
        part[block, :, run] = bit_planes.pack(codes, basis, values)
    elif values:
        together = part.shape[-1]
        part[block, :, place // together, : pages.head_dim, place % together] = stored.codes
    else:
        together = part.shape[-1]
        wide = functional.pad(stored.codes, (0, -pages.head_dim % together)).unflatten(-1, (-1, together))
        part[block, :, place // RUN, :, place % RUN] = wide
