"""Triton, imported in one place, and functions that several kernels share.

Only modules that hold kernels import this one, and `backend.py` imports those when a kernel is first needed: without a
GPU, Triton is neither loaded nor required.

Annotations serve readers as much as Triton: `tl.tensor` is a pointer or a number given at the launch, `tl.constexpr` a
number that the code is compiled for.

Split sums. Where an output tile alone would leave most of the GPU idle, several programs share its inputs. Each writes
a partial sum, and the last to arrive adds them up, in their order, so equal calls give equal bits. It costs no second
launch, which at batch 1 would cost as much as the product itself. Arrivals are counted in memory that starts as zeros
and that the last program sets back to zero, which is correct for launches of one stream, one after another.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
from torch import Tensor

from attar.kernels.triton import backend
from attar.kernels.triton.tuning import Config

__all__ = [
    "ACCUMULATE", "arrive_last", "counters", "cut", "device_name", "kernel", "next_power", "nothing", "processors",
    "tl",
]  # fmt: skip

COUNTERS = 1 << 16  # output tiles of one launch that may be split
COMPILED = tl.constexpr(not backend.interpreted())  # the interpreter knows no assembly
ACCUMULATE = "ieee"  # float32 products in float32: the default would round their factors to 10 bits
Grid = tuple[int, int, int]  # programs of a launch


def kernel(function: Callable[..., Any]) -> Any:
    """Compile a function in Triton's language: launched as `f[grid](...)`, or called by another."""
    return triton.jit(function)


@kernel
def arrive_last(counters: tl.tensor, tile: tl.tensor, SPLITS: tl.constexpr) -> tl.tensor:
    """Return whether all other programs of a tile have stored their parts, which this one may then read.

    The barrier puts the stores of all threads before the one thread's count, and acquire-release makes the other
    programs' stores visible behind it.
    """
    tl.debug_barrier()
    last = tl.atomic_add(counters + tile, 1, sem="acq_rel") == SPLITS - 1
    if last:
        tl.store(counters + tile, 0)
    tl.debug_barrier()
    return last


@functools.cache
def counters(device: torch.device) -> Tensor:
    """Return zeros to count arrivals in, for the launches of one stream."""
    return torch.zeros(COUNTERS, dtype=torch.int32, device=device)


@functools.cache
def nothing(device: torch.device) -> Tensor:
    """Return a placeholder for an operand that a kernel is compiled without."""
    return torch.zeros(1, device=device)


@functools.cache
def processors(device: torch.device) -> int:
    """Return how many programs run side by side at least: the GPU's multiprocessors. The interpreter counts 4, so that
    small shapes take every path."""
    if backend.interpreted():
        return 4
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def device_name(device: torch.device) -> str:
    """Return the GPU's name in tuning tables; empty in the interpreter."""
    return "" if backend.interpreted() else torch.cuda.get_device_name(device)


def cut(config: Config, rows: int, outputs: int, like: Tensor, dtype: torch.dtype) -> tuple[Grid, Tensor]:
    """Return the grid of a product [rows, outputs] that is cut by `config`, and memory on the device of `like` for its
    partial sums."""
    grid = (-(-rows // config.rows), -(-outputs // config.outputs), config.splits)
    shape = (grid[0] * grid[1] * config.splits, config.outputs, config.rows)
    return grid, like.new_empty(shape, dtype=dtype) if config.splits > 1 else nothing(like.device)


def next_power(number: int) -> int:
    """Return the smallest power of two that is at least `number`."""
    return 1 << max(0, number - 1).bit_length()
