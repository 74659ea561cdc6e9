"""Blocks of a KV cache as bytes, to be written to a file or sent to another process, and read back.

A block's bytes are its parts in every layer, as `PagedKV.parts` lists them, one after another, without gaps. They are
copied as they lie. So they mean the same only to a cache of equal `layout_id`, which both sides compare first. A block
is self-contained: nothing of it lies elsewhere, but for a sequence's unfinished block, which is never moved.

Copies use NumPy, never an operation of torch: a thread that copies starts no threads of its own, and lets other Python
threads run meanwhile.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from attar.errors import UserError
from attar.kv.kvquant import Channels
from attar.kv.pages import RUN, PagedKV

VERSION = 1  # of the bytes: to be raised with any change of what a part's numbers mean


class BlockBytes:
    """The blocks of all layers of a cache on a CPU.

    Raises UserError where layers have different numbers of blocks, as layers with a sliding window have with blocks of
    their own, and on other devices.
    """

    def __init__(self, pages: Sequence[PagedKV]) -> None:
        device = pages[0].keys.device.type
        if device != "cpu":
            raise UserError("kv_unsupported", f"blocks of a cache on a CPU can be moved, not on {device}")
        if len({each.blocks for each in pages}) > 1:
            raise UserError("kv_unsupported", "layers have different numbers of blocks: such blocks are not moved")
        self.layout_id = layout_id(pages)
        self._parts = [_flat(part) for each in pages for part in each.parts()]
        self.nbytes = sum(part.shape[1] for part in self._parts)
        """Bytes of one block in all layers."""

    def views(self, block: int) -> list[memoryview]:
        """Return the memory of a block, part by part: `nbytes` bytes together, to be read or to be filled."""
        return [part[block].data for part in self._parts]

    def read(self, block: int, out: bytearray) -> None:
        """Copy a block to `out`, of `nbytes` bytes."""
        view = np.frombuffer(out, np.uint8)
        for part, start, end in self._pieces():
            np.copyto(view[start:end], part[block])

    def write(self, block: int, data: bytes | bytearray | memoryview) -> None:
        """Copy `nbytes` bytes that `read` made into a block, which nothing else reads or writes meanwhile. Raises
        ValueError for other sizes, before anything is written."""
        view = np.frombuffer(data, np.uint8)
        if len(view) != self.nbytes:
            raise ValueError(f"a block has {self.nbytes} bytes, not {len(view)}")
        for part, start, end in self._pieces():
            np.copyto(part[block], view[start:end])

    def _pieces(self) -> Iterator[tuple[np.ndarray, int, int]]:
        start = 0
        for part in self._parts:
            end = start + part.shape[1]
            yield part, start, end
            start = end


def layout_id(pages: Sequence[PagedKV]) -> str:
    """Return a digest of all that the bytes of a block mean: scheme, shapes, dtypes, and calibrated bases."""
    digest = hashlib.blake2b(digest_size=16, person=b"attar layout")
    for each in pages:
        parts = [(str(part.dtype), tuple(part.shape[1:])) for part in each.parts()]
        said = (VERSION, each.scheme.name, RUN, each.block, each.kv_heads, each.head_dim, each.keys_rotated, parts)
        digest.update(repr(said).encode())
        for tensor in _calibrated(each):
            digest.update(tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return f"cpu-{VERSION}-{pages[0].scheme.name}-{digest.hexdigest()}"


def _calibrated(pages: PagedKV) -> Iterator[Tensor]:
    """Yield what calibration found for a layer, in a fixed order."""
    sides = () if pages.bases is None else (pages.bases.keys, pages.bases.values)
    for side in sides:
        yield from (side.mean, side.spread, side.levels) if isinstance(side, Channels) else (
            side.into, side.mean, side.weights, side.buckets,
        )  # fmt: skip
    if pages.signs is not None:
        yield from (pages.signs.means, pages.signs.spreads)


def _flat(part: Tensor) -> np.ndarray:
    """Return a tensor [blocks, ...] as bytes [blocks, bytes], over the same memory."""
    whole = part.detach()
    assert whole.is_contiguous(), "a part whose blocks do not lie one after another"
    return whole.flatten(1).view(torch.uint8).numpy()
