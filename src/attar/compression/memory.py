"""Limits on the memory of a block pass, so that the process holds only what it uses.

glibc keeps freed blocks of up to 32 MB for later use. Before 2.38 it seldom finds an aligned block among them even
where one of the exact size is free: the heap grows to twice its contents. During a block pass, blocks beyond `LARGE`
are therefore taken from the system and returned to it one by one, which costs some percent of the time. `give_back`
returns the free pages of smaller ones between steps. C libraries without these calls are left as they are.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

from attar.kernels import dispatch

LARGE = 3 << 20  # above the float32 slices that codecs work in
USUAL = 32 << 20  # where glibc's own threshold ends up in any process that frees tensors
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # constants of malloc.h

_libc = ctypes.CDLL(None)
_mallopt, _malloc_trim = (getattr(_libc, name, None) for name in ("mallopt", "malloc_trim"))


@contextmanager
def large_blocks_apart() -> Iterator[None]:
    """Return freed memory of large tensors to the system at once within the context, in the whole process."""
    _large(LARGE)
    try:
        yield
    finally:
        _large(USUAL)
        give_back()


def _large(size: int) -> None:
    if _mallopt is not None:
        _mallopt(_MMAP_THRESHOLD, size)
        _mallopt(_TRIM_THRESHOLD, 2 * size)  # glibc's own choice for that threshold


def give_back() -> None:
    """Return free pages of the heap, and the kernels' result buffers, to the system. Takes milliseconds."""
    dispatch.release()
    if _malloc_trim is not None:
        _malloc_trim(0)
