"""Moves of keys and values between slots of float pages, in plain torch: what eviction keeps (`eviction.py`).

Keys lie rotated in their slots. One that only changes its slot keeps its rotation and its bits. Sinks move beside the
tokens that they stand before: they are turned by the difference, from keys as they were first computed, so that they
are rounded once however often they move.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from attar.kv.pages import RUN, PagedKV


def read_keys(pages: PagedKV, blocks: Sequence[int], slots: int) -> Tensor:
    """Return the keys of the first slots of a table of float pages, [slots, G, D], in their dtype."""
    keys = pages.keys[torch.tensor(blocks)].permute(0, 2, 4, 1, 3, 5)  # to [M, runs, 16, G, D / J, J]
    return keys.flatten(-2)[..., : pages.head_dim].flatten(0, 2)[:slots]


def read(pages: PagedKV, blocks: Sequence[int], slots: int) -> tuple[Tensor, Tensor]:
    """Return keys and values of the first slots of a table of float pages, [slots, G, D] each, in their dtype."""
    values = pages.values[torch.tensor(blocks)].permute(0, 2, 4, 1, 3)  # to [M, block / J, J, G, P]
    return read_keys(pages, blocks, slots), values[..., : pages.head_dim].flatten(0, 2)[:slots]


def write(pages: PagedKV, blocks: Sequence[int], keys: Tensor, values: Tensor) -> None:
    """Write keys and values [slots, G, D] to the first slots of a table of float pages."""
    slots = torch.arange(len(keys))
    block, place, together = torch.tensor(blocks)[slots // pages.block], slots % pages.block, pages.keys.shape[-1]
    wide = functional.pad(keys, (0, -keys.shape[-1] % together)).unflatten(-1, (-1, together))
    pages.keys[block, :, place // RUN, :, place % RUN] = wide
    pages.values[block, :, place // together, : pages.head_dim, place % together] = values


def keep(pages: PagedKV, sources: Sequence[int], targets: Sequence[int], kept: Tensor) -> None:
    """Gather the slots `kept` [G, N], ascending in each head, of table `sources` into the first of table `targets`."""
    keys, values = read(pages, sources, len(sources) * pages.block)
    index = kept.T[..., None].expand(-1, -1, pages.head_dim)  # [N, G, D]
    write(pages, targets, keys.gather(0, index), values.gather(0, index))


def move_sinks(pages: PagedKV, source: int, target: int, sinks: int, turn: tuple[Tensor, Tensor] | None) -> None:
    """Write the first `sinks` slots of block `source` to those of `target`, with keys turned by `turn`.

    `turn` are cos and sin [R / 2] of the angles; None where the layer has none. Other slots stay.
    """
    if not sinks:
        return
    keys, values = read(pages, [source], sinks)
    if turn is not None:
        cos, sin = turn
        turned = 2 * len(cos)
        a, b = keys[..., :turned].float().chunk(2, -1)
        moved = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
        keys = torch.cat((moved.to(keys.dtype), keys[..., turned:]), -1)
    write(pages, [target], keys, values)
