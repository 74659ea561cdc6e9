"""Memory for results, kept warm: memory that a step frees, the next step of the same layer or shape reuses.

A fresh megabyte costs a page fault every 4 KiB, more than the kernel that fills it; the C library returns freed memory
to the system, which faults again. Here large results lie on huge pages of their own, which return to a list when the
last tensor on them is gone. Small ones are left to torch.
"""

from __future__ import annotations

import math
import mmap
import weakref

import torch
from torch import Tensor

LARGE = 1 << 20  # bytes, from which memory is kept here
MOST_FREE = 512 << 20  # bytes that lie idle at most
UNIT = 2 << 20  # a huge page


class Workspace:
    """Free pieces of memory by size. Threads do not share it: one thread runs a model."""

    def __init__(self) -> None:
        self.free: list[mmap.mmap] = []

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return an uninitialised CPU tensor."""
        count = math.prod(shape)
        size = count * dtype.itemsize
        if size < LARGE:
            return torch.empty(shape, dtype=dtype)
        piece = self._take(-(-size // UNIT) * UNIT)
        lease = memoryview(piece)  # held by the tensor
        out = torch.frombuffer(lease, dtype=dtype, count=count).view(shape)
        weakref.finalize(lease, self._give, piece)
        return out

    def _take(self, size: int) -> mmap.mmap:
        """Return the smallest free piece that is large enough and not twice as large, or a new one."""
        fitting = [piece for piece in self.free if size <= len(piece) < 2 * size]
        if fitting:
            best = min(fitting, key=len)
            self.free.remove(best)
            return best
        piece = mmap.mmap(-1, size)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            piece.madvise(mmap.MADV_HUGEPAGE)
        return piece

    def _give(self, piece: mmap.mmap) -> None:
        self.free.append(piece)
        while sum(map(len, self.free)) > MOST_FREE:
            self.free.remove(max(self.free, key=len))
