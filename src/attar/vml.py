"""Torch's elementwise functions on CPUs, settled before anything is computed with them.

On x86, torch takes cos, exp, tanh and their like of float32 from MKL, which looks for each function's kernel when it is
first called. Where several threads make that first call together, as for any large tensor, one of them may get the
least accurate kernel there is, once (https://github.com/pytorch/pytorch/issues/188792). Seen with torch 2.13 and two
threads in one process out of fifteen: half a table of rotary angles off by 1.5e-4, for as long as the process lived.

Importing this module calls each function once, with one number, which takes one thread. What computes imports it first.
"""

from __future__ import annotations

import torch

FUNCTIONS = (
    "acos", "asin", "atan", "ceil", "cos", "cosh", "erf", "erfc", "erfinv", "exp", "expm1", "floor", "lgamma", "log",
    "log10", "log1p", "log2", "round", "rsqrt", "sin", "sinh", "sqrt", "tan", "tanh", "trunc",
)  # fmt: skip
"""Those that torch's `vml.h` may take from MKL."""


def settle() -> None:
    """Call each function once, in either precision."""
    for dtype in (torch.float32, torch.float64):
        one = torch.full((1,), 0.5, dtype=dtype)
        for name in FUNCTIONS:
            getattr(torch, name)(one)


settle()
