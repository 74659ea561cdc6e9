"""Giving freed memory back to the system.

glibc keeps what is freed in blocks below 32 MB for later use, in pieces that seldom fit the next tensor: over a block's
work, hundreds of megabytes that nobody uses. `malloc_trim` hands back every free page. It takes milliseconds, so it is
called between steps of the work, not within them; other C libraries return pages by themselves or have no such call.
"""

from __future__ import annotations

import ctypes

_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)


def give_back() -> None:
    """Return free pages of the heap to the system, where the C library can."""
    if _trim is not None:
        _trim(0)
