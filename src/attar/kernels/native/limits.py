"""Peak rates of this machine, measured: the roof for the speed of kernels.

Both figures hold for the available threads and the moment: another load on the same memory halves them. A bench
therefore measures them in the run that it compares them with.
"""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

from attar.kernels.native import extension
from attar.kernels.native.extension import library

READ = 512 << 20  # bytes: past any cache
PAGE = 4096
REPEATS = 5


@dataclass(frozen=True)
class Limits:
    read_gb_s: float  # reading memory on huge pages, gigabytes (10^9) a second
    int8_gops: float  # products and sums of int8 by four-byte dot products, 10^9 a second
    tile_gops: float | None  # products and sums by AMX tiles, where there are


def measure(read: int | None = None, of: Callable[[list[float]], float] = statistics.median) -> Limits:
    """Measure the machine's rates: medians of five runs, or another function `of` their seconds. It takes some tenths
    of a second. With `read`, so many bytes are read, which may fit a cache."""
    size = -(-(READ if read is None else read) // PAGE) * PAGE
    level, arena = extension.cpu_level(), library.Arena()
    memory = arena.allocate(size)
    ctypes.memset(memory, 1, size)  # unwritten memory is one page of zeros, and in cache
    return Limits(
        size / of(_seconds(lambda: library.read_all(arena, memory, size, level))) / 1e9,
        _gops(False, "avx512" if level == "amx" else level, of),
        _gops(True, level, of) if level == "amx" else None,
    )


def _gops(tiles: bool, level: str, of: Callable[[list[float]], float]) -> float:
    rounds = 1 << 18
    made = library.multiply_int8(rounds, tiles, level)  # and the processor settles at the speed that it can sustain
    return float(made / of(_seconds(lambda: library.multiply_int8(rounds, tiles, level))) / 1e9)


def _seconds(run: Callable[[], object]) -> list[float]:
    seconds = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return seconds
