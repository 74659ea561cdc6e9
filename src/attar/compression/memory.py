"""Limits on the memory of a block pass, so that the process holds only what it uses.

glibc keeps freed blocks of up to 32 MB for later use. Before 2.38 it seldom finds an aligned block among them even
where one of the exact size is free: the heap grows to twice its contents. During a block pass, blocks beyond `LARGE`
are therefore taken from the system and returned to it one by one. That costs new pages for every tensor, so passes of
many calls keep them meanwhile (`large_blocks_kept`). `give_back` returns the free pages of smaller ones between steps.
C libraries without these calls are left as they are.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

from attar.kernels import dispatch

LARGE = 3 << 20  # above the float32 slices that codecs work in
USUAL = 32 << 20  # where glibc's own threshold ends up in any process that frees tensors
WIDEST = 64 << 20  # above the widest activation of a call, where glibc allows such a threshold
KEPT = 256 << 20  # free bytes at the end of the heap: more than all activations of a call, twice
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # constants of malloc.h

_libc = ctypes.CDLL(None)
_mallopt, _malloc_trim = (getattr(_libc, name, None) for name in ("mallopt", "malloc_trim"))


@contextmanager
def large_blocks_apart() -> Iterator[None]:
    """Return freed memory of large tensors to the system at once within the context, in the whole process."""
    with _thresholds(LARGE, 2 * LARGE):
        yield


@contextmanager
def large_blocks_kept() -> Iterator[None]:
    """Keep freed memory of tensors of up to 64 MB for the next ones within the context, and return it at the end. It is
    for a pass of many calls whose activations have the same sizes, where new pages take a quarter of the time."""
    with _thresholds(WIDEST, KEPT):
        yield


@contextmanager
def _thresholds(large: int, trim: int) -> Iterator[None]:
    """Set both limits of malloc within the context: the least size of blocks that are taken from the system apart, and
    the least number of free bytes at the end of the heap that are returned. glibc's own choice is twice the first."""
    global _current
    outer = _current
    _set(large, trim)
    try:
        yield
    finally:
        _set(*outer)
        give_back()


_current = (USUAL, 2 * USUAL)


def _set(large: int, trim: int) -> None:
    global _current
    _current = (large, trim)
    if _mallopt is not None:
        if not _mallopt(_MMAP_THRESHOLD, large):  # older releases refuse more
            _mallopt(_MMAP_THRESHOLD, min(large, USUAL))
        _mallopt(_TRIM_THRESHOLD, trim)


def give_back() -> None:
    """Return free pages of the heap, and the kernels' result buffers, to the system. Takes milliseconds."""
    dispatch.release()
    if _malloc_trim is not None:
        _malloc_trim(0)
