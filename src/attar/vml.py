"""Torch's elementwise functions on CPUs, initialized before any computation.

On x86, torch takes cos, exp, tanh and their like of float32 from MKL, which selects each function's kernel at its first
call. Where several threads make that first call together, as for any large tensor, one of them may get the least
accurate kernel, once (https://github.com/pytorch/pytorch/issues/188792). With torch 2.13 and two threads this was seen
in one process out of fifteen: half a table of rotary angles was off by 1.5e-4 for the life of the process.

Importing this module calls each function once, with one number, which takes one thread. Modules that compute import it
first.
"""

from __future__ import annotations

import torch

FUNCTIONS = (
    "acos", "asin", "atan", "ceil", "cos", "cosh", "erf", "erfc", "erfinv", "exp", "expm1", "floor", "lgamma", "log",
    "log10", "log1p", "log2", "round", "rsqrt", "sin", "sinh", "sqrt", "tan", "tanh", "trunc",
)  # fmt: skip
"""Functions that torch's `vml.h` may take from MKL."""


def settle() -> None:
    """Call each function once in float32 and once in float64."""
    for dtype in (torch.float32, torch.float64):
        one = torch.full((1,), 0.5, dtype=dtype)
        for name in FUNCTIONS:
            getattr(torch, name)(one)


settle()
